"""Counts the collectives of a compiled CPU program from its text."""

import math
import re
from typing import NamedTuple

_OP = re.compile(
    r"= (?P<type>\(?[^=]*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b[a-z]+[0-9]*\[(?P<dims>[0-9,]*)\]")


class Collective(NamedTuple):
    op: str
    elements: int  # of the result, on one device
    in_loop: bool


def collectives(text):
    """Every collective; those in a computation other than the entry count as in a loop."""
    found, in_entry = [], False
    for line in text.splitlines():
        if line.startswith(("ENTRY ", "%", "HloModule")):
            in_entry = line.startswith("ENTRY ")
        if match := _OP.search(line):
            sizes = [
                math.prod(int(d) for d in m["dims"].split(",") if d)
                for m in _ARRAY.finditer(match["type"])
            ]
            found.append(Collective(match["op"], sum(sizes), not in_entry))
    return found
