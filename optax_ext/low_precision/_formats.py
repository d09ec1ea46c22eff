"""Formats of stored arrays, and ``Quantized``, an array in one of them."""

import dataclasses
import math
import sys
from typing import Any

import jax


class _Coded:
    """A format of 8 or 4 bits."""

    bits: int
    block_size: int | None

    def __post_init__(self) -> None:
        size = self.block_size
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}.")
        if size is None:
            object.__setattr__(self, "block_size", 256 if self.bits == 8 else 128)
        elif isinstance(size, bool) or not isinstance(size, int) or size < 16 or size & (size - 1):
            raise ValueError(f"block_size must be a power of two, at least 16, got {size!r}.")


@dataclasses.dataclass(frozen=True)
class _Steps(_Coded):
    """Codes of equal or growing steps, relative to scales of blocks or of rows and columns."""

    bits: int = 8
    block_size: int | None = None
    rank1: bool = False


class Dynamic(_Steps):
    """Steps that grow with the value: seven powers of ten in 8 bits, three in 4 bits.

    Attributes:
      bits: 8 or 4.
      block_size: elements that share a float32 scale, their largest magnitude; None means 256 for 8
        bits, 128 for 4 bits.
      rank1: as for ``Linear``, for rows and columns whose magnitudes differ by decades.

    Raises:
      ValueError: if ``bits`` is neither, or ``block_size`` no power of two from 16 on.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.adam(1e-3), optax_ext.Dynamic(8, block_size=64))

    References:
      Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, ICLR 2022, arXiv 2110.02861.
    """


class Linear(_Steps):
    """Equal steps up to the scale. Unsigned with 4 bits it has no zero: 1/16, 2/16, ... 1.

    Attributes:
      bits: 8 or 4.
      block_size: as for ``Dynamic``.
      rank1: instead of blocks, an element's scale is the minimum of the maxima of its row, its
        column, and every other dim; arrays of one dim have blocks.

    Example:
      >>> import optax, optax_ext
      >>> formats = {"nu": optax_ext.Linear(4, rank1=True)}
      >>> tx = optax_ext.low_precision_state(optax.adam(1e-3), formats=formats)

    References:
      Li, Chen, Zhu: Memory Efficient Optimizers with 4-bit States, NeurIPS 2023, arXiv 2309.01507.
    """


@dataclasses.dataclass(frozen=True)
class Float8(_Coded):
    """E4M3 floats of magnitudes raised to a power per block that fills the range of E4M3.

    Attributes:
      block_size: elements that share a float32 scale and an exponent of 8 bits.
      expand: whether to raise to a power; if not, a block is only scaled.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.adamw(1e-3), optax_ext.Float8(expand=False))

    References:
      Xi et al.: COAT: Memory-Efficient FP8 Training, ICLR 2025, arXiv 2410.19313.
    """

    block_size: int = 128
    expand: bool = True

    bits = 8


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """Float32 without the lower 16 bits of its fraction; there are no scales.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.adam(1e-3), optax_ext.BFloat16())
    """

    bits = 16


Format = Dynamic | Linear | Float8 | BFloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in a low-precision format; a node of the state's tree."""

    #: uint8 (bfloat16 for that format) of the array's shape; 4-bit codes, two to a byte, have half
    #: as many rows
    codes: jax.Array
    scale: tuple[jax.Array, ...]  #: of each block, or of rows and columns; negative: block negated
    rest: jax.Array | None  #: 8 more bits of each element, uint8, if rounding errors are stored
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})  #: the array's shape
    #: of the dequantized array: float32, or float64 if the array had it
    dtype: Any = dataclasses.field(metadata={"static": True})
    format: Format = dataclasses.field(metadata={"static": True})  #: the format
    #: whether half of the codes are negative
    signed: bool = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays, over all devices."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))


def register_with_flax() -> None:
    """Lets Flax, where a program has imported it, serialize ``Quantized`` (``to_bytes``)."""
    flax = sys.modules.get("flax.serialization")
    if flax is None:
        return

    def fields(q: Quantized) -> dict[str, Any]:
        return {"codes": q.codes, "scale": q.scale, "rest": q.rest}

    def from_fields(q: Quantized, restored: Any) -> Quantized:
        if not isinstance(restored, dict):
            raise ValueError(
                f"a moment of shape {q.shape} has the format {q.format}, and the checkpoint has an "
                "array. Restore it into the state that wrote it, then call optax_ext.convert_state."
            )
        return dataclasses.replace(q, **flax.from_state_dict(fields(q), restored))

    flax.register_serialization_state(
        Quantized, lambda q: flax.to_state_dict(fields(q)), from_fields, override=True
    )
