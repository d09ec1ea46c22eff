"""A loss function, its options and its arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.step import _model_state
from sharding.step._rng import RNGS, microbatch_key


class Loss(NamedTuple):
    """A loss function, and what it takes and returns; see ``Zero.train_step``."""

    fn: Callable[..., Any]
    has_aux: bool = False
    weighted: bool = False
    rngs: bool | str = False
    microbatches: int = 1
    # Whether the transformation requires the norms of the local gradients.
    local_norm: bool = False
    model_state: bool = False
    # How the model states of all devices are reduced: a prefix tree of _model_state.REDUCTIONS.
    reduction: Any = "mean"

    def check(self) -> "Loss":
        """Itself, or an error that names the bad option."""
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}.")
        if self.rngs not in RNGS:
            raise ValueError(f"rngs must be a bool or 'per_example', got {self.rngs!r}.")
        _model_state.check_reduction(self.reduction)
        return self

    def split(self, out: Any) -> tuple[Any, Any, Any]:
        """``(value, new model state, aux)`` of what ``fn`` returned; None for what it does not."""
        if self.model_state and self.has_aux:
            value, (model_state, aux) = out
        elif self.model_state:
            (value, model_state), aux = out, None
        else:
            (value, aux), model_state = out if self.has_aux else (out, None), None
        return value, model_state, aux


class Inputs(NamedTuple):
    """The arguments of a loss beside the parameters; None for those it does not take."""

    batch: Any  # sharded over the data axes
    key: Any = None  # the same on all devices
    model_state: Any = None  # the same on all devices


def first_args(loss: Loss, axes: tuple[str, ...], inputs: Inputs) -> tuple[Any, ...]:
    """The arguments of the loss for the first micro-batch, to be traced for their types."""
    first = jax.tree.map(
        lambda x: x[: x.shape[0] // loss.microbatches] if jnp.ndim(x) else x, inputs.batch
    )
    return loss_args(loss, axes, inputs.key, first, 0, inputs.model_state)


def loss_args(
    loss: Loss, axes: tuple[str, ...], key: Any, microbatch: Any, index: Any, model_state: Any
) -> tuple[Any, ...]:
    """The arguments of the loss after the parameters, for micro-batch ``index`` of this device."""
    args = (microbatch, model_state) if loss.model_state else (microbatch,)
    # Micro-batches are numbered in the order of the batch of all devices.
    number = lax.axis_index(axes) * loss.microbatches + index
    return (*args, microbatch_key(loss.rngs, key, number, microbatch)) if loss.rngs else args
