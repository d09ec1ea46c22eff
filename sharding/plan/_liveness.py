"""What a compiled program holds at its peak, found by following its schedule."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sharding.plan._hlo import ARITHMETIC, Instruction, Program, arrays, changed_in_place

_ALIASES = frozenset(("bitcast", "opt-barrier", "while", "add-dependency"))
_ELEMENTWISE = ARITHMETIC | {"select", "convert", "copy", "negate", "compare", "and", "or", "not"}


class Buffer(NamedTuple):
    """Memory that one instruction makes.

    Attributes:
      name: the instruction.
      scope: the operation it was compiled from.
      nbytes: without padding.
      readers: the scopes of what reads it.
      copy_of: the argument that it is a copy of; empty where it is none.
    """

    name: str
    scope: str
    nbytes: float
    readers: tuple[str, ...]
    copy_of: str


def at_peak(program: Program) -> list[Buffer]:
    """The temporary buffers that are alive when their sum is largest.

    An estimate: buffers are followed from where they are made to where they are last read, in the
    order of the schedule. What XLA makes in place (loops, slices that are updated, elementwise
    operations whose operand is not read again) is taken to be made in place. Arguments, results
    and a TPU's fast memory are not temporary.
    """
    return _peak(program, program.entry)[1]


def _peak(program: Program, name: str) -> tuple[float, list[Buffer]]:
    table = program.computations[name]
    order = list(table.values())
    values: dict[str, Any] = {}
    made: dict[str, tuple[Instruction, float]] = {}  # buffer -> its maker and size
    for it in order:
        values[it.name] = _value(it, values, made, table, program)
    last = {buffer: i for i, it in enumerate(order) for buffer in _leaves(values[it.name])}
    for i, it in enumerate(order):
        if it.op not in ("tuple", "get-tuple-element", "bitcast"):
            last.update(
                (buffer, i) for o in it.operands if o in values for buffer in _leaves(values[o])
            )
    kept = set(_leaves(values[program.roots[name]]))
    readers: dict[str, set[str]] = {buffer: set() for buffer in made}
    for it in order:
        for operand in it.operands:
            for buffer in _leaves(values.get(operand)):
                if buffer in readers:
                    readers[buffer].add(program.scope(it, table))
    ends: dict[int, list[str]] = {}
    for buffer in made:
        ends.setdefault(last[buffer], []).append(buffer)
    live: dict[str, float] = {}
    best, found, inner_found = 0.0, set[str](), list[Buffer]()
    for i, it in enumerate(order):
        new = [b for b in _leaves(values[it.name]) if b in made and b not in kept]
        fresh = {b: made[b][1] for b in new if made[b][0] is it}
        if _in_place(it):  # it takes over an operand that nobody reads again
            for buffer in ends.get(i, []):
                if live.get(buffer, 0.0) and live[buffer] in fresh.values():
                    live.pop(buffer)
                    break
        live.update(fresh)
        below = [_peak(program, callee) for callee in _called(it)]
        inner, buffers = max(below, default=(0.0, []), key=lambda peak: peak[0])
        total = sum(live.values()) + inner
        if total > best:
            best, found, inner_found = total, set(live), buffers
        for buffer in ends.get(i, []):
            live.pop(buffer, None)
    own = [
        Buffer(
            b,
            program.scope(it, table),
            nbytes,
            tuple(sorted(readers[b])),
            copied_argument(it, table),
        )
        for b in sorted(found)
        for it, nbytes in (made[b],)
    ]
    return best, own + inner_found


def _called(it: Instruction) -> list[str]:
    if it.op == "while":
        return it.callees("body")
    if it.op == "conditional":
        return it.branches
    return it.callees("to_apply") if it.op == "call" else []


def _in_place(it: Instruction) -> bool:
    return it.op in _ELEMENTWISE or (it.op == "fusion" and "kind=kLoop" in it.attributes)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, frozenset):
        yield from value
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)


def _value(
    it: Instruction, values: dict, made: dict, table: dict[str, Instruction], program: Program
) -> Any:
    """The buffers that an instruction's result lies in: a list for a tuple, a set for an array."""
    operands = [values.get(name, frozenset()) for name in it.operands]
    if it.op in ("parameter", "constant"):
        return frozenset()
    if it.op == "tuple":
        return operands
    if it.op == "get-tuple-element":
        index = int(it.attributes.split("index=")[1].split(",")[0])
        value = operands[0]
        return value[index] if isinstance(value, list) and index < len(value) else value
    if it.op in _ALIASES and operands:
        return operands[0]
    if it.op.endswith(("-done", "-update")):
        return operands[0]
    if it.op.endswith("-start"):
        # The type names the operands again, before or behind the results.
        own = _in_memory(it.type) - sum(_in_memory(table[name].type) for name in it.operands)
        made[it.name] = (it, max(own, 0.0))
        return frozenset((it.name,))
    sizes = [0.0 if a.space else a.nbytes for a in arrays(it.type)]
    results: list[Any] = []
    for i, size in enumerate(sizes):
        if changed := changed_in_place(it, i, program):
            results.append(operands[changed[0]])
            continue
        name = it.name if len(sizes) == 1 else f"{it.name}/{i}"
        made[name] = (it, size)
        results.append(frozenset((name,)))
    return results if it.type.startswith("(") else (results or [frozenset()])[0]


def _in_memory(text: str) -> float:
    return sum(a.nbytes for a in arrays(text) if not a.space)


def copied_argument(it: Instruction, table: dict[str, Instruction]) -> str:
    """The name of the argument that an instruction of the entry copies as it is."""
    if it.op not in ("copy", "copy-start"):
        return ""
    source = table[it.operands[0]]
    while source.op == "bitcast":
        source = table[source.operands[0]]
    return source.scope if source.op == "parameter" else ""
