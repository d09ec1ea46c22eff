"""Delays of asynchronous pipelines: how many updates old the parameters of each stage are."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext import _validate
from optax_ext._leaves import Leaves, states_of, unboxed
from optax_ext._types import Tree

Method = Literal["pipemare", "pipedream", "pipedream_2bw", "gpipe"]


def pipeline_delays(
    num_stages: int, num_microbatches: int = 1, *, method: Method = "pipemare"
) -> tuple[np.ndarray, np.ndarray]:
    r"""Delays of the forward and of the backward pass at each stage of a pipeline.

    A delay counts updates: the gradient of step t is taken at parameters of step :math:`t - \tau`.
    For stage i = 1, ..., P and N micro-batches per update, over which fractional delays are means,

    .. math::

      \text{PipeMare:} \quad & \tau_\text{fwd} = \frac{2 (P - i) + 1}{N}, \quad
        \tau_\text{bkwd} = 0 \\
      \text{PipeDream:} \quad & \tau_\text{fwd} = \tau_\text{bkwd} = \frac{P - i}{N} \\
      \text{PipeDream-2BW:} \quad & \tau_\text{fwd} = \tau_\text{bkwd} = 1 \\
      \text{GPipe:} \quad & \tau_\text{fwd} = \tau_\text{bkwd} = 0

    Args:
      num_stages: P.
      num_microbatches: N.
      method: ``"pipemare"``, ``"pipedream"`` (which stashes weights), ``"pipedream_2bw"`` or
        ``"gpipe"``.

    Returns:
      The forward and the backward delays, two float64 arrays of shape (P,), the first stage first.
      For parameters [V, S, ...] whose stages are stacked on dim 1, pass ``delays[None]``.

    Raises:
      ValueError: if a number is below 1, or ``method`` is unknown.

    Example:
      >>> from optax_ext import pipeline_delays
      >>> forward, backward = pipeline_delays(4, 2)
      >>> forward.tolist(), backward.tolist()
      ([3.5, 2.5, 1.5, 0.5], [0.0, 0.0, 0.0, 0.0])

    References:
      Yang et al.: PipeMare, MLSys 2021, arXiv 1910.05124. Narayanan et al.: PipeDream, SOSP 2019,
      arXiv 1806.03377; PipeDream-2BW, ICML 2021, arXiv 2006.09503.
    """
    for name, value in {"num_stages": num_stages, "num_microbatches": num_microbatches}.items():
        if not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}.")
    behind, zero = np.arange(num_stages)[::-1], np.zeros(num_stages)  # (P,): P - i; 0
    delays = {
        "pipemare": ((2 * behind + 1) / num_microbatches, zero),
        "pipedream": (behind / num_microbatches, behind / num_microbatches),
        "pipedream_2bw": (zero + 1, zero + 1),
        "gpipe": (zero, zero.copy()),
    }
    if method not in delays:
        raise ValueError(
            f"method must be 'pipemare', 'pipedream', 'pipedream_2bw' or 'gpipe', got {method!r}."
        )
    return delays[method]


@dataclasses.dataclass(frozen=True, init=False)
class delays_by_path:
    """Chooses the delay of the first pattern that is found in a parameter's path, as ``by_path``.

    Args:
      rules: pattern -> delay, a number or an array that broadcasts against the leading dims of the
        parameter.
      default: the delay of parameters whose path matches no pattern.

    Raises:
      ValueError: if a pattern is not a regular expression, or a delay is negative.

    Example:
      >>> from optax_ext import delays_by_path, pipeline_delays
      >>> forward, _ = pipeline_delays(4)  # stages are dim 1 of blocks; the head is in the last one
      >>> rule = delays_by_path({"^blocks/": forward[None], "^head/": 1.0}, default=7.0)
      >>> rule.resolve("blocks/mlp/kernel").tolist(), rule.resolve("embedding")
      ([[7.0, 5.0, 3.0, 1.0]], 7.0)
    """

    rules: tuple[tuple[str, Any], ...]
    default: Any

    def __init__(self, rules: Mapping[str, Any], *, default: Any = 0.0):
        for pattern, delay in rules.items():
            _validate.pattern("delays_by_path", pattern)
            check_number(f"the delay of pattern {pattern!r}", delay)
        check_number("default", default)
        object.__setattr__(self, "rules", tuple(rules.items()))
        object.__setattr__(self, "default", default)

    def resolve(self, path: str) -> Any:
        return next((d for pattern, d in self.rules if re.search(pattern, path)), self.default)


def check_number(name: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        return
    numeric = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    kinds = (jnp.integer, jnp.floating)
    if not numeric or not any(jnp.issubdtype(np.asarray(value).dtype, k) for k in kinds):
        raise ValueError(f"{name} must be a number or an array, got {value!r}.")
    array = np.asarray(value, np.float64)
    if not (array >= 0).all():
        raise ValueError(f"{name} must not be negative, got {value}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {value}.")


def numbers_in(delays: Any) -> list[Any]:
    """Returns all delays of a number, an array, a tree of them, or a rule."""
    if isinstance(delays, delays_by_path):
        return [*(delay for _, delay in delays.rules), delays.default]
    return jax.tree.leaves(delays)


def check_delays(delays: Any) -> None:
    for value in numbers_in(delays):
        check_number("delays", value)


def delays_of(delays: Any, leaves: Leaves) -> list[Any]:
    """Returns the delay of every leaf: a number, or an array of the leaf's rank."""
    if isinstance(delays, delays_by_path):
        own = [delays.resolve(path) for path in leaves.paths]
    elif not leaves.arrays:  # also the placeholder that optax's tree_map_params passes to init
        return []
    else:
        tree = leaves.unflatten(leaves.arrays)
        try:
            own = list(map(unboxed, leaves.treedef.flatten_up_to(jax.tree.broadcast(delays, tree))))
        except ValueError as error:
            raise ValueError(
                "delays does not fit the parameters; it needs a number or an array for each of "
                f"them, or for each subtree: {error}"
            ) from None
    shapes = [tuple(x.shape) for x in leaves.arrays]
    return list(map(_fit, leaves.paths, own, shapes))


