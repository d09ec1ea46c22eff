"""train_lm.py with --memory: what the loss stores for its backward pass, and what runs again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from _report import human_bytes

import sharding as shd


class PlannedLoss(NamedTuple):
    """The plan of a loss, and what else a device holds at the peak of a step; all in bytes.

    Attributes:
      plan: the loss, within what the others leave.
      state: parameters, gradients, optimizer state and batch, as the plan of stages counts them.
      gathered: full parameters that stage 3 gathers, and their gradients; 0 at other stages.
    """

    plan: shd.remat.LossPlan
    state: float
    gathered: float

    def notes(self) -> list[str]:
        """Sentences below the table of the plan."""
        parts = [f"{human_bytes(self.state)} of state, gradients and batch"]
        if self.gathered:
            parts.append(f"{human_bytes(self.gathered)} that stage 3 gathers")
        parts.append(f"{human_bytes(self.plan.peak)} of activations")
        total = human_bytes(self.state + self.gathered + self.plan.peak)
        return [f"One device takes {total}: {', '.join(parts)}."]


def plan_loss(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    windows: jax.ShapeDtypeStruct,
    stage: Any,  # of a plan
    memory: float,
    device: jax.Device,
) -> PlannedLoss:
    """The fastest way to train the loss within the memory.

    Args:
      loss_fn: of full parameters and windows.
      params: abstract.
      windows: of a micro-batch.
      stage: what a device holds beside activations.
      memory: bytes of one device.
      device: for which programs are compiled.

    Raises:
      OverBudgetError: if nothing fits.
    """
    gathered = 0.0
    if stage.name == "stage 3":  # what the step gathers stays
        gathered = 2.0 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    state = stage.memory + stage.unreduced
    held = f"parameters, gradients and optimizer state take {human_bytes(state + gathered)}"
    left = memory - state - gathered
    try:
        if left <= 0:
            raise ValueError("nothing is left for activations.")
        plan = shd.remat.plan(loss_fn, params, windows, left, device=device)
    except ValueError as error:
        raise shd.remat.OverBudgetError(
            f"--memory {human_bytes(memory)} is not enough: {held} of a device, and {error}"
        ) from None
    return PlannedLoss(plan, state, gathered)
