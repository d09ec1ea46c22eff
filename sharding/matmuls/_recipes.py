"""Recipes: how the operands of a product, and its cotangents, are quantized. They are data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.matmuls import _grids
from sharding.matmuls._carried import clip_of
from sharding.matmuls._grids import Grid, noise_of, rounded, sample_of


class Quantizer(NamedTuple):
    """How one operand of a product becomes codes and scales.

    Example:
      >>> from sharding import matmuls
      >>> by_tensor = matmuls.RECIPES["fp8"].weight._replace(scale="tensor")
      >>> by_tensor.grid.name
      'e4m3'
    """

    #: the numbers that codes are; None leaves the operand as it is
    grid: Grid | None = None
    #: what shares a scale. ``"row"``: all that one result sums, ``"tensor"``, both by the largest
    #: magnitude. ``"power"``: the tensor, by a power of two. ``"sawb"``: the tensor, which is
    #: clipped by its moments. ``"mx"``, ``"nv"``: ``block`` elements of what is summed. Of
    #: ``ScaledParams``: ``"pact"``, the tensor, by a clip that is trained; ``"delayed"``, the
    #: tensor, by the largest magnitude of ``history`` earlier steps
    scale: str = "row"
    block: int = 0
    stochastic: bool = False  #: the rounding; otherwise to nearest
    hadamard: int = 0  #: elements of what is summed that a random Hadamard transform mixes
    history: int = 16  #: steps, at most 256

    def summed_dims(self, ndim: int, kept: tuple[int, ...]) -> tuple[int, ...]:
        """The dims of an operand along which elements share a scale, without blocks."""
        return tuple(d for d in range(ndim) if self.scale != "row" or d not in kept)


class Recipe(NamedTuple):
    """The quantizers of the three products that one product of a loss is, with its gradients.

    ``y = x w`` takes ``activation`` and ``weight``, ``dx = dy w^T`` takes ``cotangent``, and
    ``dw = x^T dy`` takes ``of_weight``, each with the codes of the forward pass.

    Example:
      >>> from sharding import matmuls
      >>> matmuls.RECIPES["int8"].cotangent.stochastic
      True
    """

    name: str
    activation: Quantizer
    weight: Quantizer
    cotangent: Quantizer  #: of dx
    of_weight: Quantizer  #: the cotangent of dw
    is_simulated: bool = False  #: whether floats stand for codes that no device multiplies
    ends: Any = None  #: a recipe of what is outside of layers; None leaves that as it is

    @property
    def cotangent_of_weight(self) -> str:
        """The field of its quantizer: of equal ones the first, whose scale it has then, too."""
        return "cotangent" if self.of_weight == self.cotangent else "of_weight"

    @property
    def carried(self) -> dict[str, str]:
        """Of the fields whose scales are in the train state, the kind of these."""
        fields = ("activation", "weight", "cotangent", self.cotangent_of_weight)
        kinds = {field: getattr(self, field).scale for field in fields}
        return {field: kind for field, kind in kinds.items() if kind in ("pact", "delayed")}


def _recipes() -> dict[str, Recipe]:
    e4m3, e5m2 = Quantizer(_grids.E4M3), Quantizer(_grids.E5M2)
    int8 = Quantizer(_grids.INT8)
    cotangent8 = int8._replace(stochastic=True)
    fp8 = Recipe("fp8", e4m3, e4m3, e5m2, e5m2)
    int8s = Recipe("int8", int8, int8, cotangent8, cotangent8)
    # OCP Microscaling Formats 1.0: a power of two for 32 elements.
    mx = Quantizer(_grids.E4M3, "mx", 32)
    # NVFP4, as trained in Chmiel et al. 2025: nearest forward, stochastic backward.
    nv = Quantizer(_grids.E2M1, "nv", 16)
    nv_cotangent = nv._replace(stochastic=True)
    # The same blocks of a uniform grid, with a Hadamard transform in each product.
    uniform = Quantizer(_grids.INT4, "nv", 16, hadamard=16)
    uniform_cotangent = uniform._replace(stochastic=True)
    sawb = Quantizer(_grids.INT4, "sawb")
    even = Quantizer(_grids.POWERS_OF_4, "power")
    odd = Quantizer(_grids.ODD_POWERS, "power")
    log = Quantizer(_grids.POWERS_OF_2, "tensor", stochastic=True)
    found = [
        *(fp8, int8s, _delayed(fp8), _delayed(int8s)),
        Recipe("mxfp8", mx, mx, mx, mx, True),
        Recipe("nvfp4", nv, nv, nv_cotangent, nv_cotangent, True),
        Recipe("ufp4", uniform, uniform, uniform_cotangent, uniform_cotangent, True),
        Recipe("sun4", sawb._replace(scale="pact"), sawb, even, odd, True, fp8),
        Recipe("luq", sawb, sawb, log, log, True),
        Recipe("identity", Quantizer(), Quantizer(), Quantizer(), Quantizer()),
    ]
    return {recipe.name: recipe for recipe in found}


def _delayed(recipe: Recipe) -> Recipe:
    a, w, g, of_weight = (q._replace(scale="delayed") for q in recipe[1:5])
    return Recipe(f"{recipe.name}_delayed", a, w, g, of_weight)


RECIPES = _recipes()

# SAWB of Choi et al. 2019: the clip of least squared error, c1 sqrt(E w^2) - c2 E|w|, of 15 levels.
_SAWB = 12.035, 12.03


def quantized(
    x: jax.Array,
    q: Quantizer,
    kept: tuple[int, ...],
    summed: int | None,
    seed: jax.Array,
    carried: jax.Array | None = None,
    of_all: Callable[[jax.Array], jax.Array] | None = None,
    source: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Codes of an operand, and its scales with dims of one, or numbers and None.

    Args:
      x: the operand.
      q: how it is quantized.
      kept: its dims that the result has, each index of which is a row.
      summed: the one of its other dims that blocks and transforms are along; None if there is none.
      seed: uint32, of stochastic rounding.
      carried: what the train state has for its scale, if that is not of the operand itself.
      of_all: of a shard of an operand, from its largest magnitudes to those of all shards.
      source: an array in memory that noise is drawn by, where a carried scale may be the same in
        each step; None: ``x``, all of which XLA may write for that.
    """
    if q.grid is None:
        return x, None
    wide, dim = to_sum_dtype(x), summed or 0
    if q.hadamard and summed is not None:
        wide = hadamard(wide, summed, q.hadamard)
    dims = q.summed_dims(x.ndim, kept)
    if q.block:
        missing = [(0, -size % q.block if d == dim else 0) for d, size in enumerate(x.shape)]
        wide, dims = jnp.pad(wide, missing), (dim + 1,)
        padded, count = wide.shape, wide.shape[dim] // q.block
        wide = wide.reshape(*x.shape[:dim], count, q.block, *x.shape[dim + 1 :])
    largest = jnp.max(jnp.abs(wide), dims, keepdims=True, initial=0)
    if of_all is not None:
        # Maxima on CPUs may ignore NaN. Of an infinite scale nothing becomes finite, either.
        largest = of_all(jnp.where(jnp.isnan(largest), jnp.inf, largest))
    scale = drawn = _scale(wide, q, q.grid.top, largest)
    if carried is not None:
        clip = clip_of(carried, q.history).astype(wide.dtype)
        scale = (clip / q.grid.top).reshape(largest.shape)
        drawn = sample_of(x if source is None else source)
    scale = jnp.maximum(scale, float(jnp.finfo(jnp.float32).tiny))
    noise = noise_of(drawn, seed, wide.shape) if q.stochastic else None
    codes = rounded(wide / scale, q.grid, noise)
    if q.block:
        numbers = (codes * scale).reshape(padded)
        return lax.slice_in_dim(numbers, 0, x.shape[dim], axis=dim), None
    if carried is not None:  # beside codes, not before them: they are made in one pass
        scale = jnp.where(jnp.isfinite(largest), scale, largest)
    return _in_own_layout(codes.astype(q.grid.dtype or wide.dtype), q.grid), scale


