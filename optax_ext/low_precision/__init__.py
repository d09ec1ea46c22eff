"""Optimizer state in few bits: formats, rounding, and the wrapper that stores any state so."""

from optax_ext.low_precision._formats import BFloat16 as BFloat16
from optax_ext.low_precision._formats import Dynamic as Dynamic
from optax_ext.low_precision._formats import Float8 as Float8
from optax_ext.low_precision._formats import Linear as Linear
from optax_ext.low_precision._formats import Quantized as Quantized
from optax_ext.low_precision._state import LowPrecisionState as LowPrecisionState
from optax_ext.low_precision._state import describe_state as describe_state
from optax_ext.low_precision._state import low_precision_state as low_precision_state
