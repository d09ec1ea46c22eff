"""Activations under a budget of bytes: what to store, to offload, and to compute again."""

from sharding.remat._plan_activations import Frontier as Frontier
from sharding.remat._plan_activations import frontier as frontier
from sharding.remat._plan_activations import in_bytes as in_bytes
from sharding.remat._plan_activations import plan as plan
from sharding.remat._planned_loss import LossPlan as LossPlan
from sharding.remat._planned_loss import OverBudgetError as OverBudgetError

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
