"""Flax modules that gather their own parameters, or look up rows of them; only users need Flax."""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from sharding._types import Tree
from sharding.loss._evaluate import after_input
from sharding.loss._loss_options import Rewrite
from sharding.loss._marks import is_marking, is_per_device
from sharding.placement._layout import Layout
from sharding.placement._specs import axes_of, entries_of, entry_of
from sharding.step._gather_and_reduce import gather, gathered, split_arrays
from sharding.step._lookup import lookup


def gathered_module(cls: type, policy: Callable[..., bool] | None, reshard: bool) -> type:
    """A subclass of a Flax module, linen or nnx, whose ``__call__`` gathers its parameters."""
    for name, wrap in (("flax.linen", gathered_call), ("flax.nnx", _nnx_call)):
        flax = sys.modules.get(name)
        if flax is not None and issubclass(cls, flax.Module):
            return _subclass(cls, __call__=wrap(flax, cls, policy, reshard))
    raise ValueError(
        f"zero.gathered takes a function of parameters, or a module class of flax.linen or "
        f"flax.nnx, got {cls}. For modules that are pytrees wrap the method: "
        "zero.gathered(Block.__call__)(block, x)."
    )


def _subclass(cls: type, **methods: Any) -> type:
    """A subclass with other methods and the same name, after which Linen names parameters."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), {**methods, **names})


def gathered_call(nn: Any, cls: Any, policy: Any, reshard: bool) -> Callable[..., Any]:
    """The ``__call__`` of a linen module that gathers its own parameters."""

    # Only functional transforms: those of classes rename the modules within.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_initializing():
            return cls.__call__(self, *args, **kwargs)
        if not (reshard and is_marking()):

            def plain(module: Any) -> Any:
                return cls.__call__(module, *args, **kwargs)

            return nn.map_variables(plain, "params", trans_in_fn=gather)(self)
        arrays, join = split_arrays((args, kwargs))

        def run(module: Any, arrays: list[Any]) -> Any:
            moved: list[Any] = []

            def gather_after_input(params: Tree) -> Any:
                params, moved[:] = after_input(params, arrays)
                return gather(params)

            def inner(module: Any) -> Any:
                args, kwargs = join(moved)
                return cls.__call__(module, *args, **kwargs)

            return nn.map_variables(inner, "params", trans_in_fn=gather_after_input)(module)

        return nn.remat(run, policy=policy)(self, arrays)

    return __call__


def _nnx_call(nnx: Any, cls: Any, policy: Any, reshard: bool) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph, params, rest = nnx.split(self, nnx.Param, ...)

        def run(params: Tree, rest: Any, *args: Any, **kwargs: Any) -> Any:
            module = nnx.merge(graph, params, rest)
            out = cls.__call__(module, *args, **kwargs)
            return out, nnx.state(module, nnx.Not(nnx.Param))

        out, rest = gathered(run, policy, reshard)(params, rest, *args, **kwargs)
        nnx.update(self, rest)
        return out

    return __call__


# --- Blocks that are gathered by name -------------------------------------------------------------


def matches(pattern: str, name: str, path: str) -> bool:
    """Whether a pattern is the name of a module's class, or is found in the module's path."""
    return pattern == name or bool(path and re.search(pattern, path))


class BlocksAreMissing(ValueError):
    """A module of ``gathered_blocks`` that a loss does not call."""


def check_found(
    blocks: Sequence[str], found: set[str], where: str, modules: Iterable[tuple[str, str]]
) -> None:
    """Raises unless all ``gathered_blocks`` were found; ``modules`` are class names and paths."""
    missing = [pattern for pattern in blocks if pattern not in found]
    if missing:
        others = ", ".join(f"{name} ({path or 'the model'})" for name, path in modules)
        others = others or "none, or is jitted and was traced before: then leave out that jit"
        raise BlocksAreMissing(
            f"gathered_blocks: {missing[0]!r} is neither the class nor in the path of {where} "
            f"{others}. Name some of these; wrap layers that are functions in zero.gathered "
            "(docs: how_to/stage_3)."
        )


# --- Embeddings -----------------------------------------------------------------------------------


def sparse_embedding(cls: type, *, shuffled: bool = False) -> type:
    """An embedding whose gradient is synchronized by the rows that were looked up.

    Args:
      cls: ``flax.linen.Embed`` or ``flax.nnx.Embed``, or a subclass that calls and sets up alike.
      shuffled: its rows are in the order of ``shuffle_rows``; shuffle a table from elsewhere.

    Returns:
      A subclass with the same name, fields and parameters whose ``__call__`` is ``lookup``. Its
      ``attend`` uses the full table, whose full gradient is then synchronized.

    Raises:
      ValueError: if the class is neither, or has a ``__call__`` of its own.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, sharding as shd
      >>> embed = shd.sparse_embedding(nn.Embed)(num_embeddings=100, features=8)
      >>> embed.init_with_output(jax.random.key(0), jnp.zeros((2, 3), int))[0].shape
      (2, 3, 8)
    """
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and issubclass(cls, linen.Embed):
        _check_own(cls, linen.Embed)

        def linen_call(self: Any, inputs: jax.Array) -> jax.Array:
            rows = lookup(self.embedding, inputs, shuffled=shuffled)
            return self.promote_dtype(rows, dtype=self.dtype, inexact=False)[0]

        return _subclass(cls, __call__=linen_call)
    if nnx is not None and issubclass(cls, nnx.Embed):
        _check_own(cls, nnx.Embed)

        def nnx_call(self: Any, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
            if out_sharding is not None:
                raise ValueError(
                    "sparse_embedding does not support out_sharding: rows are sharded as their "
                    f"ids. Got {out_sharding}; leave the argument out."
                )
            rows = lookup(self.embedding.get_value(), inputs, shuffled=shuffled)
            return self.promote_dtype((rows,), dtype=self.dtype, inexact=False)[0]

        return _subclass(cls, __call__=nnx_call)
    raise ValueError(
        "sparse_embedding takes flax.linen.Embed, flax.nnx.Embed or a subclass of one, got "
        f"{cls}. In other modules call lookup."
    )


def _check_own(cls: Any, base: Any) -> None:
    """Raises if a subclass has a call of its own, which would not be made."""
    if cls.__call__ is not base.__call__:
        raise ValueError(
            f"{cls} has a __call__ of its own, which sparse_embedding would replace. Make the "
            "subclass of sparse_embedding(...) instead."
        )


# --- Linen modules in a step ----------------------------------------------------------------------

_CALLED = "a Flax linen module that the loss calls. It calls"


def in_step(zero: Any, loss_fn: Callable[..., Any], all_blocks: bool) -> Callable[..., Any]:
    """A loss whose Flax modules know that the batch is sharded, and which blocks gather."""
    unchecked = all_blocks

    @functools.wraps(loss_fn)
    def call(params: Tree, *args: Any) -> Any:
        nonlocal unchecked
        named = without_names(params, zero._layout)
        with _intercepting(zero) as check:
            out = loss_fn(named, *args)
            if unchecked:  # the first trace alone: jax caches that of a jitted model
                check()
                unchecked = False
        return out

    if rewrite := Rewrite.of(loss_fn):
        plain = in_step(zero, rewrite.plain, all_blocks)
        vars(call)["rewrite"] = rewrite._replace(run=call, plain=plain)
    if computes := getattr(loss_fn, "computes", None):
        of_planned = {"computes": in_step(zero, computes, all_blocks=False)}
        vars(call).update(of_planned, num_rows=getattr(loss_fn, "num_rows", None))
    return call


@contextlib.contextmanager
def _intercepting(zero: Any) -> Iterator[Callable[[], None]]:
    """A context in which linen modules do so; yields a check that all blocks were found."""
    nn, layout, blocks = sys.modules.get("flax.linen"), zero._layout, zero.gathered_blocks
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
        name, path = type(module).__name__, "/".join(module.path)
        seen.setdefault(name, path)
        own = {pattern for pattern in blocks if matches(pattern, name, path)}
        found.update(own)
        if inside or not own:
            return next_fun(*args, **kwargs)
        inside = True
        try:
            call = gathered_call(nn, type(module), None, layout.recomputes)
            return call(module, *args, **kwargs)
        finally:
            inside = False

    rules = nn.get_logical_axis_rules()
    if is_per_device():
        # Each device has its own shard of the batch: constraints cannot name the axes it is over.
        rules = _without_axes(rules, layout.data_axes)
    with nn.intercept_methods(intercept), nn.logical_axis_rules(rules):
        yield lambda: check_found(blocks, found, _CALLED, seen.items())


def without_names(params: Tree, layout: Layout) -> Any:
    """Parameters whose linen boxes, which unboxing constrains to their names, name other axes.

    Those of the data, and those that the mesh lacks, are left out.
    """
    axes = layout.data_axes
    nn = sys.modules.get("flax.linen")
    if nn is None:
        return params

    def strip(x: Any) -> Any:
        if isinstance(x, nn.LogicallyPartitioned):
            return x.replace(rules=_without_axes(x.rules or nn.get_logical_axis_rules(), axes))
        if isinstance(x, nn.Partitioned):
            return x.replace(names=tuple(entries_of(x.get_partition_spec(), layout.other_axes)))
        return x

    return jax.tree.map(strip, params, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def _without_axes(rules: Any, axes: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _without(axis, axes)) for name, axis in rules)


def _without(entry: Any, axes: tuple[str, ...]) -> Any:
    """The mesh axes of a rule that are not among ``axes``."""
    entry = tuple(entry) if isinstance(entry, list) else entry
    return entry_of(tuple(axis for axis in axes_of(entry) if axis not in axes))
