"""Blocks under ``jax.checkpoint`` in scans."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sharding._types import Array, Tree

if TYPE_CHECKING:
    from sharding._zero import Zero

Fn = Callable[[Any, Any], Any]

# The name that a stack gives to the input of its block.
INPUT = "block_input"


def policy_of(saved: Collection[str], offloaded: Collection[str] = ()) -> Callable[..., Any]:
    """What ``jax.checkpoint`` stores: some values on the device, some in host memory."""
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def in_loop(fn: Fn, policy: Callable[..., Any], zero: "Zero | None") -> Fn:
    """A block of a scan that stores what the policy allows, and gathers its own parameters."""
    # At stage 3 ``zero.gathered`` has the policy and the barriers; or it is outside, so that what
    # it gathers is stored. A loop separates what runs again from its first run without barriers.
    checkpointed = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    if zero is None:
        return checkpointed(fn)
    if zero.stage < 3:
        return checkpointed(zero.gathered(fn))
    if zero.reshard_after_forward:
        return zero.gathered(fn, policy=policy)
    return zero.gathered(checkpointed(fn))


def scanned(
    fn: Fn,
    lengths: Sequence[int],
    policy: Callable[..., Any],
    zero: "Zero | None" = None,
    name_input: bool = False,
) -> Fn:
    """``stack(params, x)``: a scan over stacked parameters, or a scan over scans."""
    # ``name_input`` gives the block's input the name ``INPUT``.

    def named(params: Tree, x: Array) -> Any:
        # Only a name within the loop's body lets its carry be offloaded.
        return fn(params, jax.tree.map(with_name, x) if name_input else x)

    block = in_loop(named, policy, zero)

    def stack(params: Tree, x: Array) -> Any:
        return scan_in(lambda x, p: (block(p, x), None), x, params, lengths)[0]

    return stack


def scan_in(
    step: Callable[..., Any], carry: Any, xs: Any, lengths: Sequence[int], reverse: bool = False
) -> tuple[Any, Any]:
    """A scan; of an outer and an inner length a scan over scans, each of which runs again."""
    scan = functools.partial(lax.scan, reverse=reverse)
    if len(lengths) == 1:
        return scan(step, carry, xs, length=lengths[0])
    outer, inner = lengths
    segment = functools.partial(scan, step, length=inner)
    parts = jax.tree.map(lambda x: x.reshape(outer, inner, *x.shape[1:]), xs)
    carry, outs = scan(jax.checkpoint(segment, prevent_cse=False), carry, parts, length=outer)
    return carry, jax.tree.map(lambda x: x.reshape(outer * inner, *x.shape[2:]), outs)


def with_name(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, INPUT) if jnp.issubdtype(x.dtype, jnp.floating) else x
