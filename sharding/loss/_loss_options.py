"""``Loss``: a loss function and its options, said once; what it returned, in parts."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from sharding._types import Array, Tree

# What a loss may request as ``rngs``: no key, one for each micro-batch of a device, one for each
# example, or the number of the micro-batch beside the key (nnx models hold keys of their own).
NUMBERED: Any = object()
_RNGS = (False, True, "per_example", NUMBERED)
_REDUCTIONS = ("mean", "sum", "same")


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function and its options, said once for all that takes a loss.

    ``Zero.train_step``, ``nnx_train_step``, ``eval_step``, ``value_and_grad`` and ``check_loss``,
    ``plan.fit``, ``remat.plan`` and ``remat.frontier`` take it in place of a function and keywords,
    which mean the same. It is called as its function is; ``dataclasses.replace`` changes an option.

    Raises:
      ValueError: on an unknown option, or if the function does not take what its options say.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> def masked(params, batch):
      ...     losses = (batch["x"] @ params) ** 2
      ...     return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])
      >>> loss = shd.Loss(masked, weighted=True)
      >>> zero = shd.Zero(jax.make_mesh((1,), ("data",)))
      >>> batch = {"x": jnp.ones((4, 2)), "mask": jnp.array([1.0, 1, 0, 0])}
      >>> value, grads = zero.value_and_grad(loss)(jnp.ones(2), batch)
      >>> float(value), *map(float, loss(jnp.ones(2), batch))
      (4.0, 8.0, 2.0)
    """

    #: ``fn(params, batch)``, whose third argument is a model state, and the last one a key, if
    #: options ask for them; these are explained in ``Zero.train_step``
    fn: Callable[..., Any]
    has_aux: bool = False
    weighted: bool = False
    rngs: bool | str = False
    model_state: bool | str | tuple[str, ...] = False
    #: True: the loss of one device's rows, whose mean over devices is trained, as in PyTorch's DDP;
    #: False: the partitioner runs it; None: each device its own rows, where that is the same loss
    per_device: bool | None = None
    #: what a loss is of which micro-batches change the value, as rows meet in it: None raises,
    #: ``"by_microbatch"`` takes the mean over micro-batches
    coupled: str | None = None
    #: with ``per_device=True``, how the new model states of all devices become one: ``"mean"`` (the
    #: first device's value where not floating), ``"sum"`` (the old value plus what each device
    #: added), ``"same"`` (all are equal); or a prefix tree of these
    reduction: Any = dataclasses.field(default="mean", hash=False)

    def __post_init__(self) -> None:
        if self.rngs not in _RNGS:
            raise ValueError(f"rngs must be a bool or 'per_example', got {self.rngs!r}.")
        for kind in [] if callable(self.reduction) else jax.tree.leaves(self.reduction):
            if kind not in _REDUCTIONS:
                raise ValueError(
                    f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, or a tree of "
                    f"them, got {kind!r}."
                )
        if self.per_device not in (True, False, None):
            raise ValueError(f"per_device must be a bool or None, got {self.per_device!r}.")
        if self.coupled not in (None, "by_microbatch"):
            raise ValueError(f"coupled must be 'by_microbatch' or None, got {self.coupled!r}.")
        if isinstance(self.fn, Loss):
            raise ValueError("fn is a Loss already: use that, or dataclasses.replace(loss, ...).")
        # The function of what is a loss by itself, a ``Pipeline``, runs as that does. Unweighted,
        # its two sums are results of an evaluation, which devices must not average.
        owner = self.fn.__self__ if inspect.ismethod(self.fn) else None
        if self.per_device is None and self.weighted and isinstance(owner, _HasLoss):
            own = owner.as_loss()
            if own.fn == self.fn:
                object.__setattr__(self, "per_device", own.per_device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.fn(*args, **kwargs)

    def split(self, out: Tree) -> tuple[Any, Any, Any, Any]:
        """``(total, weight, new model state, aux)`` of what ``fn`` returned, else 1 and None.

        Raises:
          ValueError: if it did not return what the options say.
        """
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
                "(sum, weight) needs weighted=True, or, of a Pipeline, to give the pipeline itself;"
                " a pair (loss, aux) needs has_aux=True; of losses by example return the mean."
            )
        return total, weight, model_state, aux


class Rewrite(NamedTuple):
    """Of a function ``run`` that runs the trace of ``plain`` in another way: both, and how."""

    run: Callable[..., Any]
    plain: Callable[..., Any]  # by which is known what it does with rows
    again: Callable[[Callable[..., Any]], Callable[..., Any]]  # from another plain one

    @staticmethod
    def of(fn: Callable[..., Any]) -> "Rewrite | None":
        """That of a function; what wraps it has none."""
        found = getattr(fn, "rewrite", None)
        return found if isinstance(found, Rewrite) and found.run is fn else None


@runtime_checkable
class _HasLoss(Protocol):
    """What is a loss by itself, as a ``Pipeline`` is."""

    def as_loss(self) -> Loss: ...


AnyLoss: TypeAlias = Loss | _HasLoss | Callable[..., Any]

# Options that are keywords beside a function, too: they say what it takes and returns.
KEYWORDS = {field.name: field for field in dataclasses.fields(Loss)[1:5]}


def as_loss(given: AnyLoss, *options: Any, first: str | None = "params") -> Loss:
    """The loss that an argument names: as it is, or made of a function and the options beside it.

    ``options`` are in the order of a ``Loss``. Beside a ``Pipeline``, which is a loss by itself,
    they may repeat its own. Errors call the first argument of the function ``first``; None: it may
    be a layer, of any arguments.
    """
    if isinstance(given, Loss):
        loss = given
    elif isinstance(given, _HasLoss):
        loss = given.as_loss()
    else:
        return _with_arguments(Loss(given, *options), first)
    for (name, field), value in zip(KEYWORDS.items(), options, strict=False):
        is_repeated = loss is not given and value == getattr(loss, field.name)
        if value != field.default and not is_repeated:
            raise ValueError(
                f"a {type(given).__name__} has its options in it, and {name}={value!r} was given "
                f"beside it. Leave that out, or make a Loss with {field.name}={value!r}."
            )
    return _with_arguments(loss, first)


def take_loss(given: AnyLoss, options: dict[str, Any], **more: Any) -> tuple[Loss, dict[str, Any]]:
    """``as_loss`` with those of some options that are of a loss, and the other ones."""
    own = [options.get(name, field.default) for name, field in KEYWORDS.items()]
    return as_loss(given, *own, **more), {k: x for k, x in options.items() if k not in KEYWORDS}


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
        is_array = hasattr(x, "dtype") and hasattr(x, "shape")
        return f"{x.dtype}{list(x.shape)}" if is_array else type(x).__name__

    return str(jax.tree.map(short, out)).replace("'", "")


def _with_arguments(loss: Loss, first: str | None) -> Loss:
    """Itself, or an error if its function does not take what the options say."""
    fn, more = loss.fn, {"model_state": loss.model_state, "key": loss.rngs}
    names = first or "params", "batch", *(name for name, is_taken in more.items() if is_taken)
    if not callable(fn):
        raise ValueError(
            f"a step takes a function of ({', '.join(names)}), got a {type(fn).__name__}, which "
            "is not callable."
        )
    if first is None:
        return loss
    try:
        # A wrapper may take other arguments than what it wraps.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # not known
        return loss
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"a step with these options calls {getattr(fn, '__name__', 'the function')}"
            f"({', '.join(names)}), and it takes {signature}: {error}. The last argument is the "
            "key with rngs, the third the model state with model_state; leave out those options, "
            "or take the arguments."
        ) from None
    return loss
