"""The peak memory of a compiled program, found by following its schedule."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from sharding.plan.audit._hlo import (
    ARITHMETIC,
    Instruction,
    Program,
    Table,
    arrays,
    behind,
    changed_in_place,
    main_bytes,
)

_RENAMES = frozenset(("tuple", "get-tuple-element", "bitcast"))
_ALIASES = frozenset(("bitcast", "opt-barrier", "while", "add-dependency"))
_ELEMENTWISE = ARITHMETIC | {"select", "convert", "copy", "negate", "compare", "and", "or", "not"}


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory that one instruction allocates."""

    name: str  # the instruction
    nbytes: float  # without padding
    scope: str = ""  # the operation it was compiled from
    copy_of: str = ""  # the argument that it is a copy of; empty where it is none
    last: int = 0  # the index of the last instruction that reads it
    readers: set[str] = dataclasses.field(default_factory=set)  # the scopes of all


def at_peak(program: Program) -> list[Buffer]:
    """The temporary buffers that are live when their sum is largest, in the order of the schedule.

    Loops, updates of slices, and elementwise operations on an operand that is not read again are
    taken to be in place. Arguments, results and a TPU's fast memory are not temporary.
    """
    return _peak(program, program.entry)[1]


def _peak(program: Program, name: str) -> tuple[float, list[Buffer]]:
    """The bytes of a computation's temporaries at their peak, and the buffers that are live."""
    table = program.computations[name]
    made, values = _lifetimes(program, table)
    results = set(_leaves(values[program.roots[name]]))  # its caller counts them
    freed_after = collections.defaultdict(list)
    for buffer in (buffer for buffers in made for buffer in buffers):
        freed_after[buffer.last].append(buffer)
    live: dict[Buffer, float] = {}
    peak, at_peak = 0.0, list[Buffer]()
    for i, instr in enumerate(table.values()):
        # Allocate: an in-place instruction takes over an operand of its size that ends here.
        allocated = {buffer: buffer.nbytes for buffer in made[i] if buffer not in results}
        loop = instr.op == "fusion" and "kind=kLoop" in instr.attributes
        if loop or instr.op in _ELEMENTWISE:
            for buffer in freed_after[i]:
                if live.get(buffer) and buffer.nbytes in allocated.values():
                    live.pop(buffer)
                    break
        live |= allocated

        # Measure, with the temporaries of the callee that needs most.
        callees = [_peak(program, callee) for callee in instr.called]
        callee_peak, buffers = max(callees, default=(0.0, []), key=lambda callee: callee[0])
        total = sum(live.values()) + callee_peak
        if total > peak:
            peak, at_peak = total, [*sorted(live, key=lambda x: x.name), *buffers]

        # Free.
        for buffer in freed_after[i]:
            live.pop(buffer, None)
    return peak, at_peak


def _lifetimes(program: Program, table: Table) -> tuple[list[list[Buffer]], dict[str, Any]]:
    """What each instruction of a computation allocates, and its value as ``_value`` has it."""
    made: list[list[Buffer]] = []
    values: dict[str, Any] = {}
    for i, instr in enumerate(table.values()):
        made.append([])
        values[instr.name] = _value(instr, values, made[-1], table, program)
        scope, copied = program.scope(instr, table), copied_argument(instr, table)
        for buffer in made[-1]:
            buffer.scope, buffer.copy_of, buffer.last = scope, copied, i
        # An instruction that renames a buffer does not use it, its users do.
        for buffer in (buffer for name in instr.operands for buffer in _leaves(values.get(name))):
            buffer.readers.add(scope)
            buffer.last = buffer.last if instr.op in _RENAMES else i
    return made, values


def _leaves(value: Any) -> Iterator[Buffer]:
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif value is not None:
        yield value


def _value(
    instr: Instruction, values: dict[str, Any], made: list[Buffer], table: Table, program: Program
) -> Any:
    """What holds a result, with new ones in ``made``: a buffer or None; of a tuple a list."""
    operands = [values.get(name) for name in instr.operands]

    # Results without memory of their own.
    if instr.op in ("parameter", "constant"):
        return None
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
        made.append(Buffer(instr.name, max(own, 0.0)))
        return made[0]

    # All others: a buffer for each array that is not an operand updated in place.
    sizes = [0.0 if a.space else a.nbytes for a in arrays(instr.type)]
    results: list[Any] = []
    for i, size in enumerate(sizes):
        if changed := changed_in_place(instr, i, program):
            results.append(operands[changed[0]])
        else:
            name = instr.name if len(sizes) == 1 else f"{instr.name}/{i}"
            made.append(Buffer(name, size))
            results.append(made[-1])
    return results if instr.type.startswith("(") else (results or [None])[0]


def copied_argument(instr: Instruction, table: Table) -> str:
    """The name of the argument that an instruction of the entry copies unchanged."""
    if instr.op not in ("copy", "copy-start"):
        return ""
    source = behind(table[instr.operands[0]], table)
    return source.scope if source.op == "parameter" else ""


def temporaries_of(compiled: Any) -> int:
    """Bytes of device memory that a program needs beside its arguments and results."""
    return int(temporary_bytes(compiled.memory_analysis(), tiled=":T(" in compiled.as_text()))


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
