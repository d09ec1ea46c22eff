"""A loss in a step: its arguments, random keys, micro-batches and weights."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Batch, Tree
from sharding.loss._loss_options import NUMBERED, Loss
from sharding.step._checks import check_whole_number
from sharding.step._model_state import checked


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

    def split(self, out: Tree, old: Tree = None) -> tuple[Any, Any, Any, Any]:
        """``Loss.split``, with a total of which the mean over parts is trained.

        With the ``old`` model state the new one is in its dtypes.
        """
        total, weight, new, aux = super().split(out)
        new = checked(old, new) if self.model_state and old is not None else new
        return total * self.times if self.times > 1 else total, weight, new, aux

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


# --- Random keys -------------------------------------------------------------------------------


def step_key(state: Tree, key: Any) -> Any:
    """The key of this step: the key of the run, folded by the step count of the train state."""
    if isinstance(state, tuple):
        if key is None:
            raise ValueError(
                "rngs=True with a state that is a pair needs a new key in each call: "
                "step(state, batch, key) (docs: how_to/random_keys)."
            )
        return key
    return jax.random.fold_in(jax.random.key(0) if key is None else key, state.step)


def microbatch_key(rngs: Any, key: Any, number: Any, microbatch: Batch) -> Any:
    """What the loss gets as its key for the micro-batch of this number of all devices, if any."""
    if not rngs:
        return None
    if rngs is NUMBERED:
        return number, None if key is None else jax.random.fold_in(key, number)
    if rngs != "per_example":
        return jax.random.fold_in(key, number)
    sizes = [x.shape[0] for x in jax.tree.leaves(microbatch) if jnp.ndim(x)]
    if not sizes:
        raise ValueError("rngs='per_example': the batch holds only scalars, and no examples.")
    examples = number * sizes[0] + jnp.arange(sizes[0])  # numbers in the batch of all devices
    return jax.vmap(jax.random.fold_in, (None, 0))(key, examples)


# --- Micro-batches -----------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums over micro-batches, on one device or on the mesh."""

    loss: jax.Array
    weight: jax.Array
    local: list[jax.Array]  # as squares returns them
    grads: list[jax.Array]  # of trained parameters


def split_microbatches(batch: Batch, count: int) -> Any:
    """(examples of a device, ...) to (micro-batch, examples, ...); scalars are the same in all."""
    return jax.tree.map(
        lambda x: (
            jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:]))
            if jnp.ndim(x)
            else jnp.full(count, x)
        ),
        batch,
    )


def join_microbatches(x: jax.Array) -> jax.Array:
    """(micro-batch, ...) to one value: scalars are averaged, batch arrays concatenated."""
    if x.ndim == 1:
        return jnp.mean(x, axis=0)
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


def inverse_weight(weight: jax.Array) -> jax.Array:
    """What divides sums by their weight; 0 where nothing has a weight."""
    return jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
