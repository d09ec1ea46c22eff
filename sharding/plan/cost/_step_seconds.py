"""What a training step takes, by what it waits for, and how much of that overlaps."""

import dataclasses
from typing import Any

# How much slower computing and sending are on GPUs while both run: Zhu et al., Mist, EuroSys 2025,
# factors that its code has for A100. TPUs send by engines of their own.
COMPUTE_SLOWDOWN, WIRE_SLOWDOWN = 1.286, 1.039
PARTS_OF_STEP = (
    *("matmul", "elementwise", "overhead", "tensor", "bubble", "transfers", "data", "update"),
    "host",
)


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the slowest device."""

    matmul: float  #: of matrix products, with those that are computed again
    elementwise: float  #: of passes over memory in all other operations, likewise
    overhead: float  #: of kernels beside their rooflines, likewise
    tensor: float  #: of collectives among the devices that share a layer
    bubble: float  #: idle, in a pipeline; without a flush for the updates of other stages
    transfers: float  #: of messages between stages
    data: float  #: of gathering parameters and reducing gradients over data-parallel devices
    update: float  #: of the optimizer, with its products
    host: float  #: of moving optimizer state to and from host memory
    hideable: float  #: of computing that can run at the same time as ``data``
    interference: bool  #: whether computing and sending slow each other down, as on GPUs
    #: of ``data``, what nothing can hide: compressed gradients after all passes
    exposed: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of forward and backward passes without any wire."""
        return self.matmul + self.elementwise + self.overhead

    @property
    def no_overlap(self) -> float:
        """Seconds if nothing overlaps."""
        passes = self.compute + self.tensor + self.bubble + self.transfers
        return passes + self.data + self.update + self.host

    @property
    def seconds(self) -> float:
        """The prediction.

        Computing that can run beside the collectives of data parallelism does, and both slow each
        other down on GPUs; the host link runs beside the update. All else is waited for.
        """
        passes = self.compute + self.tensor + self.bubble + self.transfers
        both = self._both(self.data - self.exposed) + self.exposed
        return passes - self.hideable + both + max(self.update, self.host)

    def _both(self, data: float) -> float:
        """Seconds of collectives and ``hideable`` together."""
        if not self.interference:
            return max(data, self.hideable)
        compute, wire = self.hideable * COMPUTE_SLOWDOWN, data * WIRE_SLOWDOWN
        if compute < wire:
            return compute + (wire - compute) / WIRE_SLOWDOWN
        return wire + (compute - wire) / COMPUTE_SLOWDOWN

    @property
    def full_overlap(self) -> float:
        """Seconds if computing, all wires and the host link overlap completely."""
        wires = self.tensor + self.transfers + self.data
        return max(self.compute + self.update, wires, self.host) + self.bubble

    @property
    def limit(self) -> str:
        """What takes longest: a name of the attributes."""
        return max(PARTS_OF_STEP, key=lambda name: float(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        totals = ("no_overlap", "seconds", "full_overlap", "limit")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}
