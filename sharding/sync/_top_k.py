"""The largest elements of each gradient; the rest waits."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._all_gather import all_gather_concat
from sharding.placement._specs import Axes
from sharding.sync._dense import dense_mean, dense_method
from sharding.sync._interface import (
    GradientSync,
    Method,
    Noise,
    check_density,
    leafwise,
    wide,
)

_FEEDBACKS = ("error", "ef21", None)
# Elements that the int32 indices of a top-k can address.
_MOST = 2**31 - 1


def top_k(
    density: float | Mapping[int, float] = 0.01,
    *,
    feedback: str | None = "error",
    momentum: float | None = None,
    nesterov: bool = False,
    clip_norm: float | None = None,
    approximate: bool = False,
    min_size: int = 4096,
) -> GradientSync:
    r"""Sends the largest elements of each gradient, and keeps the rest for later.

    With :math:`T` that keeps the elements of largest magnitude and :math:`e_i` what device i has
    not sent yet (gradient dropping),

    .. math::

      a_i = e_i + g_i, \quad \bar g = \frac 1n \sum_i T(a_i), \quad e_i \leftarrow a_i - T(a_i)

    ``momentum`` m makes deep gradient compression of it, for an optimizer without momentum:
    :math:`u_i \leftarrow m u_i + g_i`, :math:`a_i = e_i + u_i`, and where an element is sent
    :math:`u_i` becomes zero, too. ``feedback="ef21"`` sends what has changed:
    :math:`c_i = T(g_i - h_i)`, :math:`h_i \leftarrow h_i + c_i`,
    :math:`\bar g = \frac 1n \sum_i h_i`.

    On the wire (n - 1) k values and indices, 8 bytes each, from each device: all are gathered. Each
    device keeps an error as large as the gradients, with ``momentum`` or ``"ef21"`` two.

    An array of more than 2^31 - 1 elements is split into equal sections that int32 can index, and
    each section sends its own largest elements.

    Args:
      density: what part of an array's elements is sent, above 0, at most 1. Or several by the step
        from which on they count, as a warm-up: ``{0: 0.25, 100: 0.06, 200: 0.01}``.
      feedback: ``"error"``, ``"ef21"``, or None: what is not sent is lost.
      momentum: of deep gradient compression; needs ``feedback="error"``.
      nesterov: its form of Nesterov: :math:`u \leftarrow m (u + g)`, :math:`a = e + u + g`.
      clip_norm: the norm that a gradient is cut to before all else, an array at a time; on n
        devices that over the root of n.
      approximate: may miss some of the largest (``lax.approx_max_k``); faster on TPUs.
      min_size: smaller arrays are sent whole, with the same momentum and clip.

    Returns:
      A ``GradientSync``.

    Raises:
      ValueError: if a density is not above 0 and at most 1, or options do not go together.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.top_k({0: 0.25, 100: 0.06, 200: 0.01}, momentum=0.9, clip_norm=1.0)

    References:
      Aji, Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
      arXiv 1704.05021. Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
      arXiv 1712.01887. Richtarik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better,
      and Practically Faster Error Feedback, NeurIPS 2021, arXiv 2106.05203.
    """
    schedule = dict(sorted(density.items())) if isinstance(density, Mapping) else {0: density}
    _check(schedule, feedback, momentum, nesterov, clip_norm)

    def init(x: Any) -> dict[str, jax.Array]:
        zeros = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        if feedback == "ef21":
            return {"own": zeros, "mean": zeros}
        state = {} if momentum is None else {"momentum": zeros}
        return state | ({"error": zeros} if feedback else {})

    def clipped(x: jax.Array, axes: Axes) -> jax.Array:
        x = wide(x)
        if clip_norm is None:
            return x
        most = clip_norm / math.sqrt(lax.axis_size(axes))
        norm = jnp.sqrt(jnp.sum(x**2))
        return x * jnp.minimum(1, most / jnp.where(norm == 0, 1, norm))

    def moved(old: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The momentum, and by how much it moves."""
        assert momentum is not None
        if nesterov:
            new = momentum * (old + x)
            return new, new + x
        new = momentum * old + x
        return new, new

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        x, new = clipped(x, axes), {}
        if feedback == "ef21":
            whole = x - state["own"]
        elif momentum is None:
            whole = x + state["error"] if feedback else x
        else:
            new["momentum"], whole = moved(state["momentum"], x)
            whole += state["error"]

        total, indices = _by_step(schedule, noise, whole, axes, approximate)
        total = _array(total, x.shape)

        def unsent(y: jax.Array) -> jax.Array:
            """Zeros where an element was sent."""
            return _array(_each(_zeroed)(_sections(y), indices), x.shape)

        if feedback == "ef21":
            own = state["own"] + whole - unsent(whole)
            total = state["mean"] + total
            return total, {"own": own, "mean": total}
        if feedback:
            new["error"] = unsent(whole)
        if momentum is not None:
            new["momentum"] = unsent(new["momentum"])
        return total, new

    def small(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        del noise
        new, x = moved(state["momentum"], dense_mean(clipped(x, axes), axes))
        return x, {"momentum": new}

    method, plain = Method(init, mean, counts=len(schedule) > 1), dense_method()
    if momentum is not None:
        plain = Method(lambda x: {"momentum": init(x)["momentum"]}, small)
    return leafwise(lambda path, x: method if x.size >= min_size else plain)


def _check(
    schedule: Mapping[int, float],
    feedback: str | None,
    momentum: float | None,
    nesterov: bool,
    clip_norm: float | None,
) -> None:
    for density in schedule.values():
        check_density(density)
    if 0 not in schedule:
        raise ValueError(f"density must tell what counts from step 0 on, got {dict(schedule)}.")
    if feedback not in _FEEDBACKS:
        raise ValueError(f"feedback must be 'error', 'ef21' or None, got {feedback!r}.")
    if momentum is not None and feedback != "error":
        raise ValueError(f"momentum needs feedback='error', got {feedback!r}.")
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}.")
    if nesterov and momentum is None:
        raise ValueError("nesterov needs a momentum.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm!r}.")


