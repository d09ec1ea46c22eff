"""Parameters that are stored otherwise than a loss sees them: in few bits, adapted, or masked."""

from sharding.stored._files import Lazy as Lazy
from sharding.stored._files import orbax as orbax
from sharding.stored._files import safetensors as safetensors
from sharding.stored._files import stack as stack
from sharding.stored._forms import Adapted as Adapted
from sharding.stored._forms import Coded as Coded
from sharding.stored._forms import Form as Form
from sharding.stored._forms import Masked as Masked
from sharding.stored._merge import merge as merge
from sharding.stored._merge import peft as peft
from sharding.stored._normal_float import NormalFloat4 as NormalFloat4
from sharding.stored._store import frozen as frozen
from sharding.stored._store import lora as lora
from sharding.stored._store import masked as masked
from sharding.stored._store import store as store
from sharding.stored._store import trained as trained
from sharding.stored._stored_loss import loss_of as loss_of

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
