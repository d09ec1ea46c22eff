"""The arguments of a compiled step: the part of the state that each is, and its memory."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sharding.plan.program._hlo import Array, Program, arrays
from sharding.plan.program._scopes import phase_of

# By the name of an argument, such as state.params['w'] or state[1][0].mu['w'].
PARTS = {
    "master weights": r"\bmaster\b",
    "optimizer state": r"opt_?state|optimizer|^state\[1\]",
    "parameters": r"params|^state\[0\]|weights|model",
    "batch and others": r"",
}
STATE = tuple(PARTS)[:-1]
# Names of optimizers' averages; read only where no argument has a name of PARTS.
_AVERAGES = r"\b(mu|nu|trace|momentum|moments?\d?|velocity|exp_avg\w*|count|inner_state)\b"


class Argument(NamedTuple):
    """One argument of a program.

    Attributes:
      name: as jax names it, such as ``state.params['w']``.
      part: one of ``PARTS``, or of the caller's.
      array: its type on one device.
      donated: whether a result takes over its memory.
      returned: whether a new result has its type; gradients do not count.
      replicated: whether every device has the full array.
    """

    name: str
    part: str
    array: Array
    donated: bool
    returned: bool
    replicated: bool

    @property
    def nbytes(self) -> float:
        """Bytes in the memory of one device."""
        return self.array.nbytes if self.array.space == 0 else 0.0

    @property
    def root(self) -> str:
        """The argument of the function that it belongs to, such as ``state``."""
        return re.split(r"\W", self.name)[0]


def arguments_of(
    program: Program, parts: Mapping[str, str], shardings: Sequence[Any] = ()
) -> tuple[list[Argument], list[str]]:
    """The arguments, and a note where parameters were not found by name.

    Args:
      program: the compiled program.
      parts: a regular expression of the names of each part; see ``audit``.
      shardings: of the arguments, where known: programs for TPUs do not contain them.
    """
    results = _results(program)
    found = []
    table = program.computations[program.entry]
    given = [it for it in table.values() if it.op == "parameter"]
    if len(shardings) != len(given):  # some arguments are not used
        shardings = ()
    for it in given:
        for array in arrays(it.type):
            part = next((p for p, pattern in parts.items() if re.search(pattern, it.scope)), "")
            donated = int(it.literal) in program.donated
            key = (array.dtype, array.dims)
            returned = donated or results[key] > 0
            results[key] -= returned and not donated
            replicated = "sharding={replicated}" in it.attributes
            if shardings:
                replicated = shardings[int(it.literal)].is_fully_replicated
            found.append(Argument(it.scope, part, array, donated, returned, replicated))
    if parts is PARTS and not any(each.part in STATE for each in found) and _trains(program):
        return _by_structure(found)
    return found, []


def _trains(program: Program) -> bool:
    """Whether it is a training step: it has a backward pass."""
    scopes = (it.scope for table in program.computations.values() for it in table.values())
    return any(phase_of(scope) == "backward" for scope in scopes)


def _results(program: Program) -> collections.Counter:
    """The types of results that are neither written into an argument nor gradients."""
    table = program.computations[program.entry]
    root = table[program.roots[program.entry]]
    names = root.operands if root.op == "tuple" else [root.name]
    found: collections.Counter = collections.Counter()
    for i, (name, array) in enumerate(zip(names, arrays(root.type), strict=False)):
        phase = phase_of(program.scope(table[name], table))
        if i not in program.aliased and phase not in ("forward", "backward", "gradient sync"):
            found[array.dtype, array.dims] += 1
    return found


def _by_structure(found: Sequence[Argument]) -> tuple[list[Argument], list[str]]:
    """Parameters and state by structure: floating arguments whose type is among the results."""
    assigned = []
    for each in found:
        is_state = each.returned and re.match(r"b?f\d", each.array.dtype)
        part = "optimizer state" if re.search(_AVERAGES, each.name) else "parameters"
        assigned.append(each._replace(part=part if is_state else each.part))
    roots = dict.fromkeys(each.root for each in assigned if each.part in STATE)
    if roots:
        return assigned, [
            "no argument is named params: arguments that come back with the same type are taken "
            f"for parameters and state, of {', '.join(roots)}; name others with parts="
        ]
    return assigned, [
        "no argument is named params, and none comes back: all are counted as batch and others; "
        "name parameters with parts="
    ]
