"""What a configuration costs: planned before anything is compiled, audited once it is."""

from sharding.plan.audit._audit import audit as audit
from sharding.plan.audit._find_batch import find_batch as find_batch
from sharding.plan.cost._estimate import estimate as estimate
from sharding.plan.cost._parallel_plan import ParallelPlan as ParallelPlan
from sharding.plan.cost._step_time import step_seconds as step_seconds
from sharding.plan.cost._wire_and_flops import pipeline_wire as pipeline_wire
from sharding.plan.machine import targets as targets
from sharding.plan.machine._devices import kind_of as kind_of
from sharding.plan.model._layer_costs import activations_of as activations_of
from sharding.plan.model._layer_costs import layer_costs as layer_costs
from sharding.plan.model._models import MODELS as MODELS
from sharding.plan.model._models import Decoder as Decoder
from sharding.plan.search._build import build as build
from sharding.plan.search._chosen_plan import compare as compare
from sharding.plan.search._fit import fit as fit
from sharding.plan.search._plan_file import PlanFile as PlanFile
from sharding.plan.search._search import NoPlanFits as NoPlanFits
from sharding.plan.search._search import search as search
from sharding.plan.search._traced_model import TracedModel as TracedModel
from sharding.plan.search._verify import verify as verify

_INTERNAL = {"cost", "machine", "model"}  # modules
__all__ = [name for name in dir() if not name.startswith("_") and name not in _INTERNAL]
__dir__ = __all__.copy
