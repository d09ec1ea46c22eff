"""Optimizer state in low precision: formats, rounding, and the wrapper for any transformation."""

from optax_ext.low_precision._first_use import error_of_codes as error_of_codes
from optax_ext.low_precision._quantize import dequantize as dequantize
from optax_ext.low_precision._quantize import quantize as quantize
from optax_ext.low_precision._rounding import uniform as uniform
from optax_ext.low_precision._wrapper import kernels_beside_xla as kernels_beside_xla
