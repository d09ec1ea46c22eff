"""The peak memory of a compiled program, found by following its schedule."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sharding.plan.audit._hlo import (
    ARITHMETIC,
    Instruction,
    Program,
    arrays,
    behind,
    changed_in_place,
    main_bytes,
)

_ALIASES = frozenset(("bitcast", "opt-barrier", "while", "add-dependency"))
_ELEMENTWISE = ARITHMETIC | {"select", "convert", "copy", "negate", "compare", "and", "or", "not"}


class Buffer(NamedTuple):
    """Memory that one instruction allocates."""

    name: str  # the instruction
    scope: str  # the operation it was compiled from
    nbytes: float  # without padding
    readers: tuple[str, ...]  # the scopes of the instructions that read it
    copy_of: str  # the argument that it is a copy of; empty where it is none


def at_peak(program: Program) -> list[Buffer]:
    """The temporary buffers that are live when their sum is largest.

    An estimate: a buffer is live from the instruction that allocates it to the last one that reads
    it, in the order of the schedule. Operations that XLA does in place (loops, updates of slices,
    elementwise operations on an operand that is not read again) are taken to be in place.
    Arguments, results and a TPU's fast memory are not temporary.
    """
    return _peak(program, program.entry)[1]


class _Lifetimes(NamedTuple):
    """The buffers of one computation, by name."""

    values: dict[str, Any]  # of each instruction, the buffers that hold its result; see ``_value``
    # the instruction that allocates a buffer, and the buffer's bytes
    sources: dict[str, tuple[Instruction, float]]
    # by the index of an instruction, the buffers that it is the last to read
    freed_after: dict[int, list[str]]
    results: set[str]  # the buffers that hold the computation's result, which its caller counts
    readers: dict[str, set[str]]  # the scopes of the instructions that read a buffer


def _lifetimes(program: Program, name: str) -> _Lifetimes:
    """Where each buffer of a computation is allocated and last read."""
    table = program.computations[name]
    order = list(table.values())
    values: dict[str, Any] = {}
    sources: dict[str, tuple[Instruction, float]] = {}
    for instr in order:
        values[instr.name] = _value(instr, values, sources, table, program)

    # The last reader. An instruction that renames a buffer does not read it, its users do.
    last = {buffer: i for i, instr in enumerate(order) for buffer in _leaves(values[instr.name])}
    for i, instr in enumerate(order):
        if instr.op not in ("tuple", "get-tuple-element", "bitcast"):
            last.update((buffer, i) for o in instr.operands for buffer in _leaves(values.get(o)))
    freed_after: dict[int, list[str]] = {}
    for buffer in sources:
        freed_after.setdefault(last[buffer], []).append(buffer)

    readers: dict[str, set[str]] = {buffer: set() for buffer in sources}
    for instr in order:
        for operand in instr.operands:
            for buffer in _leaves(values.get(operand)):
                if buffer in readers:
                    readers[buffer].add(program.scope(instr, table))
    results = set(_leaves(values[program.roots[name]]))
    return _Lifetimes(values, sources, freed_after, results, readers)


def _peak(program: Program, name: str) -> tuple[float, list[Buffer]]:
    """The bytes of a computation's temporaries at their peak, and the buffers that are live."""
    table = program.computations[name]
    life = _lifetimes(program, name)
    live: dict[str, float] = {}  # buffer -> bytes
    peak, at_peak, of_callee = 0.0, set[str](), list[Buffer]()
    for i, instr in enumerate(table.values()):
        freed = life.freed_after.get(i, [])

        # Allocate: an in-place instruction takes over an operand of its size that ends here.
        allocated = {
            buffer: life.sources[buffer][1]
            for buffer in _leaves(life.values[instr.name])
            if buffer in life.sources
            and buffer not in life.results
            and life.sources[buffer][0] is instr
        }
        loop = instr.op == "fusion" and "kind=kLoop" in instr.attributes
        if loop or instr.op in _ELEMENTWISE:
            for buffer in freed:
                if live.get(buffer, 0.0) and live[buffer] in allocated.values():
                    live.pop(buffer)
                    break
        live.update(allocated)

        # Measure, with the temporaries of the callee that needs most.
        callees = [_peak(program, callee) for callee in _called(instr)]
        callee_peak, buffers = max(callees, default=(0.0, []), key=lambda callee: callee[0])
        total = sum(live.values()) + callee_peak
        if total > peak:
            peak, at_peak, of_callee = total, set(live), buffers

        # Free.
        for buffer in freed:
            live.pop(buffer, None)
    return peak, [_buffer(name, life, table, program) for name in sorted(at_peak)] + of_callee


