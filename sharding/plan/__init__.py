"""What a configuration costs: planned before anything is compiled, audited once it is."""

from sharding.plan._devices import kind_of as kind_of
from sharding.plan._find_batch import FoundBatch as FoundBatch
from sharding.plan._find_batch import find_batch as find_batch
from sharding.plan._models import MODELS as MODELS
from sharding.plan._plan import Plan as Plan
from sharding.plan._plan import estimate as estimate
from sharding.plan._plot import plot_audits as plot_audits
from sharding.plan._plot import plot_plans as plot_plans
from sharding.plan._show import show as show
from sharding.plan._stage_plan import StagePlan as StagePlan
