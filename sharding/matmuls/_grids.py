"""Numbers that codes of few bits stand for, and rounding to them, nearest or stochastic."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext.low_precision import uniform


class Grid(NamedTuple):
    r"""Zero, and numbers of either sign, or of one, up to ``top``.

    A number of magnitude :math:`y` is a multiple of the step

    .. math::
        2^{\max(\lfloor\log_2 y\rfloor,\ \mathit{lowest}) - \mathit{mantissa}}

    Formats of floats are grids, with subnormal numbers below ``lowest``. Of integers all numbers
    are below it. With radix 4, numbers are :math:`4^k`, or :math:`2 \cdot 4^k` if ``odd``.
    """

    name: str
    top: float
    mantissa: int  # bits of the fraction
    lowest: int  # the exponent below which steps are equal
    dtype: Any = None  # of codes, where devices multiply them; None: floats stand for them
    radix: int = 2
    odd: bool = False
    signed: bool = True


E4M3 = Grid("e4m3", 448.0, 3, -6, jnp.float8_e4m3fn)
E5M2 = Grid("e5m2", 57344.0, 2, -14, jnp.float8_e5m2)
E2M1 = Grid("e2m1", 6.0, 1, 0)
INT8 = Grid("int8", 127.0, 7, 7, jnp.int8)
INT4 = Grid("int4", 7.0, 3, 3)
# A bit for the sign and three for the exponent: zero and seven powers of two, or of four.
POWERS_OF_2 = Grid("powers of 2", 64.0, 0, 0)
POWERS_OF_4 = Grid("powers of 4", 64.0, 0, -6, radix=4)
ODD_POWERS = Grid("2 times powers of 4", 128.0, 0, -5, radix=4, odd=True)


def rounded(y: jax.Array, grid: Grid, noise: jax.Array | None = None) -> jax.Array:
    """The number of a grid that is nearest to each of ``y``, ties to even; beyond ``top``, that.

    With ``noise``, uniform in [0, 1), it is one of the two neighbours, and ``y`` in the mean.
    """
    y = jnp.clip(y, -grid.top if grid.signed else 0.0, grid.top)
    if grid.radix == 4:
        return _nearest_of_radix_4(y, grid)
    if noise is None and grid.dtype is not None and grid.dtype != jnp.int8:
        return y.astype(grid.dtype).astype(y.dtype)  # which XLA does in one instruction
    if grid.top < 2.0 ** (grid.lowest + 1):
        # No array: XLA:TPU would make that before a loop over layers, and read it in each.
        step: Any = 2.0 ** (grid.lowest - grid.mantissa)
    else:
        step = _power_of_2(jnp.maximum(_exponent(y), grid.lowest) - grid.mantissa, y.dtype)
    steps = y / step
    return (jnp.round(steps) if noise is None else jnp.floor(steps + noise)) * step


def _nearest_of_radix_4(y: jax.Array, grid: Grid) -> jax.Array:
    """The nearest power of four: :math:`4^k` up to the middle to the next, :math:`4^{k+1} / 1.6`.

    What is below the smallest power's own share of that, 0.625 of it, is zero.
    """
    first = 2.0 if grid.odd else 1.0
    exponent = jnp.floor_divide(_exponent(y * (1.6 / first)), 2)
    power = first * _power_of_2(2 * exponent, y.dtype)
    power = jnp.minimum(power, grid.top)
    is_zero = jnp.abs(y) * 1.6 < 2.0**grid.lowest
    return jnp.where(jnp.isnan(y), y, jnp.where(is_zero, 0.0, jnp.sign(y) * power))


def _exponent(y: jax.Array) -> jax.Array:
    """The largest k for which 2^k is not above the magnitude."""
    return jnp.frexp(y)[1] - 1


def _power_of_2(exponent: jax.Array, dtype: Any) -> jax.Array:
    return jnp.ldexp(jnp.ones((), dtype), exponent)


# --- Noise ----------------------------------------------------------------------------------------


def noise_of(scale: jax.Array, seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32, uniform in [0, 1): a hash of each element's index, the seed and the scales' bits.

    A loss has no key for its backward pass. The scales of a tensor differ from step to step, and
    from layer to layer, in their last bits; their sum as integers is the same on any mesh.
    """
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)
    start = jnp.sum(bits, dtype=jnp.uint32) ^ seed
    return uniform(jnp.stack([start, jnp.zeros_like(start)]), shape)


def sample_of(x: jax.Array) -> jax.Array:
    """Elements in the middle, each times a number of its own, so that codes have bits enough."""
    middle = x[tuple(slice(max(n // 2 - 4, 0), n // 2 + 4) for n in x.shape)]
    # No array of constants: of equal ones in a loop XLA does not see that they are.
    return middle.astype(jnp.float32) * (1 + uniform(jnp.zeros(2, jnp.uint32), middle.shape))
