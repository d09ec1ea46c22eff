"""Sparse gradient sync: the largest elements of each gradient, with error feedback."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

    sent = _TopK(schedule, feedback, momentum, clip_norm)
    method = Method(sent.init, sliced(sent.all_reduce), counts_steps=len(schedule) > 1)
    small = dense_method()
    if momentum is not None:
        small = Method(sent.init_small, sliced(sent.all_reduce_small), in_full=True)
    return by_size("top_k", method, small, min_size)


class _TopK(NamedTuple):
    """The arguments of ``top_k``, and what it does with one array."""

    schedule: dict[int, float]  # the density from a step on
    feedback: str | None
    momentum: float | None
    clip_norm: float | None

    def init(self, x: Array) -> dict[str, jax.Array]:
        if self.feedback == "ef21":
            return {"own": _zeros(x), "mean": _zeros(x)}
        state = {} if self.momentum is None else self.init_small(x)
        if self.feedback:
            state["error"] = _zeros(x)
        return state

    def init_small(self, x: Array) -> dict[str, jax.Array]:
        return {"momentum": _zeros(x)}

    def all_reduce(self, x: jax.Array, state: Tree, axes: Axes, context: StepContext) -> Reduced:
        full = self._clip(x, axes)  # all that could be sent, (*x.shape)
        new = {}
        if self.momentum is not None:
            full = new["momentum"] = self.momentum * state["momentum"] + full
        if self.feedback == "ef21":
            full = full - state["own"]
        elif self.feedback:
            full = full + state["error"]

        # The mean of the largest elements of all devices, and which ones this device sent.
        mean, indices = _mean_of_largest(self.schedule, context, full, axes)
        mean = _array(mean, x.shape)

        # The new state.
        if self.feedback == "ef21":
            own = state["own"] + full - _unsent(full, indices)
            mean = state["mean"] + mean
            return mean, {"own": own, "mean": mean}
        if self.feedback:
            new["error"] = _unsent(full, indices)
        if self.momentum is not None:
            new["momentum"] = _unsent(new["momentum"], indices)
        return mean, new

    def all_reduce_small(
        self, x: jax.Array, state: Tree, axes: Axes, context: StepContext
    ) -> Reduced:
        """The full mean of a small array, with momentum."""
        new = self.momentum * state["momentum"] + dense_mean(self._clip(x, axes), axes)
        return new, {"momentum": new}

    def _clip(self, x: jax.Array, axes: Axes) -> jax.Array:
        x = to_sum_dtype(x)
        if self.clip_norm is None:
            return x
        norm = jnp.sqrt(jnp.sum(x**2))
        max_norm = self.clip_norm / math.sqrt(lax.axis_size(axes))
        return x * jnp.minimum(1, max_norm / jnp.where(norm == 0, 1, norm))


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

    send = functools.partial(_send_largest, axes, max(counts))
    sends = [functools.partial(_per_section, functools.partial(send, count)) for count in counts]
    if len(schedule) == 1:
        return sends[0](sections)
    # One branch per density; the current one is the last whose step is reached.
    current = jnp.searchsorted(jnp.array(list(schedule)), context.step, side="right") - 1
    return lax.switch(current, sends, sections)


def _send_largest(
    axes: Axes, most: int, count: int, flat: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The mean of the ``count`` largest elements of all devices, and the indices of its own."""
    own = lax.top_k(jnp.abs(flat), count)[1]  # (count,)
    values, indices = (all_gather_concat(part, axes) for part in (flat[own], own))
    mean = jnp.zeros_like(flat).at[indices].add(values) / lax.axis_size(axes)
    # Equally long for all densities; padding is out of range and dropped.
    return mean, jnp.pad(own, (0, most - count), constant_values=flat.size)


def _unsent(x: jax.Array, indices: jax.Array) -> jax.Array:
    """The array with zeros at the elements that were sent."""
    zero_at = lambda flat, indices: flat.at[indices].set(0, mode="drop")  # noqa: E731
    return _array(_per_section(zero_at, _sections(x), indices), x.shape)
