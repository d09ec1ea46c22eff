"""How kernels run: in programs for which platform, on which shards, and with which parameters.

An internal interface, without promises to users: ``low_precision_state`` calls its kernel through
it, and ``sharding`` says how arrays are sharded, for a kernel sees those of one device.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import optax

from optax_ext._leaves import path_name

Dims = tuple[int, ...]


class Shards(Protocol):
    """How the arrays of each parameter, with their global shapes, are on several devices."""

    def shape_of(self, path: str, shape: Dims) -> Dims | None:
        """Returns the shape of a shard of a parameter; None if the path is not one's."""

    def run(
        self,
        path: str,
        fn: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        dims: Sequence[Dims],
        result_dims: Sequence[Dims],
    ) -> list[jax.Array]:
        """Calls ``fn`` on each device with its shards, and returns the results as global arrays.

        ``dims`` has, for each dim of each operand, the dim of the parameter that it is sharded as.
        """


class _Applied:
    """Parameters in a step, and new ones that were computed beside their updates."""

    def __init__(self, params: dict[str, jax.Array]):
        self.params = params
        self.new: dict[str, tuple[jax.Array, jax.Array]] = {}  # (update, new parameter) by path


_INTERPRETED = contextvars.ContextVar("interpreted", default=False)
_SHARDS: contextvars.ContextVar[Shards | None] = contextvars.ContextVar("shards", default=None)
_APPLIED: contextvars.ContextVar[_Applied | None] = contextvars.ContextVar("applied", default=None)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels traced here run on any platform, uncompiled."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def is_interpreted() -> bool:
    """Whether kernels traced here are interpreted."""
    return _INTERPRETED.get()


def for_tpus(kernel: Callable[..., Any], default: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``kernel`` in programs for TPUs, ``default`` in others."""
    if _INTERPRETED.get():
        return kernel(*arguments)
    return jax.lax.platform_dependent(*arguments, tpu=kernel, default=default)


# --- Shards ---------------------------------------------------------------------------------------


def on_shards() -> bool:
    """Whether kernels traced here run on shards, of which ``kernels_on`` says how they are made."""
    return _SHARDS.get() is not None


@contextlib.contextmanager
def kernels_on(shards: Shards) -> Iterator[None]:
    """Kernels traced here run on these shards."""
    token = _SHARDS.set(shards)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def shard_shape(path: str, shape: Dims) -> Dims | None:
    """Returns the shape of what a device has of a parameter; None if that is unknown."""
    shards = _SHARDS.get()
    return shape if shards is None else shards.shape_of(path, shape)


def run_on_shards(
    path: str,
    fn: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    dims: Sequence[Dims],
    result_dims: Sequence[Dims],
) -> list[jax.Array]:
    """Calls ``fn`` as ``Shards.run`` does; on one device, with the arrays as they are."""
    shards = _SHARDS.get()
    if shards is None:
        return fn(*operands)
    return shards.run(path, fn, operands, dims, result_dims)


# --- Parameters -----------------------------------------------------------------------------------


def update_params(
    update: Callable[..., Any],
    grads: Any,
    state: Any,
    params: Any,
    place: Callable[[Any], Any] = lambda updates: updates,
) -> tuple[Any, Any]:
    """Returns ``optax.apply_updates(params, place(updates))`` and the new state.

    A kernel that reads a parameter's gradient also writes the new parameter, so that no update
    passes through memory. That holds for updates that no later transformation changes.
    """
    applied = _Applied(dict(_by_path(params)))
    token = _APPLIED.set(applied)
    try:
        updates, new_state = update(grads, state, params)
    finally:
        _APPLIED.reset(token)
    final = dict(_by_path(updates))
    if any(final.get(path) is not u for path, (u, _) in applied.new.items()):
        # A later transformation reads them, and those of a kernel are differences of parameters.
        applied.new.clear()
        updates, new_state = update(grads, state, params)
    params = optax.apply_updates(params, place(updates))
    new = {path: param for path, (_, param) in applied.new.items()}
    return jax.tree_util.tree_map_with_path(
        lambda path, p: new.get(path_name(path), p), params
    ), new_state


def _by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    return ((path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree))


def param_to_update(path: str) -> jax.Array | None:
    """Returns the parameter to which ``update_params`` applies an update, by its path."""
    applied = _APPLIED.get()
    return None if applied is None else applied.params.get(path)


def report_new_param(path: str, update: jax.Array, new: jax.Array) -> None:
    """Reports the sum of a parameter and its update to ``update_params``."""
    applied = _APPLIED.get()
    assert applied is not None
    applied.new[path] = update, new
