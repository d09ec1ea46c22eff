"""A ledger of one step on one device: what it sends, computes and holds, and what that adds up to.

Rows are made where their rule is known: those of ZeRO in ``_stage_plan``, those of pipelines and of
shared layers beside their schedules, those of a compiled program by ``Audit.ledger``. Bytes sent,
operations, seconds, the fullest moment and its parts are sums of the same rows; a program is proven
by ``differences`` of its ledger and that of its plan.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sharding.plan._format import Table, flops, size

# What is beside the arguments of a step, in the order of tables.
_BESIDE = ("activations", "temporaries", "gathered", "gradients")
# What a device does by itself: operations of matrix products; bytes of its memory, of the host's.
_OF_DEVICE = ("products", "passes", "copies")


class WorkRow(NamedTuple):
    """Something that takes time."""

    part: str  # of the step, one of ``PARTS_OF_STEP``; of a program one of ``PHASES``
    op: str  # a collective; or ``"products"``, ``"passes"`` or ``"copies"`` of the device
    amount: float  # bytes: of the full array, of a permute those it sends; of products operations
    on: tuple[str, ...]  # mesh axes of a collective, or what is busy: ``"memory"``, ``"host_link"``
    times: float = 1.0  # in a step
    beside: str = ""  # which passes hide it: ``"all"``, ``"backward"`` or ``"last backward"``
    is_sent: bool = False  # whether ``amount`` is what one device sends, as programs say it

    def sent(self, sizes: Mapping[str, int], far: Collection[str] | None = None) -> float:
        """Bytes that one device sends over these axes, in the ring convention.

        With ``far`` axes, those that leave a group of the others: of devices that send an array
        around in h such groups of g, each sends its part, 1 / g, to the next group.
        """
        if self.op in _OF_DEVICE:
            return 0.0
        if self.op == "permute" or self.is_sent:
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


def held_by_part(parts: Mapping[str, float]) -> tuple[HeldRow, ...]:
    """The rows of which ``Ledger.by_part`` makes these parts."""
    rows = [HeldRow(name, parts[name]) for name in ("params", "state", "batch")]
    rows.append(HeldRow("gradients", parts["grads"], "layers"))
    return (*rows, HeldRow("activations", parts["activations"], "layers"))


class Ledger:
    """The rows of one device, and what they add up to."""

    work: tuple[WorkRow, ...]  #: what is sent and computed
    sizes: Mapping[str, int]  #: of the mesh axes
    far: tuple[str, ...]  #: those between hosts or slices; where there are none, of replicas

    @property
    def held(self) -> tuple[HeldRow, ...]:
        """What takes memory, row by row."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether ``held`` has all that a step holds, with its activations."""
        return bool(self.held)

    @property
    def wire(self) -> float:
        """Bytes sent per step, in the ring convention; without what optimizers send."""
        return sum(row.sent(self.sizes) for row in self.work)

    @property
    def network(self) -> float:
        """The part of ``wire`` that leaves a host or slice; without these, a replica."""
        return sum(row.sent(self.sizes, self.far) for row in self.work)

    @property
    def products(self) -> float:
        """Operations of matrix products in a step; 0 where no row has them."""
        return self._total("products")

    @property
    def moved(self) -> float:
        """Bytes that are read from and written to device memory; of plans the least."""
        return self._total("passes")

    @property
    def host_wire(self) -> float:
        """Bytes that move to host memory and back per step."""
        return self._total("copies")

    def _total(self, op: str) -> float:
        return sum(row.amount * row.times for row in self.work if row.op == op)

    @property
    def sent(self) -> dict[str, float]:
        """Bytes sent, by operation and mesh axes, such as ``"all-gather over data"``."""
        found: dict[str, float] = {}
        for row in self.work:
            if row.op not in _OF_DEVICE:
                several = [x for x, devices in self.sizes.items() if x in row.on and devices > 1]
                op = "collective-permute" if row.op == "permute" else row.op
                name = f"{op} over {'+'.join(several) or '?'}"
                found[name] = found.get(name, 0.0) + row.sent(self.sizes)
        return found

    def of_part(self, part: str, *, others: bool = False) -> "StepRows":
        """What is sent and computed in a part of the step; or in all ``others``."""
        rows = tuple(row for row in self.work if (row.part == part) != others)
        return StepRows(rows, self.sizes, self.held, self.far)

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
        beside = [sum(parts.values()) for parts in self.moments.values()]
        return self.arguments + max(beside, default=0.0)

    def by_part(self, batch: float = 0.0) -> dict[str, float]:
        """``peak`` by what it is, with ``batch`` more bytes of the batch.

        Gradients are those at the layers, or wherever a program needs most. All that is neither an
        argument nor a gradient counts as activations.
        """
        parts = dict.fromkeys(("params", "grads", "state", "batch"), 0.0)
        moments: dict[str, float] = {}
        grads = 0.0
        for row in self.held:
            if row.at:
                moments[row.at] = moments.get(row.at, 0.0) + row.nbytes
            elif row.memory == "device":
                parts[row.part] += row.nbytes
            if row.at in ("layers", "peak") and row.part == "gradients":
                grads = row.nbytes
        total = sum(parts.values()) + max(moments.values(), default=0.0) + batch
        parts["batch"] += batch
        parts["grads"] = grads
        return parts | {"activations": total - sum(parts.values()), "total": total}


@dataclasses.dataclass(frozen=True)
class StepRows(Ledger):
    """The rows of a step as they are, such as those of its compiled program."""

    work: tuple[WorkRow, ...]
    sizes: Mapping[str, int]
    buffers: tuple[HeldRow, ...] = ()  #: what takes memory
    far: tuple[str, ...] = ()

    @property
    def held(self) -> tuple[HeldRow, ...]:
        return self.buffers


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

    name: str  # such as ``"all-gather over data"``, ``"products"`` or a part of the memory
    planned: float  # bytes; of products operations
    program: float  # likewise


def differences(planned: Ledger, program: Ledger) -> tuple[Difference, ...]:
    """Rows of a program and of its plan that differ by more than ``DIFFERS``, and more than 1 %.

    That is 1 % of all that is planned to be sent, or held. Operations and memory are compared where
    the plan has them. What an optimizer sends and computes by itself is not planned.
    """
    program = program.of_part("update", others=True)
    found = [*_that_differ(planned.sent, program.sent)]
    if planned.products:
        found += _that_differ({"products": planned.products}, {"products": program.products})
    if planned.is_whole:
        held = planned.by_part()
        parts = program.by_part()
        del held["total"]
        found += _that_differ(held, {name: parts[name] for name in held})
    return tuple(found)


def _that_differ(
    planned: Mapping[str, float], program: Mapping[str, float]
) -> Iterator[Difference]:
    least = 0.01 * sum(planned.values())
    for name in {**planned, **program}:
        row = Difference(name, planned.get(name, 0.0), program.get(name, 0.0))
        if abs(row.program - row.planned) > max(DIFFERS * row.planned, least):
            yield row


def table_of_differences(found: Mapping[str, Iterable[Difference]]) -> list[Table]:
    """The rows that differ, each with the words before its name; no table where there are none."""
    rows = [
        (f"{words}{row.name}", *map(flops if row.name == "products" else size, row[1:]))
        for words, several in found.items()
        for row in several
    ]
    title = f"more than {DIFFERS:.0%} from the plan"
    return [Table(title, ("", "planned", "program"), rows)] if rows else []
