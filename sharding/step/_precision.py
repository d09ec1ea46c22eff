"""The dtypes of computing, reducing, accumulating and gathering."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from sharding._types import DType
from sharding.collectives._sum_dtype import sum_dtype


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of a step; the parameters' own is that of the train state.

    With float32 parameters and ``compute=bfloat16``, stage 3 gathers bfloat16; stages 1 and 2,
    which gather parameters for the train state, gather float32. Leaves that are not floating keep
    theirs.

    Attributes:
      compute: parameters are cast to it for the loss; None: as they are. The batch is not, since
        targets would lose precision: cast float32 inputs in the loss, or it computes in float32.
      reduce: gradients are cast to it to be summed over devices; None: as autodiff makes them.
      accumulate: gradients are accumulated over micro-batches, and passed to the transformation, in
        it; None: accumulated in float32 at least, passed in the parameters' dtype.
      gather: at stage 3, int8 or int4 sends floating matrices of at least 512 elements a shard in
        codes, with a scale for 512 elements (ZeRO++'s qwZ). Loss and gradient see decoded values;
        the update changes the parameters themselves. None: the dtype that computes.

    Raises:
      ValueError: if a dtype is not floating, or ``gather`` neither int8 nor int4.

    Example:
      >>> import jax.numpy as jnp, sharding as shd
      >>> shd.Precision(compute=jnp.bfloat16, reduce=jnp.float32).reduce
      dtype('float32')

    References:
      Micikevicius, Narang, Alben et al.: Mixed Precision Training, ICLR 2018, arXiv 1710.03740.
      Wang, Qin, Jacobs et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model
      Training, 2023, arXiv 2306.10209.
    """

    compute: Any = None
    reduce: Any = None
    accumulate: Any = None
    gather: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            dtype = jnp.dtype(value)
            if field.name == "gather":
                if dtype not in (jnp.int8, jnp.int4):
                    raise ValueError(f"Precision.gather must be int8, int4 or None, got {dtype}.")
            elif not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"Precision.{field.name} must be a floating dtype, got {dtype}.")
            object.__setattr__(self, field.name, dtype)

    def of_loss(self, dtype: DType) -> Any:
        return _unless_none(self.compute, dtype)

    def of_sum(self, dtype: DType) -> Any:
        return _unless_none(self.reduce, dtype)

    @property
    def gather_bits(self) -> int | None:
        """In how many bits parameters are sent, if in codes."""
        return None if self.gather is None else jnp.iinfo(self.gather).bits

    def of_accumulator(self, dtype: DType) -> Any:
        return _unless_none(self.accumulate, sum_dtype(dtype))

    def of_result(self, dtype: DType) -> Any:
        """In which dtype the transformation gets a gradient."""
        return _unless_none(self.accumulate, dtype)

    def divides_first(self, dtypes: Iterable[DType]) -> bool:
        """Whether a loss of parameters is divided before it is differentiated.

        float16, of a parameter or of a gradient, overflows in sums.
        """
        each = ((x, self.of_loss(x), self.of_sum(self.of_loss(x))) for x in dtypes)
        return any(jnp.float16 in dtypes for dtypes in each)


def _unless_none(choice: Any, dtype: DType) -> Any:
    return choice if choice is not None and jnp.issubdtype(dtype, jnp.floating) else dtype
