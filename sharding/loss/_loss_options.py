"""``Loss``: a loss function and its options, said once; what it returned, in parts."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding._types import Array, Tree

# What a loss may request as ``rngs``: no key, one for each micro-batch of a device, one for each
# example, or the number of the micro-batch beside the key (nnx models hold keys of their own).
NUMBERED: Any = object()
RNGS = (False, True, "per_example", NUMBERED)

# How the model states of all devices are reduced to one.
REDUCTIONS = ("mean", "sum", "same")


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function, and what it takes and returns; see ``Zero.train_step``."""

    fn: Callable[..., Any]
    has_aux: bool = False
    weighted: bool = False
    rngs: bool | str = False
    model_state: bool | str | tuple[str, ...] = False
    # A prefix tree of REDUCTIONS, or a function of the model state that gives one.
    reduction: Any = "mean"

    def check(self) -> "Loss":
        """Itself, or an error that names the bad option."""
        if self.rngs not in RNGS:
            raise ValueError(f"rngs must be a bool or 'per_example', got {self.rngs!r}.")
        for kind in [] if callable(self.reduction) else jax.tree.leaves(self.reduction):
            if kind not in REDUCTIONS:
                raise ValueError(
                    f"model_state_reduction must be one of {', '.join(map(repr, REDUCTIONS))}, or "
                    f"a tree of them, got {kind!r}."
                )
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
