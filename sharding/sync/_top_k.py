"""Sparse gradient sync: the largest elements of each gradient, with error feedback."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Array, Tree
from sharding.collectives._reduce_scatter import all_gather_concat
from sharding.collectives._sum_dtype import sum_dtype, to_sum_dtype
from sharding.placement._specs import Axes
from sharding.sync._dense import dense_mean, dense_method
from sharding.sync._interface import (
    GradientSync,
    Method,
    Reduced,
    StepContext,
    by_size,
    check_density,
    sliced,
)

# Elements that the int32 indices of a top-k can address.
_MAX_SECTION_SIZE = 2**31 - 1


def top_k(
    density: float | Mapping[int, float] = 0.01,
    *,
    feedback: str | None = "error",
    momentum: float | None = None,
    clip_norm: float | None = None,
    min_size: int = 4096,
) -> GradientSync:
    r"""Sends the largest elements of each gradient and adds the rest to the next one.

    With :math:`T` selecting the elements of largest magnitude and :math:`e_i` the error-feedback
    residual of device i (gradient dropping),

    .. math::

      a_i = e_i + g_i, \quad \bar g = \frac 1n \sum_i T(a_i), \quad e_i \leftarrow a_i - T(a_i)

    ``momentum`` m turns it into deep gradient compression, for an optimizer without momentum:
    :math:`u_i \leftarrow m u_i + g_i`, :math:`a_i = e_i + u_i`, and :math:`u_i` becomes zero, too,
    at the elements that are sent. ``feedback="ef21"`` sends corrections of an estimate of the mean:
    :math:`c_i = T(g_i - h_i)`, :math:`h_i \leftarrow h_i + c_i`, :math:`\bar g = \frac 1n \sum_i
    h_i`.

    Wire bytes per device: an all-gather of k values and indices, (n - 1) k times 8. State per
    device: a residual as large as the gradients, with ``momentum`` or ``"ef21"`` two such arrays.
    Each equal section of an array of more than 2^31 - 1 elements sends its own largest ones.

    Args:
      density: the fraction of an array's elements that is sent, above 0, at most 1. Or a schedule,
        step -> density from that step on, as a warm-up: ``{0: 0.25, 100: 0.06, 200: 0.01}``.
      feedback: ``"error"``, ``"ef21"``, or None: elements that are not sent are lost.
      momentum: of deep gradient compression; needs ``feedback="error"``.
      clip_norm: each device first clips the gradient of each array to this norm, divided by the
        root of the number of devices.
      min_size: smaller arrays are sent in full, with the same momentum and clip.

    Raises:
      ValueError: if a density is not above 0 and at most 1, or options exclude each other; in
        ``init``, if all arrays are smaller than ``min_size``.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.top_k({0: 0.25, 100: 0.06, 200: 0.01}, momentum=0.9, clip_norm=1.0)

    References:
      Aji, Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017, arXiv
      1704.05021. Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018, arXiv
      1712.01887. Richtarik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better, and
      Practically Faster Error Feedback, NeurIPS 2021, arXiv 2106.05203.
    """
    schedule = dict(sorted(density.items())) if isinstance(density, Mapping) else {0: density}
    for fraction in schedule.values():
        check_density(fraction)
    if 0 not in schedule:
        raise ValueError(f"density must have an entry for step 0, got {schedule}.")
    if feedback not in ("error", "ef21", None):
        raise ValueError(f"feedback must be 'error', 'ef21' or None, got {feedback!r}.")
    if momentum is not None and feedback != "error":
        raise ValueError(f"momentum needs feedback='error', got {feedback!r}.")
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm!r}.")

    def init(x: Array) -> dict[str, jax.Array]:
        if feedback == "ef21":
            return {"own": _zeros(x), "mean": _zeros(x)}
        state = {} if momentum is None else {"momentum": _zeros(x)}
        return state | ({"error": _zeros(x)} if feedback else {})

    def clip(x: jax.Array, axes: Axes) -> jax.Array:
        x = to_sum_dtype(x)
        if clip_norm is None:
            return x
        norm = jnp.sqrt(jnp.sum(x**2))
        max_norm = clip_norm / math.sqrt(lax.axis_size(axes))
        return x * jnp.minimum(1, max_norm / jnp.where(norm == 0, 1, norm))

    def all_reduce(x: jax.Array, state: Tree, axes: Axes, context: StepContext) -> Reduced:
        full, new = clip(x, axes), {}  # all that could be sent, (*x.shape)
        if momentum is not None:
            full = new["momentum"] = momentum * state["momentum"] + full
        if feedback == "ef21":
            full = full - state["own"]
        elif feedback:
            full = full + state["error"]

        # The mean of the largest elements of all devices, and which ones this device sent.
        mean, indices = _mean_of_largest(schedule, context, full, axes)
        mean = _array(mean, x.shape)

        def unsent(y: jax.Array) -> jax.Array:
            """The array with zeros at the elements that were sent."""
            zero_at = lambda flat, indices: flat.at[indices].set(0, mode="drop")  # noqa: E731
            return _array(_per_section(zero_at, _sections(y), indices), x.shape)

        # The new state.
        if feedback == "ef21":
            own = state["own"] + full - unsent(full)
            mean = state["mean"] + mean
            return mean, {"own": own, "mean": mean}
        if feedback:
            new["error"] = unsent(full)
        if momentum is not None:
            new["momentum"] = unsent(new["momentum"])
        return mean, new

    def all_reduce_small(x: jax.Array, state: Tree, axes: Axes, context: StepContext) -> Reduced:
        """The full mean of a small array, with momentum."""
        new = momentum * state["momentum"] + dense_mean(clip(x, axes), axes)
        return new, {"momentum": new}

    method = Method(init, sliced(all_reduce), counts_steps=len(schedule) > 1)
    small = dense_method()
    if momentum is not None:
        small = Method(lambda x: {"momentum": _zeros(x)}, sliced(all_reduce_small), in_full=True)
    return by_size("top_k", method, small, min_size)


def _zeros(x: Array) -> jax.Array:
    return jnp.zeros(x.shape, sum_dtype(x.dtype))


def _sections(x: jax.Array) -> jax.Array:
    """The array as a vector, or as (sections, size) if int32 cannot index such a vector."""
    count = -(-x.size // _MAX_SECTION_SIZE)
    if count <= 1:
        return x.ravel()
    return jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)


def _array(sections: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``_sections``."""
    return sections.ravel()[: math.prod(shape)].reshape(shape)


