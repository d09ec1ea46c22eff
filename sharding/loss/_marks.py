"""What marks, in a traced loss, the places where it is to get parameters in another way."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_ext.kernels import calling_default

# The name that marks the arrays that a loss passes to ``gather``.
MARK = "sharding.gather"
# What runs a loss that is being traced: each device, or the partitioner. The user's loss calls
# ``gather``, so that there is no argument for it.
_TRACED: contextvars.ContextVar[str] = contextvars.ContextVar("traced", default="")


@contextlib.contextmanager
def marking(per_device: bool = False) -> Iterator[None]:
    """A context in which calls of ``gather`` mark arrays, and ``with_handles`` leaves calls.

    ``per_device`` says that the loss has the rows of one device.
    """
    token = _TRACED.set("device" if per_device else "all rows")
    try:
        yield
    finally:
        _TRACED.reset(token)


def is_marking() -> bool:
    return bool(_TRACED.get())


def is_per_device() -> bool:
    """Whether a loss that is being traced has the rows of one device."""
    return _TRACED.get() == "device"


# A function in a traced loss, ``fn``, that takes handles in place of parameters where what runs the
# loss has them.
CALL = calling_default("with_handles")


def with_handles(fn: Callable[..., Any], *args: Any, by_rows: bool = False) -> Any:
    """``fn(*args)``, which gets a ``ParamHandle`` in place of each sharded parameter.

    ``by_rows`` says that it looks up rows of its first argument.
    """
    if not is_marking():
        return fn(*args)
    flat, treedef = jax.tree.flatten(args)
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
    if any(isinstance(x, jax.core.Tracer) for x in closed.consts):  # of this trace alone
        return fn(*args)

    def call(*flat: Any) -> list[Any]:
        return jax.tree.leaves(fn(*treedef.unflatten(flat)))

    out = CALL.bind(*flat, fn=call, default=closed, by_rows=by_rows)
    return jax.tree.unflatten(jax.tree.structure(results), out)
