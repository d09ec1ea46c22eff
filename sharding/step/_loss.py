"""A loss in a step, and its arguments."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Batch, Tree
from sharding.loss._loss_options import Loss
from sharding.step._checks import check_whole_number
from sharding.step._rng import microbatch_key


@dataclasses.dataclass(frozen=True)
class StepLoss(Loss):
    """A loss in a step, of micro-batches."""

    microbatches: int = 1
    # Whether the transformation requires the norms of the local gradients.
    local_norm: bool = False
    # Of a sum over rows, the number of parts that it is a mean over.
    times: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("microbatches", self.microbatches, 1)

    def split(self, out: Tree) -> tuple[Any, Any, Any, Any]:
        """``Loss.split``, with a total of which the mean over parts is trained."""
        total, *more = super().split(out)
        return (total * self.times if self.times > 1 else total, *more)

    def first_args(self, axes: tuple[str, ...], inputs: "Inputs") -> tuple[Any, ...]:
        """The arguments for the first micro-batch, to be traced for their types."""
        first = jax.tree.map(
            lambda x: x[: x.shape[0] // self.microbatches] if jnp.ndim(x) else x, inputs.batch
        )
        return self.device_args(axes, inputs.key, first, 0, inputs.model_state)

    def device_args(
        self, axes: tuple[str, ...], key: Any, microbatch: Batch, index: Any, model_state: Tree
    ) -> tuple[Any, ...]:
        """``loss_args`` for micro-batch ``index`` of this device."""
        number = index
        if self.per_device or self.rngs == "per_example":
            # Micro-batches are numbered in the order of the batch of all devices.
            number = lax.axis_index(axes) * self.microbatches + index
        keys = microbatch_key(self.rngs, key, number, microbatch)
        return loss_args(self, microbatch, model_state, keys)


class Inputs(NamedTuple):
    """The arguments of a loss beside the parameters; None for those it does not take."""

    batch: Any  # sharded over the data axes
    key: Any = None  # the same on all devices
    model_state: Any = None  # the same on all devices


def loss_args(loss: Loss, microbatch: Batch, model_state: Tree, keys: Any) -> tuple[Any, ...]:
    """The arguments of the loss after the parameters: those that its options ask for."""
    args = (microbatch, model_state) if loss.model_state else (microbatch,)
    return (*args, keys) if loss.rngs else args
