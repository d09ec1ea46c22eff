"""Gradient sync methods: dense, quantized, low-rank or sparse. ``Zero(sync=...)`` takes one."""

from sharding.sync._agsparse import agsparse as agsparse
from sharding.sync._by_path import by_path as by_path
from sharding.sync._dense import dense as dense
from sharding.sync._gradzip import gradzip as gradzip
from sharding.sync._interface import GradientSync as GradientSync
from sharding.sync._interface import RowMethod as RowMethod
from sharding.sync._interface import SyncedState as SyncedState
from sharding.sync._interface import SyncState as SyncState
from sharding.sync._interface import resize as resize
from sharding.sync._interface import transformation as transformation
from sharding.sync._powersgd import powersgd as powersgd
from sharding.sync._qsgd import qsgd as qsgd
from sharding.sync._sparsity import Choice as Choice
from sharding.sync._sparsity import Sparsity as Sparsity
from sharding.sync._top_k import top_k as top_k
from sharding.sync._zen import zen as zen

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
