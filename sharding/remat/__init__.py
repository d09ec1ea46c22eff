"""Activations under a budget of bytes: what to store, and what to compute again."""

from sharding.remat._chain_plan import ChainPlan as ChainPlan
from sharding.remat._chain_plan import OverBudgetError as OverBudgetError
from sharding.remat._remat_plan import frontier as frontier
from sharding.remat._remat_plan import plan as plan