def _in_own_layout(codes: jax.Array, grid: Grid) -> jax.Array:
    """Codes of float8 in the layout of their dims.

    XLA would transpose all layers of a stack, before its loop, to the one in which it multiplies.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    # The partitioner would gather what has a layout.
    is_partitioned = any(size > 1 and kind != AxisType.Manual for kind, size in kinds)
    if grid.dtype in (None, jnp.int8) or is_partitioned:
        return codes
    return with_layout_constraint(codes, Layout(tuple(range(codes.ndim))))


def _scale(x: jax.Array, q: Quantizer, top: float, largest: jax.Array) -> jax.Array:
    """The number that a code of one stands for, of the largest magnitudes."""
    if q.scale in ("sawb", "pact"):
        rms = jnp.sqrt(_mean(jnp.square(x)))
        clip = _SAWB[0] * rms - _SAWB[1] * _mean(jnp.abs(x))
        # A few numbers, or equal ones, have no such clip.
        largest = jnp.where((clip > 0) & (clip < largest), clip, largest)
    if q.scale == "nv":  # scales in e4m3, of one scale of the tensor
        whole = jnp.max(largest, keepdims=True, initial=0) / (top * _grids.E4M3.top)
        whole = jnp.maximum(whole, float(jnp.finfo(jnp.float32).tiny))
        return rounded(largest / (top * whole), _grids.E4M3) * whole
    if q.scale == "mx":
        return _power_below(largest) * 2.0 ** (1 - int(np.frexp(top)[1]))
    if q.scale == "power":  # of four the largest: both phases have one scale
        even = largest / 64.0
        power = _power_below(even)
        return jnp.where(power == even, even, 2 * power)
    return largest / top


def _power_below(x: jax.Array) -> jax.Array:
    """The largest power of two that is not above ``x``; what is not finite stays."""
    _, exponent = jnp.frexp(x)
    return jnp.where(jnp.isfinite(x), jnp.ldexp(jnp.ones_like(x), exponent - 1), x)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.sum(x, keepdims=True) / max(x.size, 1)


def hadamard(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Mixes each ``size`` elements along a dim by an orthogonal matrix of equal magnitudes.

    A sum over the dim of products of two arrays so mixed stays the same, and large elements are
    spread. Where ``size`` does not divide the dim, nothing is mixed.
    """
    if x.shape[dim] % size:
        return x
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size)
    mixing = jnp.asarray(signs[:, None] * scipy.linalg.hadamard(size) * size**-0.5, x.dtype)
    last = jnp.moveaxis(x, dim, -1)
    groups = last.reshape(*last.shape[:-1], -1, size)
    return jnp.moveaxis((groups @ mixing).reshape(last.shape), -1, dim)
