"""Checkpoints in the host memory of peers: survives lost machines at the cost of seconds."""

from sharding.recovery._peer_checkpoints import Restored as Restored
from sharding.recovery._peer_placement import PeerDescription as PeerDescription
from sharding.recovery._snapshot_writer import SaveCounts as SaveCounts

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
