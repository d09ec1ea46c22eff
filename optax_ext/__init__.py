"""Memory-efficient optimizers as composable optax gradient transformations."""

from optax_ext._adafactor import MomentumState as MomentumState
from optax_ext._adafactor import ScaleByAdafactorState as ScaleByAdafactorState
from optax_ext._adafactor import adafactor as adafactor
from optax_ext._adafactor import scale_by_adafactor as scale_by_adafactor
from optax_ext._came import ScaleByCameState as ScaleByCameState
from optax_ext._came import came as came
from optax_ext._came import scale_by_came as scale_by_came
from optax_ext._factored import Factoring as Factoring
from optax_ext._factored import FactoringRule as FactoringRule
from optax_ext._factored import by_path as by_path
from optax_ext._factored import flax_attention as flax_attention
from optax_ext._factored import last_two_dims as last_two_dims
from optax_ext._factored import two_largest_dims as two_largest_dims
from optax_ext._master import MasterWeightsState as MasterWeightsState
from optax_ext._master import master_weights as master_weights
from optax_ext.low_precision import BFloat16 as BFloat16
from optax_ext.low_precision import Dynamic as Dynamic
from optax_ext.low_precision import Float8 as Float8
from optax_ext.low_precision import Linear as Linear
from optax_ext.low_precision import LowPrecisionState as LowPrecisionState
from optax_ext.low_precision import Quantized as Quantized
from optax_ext.low_precision import describe_state as describe_state
from optax_ext.low_precision import low_precision_state as low_precision_state
