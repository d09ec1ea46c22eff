"""The arguments of a compiled step: the part of the state that each is, and its memory."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sharding.plan.audit._hlo import Array, Program, arrays, phase_of

# By the name of an argument, such as state.params['w'] or state[1][0].mu['w'].
PARTS = {
    "master weights": r"\bmaster\b",
    "optimizer state": r"opt_?state|optimizer|^state\[1\]",
    "parameters": r"params|^state\[0\]|weights|model",
    "batch and others": r"",
}
STATE = tuple(PARTS)[:-1]
# Floats, and the codes of low-bit state; not counters, keys or tokens.
_STATE_DTYPES = r"b?f\d|[us][48]\b"


class Argument(NamedTuple):
    name: str  # as jax names it, such as ``state.params['w']``
    part: str  # one of ``PARTS``, or of the caller's
    array: Array  # its type on one device
    donated: bool  # whether a result takes over its memory
    returned: bool  # whether a new result has its type; gradients do not count
    replicated: bool  # whether every device has the full array

    @property
    def nbytes(self) -> float:
        return self.array.nbytes if self.array.space == 0 else 0.0

    @property
    def root(self) -> str:
        """The argument of the function that it belongs to, such as ``state``."""
        return re.split(r"\W", self.name)[0]


def arguments_of(
    program: Program, parts: Mapping[str, str], shardings: Sequence[Any] = ()
) -> tuple[list[Argument], list[str]]:
    """The arguments, and a note where their part was not found by name.

    Programs for TPUs do not contain the ``shardings`` of their arguments.
    """
    results, notes = _results(program), []
    arguments, unnamed = [], []
    read = _read_by_loss(program, program.entry) if parts is PARTS else set()
    table = program.computations[program.entry]
    given = [instr for instr in table.values() if instr.op == "parameter"]
    if len(shardings) != len(given):  # some arguments are not used
        shardings = ()
    for instr in given:
        for array in arrays(instr.type):
            part = next((p for p, name in parts.items() if re.search(name, instr.scope)), "")
            donated = int(instr.literal) in program.donated
            key = (array.dtype, array.dims)
            returned = donated or results[key] > 0
            results[key] -= returned and not donated
            replicated = "sharding={replicated}" in instr.attributes
            if shardings:
                replicated = shardings[int(instr.literal)].is_fully_replicated
            arguments.append(Argument(instr.scope, part, array, donated, returned, replicated))
            of_state = array.dims and re.match(_STATE_DTYPES, array.dtype)
            if read and part not in STATE and returned and of_state:
                part = "parameters" if (int(instr.literal), None) in read else "optimizer state"
                arguments[-1] = arguments[-1]._replace(part=part)
                unnamed.append(arguments[-1].root)
    if unnamed:
        notes = [
            "arguments of other names than params and opt_state come back, of "
            f"{', '.join(dict.fromkeys(unnamed))}: those that the loss reads are counted as "
            "parameters, others as optimizer state; name them with parts="
        ]
    elif read and not any(argument.part in STATE for argument in arguments):
        notes = [
            "no argument is named params, and none comes back: all are counted as batch and "
            "others; name parameters with parts="
        ]
    return arguments, notes


def _read_by_loss(program: Program, name: str) -> set[tuple[int, int | None]]:
    """The parameters that the loss and its gradient depend on, with the place in one's tuple."""
    table = program.computations[name]
    read: set[tuple[int, int | None]] = set()
    needed: dict[str, set[int | None]] = {}  # of each instruction, places in its result

    def need(instruction: str, *places: int | None) -> None:
        needed.setdefault(instruction, set()).update(places)

    for instr in reversed(table.values()):
        places = needed.get(instr.name, set())
        called, chooses = instr.called or instr.callees("calls"), instr.op == "conditional"
        for i, callee in enumerate(called, 1):
            for number, place in _read_by_loss(program, callee):
                need(instr.operands[i if chooses else number], place)
        if instr.op == "parameter":
            read |= {(int(instr.literal), place) for place in places}
        elif instr.op == "get-tuple-element" and places:
            need(instr.operands[0], instr.element)
        elif instr.op == "tuple":
            for i, operand in enumerate(instr.operands):
                need(operand, *({None} if places & {i, None} else ()))
        elif instr.op in ("while", "opt-barrier"):
            need(instr.operands[0], *places)
        elif places or (not called and phase_of(instr.scope) in ("forward", "backward")):
            for operand in instr.operands:
                need(operand, None)
    return read


def _results(program: Program) -> collections.Counter:
    """The types of results that are neither written into an argument nor gradients."""
    table = program.computations[program.entry]
    root = table[program.roots[program.entry]]
    names = root.operands if root.op == "tuple" else [root.name]
    types: collections.Counter = collections.Counter()
    for i, (name, array) in enumerate(zip(names, arrays(root.type), strict=False)):
        phase = phase_of(program.scope(table[name], table))
        if i not in program.aliased and phase not in ("forward", "backward", "gradient sync"):
            types[array.dtype, array.dims] += 1
    return types
