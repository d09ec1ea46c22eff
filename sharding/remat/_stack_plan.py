"""A plan for a scanned stack of equal blocks: what it stores, and the function that does it."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sharding.remat._checkpoint import INPUT, policy_of, scanned
from sharding.remat._planned import RematPlan

if TYPE_CHECKING:
    from sharding._zero import Zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan(RematPlan):
    """What a scan over a stack of blocks stores for its backward pass.

    Attributes:
      block: ``block(params, x) -> x`` with the parameters of one layer.
      lengths: of the scan; or of an outer scan and of an inner one, which runs again as a whole.
      names: of the values of a block that are saved on the device.
      offloaded: of the values that are copied to host memory; ``"block_input"`` is the input.
      input_names: that the block gives to its input by itself.
    """

    block: Callable[[Any, Any], Any]
    lengths: tuple[int, ...]
    names: tuple[str, ...]
    offloaded: tuple[str, ...] = ()
    input_names: tuple[str, ...] = ()

    @property
    def policy(self) -> Callable[..., bool]:
        """For ``jax.checkpoint``, ``nn.remat`` or ``zero.gathered`` around the block of a scan.

        Where the block's input is offloaded, the block must name it ``"block_input"`` in its first
        line; ``apply`` does so. With two lengths ``jax.checkpoint`` is around the inner scan, too.
        """
        offloaded = self.offloaded
        if INPUT in offloaded:
            offloaded = (*offloaded, *self.input_names)
        return policy_of(self.names, offloaded)

    def apply(self, zero: "Zero | None" = None) -> Callable[[Any, Any], Any]:
        """``fn(params, x)``, the scan over stacked parameters.

        Args:
          zero: whose ``train_step`` runs it; each layer gathers its own parameters, as those that
            ``zero.gathered`` returns.
        """
        return scanned(self.block, self.lengths, self.policy, zero, INPUT in self.offloaded)

    @property
    def summary(self) -> str:
        """Lengths of the scans, and names."""
        parts = [" x ".join(map(str, self.lengths)), *self.names]
        return " ".join([*parts, *(f"{name} (host)" for name in self.offloaded)])

    def choices(self) -> list[tuple[str, str, str]]:
        """Rows of the scans and the names."""
        scans = " x ".join(map(str, self.lengths))
        rows = [("scan", scans, "the inner one runs again" if len(self.lengths) > 1 else "")]
        rows.append(("saves", ", ".join(self.names) or "its input", ""))
        if self.offloaded:
            rows.append(("offloads", ", ".join(self.offloaded), ""))
        return rows
