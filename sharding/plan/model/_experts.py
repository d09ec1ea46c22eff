"""A mixture of experts: which tokens each expert gets, what it makes of them, and the way back."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import Array
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.loss._declared_rows import keeps_rows_apart

EXPERT_AXIS = "expert"  # of devices that have other experts of each layer, and other sequences


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts in the place of a layer's MLP, each an MLP of its own.

    A router sends each token to those that it scores highest. ``Decoder.hidden`` is the width of
    all MLPs that a token passes, so that an expert has ``hidden / (active + shared)``.

    References:
      Jiang et al.: Mixtral of Experts, 2024, arXiv 2401.04088. DeepSeek-AI: DeepSeek-V3 Technical
      Report, 2024, arXiv 2412.19437. Lepikhin et al.: GShard, 2020, arXiv 2006.16668 (slots).
    """

    number: int  #: in each layer
    active: int  #: to how many a token is sent
    shared: int = 0  #: others, which all tokens pass
    dense_layers: int = 0  #: the first layers, which have a single MLP as wide as ``hidden``
    #: slots of an expert by the tokens of a sequence that it gets on average; it drops all others
    capacity: float = 1.25

    @property
    def share(self) -> float:
        """The tokens that an expert gets on average, of all."""
        return self.active / self.number

    def slots(self, length: int) -> int:
        """Tokens of a sequence that an expert takes."""
        return math.ceil(self.capacity * length * self.share)


def on_expert_axis(x: Array) -> Array:
    """Rows, shared by the devices of the expert axis where the mesh of the program has one."""
    if not _num_devices():
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(EXPERT_AXIS))


def apply_experts(
    experts: Experts,
    mlp: Callable[..., Array],
    x: Array,
    router: Array,
    matrices: dict[str, Array],
) -> Array:
    """What its experts make of each token, weighted by the softmax of their scores.

    With p = x router and T the ``active`` largest of p: sum over e in T of softmax(p_T)_e mlp_e(x).
    On an expert axis of n devices, each sends the slots of all experts to their owners, and back:
    two all-to-alls of batch x number x slots x width values.

    Args:
      experts: how many there are.
      mlp: ``mlp(matrices, x)``, of values (experts, tokens, width).
      x: (batch, length, width).
      router: (width, number).
      matrices: of the experts, (number, ...) each.
    """
    several = _num_devices() > 0
    exchange = functools.partial(lax.all_to_all, axis_name=EXPERT_AXIS, tiled=True)

    def of_rows(x: Array, router: Array, matrices: dict[str, Array]) -> Array:
        scores = to_sum_dtype(x @ router)
        top, chosen = lax.top_k(scores, experts.active)
        weights = jax.nn.softmax(top).astype(x.dtype)
        sent, slot = jax.vmap(functools.partial(_to_slots, experts))(x, chosen)
        if several:
            sent = exchange(sent, split_axis=1, concat_axis=0)
        batch, number, slots, width = sent.shape
        by_expert = sent.swapaxes(0, 1).reshape(number, batch * slots, width)
        made = mlp(matrices, by_expert).reshape(number, batch, slots, width).swapaxes(0, 1)
        if several:
            made = exchange(made, split_axis=0, concat_axis=1)
        return jax.vmap(_from_slots)(made, slot, weights)

    if several:
        own = PartitionSpec(EXPERT_AXIS)
        specs: Any = {"in_specs": (own, PartitionSpec(), own), "out_specs": own}
        of_rows = jax.shard_map(of_rows, axis_names={EXPERT_AXIS}, **specs)
        of_rows = keeps_rows_apart(of_rows, in_dims=(0, None, None), out_dims=0)
    return of_rows(x, router, matrices)


def _num_devices() -> int:
    """Of the expert axis; 0 where there is none."""
    return jax.sharding.get_abstract_mesh().shape.get(EXPERT_AXIS, 0)


def _to_slots(experts: Experts, x: Array, chosen: Array) -> tuple[Array, Array]:
    """The tokens of one sequence in the slots of their experts, and the slot of each choice.

    ``x`` is (length, width), ``chosen`` (length, active). Earlier tokens come first; a choice
    without a slot has a number past the last one.
    """
    slots = experts.slots(len(x))
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # by expert, then by token
    by_expert = flat[order]
    counts = jnp.bincount(flat, length=experts.number)
    place = jnp.arange(flat.size) - (jnp.cumsum(counts) - counts)[by_expert]
    past = experts.number * slots
    taken = jnp.where(place < slots, by_expert * slots + place, past)
    slot = jnp.zeros_like(taken).at[order].set(taken)
    token = jnp.full(past, len(x)).at[taken].set(order // experts.active, mode="drop")
    sent = jnp.take(x, token, axis=0, mode="fill", fill_value=0)
    return sent.reshape(experts.number, slots, -1), slot


def _from_slots(made: Array, slot: Array, weights: Array) -> Array:
    """The weighted sum of what the experts of each token made, zero of those without a slot."""
    flat = made.reshape(-1, made.shape[-1])
    each = jnp.take(flat, slot, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("tkw,tk->tw", each.reshape(*weights.shape, -1), weights)
