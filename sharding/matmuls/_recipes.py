"""Recipes: how the operands of a product, and its cotangents, are quantized. They are data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.matmuls import _grids
from sharding.matmuls._grids import Grid, noise_of, rounded


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
    #: clipped by its moments. ``"mx"``, ``"nv"``: ``block`` elements of what is summed
    scale: str = "row"
    block: int = 0
    stochastic: bool = False  #: the rounding; otherwise to nearest
    hadamard: int = 0  #: elements of what is summed that a random Hadamard transform mixes

    @property
    def has_codes_of_shards(self) -> bool:
        """Whether codes are of 8 bits, and shards have the same as the whole, of one largest."""
        is_coded = self.grid is not None and self.grid.dtype is not None
        return is_coded and self.scale in ("row", "tensor") and not self.stochastic


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


def _recipes() -> dict[str, Recipe]:
    e4m3, e5m2 = Quantizer(_grids.E4M3), Quantizer(_grids.E5M2)
    int8 = Quantizer(_grids.INT8)
    cotangent8 = int8._replace(stochastic=True)
    fp8 = Recipe("fp8", e4m3, e4m3, e5m2, e5m2)
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
        fp8,
        Recipe("int8", int8, int8, cotangent8, cotangent8),
        Recipe("mxfp8", mx, mx, mx, mx, True),
        Recipe("nvfp4", nv, nv, nv_cotangent, nv_cotangent, True),
        Recipe("ufp4", uniform, uniform, uniform_cotangent, uniform_cotangent, True),
        Recipe("sun4", sawb, sawb, even, odd, True, fp8),
        Recipe("luq", sawb, sawb, log, log, True),
        Recipe("identity", Quantizer(), Quantizer(), Quantizer(), Quantizer()),
    ]
    return {recipe.name: recipe for recipe in found}


RECIPES = _recipes()

# SAWB of Choi et al. 2019: the clip of least squared error, c1 sqrt(E w^2) - c2 E|w|, of 15 levels.
_SAWB = 12.035, 12.03


def quantized(
    x: jax.Array,
    q: Quantizer,
    kept: tuple[int, ...],
    summed: int | None,
    seed: jax.Array,
    of_all: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Codes of an operand, and its scales with dims of one, or numbers and None.

    Args:
      x: the operand.
      q: how it is quantized.
      kept: its dims that the result has, each index of which is a row.
      summed: the one of its other dims that blocks and transforms are along; None if there is none.
      seed: uint32, of stochastic rounding.
      of_all: of a shard of an operand, from its largest magnitudes to those of all shards.
    """
    if q.grid is None:
        return x, None
    wide = to_sum_dtype(x)
    if q.hadamard and summed is not None:
        wide = hadamard(wide, summed, q.hadamard)
    if q.block:
        return _by_blocks(wide, q, summed or 0, seed), None
    scale = _scale(wide, q, kept, of_all)
    noise = noise_of(scale, seed, wide.shape) if q.stochastic else None
    codes = rounded(wide / scale, q.grid, noise)
    if q.grid.dtype is None:
        return codes.astype(wide.dtype), scale
    codes = codes.astype(q.grid.dtype)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    # The partitioner would gather what has a layout.
    is_partitioned = any(size > 1 and kind != AxisType.Manual for kind, size in kinds)
    if codes.dtype == jnp.int8 or is_partitioned:
        return codes, scale
    # Otherwise XLA transposes all layers of a stack, before its loop, to the layout in which it
    # multiplies floats of 8 bits.
    return with_layout_constraint(codes, Layout(tuple(range(codes.ndim)))), scale


def _scale(x: jax.Array, q: Quantizer, kept: tuple[int, ...], of_all: Any) -> jax.Array:
    """The number that a code of one stands for; of zeros alone, the smallest normal number."""
    assert q.grid is not None
    dims = tuple(d for d in range(x.ndim) if q.scale != "row" or d not in kept)
    largest = jnp.max(jnp.abs(x), dims, keepdims=True, initial=0)
    if of_all is not None:
        # Maxima on CPUs may ignore NaN. Of an infinite scale nothing becomes finite, either.
        largest = of_all(jnp.where(jnp.isnan(largest), jnp.inf, largest))
    if q.scale == "sawb":
        rms = jnp.sqrt(_mean(jnp.square(x)))
        clip = _SAWB[0] * rms - _SAWB[1] * _mean(jnp.abs(x))
        # A few numbers, or equal ones, have no such clip.
        largest = jnp.where((clip > 0) & (clip < largest), clip, largest)
    scale = largest / q.grid.top
    if q.scale == "power":
        even = largest / 64.0  # the largest power of four: both phases have one scale
        part, exponent = jnp.frexp(even)
        scale = jnp.where(jnp.isfinite(even), jnp.ldexp(jnp.ones_like(even), exponent), even)
        scale = jnp.where(part == 0.5, even, scale)
    return jnp.maximum(scale, float(jnp.finfo(jnp.float32).tiny))


def _mean(x: jax.Array) -> jax.Array:
    return jnp.sum(x, keepdims=True) / max(x.size, 1)


def _by_blocks(x: jax.Array, q: Quantizer, dim: int, seed: jax.Array) -> jax.Array:
    """The numbers that codes of blocks along a dim stand for."""
    assert q.grid is not None
    size = x.shape[dim]
    missing = -size % q.block
    padded = jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])
    shape = (*x.shape[:dim], (size + missing) // q.block, q.block, *x.shape[dim + 1 :])
    blocks = padded.reshape(shape)
    largest = jnp.max(jnp.abs(blocks), dim + 1, keepdims=True, initial=0)
    tiny = float(jnp.finfo(jnp.float32).tiny)
    if q.scale == "mx":
        _, exponent = jnp.frexp(largest)
        emax = int(np.frexp(q.grid.top)[1])
        scale = jnp.ldexp(jnp.ones_like(largest), exponent - emax)
        scale = jnp.where(jnp.isfinite(largest), scale, largest)
    else:  # scales in e4m3, of one scale of the tensor
        whole = jnp.max(largest, keepdims=True, initial=0) / (q.grid.top * _grids.E4M3.top)
        whole = jnp.maximum(whole, tiny)
        scale = rounded(largest / (q.grid.top * whole), _grids.E4M3) * whole
    scale = jnp.maximum(scale, tiny)
    noise = noise_of(scale, seed, blocks.shape) if q.stochastic else None
    numbers = (rounded(blocks / scale, q.grid, noise) * scale).reshape(padded.shape)
    return jax.lax.slice_in_dim(numbers, 0, size, axis=dim)


def hadamard(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Mixes each ``size`` elements along a dim by an orthogonal matrix of equal magnitudes.

    A sum over the dim of products of two arrays so mixed stays the same, and large elements are
    spread. Where ``size`` does not divide the dim, nothing is mixed.
    """
    if x.shape[dim] % size:
        return x
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size)
    mixing = jnp.asarray(signs[:, None] * matrix * size**-0.5, x.dtype)
    last = jnp.moveaxis(x, dim, -1)
    groups = last.reshape(*last.shape[:-1], -1, size)
    return jnp.moveaxis((groups @ mixing).reshape(last.shape), -1, dim)
