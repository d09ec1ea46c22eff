"""Random keys of a step, of its micro-batches and of single examples."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding._types import Batch, Tree
from sharding.loss._loss_options import NUMBERED


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
