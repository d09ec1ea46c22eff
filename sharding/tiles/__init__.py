"""Parts of a loss that exist one tile at a time: logits, and the inside of any MLP."""

from sharding.tiles._cross_entropy import cross_entropy as cross_entropy
from sharding.tiles._tiled_loss import report_tiles as report_tiles
from sharding.tiles._tiled_loss import tiled as tiled

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
