"""The loss of a language model's head, of which a part of the logits exists at a time.

With logits l = x W, capped as z = c tanh(l / c) if asked, a token of label y has the loss

    log Z - (1 - s) z_y - s mean(z) + r (log Z)^2,    log Z = log sum_v exp z_v

of label smoothing s and z-loss r. The vocabulary is read in tiles of columns: forward they add to
log Z, z_y and the mean; backward they are computed again, each gives its columns of W's gradient,
and what it adds to that of x. So W and its gradient are read and written once in each pass.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Array
from sharding.collectives._sum_dtype import sum_dtype
from sharding.tiles._tile_equations import for_each_tile

_COLUMNS = 4096  # of a tile, where nothing is asked
_LANES = 128  # XLA for TPUs copies W's gradient to another layout if tiles start between them
_REDUCTIONS = ("mean", "sum", None)


class _Head(NamedTuple):
    """What a head computes, by numbers that are no arrays."""

    tiles: int
    vocab_dim: int
    shards: int
    softcap: float | None
    z_loss: float
    label_smoothing: float

    def columns(self, w: Array) -> tuple[int, int]:
        """Of a shard, and of a tile in it: lanes of TPUs are not split, but for small tiles."""
        count = w.shape[self.vocab_dim] // self.shards
        size = math.ceil(count / self.tiles)
        return count, size if size < _LANES else min(count, math.ceil(size / _LANES) * _LANES)


def cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    *,
    tiles: int | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    weights: Array | None = None,
    reduction: str | None = "mean",
    vocab_dim: int = 1,
    vocab_shards: int = 1,
) -> jax.Array:
    """The cross entropy of ``x @ w`` and labels, without the array of all logits.

    It equals ``optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)``, and so do its
    gradients. The product is computed once more in the backward pass. Logits and sums are float32
    at least; the products of gradients are in the dtype of ``x`` and ``w``, as without it.

    Args:
      x: what the head reads, (..., D) of any floating dtype.
      w: the matrix of the head, (D, V).
      labels: integers of the shape (...).
      tiles: in how many parts the vocabulary is computed, from 1 to V; by default of 4,096 columns.
      softcap: c, if logits are ``c * tanh(logits / c)``.
      z_loss: the factor of ``logsumexp(logits) ** 2``.
      label_smoothing: from 0 to 1, the part of a label that all words share.
      weights: of tokens, (...). Where one is 0 the label may be any number.
      reduction: ``"mean"`` divides the sum by that of weights, or by the number of tokens;
        ``"sum"`` adds the weighted losses; None returns them, in the shape of the labels.
      vocab_dim: 0 if ``w`` is (V, D), as a tied table of embeddings.
      vocab_shards: over how many devices the partitioner shards the vocabulary. A tile has columns
        of each, so that none is moved.

    Returns:
      The loss, in float32 or the dtype of ``x`` and ``w`` if that is wider.

    Raises:
      ValueError: if shapes, dtypes or numbers are no such.

    Example:
      >>> import jax.numpy as jnp, sharding as shd
      >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 8))
      >>> float(shd.cross_entropy(x, w, jnp.zeros((2, 3), int), tiles=2)) == float(jnp.log(8.0))
      True
    """
    _check_arrays(x, w, labels, weights, vocab_dim)
    vocab = w.shape[vocab_dim]
    tiles = math.ceil(vocab / vocab_shards / _COLUMNS) if tiles is None else tiles
    head = _Head(tiles, vocab_dim, vocab_shards, softcap, z_loss, label_smoothing)
    _check_numbers(head, vocab, reduction)
    # The size of a vocabulary may be no number of 8 bits, of which labels may be.
    labels = jnp.asarray(labels, jnp.promote_types(jnp.result_type(labels), jnp.int32))
    losses = _losses(head, x, w, labels)
    is_word = (labels >= 0) & (labels < vocab)
    if weights is None:
        losses = jnp.where(is_word, losses, jnp.nan)
    else:
        weights = jnp.asarray(weights, losses.dtype)
        losses = weights * jnp.where(is_word, losses, jnp.where(weights == 0, 0, jnp.nan))
    if reduction is None:
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if weights is None else losses.sum() / weights.sum()


def _check_arrays(x: Array, w: Array, labels: Array, weights: Array | None, vocab_dim: int) -> None:
    """Raises a ``ValueError`` at arrays that do not fit together."""
    if vocab_dim not in (0, 1):
        raise ValueError(f"vocab_dim must be 0 or 1, a dim of w, got {vocab_dim!r}.")
    for name, array in {"x": x, "w": w}.items():
        if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
            raise ValueError(
                f"{name} of cross_entropy must be floating, got {jnp.result_type(array)}."
            )
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(
            f"labels of cross_entropy must be integers, got {jnp.result_type(labels)}."
        )
    shapes = {"x": jnp.shape(x), "w": jnp.shape(w), "labels": jnp.shape(labels)}
    is_fit = len(shapes["w"]) == 2 and shapes["x"][-1:] == shapes["w"][1 - vocab_dim :][:1]
    is_fit = is_fit and shapes["labels"] == shapes["x"][:-1]
    if weights is not None:
        shapes["weights"] = jnp.shape(weights)
        is_fit = is_fit and shapes["weights"] == shapes["labels"]
    if not is_fit:
        given = ", ".join(f"{name} of {shape}" for name, shape in shapes.items())
        of_w = "(D, V)" if vocab_dim else "(V, D)"
        raise ValueError(
            f"cross_entropy takes x of (..., D), w of {of_w}, and labels and weights of (...), got "
            f"{given}."
        )


def _check_numbers(head: _Head, vocab: int, reduction: str | None) -> None:
    """Raises a ``ValueError`` at options that are out of range."""
    if not isinstance(head.shards, int) or head.shards < 1 or vocab % head.shards:
        raise ValueError(
            f"vocab_shards must divide the vocabulary of {vocab}, got {head.shards!r}."
        )
    most = vocab // head.shards
    is_int = isinstance(head.tiles, int) and not isinstance(head.tiles, bool)
    if not is_int or not 1 <= head.tiles <= most:
        raise ValueError(
            f"tiles must be from 1 to {most}, the columns of a shard of w, got {head.tiles!r}."
        )
    for name in ("softcap", "z_loss", "label_smoothing"):
        if isinstance(getattr(head, name), jax.core.Tracer):
            raise ValueError(
                f"{name} of cross_entropy must be a number of Python, got a traced array. Close "
                "over the number, or name it in static_argnames of jit."
            )
    if head.softcap is not None and not head.softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {head.softcap!r}.")
    if not 0 <= head.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {head.label_smoothing!r}.")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be 'mean', 'sum' or None, got {reduction!r}.")


# --- Tiles ----------------------------------------------------------------------------------------


def _logits(
    head: _Head, x: Array, w: Array, labels: Array, start: Any, size: int
) -> tuple[Array, Array, Array]:
    """Of a tile: its columns of w; capped logits (..., shards, columns); which are of labels."""
    own = lax.dynamic_slice_in_dim(_by_shards(head, w), start, size, head.vocab_dim + 1)
    dtype = sum_dtype(jnp.result_type(x, w))
    contracted = (x.ndim - 1,), (1 if head.vocab_dim else 2,)
    z = lax.dot_general(x, own, (contracted, ((), ())), preferred_element_type=dtype)
    if head.softcap is not None:
        z = head.softcap * jnp.tanh(z / head.softcap)
    column = lax.broadcasted_iota(jnp.int32, (head.shards, size), 1) + start
    of_shard = lax.broadcasted_iota(jnp.int32, (head.shards, size), 0)
    number = of_shard * (w.shape[head.vocab_dim] // head.shards) + column
    is_label = labels[..., None, None] == jnp.expand_dims(number, tuple(range(x.ndim - 1)))
    return own, z, is_label


def _by_shards(head: _Head, w: Array) -> Array:
    """The matrix as (shards, D, columns of one), or (shards, columns of one, D)."""
    at, columns = head.vocab_dim, w.shape[head.vocab_dim] // head.shards
    split = w.reshape(*w.shape[:at], head.shards, columns, *w.shape[at + 1 :])
    return jnp.moveaxis(split, at, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(head: _Head, x: Array, w: Array, labels: Array) -> Array:
    """The loss of each token."""
    return _forward(head, x, w, labels)[0]


def _forward(head: _Head, x: Array, w: Array, labels: Array) -> tuple[Array, Any]:
    def add(sums: Any, start: Any, size: int) -> tuple[Array, ...]:
        highest, total, of_label, of_all = sums
        _, z, is_label = _logits(head, x, w, labels, start, size)
        # In one pass: XLA for GPUs would read the logits three times.
        columns, each = (z.ndim - 2, z.ndim - 1), (z, jnp.where(is_label, z, 0), z)
        highest_of_tile, *more = lax.reduce(each, start_of, combine, columns)
        new = jnp.maximum(highest, highest_of_tile)
        powers = jnp.exp(z - new[..., None, None])
        total = total * jnp.exp(highest - new) + powers.sum((-2, -1))
        return new, total, of_label + more[0], of_all + more[1]

    def combine(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return jnp.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2]

    zeros = jnp.zeros(labels.shape, sum_dtype(jnp.result_type(x, w)))
    start_of = tuple(jnp.asarray(v, zeros.dtype) for v in (-jnp.inf, 0, 0))
    sums = zeros - jnp.inf, zeros, zeros, zeros
    highest, total, of_label, of_all = for_each_tile(add, sums, *head.columns(w))
    log_z = highest + jnp.log(total)
    smoothing, words = head.label_smoothing, w.shape[head.vocab_dim]
    losses = log_z - (1 - smoothing) * of_label - smoothing / words * of_all
    return losses + head.z_loss * log_z**2, (x, w, labels, log_z)


def _backward(head: _Head, stored: Any, cotangent: Array) -> tuple[Array, Array, None]:
    x, w, labels, log_z = stored
    smoothing, words, narrow = head.label_smoothing, w.shape[head.vocab_dim], jnp.result_type(x, w)
    of_power = (cotangent * (1 + 2 * head.z_loss * log_z))[..., None, None]
    cotangent = cotangent[..., None, None]
    tokens = tuple(range(x.ndim - 1))

    def add(grads: Any, start: Any, size: int) -> tuple[Array, Array]:
        of_x, of_w = grads
        own, z, is_label = _logits(head, x, w, labels, start, size)
        of_z = of_power * jnp.exp(z - log_z[..., None, None])
        of_z -= cotangent * ((1 - smoothing) * is_label + smoothing / words)
        if head.softcap is not None:
            of_z *= 1 - (z / head.softcap) ** 2
        of_z = of_z.astype(narrow)
        over = (of_z.ndim - 2, of_z.ndim - 1), ((0, 2) if head.vocab_dim else (0, 1))
        more = lax.dot_general(of_z, own, (over, ((), ())), preferred_element_type=of_x.dtype)
        first, second = (x, of_z) if head.vocab_dim else (of_z, x)
        of_own = lax.dot_general(
            first, second, ((tokens, tokens), ((), ())), preferred_element_type=narrow
        )
        of_own = jnp.moveaxis(of_own, head.vocab_dim, 0).astype(w.dtype)
        of_w = lax.dynamic_update_slice_in_dim(of_w, of_own, start, head.vocab_dim + 1)
        return of_x + more, of_w

    zeros = jnp.zeros(x.shape, log_z.dtype), jnp.zeros_like(_by_shards(head, w))
    # The last logits are those of the forward pass, which XLA keeps until they are read.
    of_x, of_w = for_each_tile(add, zeros, *head.columns(w), reverse=True)
    return of_x.astype(x.dtype), jnp.moveaxis(of_w, 0, head.vocab_dim).reshape(w.shape), None


_losses.defvjp(_forward, _backward)
