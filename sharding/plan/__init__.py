"""What a configuration costs: planned before anything is compiled, audited once it is."""

from sharding.plan._plan import Plan as Plan
from sharding.plan._plan import StagePlan as StagePlan
from sharding.plan._plan import estimate as estimate
