"""A loss function, its options and its arguments."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding._types import Array, Batch, Tree
from sharding.step import _model_state
from sharding.step._checks import check_whole_number
from sharding.step._rng import RNGS, microbatch_key


class Loss(NamedTuple):
    """A loss function, and what it takes and returns; see ``Zero.train_step``."""

    fn: Callable[..., Any]
    has_aux: bool = False
    weighted: bool = False
    rngs: bool | str = False
    microbatches: int = 1
    model_state: bool = False
    # How the model states of all devices are reduced: a prefix tree of _model_state.REDUCTIONS, or
    # a function of the model state that gives one.
    reduction: Any = "mean"
    # Whether the transformation requires the norms of the local gradients.
    local_norm: bool = False

    def check(self) -> "Loss":
        """Itself, or an error that names the bad option."""
        check_whole_number("microbatches", self.microbatches, 1)
        if self.rngs not in RNGS:
            raise ValueError(f"rngs must be a bool or 'per_example', got {self.rngs!r}.")
        _model_state.check_reduction(self.reduction)
        return self

    def split(self, out: Tree) -> tuple[Any, Any, Any, Any]:
        """``(total, weight, new model state, aux)`` of what ``fn`` returned, else 1 and None."""
        model_state = aux = None
        if self.model_state and self.has_aux:
            out, more = as_pair(out, "(loss, (new model state, aux))")
            model_state, aux = as_pair(more, "(new model state, aux) beside the loss")
        elif self.model_state:
            out, model_state = as_pair(out, "(loss, new model state)")
        elif self.has_aux:
            out, aux = as_pair(out, "(loss, aux), as has_aux says")
        one = (out, jnp.ones(()))
        total, weight = as_pair(out, "(sum, weight), as weighted says") if self.weighted else one
        if not (_is_scalar(total, jnp.floating) and _is_scalar(weight, np.generic)):
            raise ValueError(
                f"the loss is {_returned(out)}, and must be "
                f"{'a pair of scalars' if self.weighted else 'one floating scalar'}. A pair "
                "(sum, weight), such as that of a Pipeline, needs weighted=True, a pair "
                "(loss, aux) has_aux=True; of losses by example return the mean."
            )
        return total, weight, model_state, aux


def as_pair(out: Tree, expected: str) -> Any:
    """A pair that a loss returned, or an error that says what was expected."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise ValueError(f"the loss must return {expected}; it returned {_returned(out)}.")
    return out


def _is_scalar(x: Array, kind: Any) -> bool:
    x = np.asarray(x) if isinstance(x, int | float) else x
    return getattr(x, "shape", None) == () and jnp.issubdtype(x.dtype, kind)


def _returned(out: Tree) -> str:
    def short(x: Array) -> str:
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__

    return str(jax.tree.map(short, out)).replace("'", "")


def check_arguments(fn: Callable[..., Any], *names: str, **more: Any) -> None:
    """Raises if a function does not take these arguments, and of ``more`` those that are true."""
    names += tuple(name for name, given in more.items() if given)
    if not callable(fn):
        raise ValueError(
            f"a step takes a function of ({', '.join(names)}), got a {type(fn).__name__}, which "
            "is not callable."
        )
    try:
        # A wrapper may take other arguments than what it wraps.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # not known
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"a step with these options calls {getattr(fn, '__name__', 'the function')}"
            f"({', '.join(names)}), and it takes {signature}: {error}. The last argument is the "
            "key with rngs, the third the model state with model_state; leave out those options, "
            "or take the arguments."
        ) from None


class Inputs(NamedTuple):
    """The arguments of a loss beside the parameters; None for those it does not take."""

    batch: Any  # sharded over the data axes
    key: Any = None  # the same on all devices
    model_state: Any = None  # the same on all devices


def first_args(loss: Loss, axes: tuple[str, ...], inputs: Inputs) -> tuple[Any, ...]:
    """The arguments of the loss for the first micro-batch, to be traced for their types."""
    first = jax.tree.map(
        lambda x: x[: x.shape[0] // loss.microbatches] if jnp.ndim(x) else x, inputs.batch
    )
    return device_args(loss, axes, inputs.key, first, 0, inputs.model_state)


def device_args(
    loss: Loss, axes: tuple[str, ...], key: Any, microbatch: Batch, index: Any, model_state: Tree
) -> tuple[Any, ...]:
    """``loss_args`` for micro-batch ``index`` of this device."""
    # Micro-batches are numbered in the order of the batch of all devices.
    number = lax.axis_index(axes) * loss.microbatches + index
    keys = microbatch_key(loss.rngs, key, number, microbatch)
    return loss_args(loss, microbatch, model_state, keys)


def loss_args(loss: Loss, microbatch: Batch, model_state: Tree, keys: Any) -> tuple[Any, ...]:
    """The arguments of the loss after the parameters: those that its options ask for."""
    args = (microbatch, model_state) if loss.model_state else (microbatch,)
    return (*args, keys) if loss.rngs else args
