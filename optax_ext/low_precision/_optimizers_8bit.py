"""Optimizers with 8-bit state, under their common names."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import optax

from optax_ext._adafactor import adafactor
from optax_ext._came import came
from optax_ext._lamb import lamb
from optax_ext.low_precision._wrapper import low_precision_state

_Arguments = ParamSpec("_Arguments")


def _in_8_bits(
    name: str,
    make: Callable[_Arguments, optax.GradientTransformation],
    described: str,
    bytes_per_parameter: str,
) -> Callable[_Arguments, optax.GradientTransformationExtraArgs]:
    """Returns ``make`` with ``low_precision_state`` around its transformation."""

    @functools.wraps(make)
    def make_8_bits(
        *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> optax.GradientTransformationExtraArgs:
        return low_precision_state(make(*args, **kwargs))

    make_8_bits.__name__ = make_8_bits.__qualname__ = name
    make_8_bits.__module__ = __name__
    make_8_bits.__doc__ = f"""{described} with moments in 8 bits.

    Takes the same arguments and wraps it in ``low_precision_state``: {bytes_per_parameter} of state
    per parameter of a large matrix, rounded stochastically. Errors are those of both.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> state = optax_ext.{name}(1e-3).init({{"w": jnp.zeros((256, 256))}})
      >>> "Dynamic(bits=8, block_size=256, rank1=False)" in optax_ext.describe_state(state)
      True

    References:
      Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, ICLR 2022, arXiv 2110.02861.
    """
    return make_8_bits


adamw8bit = _in_8_bits("adamw8bit", optax.adamw, "``optax.adamw``", "2.03 bytes")
lion8bit = _in_8_bits("lion8bit", optax.lion, "``optax.lion``", "1.02 bytes")
lamb8bit = _in_8_bits("lamb8bit", lamb, "``lamb`` with its trust ratio", "2.03 bytes")
came8bit = _in_8_bits("came8bit", came, "``came``", "1.02 bytes")
adafactor8bit = _in_8_bits(
    "adafactor8bit",
    functools.wraps(adafactor)(functools.partial(adafactor, momentum=0.9)),
    "``adafactor`` with momentum (0.9 unless given)",
    "1.02 bytes",
)
