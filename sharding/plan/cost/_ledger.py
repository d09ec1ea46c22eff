"""A ledger of one step on one device: what it sends, computes and holds, and what that adds up to.

Rows are made where their rule is known: those of ZeRO in ``_stage_plan``, those of pipelines and of
shared layers beside their schedules. Bytes sent, seconds, the fullest moment and its parts are sums
of the same rows.
"""

import collections
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from sharding.plan._format import memory_by_part

# The fullest moment of the passes, which has gradients of all layers.
LAYERS = "layers"
# What is beside the arguments of a step, in the order of tables.
_BESIDE = ("activations", "temporaries", "gathered", "gradients")


class WorkRow(NamedTuple):
    """Something that takes time."""

    part: str  # of the step, one of ``PARTS_OF_STEP``
    op: str  # a collective; or ``"products"``, ``"passes"`` or ``"copies"`` of the device
    amount: float  # bytes: of the full array, of a permute those it sends; of products operations
    on: tuple[str, ...]  # mesh axes of a collective, or what is busy: ``"memory"``, ``"host link"``
    times: float = 1.0  # in a step
    beside: str = ""  # which passes hide it: ``"all"``, ``"backward"`` or ``"last backward"``

    def sent(self, sizes: Mapping[str, int], far: Collection[str] | None = None) -> float:
        """Bytes that one device sends over these axes, in the ring convention.

        With ``far`` axes, those that leave a group of the others: of devices that send an array
        around in h such groups of g, each sends its part, 1 / g, to the next group.
        """
        if self.op == "permute":
            return self.amount * self.times
        devices = math.prod(sizes[axis] for axis in self.on)
        groups = devices
        if far is not None:
            groups = math.prod(sizes[axis] for axis in self.on if axis in far)
        passes = 2 if self.op == "all-reduce" else 1
        return self.amount * passes * self.times * (groups - 1) / devices


class HeldRow(NamedTuple):
    """Something that takes memory."""

    part: str  # ``"params"``, ``"state"``, ``"batch"``; or one of those beside the arguments
    nbytes: float
    at: tuple[str, ...] = ()  # the moments at which it is there; empty: at all, an argument
    memory: str = "device"  # or ``"host"``


class Ledger(NamedTuple):
    """All rows of one device."""

    work: tuple[WorkRow, ...] = ()
    held: tuple[HeldRow, ...] = ()

    @property
    def arguments(self) -> float:
        """Bytes in device memory at every moment."""
        return sum(row.nbytes for row in self.held if not row.at and row.memory == "device")

    @property
    def moments(self) -> dict[str, dict[str, float]]:
        """Bytes beside ``arguments`` at each moment, by what they are."""
        found: dict[str, dict[str, float]] = {}
        for row in self.held:
            for moment in row.at:
                parts = found.setdefault(moment, dict.fromkeys(_BESIDE, 0.0))
                parts[row.part] += row.nbytes
        return found

    @property
    def peak(self) -> float:
        """``arguments``, and what is beside them at the fullest of ``moments``."""
        beside = [sum(parts.values()) for parts in self.moments.values()]
        return self.arguments + max(beside, default=0.0)

    def by_part(self, batch: float = 0.0) -> dict[str, float]:
        """``peak`` by what it is, with ``batch`` more bytes of the batch."""
        always: dict[str, float] = collections.defaultdict(float)
        for row in self.held:
            if not row.at and row.memory == "device":
                always[row.part] += row.nbytes
        grads = self.moments[LAYERS]["gradients"] if LAYERS in self.moments else 0.0
        return memory_by_part(
            self.peak + batch,
            params=always["params"],
            grads=grads,
            state=always["state"],
            batch=always["batch"] + batch,
        )

    def seconds(self, clock: Callable[[WorkRow], float]) -> dict[tuple[str, str], float]:
        """Seconds by part of the step, and by what hides them."""
        found: dict[tuple[str, str], float] = {}
        for row in self.work:
            key = row.part, row.beside
            found[key] = found.get(key, 0.0) + row.times * clock(row)
        return found


def merged(rows: Iterable[WorkRow]) -> tuple[WorkRow, ...]:
    """Rows that differ in their amounts alone, as one."""
    amounts: dict[Any, float] = {}
    for row in rows:
        key = row._replace(amount=0.0)
        amounts[key] = amounts.get(key, 0.0) + row.amount
    return tuple(key._replace(amount=amount) for key, amount in amounts.items() if amount)
