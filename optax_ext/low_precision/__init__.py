"""Optimizer state in low precision: formats, rounding, and the wrapper for any transformation."""

from optax_ext.low_precision._bfloat16_params import (
    StochasticRoundingState as StochasticRoundingState,
)
from optax_ext.low_precision._bfloat16_params import apply_updates as apply_updates
from optax_ext.low_precision._bfloat16_params import stochastic_rounding as stochastic_rounding
from optax_ext.low_precision._formats import BFloat16 as BFloat16
from optax_ext.low_precision._formats import Dynamic as Dynamic
from optax_ext.low_precision._formats import Float8 as Float8
from optax_ext.low_precision._formats import Linear as Linear
from optax_ext.low_precision._formats import Quantized as Quantized
from optax_ext.low_precision._optimizers_8bit import adafactor8bit as adafactor8bit
from optax_ext.low_precision._optimizers_8bit import adamw8bit as adamw8bit
from optax_ext.low_precision._optimizers_8bit import came8bit as came8bit
from optax_ext.low_precision._optimizers_8bit import lamb8bit as lamb8bit
from optax_ext.low_precision._optimizers_8bit import lion8bit as lion8bit
from optax_ext.low_precision._stored_state import LowPrecisionState as LowPrecisionState
from optax_ext.low_precision._stored_state import convert_state as convert_state
from optax_ext.low_precision._stored_state import describe_state as describe_state
from optax_ext.low_precision._wrapper import STATE_FORMATS as STATE_FORMATS
from optax_ext.low_precision._wrapper import low_precision_state as low_precision_state

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
