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
