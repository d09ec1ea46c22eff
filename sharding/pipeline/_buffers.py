"""What a stage of a pipeline stores between ticks, and what its operations find for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from sharding.pipeline._stage import Arrays


class Ends(NamedTuple):
    """What comes before and after the layers.

    Attributes:
      embed: ``embed(shared, microbatch, key) -> x``.
      head: ``head(shared, x, microbatch, key) -> (sum, (weight, aux))``.
      join: ``join(trained leaves, frozen leaves) -> shared``, the tree of shared parameters.
    """

    embed: Callable[[Any, Any, Any], Any]
    head: Callable[[Any, Any, Any, Any], Any]
    join: Callable[[Arrays, Arrays], Any]


class Totals(NamedTuple):
    """Sums over micro-batches, of one stage.

    Attributes:
      sum: of losses.
      weight: of examples or tokens.
      aux: leaves [micro-batches, ...].
    """

    sum: Any
    weight: Any
    aux: Any


class Found(NamedTuple):
    """What an operation stores for a later one of its stage; None where it does not.

    It leaves the branch as a value. Slots that a branch returned would be copied in every tick by
    XLA's compilers for CPUs and GPUs, and be in memory twice. Sums of gradients are returned: a
    value would be as large as they are.

    Attributes:
      residuals: of a forward pass, [layers, ...].
      crossing: of the first half of a backward pass, [layers, ...].
    """

    residuals: Any = None
    crossing: Any = None


class Buffers(NamedTuple):
    """What a stage stores between ticks.

    Attributes:
      messages: activations and cotangents, leaves [slots + 1, ...].
      residuals: [slots + 1, layers, ...], from forward to backward passes.
      crossing: [slots + 1, layers, ...], from the first to the second half of backward passes.
      layer_grads: of the trained parameters, [chunks * layers, ...].
      shared_grads: of the trained shared parameters.
      totals: of the loss.
      versions: of the parameters, in an asynchronous pipeline.
      opt_state: of the optimizer there.
    """

    messages: Any
    residuals: Arrays
    crossing: Arrays
    layer_grads: Arrays
    shared_grads: Arrays
    totals: Totals
    versions: Any = ()
    opt_state: Any = ()


def read_slot(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def write_slot(tree: Any, i: Any, new: Any) -> Any:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), tree, new)
