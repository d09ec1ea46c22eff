"""Checkpoints in the host memory of peers: survives lost machines at the cost of seconds."""

from sharding.recovery._peer_checkpoints import Restored as Restored
from sharding.recovery._peer_checkpoints import SaveCounts as SaveCounts
from sharding.recovery._peer_description import PeerDescription as PeerDescription

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