def _sections(x: jax.Array) -> jax.Array:
    """The array as a vector; as rows of a matrix where int32 cannot index a vector of its size."""
    count = -(-x.size // _MOST)
    if count <= 1:
        return x.ravel()
    return jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)


def _array(sections: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``_sections``."""
    return sections.ravel()[: math.prod(shape)].reshape(shape)


def _each(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a vector, applied to every section."""

    def run(sections: jax.Array, *more: Any) -> Any:
        return (fn if sections.ndim == 1 else jax.vmap(fn))(sections, *more)

    return run


def _zeroed(flat: jax.Array, indices: jax.Array) -> jax.Array:
    return flat.at[indices].set(0, mode="drop")


def _by_step(
    schedule: Mapping[int, float], noise: Noise, x: jax.Array, axes: Axes, approximate: bool
) -> tuple[jax.Array, jax.Array]:
    """The mean of what is sent, by sections, and where this device sent; by the step's density."""
    sections = _sections(x)
    size = sections.shape[-1]
    counts = [max(1, math.ceil(density * size)) for density in schedule.values()]

    def send(count: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        def run(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
            find = lax.approx_max_k if approximate else lax.top_k
            indices = find(jnp.abs(flat), count)[1]
            values, places = (all_gather_concat(part, axes) for part in (flat[indices], indices))
            total = jnp.zeros_like(flat).at[places].add(values) / lax.axis_size(axes)
            # Of one length for all densities; what is too far is dropped.
            return total, jnp.pad(indices, (0, max(counts) - count), constant_values=size)

        return _each(run)

    if len(schedule) == 1:
        return send(counts[0])(sections)
    now = jnp.searchsorted(jnp.array(list(schedule)), noise.step, side="right") - 1
    return lax.switch(now, [send(count) for count in counts], sections)