def _buffer(name: str, life: _Lifetimes, table: dict[str, Instruction], program: Program) -> Buffer:
    instr, nbytes = life.sources[name]
    readers = tuple(sorted(life.readers[name]))
    return Buffer(name, program.scope(instr, table), nbytes, readers, copied_argument(instr, table))


def _called(instr: Instruction) -> list[str]:
    """The computations that run while an instruction runs."""
    if instr.op == "while":
        return instr.callees("body")
    if instr.op == "conditional":
        return instr.branches
    return instr.callees("to_apply") if instr.op == "call" else []


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, frozenset):
        yield from value
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)


def _value(
    instr: Instruction,
    values: dict[str, Any],
    sources: dict[str, tuple[Instruction, float]],
    table: dict[str, Instruction],
    program: Program,
) -> Any:
    """The buffers that hold a result: a set for an array, a list of values for a tuple.

    Buffers that the instruction allocates are added to ``sources``.
    """
    operands = [values.get(name, frozenset()) for name in instr.operands]

    # Results without memory of their own.
    if instr.op in ("parameter", "constant"):
        return frozenset()
    if instr.op == "tuple":
        return operands
    if instr.op == "get-tuple-element":
        index, value = instr.element or 0, operands[0]
        return value[index] if isinstance(value, list) and index < len(value) else value
    if instr.op in _ALIASES and operands:
        return operands[0]

    # Asynchronous operations: the start allocates, the others pass on.
    if instr.op.endswith(("-done", "-update")):
        return operands[0]
    if instr.op.endswith("-start"):
        # The type lists the operands as well, before or after the results.
        own = main_bytes(instr.type) - sum(main_bytes(table[name].type) for name in instr.operands)
        sources[instr.name] = (instr, max(own, 0.0))
        return frozenset((instr.name,))

    # All others: a buffer for each array that is not an operand updated in place.
    sizes = [0.0 if a.space else a.nbytes for a in arrays(instr.type)]
    results: list[Any] = []
    for i, size in enumerate(sizes):
        if changed := changed_in_place(instr, i, program):
            results.append(operands[changed[0]])
            continue
        name = instr.name if len(sizes) == 1 else f"{instr.name}/{i}"
        sources[name] = (instr, size)
        results.append(frozenset((name,)))
    return results if instr.type.startswith("(") else (results or [frozenset()])[0]


def copied_argument(instr: Instruction, table: dict[str, Instruction]) -> str:
    """The name of the argument that an instruction of the entry copies unchanged."""
    if instr.op not in ("copy", "copy-start"):
        return ""
    source = behind(table[instr.operands[0]], table)
    return source.scope if source.op == "parameter" else ""


def temporaries_of(compiled: Any) -> int:
    """Bytes of device memory that a program needs beside its arguments and results."""
    return int(temporary_bytes(compiled.memory_analysis(), tiled=is_tiled(compiled.as_text())))


def is_tiled(text: str) -> bool:
    """Whether a program has the layouts of TPUs, whose memory consists of tiles."""
    return ":T(" in text


def temporary_bytes(memory: Any, *, tiled: bool) -> float:
    """Bytes of temporaries by ``compiled.memory_analysis()``; of a TPU's program where it is tiled.

    CPUs and GPUs allocate ``temp_size_in_bytes``. For TPUs that is more than the addresses of the
    program take, by up to a half. Their ``peak_memory_in_bytes`` is what is live at once: arguments
    and results, too, what is on the host, and buffers in the memory of the chip, 16 to 128 MiB. The
    addresses end 0 to 6 % above what it leaves for temporaries.
    """
    allocated = float(memory.temp_size_in_bytes)
    if not tiled or not memory.peak_memory_in_bytes:
        return allocated
    live = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    live -= memory.host_temp_size_in_bytes + memory.argument_size_in_bytes
    live -= memory.output_size_in_bytes - memory.alias_size_in_bytes
    return min(allocated, max(0.0, float(live)))
