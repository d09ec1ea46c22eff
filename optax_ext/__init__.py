"""Memory-efficient optimizers as composable optax gradient transformations."""

from optax_ext._adafactor import MomentumState as MomentumState
from optax_ext._adafactor import ScaleByAdafactorState as ScaleByAdafactorState
from optax_ext._adafactor import adafactor as adafactor
from optax_ext._adafactor import scale_by_adafactor as scale_by_adafactor
from optax_ext._batch_schedule import BatchSchedule as BatchSchedule
from optax_ext._came import ScaleByCameState as ScaleByCameState
from optax_ext._came import came as came
from optax_ext._came import scale_by_came as scale_by_came
from optax_ext._describe_factoring import FactoringRow as FactoringRow
from optax_ext._describe_factoring import FactoringTable as FactoringTable
from optax_ext._describe_factoring import describe_factoring as describe_factoring
from optax_ext._factoring import Factoring as Factoring
from optax_ext._factoring import FactoringRule as FactoringRule
from optax_ext._factoring import by_path as by_path
from optax_ext._factoring import last_two_dims as last_two_dims
from optax_ext._factoring import two_largest_dims as two_largest_dims
from optax_ext._flax_transformer import flax_transformer as flax_transformer
from optax_ext._lamb import ScaleByLambState as ScaleByLambState
from optax_ext._lamb import lamb as lamb
from optax_ext._lamb import scale_by_lamb as scale_by_lamb
from optax_ext._large_batch import GradientNoiseScaleState as GradientNoiseScaleState
from optax_ext._large_batch import batch_advice as batch_advice
from optax_ext._large_batch import gradient_noise_scale as gradient_noise_scale
from optax_ext._large_batch import gradual_warmup as gradual_warmup
from optax_ext._large_batch import linear_scaling as linear_scaling
from optax_ext._large_batch import noise_scale as noise_scale
from optax_ext._large_batch import square_root_scaling as square_root_scaling
from optax_ext._lars import LarsMomentumState as LarsMomentumState
from optax_ext._lars import ScaleByLarsState as ScaleByLarsState
from optax_ext._lars import lars as lars
from optax_ext._lars import scale_by_lars as scale_by_lars
from optax_ext._lazy_rows import lazy_rows as lazy_rows
from optax_ext._master_weights import MasterWeightsState as MasterWeightsState
from optax_ext._master_weights import master_weights as master_weights
from optax_ext._parameter_masks import decay_mask as decay_mask
from optax_ext._parameter_masks import hidden_matrices as hidden_matrices
from optax_ext._pipemare import DiscrepancyCorrectionState as DiscrepancyCorrectionState
from optax_ext._pipemare import ScaleByDelayState as ScaleByDelayState
from optax_ext._pipemare import backward_params as backward_params
from optax_ext._pipemare import discrepancy_correction as discrepancy_correction
from optax_ext._pipemare import scale_by_delay as scale_by_delay
from optax_ext._version import __version__ as __version__
from optax_ext.low_precision._formats import BFloat16 as BFloat16
from optax_ext.low_precision._formats import Dynamic as Dynamic
from optax_ext.low_precision._formats import Float8 as Float8
from optax_ext.low_precision._formats import Linear as Linear
from optax_ext.low_precision._formats import Quantized as Quantized
from optax_ext.low_precision._rounding import (
    StochasticRoundingState as StochasticRoundingState,
)
from optax_ext.low_precision._rounding import apply_updates as apply_updates
from optax_ext.low_precision._rounding import stochastic_rounding as stochastic_rounding
from optax_ext.low_precision._stored_state import LowPrecisionState as LowPrecisionState
from optax_ext.low_precision._stored_state import convert_state as convert_state
from optax_ext.low_precision._stored_state import describe_state as describe_state
from optax_ext.low_precision._wrapper import STATE_FORMATS as STATE_FORMATS
from optax_ext.low_precision._wrapper import adafactor8bit as adafactor8bit
from optax_ext.low_precision._wrapper import adamw8bit as adamw8bit
from optax_ext.low_precision._wrapper import came8bit as came8bit
from optax_ext.low_precision._wrapper import lamb8bit as lamb8bit
from optax_ext.low_precision._wrapper import lion8bit as lion8bit
from optax_ext.low_precision._wrapper import low_precision_state as low_precision_state

# Modules.
_INTERNAL = {"equations", "kernels", "leaf_by_leaf", "low_precision", "traced_graph", "user_line"}
__all__ = [name for name in dir() if not name.startswith("_") and name not in _INTERNAL]
__dir__ = __all__.copy
