"""Unmodified Flax linen models in a step: ``BatchNorm`` over all devices, ``gathered_blocks``."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from sharding._types import Tree
from sharding.placement._specs import axes_of, entry_of
from sharding.step.flax._batch_norm import over_devices
from sharding.step.flax._modules import check_found, gathered_call, matches

_CALLED = "a Flax linen module that the loss calls. It calls"


def in_step(
    loss_fn: Callable[..., Any],
    axes: tuple[str, ...],
    view: str,
    sync_batch_norm: bool,
    blocks: Sequence[str],
    reshard: bool,
    all_blocks: bool,
) -> Callable[..., Any]:
    """A loss whose Flax modules know that the batch is sharded, and which blocks gather."""
    unchecked = all_blocks

    @functools.wraps(loss_fn)
    def call(params: Tree, *args: Any) -> Any:
        nonlocal unchecked
        named = without_names(params, axes)
        with _intercepting(axes, view, sync_batch_norm, blocks, reshard) as check:
            out = loss_fn(named, *args)
            if unchecked:  # the first trace alone: jax caches that of a jitted model
                check()
                unchecked = False
        return out

    return call


@contextlib.contextmanager
def _intercepting(
    axes: tuple[str, ...], view: str, sync_batch_norm: bool, blocks: Sequence[str], reshard: bool
) -> Iterator[Callable[[], None]]:
    """A context in which linen modules do so; yields a check that all blocks were found."""
    nn = sys.modules.get("flax.linen")
    if nn is None:
        yield lambda: check_found(blocks, set(), _CALLED, [])
        return
    found: set[str] = set()
    seen: dict[str, str] = {}
    inside = False  # of a block that gathers: what it holds is gathered with it

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal inside
        module = context.module
        if context.method_name != "__call__" or module.is_initializing():
            return next_fun(*args, **kwargs)
        if sync_batch_norm and view == "device" and isinstance(module, nn.BatchNorm):
            with over_devices(module, axes):
                return next_fun(*args, **kwargs)
        name, path = type(module).__name__, "/".join(module.path)
        seen.setdefault(name, path)
        own = {pattern for pattern in blocks if matches(pattern, name, path)}
        found.update(own)
        if inside or not own:
            return next_fun(*args, **kwargs)
        inside = True
        try:
            return gathered_call(nn, type(module), None, reshard)(module, *args, **kwargs)
        finally:
            inside = False

    rules = nn.get_logical_axis_rules()
    if view == "device":
        # Each device has its own shard of the batch: constraints cannot name the axes it is over.
        rules = _without_axes(rules, axes)
    with nn.intercept_methods(intercept), nn.logical_axis_rules(rules):
        yield lambda: check_found(blocks, found, _CALLED, seen.items())


def without_names(params: Tree, axes: tuple[str, ...]) -> Any:
    """Parameters whose linen boxes name none of these axes, to which unboxing constrains them."""
    nn = sys.modules.get("flax.linen")
    if nn is None:
        return params

    def strip(x: Any) -> Any:
        if isinstance(x, nn.LogicallyPartitioned):
            return x.replace(rules=_without_axes(x.rules or nn.get_logical_axis_rules(), axes))
        if isinstance(x, nn.Partitioned):
            return x.replace(names=tuple(_without(entry, axes) for entry in x.names))
        return x

    return jax.tree.map(strip, params, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def _without_axes(rules: Any, axes: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _without(axis, axes)) for name, axis in rules)


def _without(entry: Any, axes: tuple[str, ...]) -> Any:
    """The mesh axes of a rule that are not among ``axes``."""
    entry = tuple(entry) if isinstance(entry, list) else entry
    return entry_of(tuple(axis for axis in axes_of(entry) if axis not in axes))