def _fit(path: str, delay: Any, shape: tuple[int, ...]) -> Any:
    """Returns the delay with a dim of size 1 for each trailing dim of ``shape`` that it lacks."""
    own = np.shape(delay)
    if not own:
        return delay
    if len(own) > len(shape) or any(n not in (1, m) for n, m in zip(own, shape, strict=False)):
        raise ValueError(
            f"delays has an array of shape {own} for parameter {path!r} of shape {shape}; an array "
            "must broadcast against the leading dims of its parameter. Choose others for this one "
            "with delays_by_path."
        )
    return delay.reshape(own + (1,) * (len(shape) - len(own)))


def map_slots(
    names: tuple[str, str],  # of the function that is called, and of that which makes the states
    fn: Callable[[Any, Any], Any],
    params: Tree,
    state: Tree,
    state_type: type,
    field: Callable[[Any], Any],  # the tree of slots in a state of this type
) -> Any:
    """Returns ``fn(p, slot)`` for each parameter with a slot in states of a type, others as is."""
    caller, maker = names
    states = states_of(state_type, state)
    if not states:
        raise ValueError(
            f"{caller} reads the state of {maker}, of which this optimizer state contains none. "
            f"Put {maker} last in the chain."
        )
    leaves = Leaves.of_any_dtype(params)
    merged: list[Any] = [None] * len(leaves.paths)
    for own in states:
        for i, slot in enumerate(leaves.slots(maker, field(own))):
            if isinstance(slot, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
                if merged[i] is not None:
                    raise ValueError(
                        f"{caller} reads one state of {maker} for each parameter, found several "
                        f"for {leaves.paths[i]!r}. Pass the part that contains one."
                    )
                shape = leaves.arrays[i].shape
                if slot.shape != shape:
                    raise ValueError(
                        f"parameter {leaves.paths[i]!r} of shape {tuple(shape)} does not match the "
                        f"state of {maker}, where it has shape {tuple(slot.shape)}."
                    )
                merged[i] = slot
            elif jax.tree.leaves(slot):
                raise ValueError(
                    f"{caller} needs the arrays of {maker}, found {type(slot).__name__}. Put "
                    "low_precision_state around the other transformations of the chain alone."
                )
    pairs = zip(leaves.arrays, merged, strict=True)
    return leaves.unflatten([p if slot is None else fn(p, slot) for p, slot in pairs])


def whole_number(value: Any) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"delays sets the shapes of the state and must be known while tracing, got {value}. "
            "Under optax.inject_hyperparams name it in static_args."
        )
    array = np.asarray(value, np.float64)
    if (array != np.floor(array)).any():
        raise ValueError(
            f"delays must be whole numbers of updates, got {value}. Round them, for example with "
            "np.round."
        )
    return array.astype(np.int64)