def _per_section(fn: Callable[..., Any], sections: jax.Array, *more: Any) -> Any:
    """A function of vectors, applied to every section."""
    return (fn if sections.ndim == 1 else jax.vmap(fn))(sections, *more)


def _mean_of_largest(
    schedule: Mapping[int, float], context: StepContext, x: jax.Array, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """The mean of what all devices send, in sections, and the indices that this device sent."""
    sections = _sections(x)
    size = sections.shape[-1]
    counts = [max(1, math.ceil(density * size)) for density in schedule.values()]

    def send(count: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        def run(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
            own = lax.top_k(jnp.abs(flat), count)[1]  # (count,)
            values, indices = (all_gather_concat(part, axes) for part in (flat[own], own))
            mean = jnp.zeros_like(flat).at[indices].add(values) / lax.axis_size(axes)
            # Equally long for all densities; padding is out of range and dropped.
            return mean, jnp.pad(own, (0, max(counts) - count), constant_values=size)

        return functools.partial(_per_section, run)

    if len(schedule) == 1:
        return send(counts[0])(sections)
    # One branch per density; the current one is the last whose step is reached.
    current = jnp.searchsorted(jnp.array(list(schedule)), context.step, side="right") - 1
    return lax.switch(current, [send(count) for count in counts], sections)
