"""Where arrays live and what crosses the wire: ZeRO for any optax transformation."""

from optax_ext import __version__ as __version__
from sharding import matmuls as matmuls
from sharding import pipeline as pipeline
from sharding import plan as plan
from sharding import recovery as recovery
from sharding import remat as remat
from sharding import stored as stored
from sharding import sync as sync
from sharding import tiles as tiles
from sharding._local_steps import LocalState as LocalState
from sharding._local_steps import LocalSteps as LocalSteps
from sharding._zero import Zero as Zero
from sharding.check._check_machine import check_machine as check_machine
from sharding.check._machine_report import MachineReport as MachineReport
from sharding.loss._declared_rows import keeps_rows_apart as keeps_rows_apart
from sharding.loss._loss_options import Loss as Loss
from sharding.matmuls._quantized_loss import quantized_matmuls as quantized_matmuls
from sharding.offload._transformation import offload as offload
from sharding.pipeline._pipeline import Pipeline as Pipeline
from sharding.pipeline.asynchronous._async_pipeline import AsyncPipeline as AsyncPipeline
from sharding.pipeline.asynchronous._async_pipeline import AsyncState as AsyncState
from sharding.placement._describe import Description as Description
from sharding.placement._state_specs import state_shardings as state_shardings
from sharding.placement._state_specs import state_specs as state_specs
from sharding.plan import targets as targets
from sharding.plan.audit._audit import Audit as Audit
from sharding.plan.audit._audit import audit as audit
from sharding.plan.audit._program_collectives import wire_bytes as wire_bytes
from sharding.plan.machine._devices import DeviceKind as DeviceKind
from sharding.recovery._load_state import NoCompleteCheckpoint as NoCompleteCheckpoint
from sharding.recovery._peer_checkpoints import PeerCheckpoints as PeerCheckpoints
from sharding.step._batch_moments import batch_moments as batch_moments
from sharding.step._batch_rows import pad_rows as pad_rows
from sharding.step._lookup import lookup as lookup
from sharding.step._lookup import shuffle_rows as shuffle_rows
from sharding.step._lookup import unshuffle_rows as unshuffle_rows
from sharding.step._precision import Precision as Precision
from sharding.step.flax._modules import sparse_embedding as sparse_embedding
from sharding.step.owners._by_owner import by_owner as by_owner
from sharding.tiles._cross_entropy import cross_entropy as cross_entropy
from sharding.tiles._tiled_loss import tiled as tiled

_INTERNAL = {"check", "collectives", "loss", "placement", "step"}  # modules
__all__ = [name for name in dir() if not name.startswith("_") and name not in _INTERNAL]
__dir__ = __all__.copy
