"""How kernels run: in programs for which platform, on which shards, and with the parameters inside.

A kernel sees the arrays of one device: ``sharding`` says how they are sharded.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax

Dims = tuple[int, ...]
Path = tuple[Any, ...]  # of a parameter in its tree


class Shards:
    """How the arrays of each parameter are on devices; here all are on one, unsharded."""

    interpret = False

    def shape_of(self, path: Path, shape: Dims) -> Dims | None:
        """Returns the shape of a shard; None if there is no such parameter of this shape."""
        return shape

    def run(
        self,
        path: Path,
        fn: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        dims: Sequence[Dims],
        result_dims: Sequence[Dims],
    ) -> list[jax.Array]:
        """Calls ``fn`` on each device with its shards, and returns the results as global arrays.

        ``dims`` has, for each dim of each operand, the dim of the parameter that it is sharded as.
        """
        return fn(*operands)


def for_tpus(kernel: Callable[..., Any], default: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``kernel`` in programs for TPUs, ``default`` in others."""
    return jax.lax.platform_dependent(*arguments, tpu=kernel, default=default)


# Between the step and a transformation inside others, of which MultiSteps and lookahead pass
# on no extra arguments.
_SHARDS: contextvars.ContextVar[Shards | None] = contextvars.ContextVar("shards", default=None)


def shards() -> Shards | None:
    """Returns how arrays are sharded where this is traced; None on one device."""
    return _SHARDS.get()


@contextlib.contextmanager
def kernels_on(shards: Shards) -> Iterator[None]:
    """Kernels traced here run on these shards."""
    token = _SHARDS.set(shards)
    try:
        yield
    finally:
        _SHARDS.reset(token)


# ``update`` and ``optax.apply_updates`` in one: from gradients, state, parameters and extra
# arguments to new parameters and the new state.
UpdateParams = Callable[..., tuple[Any, Any]]


class WithUpdateParams(optax.GradientTransformationExtraArgs):
    """A transformation whose kernels can update the parameters, too."""

    update_params: UpdateParams


def update_params_of(tx: optax.GradientTransformation) -> UpdateParams | None:
    """Returns how the outermost transformation updates parameters without updates in memory."""
    return getattr(tx, "update_params", None)
