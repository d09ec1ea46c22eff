"""A ledger of one step on one device: what it sends, computes and holds, and what that adds up to.

Rows are made where their rule is known: those of ZeRO in ``_stage_plan``, those of pipelines and of
shared layers beside their schedules. Bytes sent, seconds, the fullest moment and its parts are sums
of the same rows.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

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
    at: str = ""  # the moment at which it is there; empty: all of them, an argument
    memory: str = "device"  # or ``"host"``


def held_at(**moments: tuple[float, float, float, float]) -> tuple[HeldRow, ...]:
    """Rows of each moment: activations, temporaries, what is gathered, gradients."""
    return tuple(
        HeldRow(part, nbytes, moment)
        for moment, parts in moments.items()
        for part, nbytes in zip(_BESIDE, parts, strict=True)
    )


class Ledger:
    """The rows of one device, and what they add up to."""

    work: tuple[WorkRow, ...]  #: what is sent, by operation and mesh axes
    sizes: Mapping[str, int]  #: of the mesh axes
    far: tuple[str, ...]  #: those between hosts or slices; where there are none, of replicas

    @property
    def held(self) -> tuple[HeldRow, ...]:
        """What takes memory, row by row."""
        raise NotImplementedError

    @property
    def wire(self) -> float:
        """Bytes sent per step, in the ring convention; without what optimizers send."""
        return sum(row.sent(self.sizes) for row in self.work)

    @property
    def network(self) -> float:
        """The part of ``wire`` that leaves a host or slice; without these, a replica."""
        return sum(row.sent(self.sizes, self.far) for row in self.work)

    @property
    def arguments(self) -> float:
        """Parameters, state and batch in device memory."""
        return sum(row.nbytes for row in self.held if not row.at and row.memory == "device")

    @property
    def moments(self) -> dict[str, dict[str, float]]:
        """Bytes beside ``arguments`` at each moment that may be the fullest, by what they are.

        In the backward pass of the last micro-batch: at the head, before any of its gradients is
        there; and at the layers, where compilers hold those of all layers from the first one on.
        Then the compressed sync, and the update.
        """
        found: dict[str, dict[str, float]] = {}
        for row in self.held:
            if row.at:
                found.setdefault(row.at, {})[row.part] = row.nbytes
        return found

    @property
    def peak(self) -> float:
        """``arguments``, and what is beside them at the fullest of ``moments``."""
        return self.arguments + max(sum(parts.values()) for parts in self.moments.values())

    def by_part(self, batch: float = 0.0) -> dict[str, float]:
        """``peak`` by what it is, with ``batch`` more bytes of the batch.

        All that is neither an argument nor a gradient counts as activations.
        """
        parts = dict.fromkeys(("params", "grads", "state", "batch"), 0.0)
        moments: dict[str, float] = {}
        grads = 0.0
        for row in self.held:
            if row.at:
                moments[row.at] = moments.get(row.at, 0.0) + row.nbytes
            elif row.memory == "device":
                parts[row.part] += row.nbytes
            if row.at == "layers" and row.part == "gradients":
                grads = row.nbytes
        total = sum(parts.values()) + max(moments.values()) + batch
        parts["batch"] += batch
        parts["grads"] = grads
        return parts | {"activations": total - sum(parts.values()), "total": total}


def merged(rows: Iterable[WorkRow]) -> tuple[WorkRow, ...]:
    """Rows that differ in their amounts alone, as one."""
    amounts: dict[Any, float] = {}
    for row in rows:
        key = row._replace(amount=0.0)
        amounts[key] = amounts.get(key, 0.0) + row.amount
    return tuple(key._replace(amount=amount) for key, amount in amounts.items() if amount)


DIFFERS = 0.03  # the share of a figure from which a difference is named


class Difference(NamedTuple):
    """A row that a program has otherwise than its plan."""

    name: str  # such as ``"all-gather over data"``, or a part of the memory
    planned: float  # bytes
    program: float  # bytes


def sent_over(op: str, axes: Collection[str], sizes: Mapping[str, int]) -> str:
    """The name of all that one operation sends over the same axes."""
    several = [axis for axis, size in sizes.items() if axis in axes and size > 1]
    return f"{'collective-permute' if op == 'permute' else op} over {'+'.join(several) or '?'}"


def differences(
    planned: Mapping[str, float], program: Mapping[str, float]
) -> tuple[Difference, ...]:
    """Rows that differ by more than ``DIFFERS``, and by more than 1 % of all that is planned."""
    least = 0.01 * sum(planned.values())
    rows = (Difference(x, planned.get(x, 0.0), program.get(x, 0.0)) for x in {**planned, **program})
    return tuple(
        row for row in rows if abs(row.program - row.planned) > max(DIFFERS * row.planned, least)
    )
