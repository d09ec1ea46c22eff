"""Activations under a budget of bytes: what to store, to offload, and to compute again."""

from sharding.plan.model._models import PRESETS as PRESETS
from sharding.remat._loss_plan import LossPlan as LossPlan
from sharding.remat._plan_activations import frontier as frontier
from sharding.remat._plan_activations import in_bytes as in_bytes
from sharding.remat._plan_activations import plan as plan
from sharding.remat._remat_plan import Frontier as Frontier
from sharding.remat._remat_plan import OverBudgetError as OverBudgetError
from sharding.remat._remat_plan import RematPlan as RematPlan
from sharding.remat._remat_plan import plot as plot
from sharding.remat._stack_plan import StackPlan as StackPlan

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
