"""What a configuration costs: planned before anything is compiled, audited once it is."""

from sharding.plan._format import show as show
from sharding.plan.audit._audit import audit as audit
from sharding.plan.audit._find_batch import FoundBatch as FoundBatch
from sharding.plan.audit._find_batch import find_batch as find_batch
from sharding.plan.cost._estimate import Plan as Plan
from sharding.plan.cost._estimate import estimate as estimate
from sharding.plan.cost._parallel_plan import ParallelPlan as ParallelPlan
from sharding.plan.cost._pipeline_schedules import bubble_share as bubble_share
from sharding.plan.cost._pipeline_schedules import lockstep_seconds as lockstep_seconds
from sharding.plan.cost._pipeline_schedules import max_in_flight as max_in_flight
from sharding.plan.cost._plan_costs import PipelineStage as PipelineStage
from sharding.plan.cost._stage_plan import StagePlan as StagePlan
from sharding.plan.cost._step_time import StepSeconds as StepSeconds
from sharding.plan.cost._step_time import step_seconds as step_seconds
from sharding.plan.cost._wire_and_flops import pipeline_wire as pipeline_wire
from sharding.plan.machine import targets as targets
from sharding.plan.machine._collective_time import Machine as Machine
from sharding.plan.machine._collective_time import NodeGroup as NodeGroup
from sharding.plan.machine._collective_time import TorusGroup as TorusGroup
from sharding.plan.machine._collective_time import collective_seconds as collective_seconds
from sharding.plan.machine._devices import kind_of as kind_of
from sharding.plan.model._layer_costs import Activations as Activations
from sharding.plan.model._layer_costs import Implementation as Implementation
from sharding.plan.model._layer_costs import LayerCost as LayerCost
from sharding.plan.model._layer_costs import activations_of as activations_of
from sharding.plan.model._layer_costs import layer_costs as layer_costs
from sharding.plan.model._models import MODELS as MODELS
from sharding.plan.model._models import Decoder as Decoder
from sharding.plan.search._estimate_pipeline import PipelinePlan as PipelinePlan
from sharding.plan.search._estimate_pipeline import estimate_pipeline as estimate_pipeline
from sharding.plan.search._fit import FittedPlan as FittedPlan
from sharding.plan.search._fit import Proof as Proof
from sharding.plan.search._fit import fit as fit
from sharding.plan.search._plan_file import PlanFile as PlanFile
from sharding.plan.search._search import ChosenPlan as ChosenPlan
from sharding.plan.search._search import NoPlanFits as NoPlanFits
from sharding.plan.search._search import SearchResult as SearchResult
from sharding.plan.search._search import search as search
from sharding.plan.search._traced_model import TracedModel as TracedModel
from sharding.plan.search._verify import Verification as Verification
from sharding.plan.search._verify import verify as verify

_INTERNAL = {"cost", "machine", "model"}  # modules
__all__ = [name for name in dir() if not name.startswith("_") and name not in _INTERNAL]
__dir__ = __all__.copy
