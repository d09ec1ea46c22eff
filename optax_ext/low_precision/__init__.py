"""Optimizer state in low precision: formats, rounding, and the wrapper for any transformation."""

from optax_ext.low_precision._quantize import dequantize as dequantize
from optax_ext.low_precision._quantize import quantize as quantize
