"""Pipelines: schedules as tables, and one program that runs any of them."""

from sharding.pipeline._operations import Costs as Costs
from sharding.pipeline._operations import Op as Op
from sharding.pipeline._operations import Place as Place
from sharding.pipeline._operations import ScheduleError as ScheduleError
from sharding.pipeline._schedule import Figures as Figures
from sharding.pipeline._schedule import Schedule as Schedule
from sharding.pipeline._schedules import chimera as chimera
from sharding.pipeline._schedules import gpipe as gpipe
from sharding.pipeline._schedules import interleaved as interleaved
from sharding.pipeline._schedules import one_f_one_b as one_f_one_b
from sharding.pipeline._schedules import zb_h1 as zb_h1
from sharding.pipeline._schedules import zb_v as zb_v
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule as AsyncSchedule
from sharding.pipeline.asynchronous._async_schedule import pipedream as pipedream
from sharding.pipeline.asynchronous._async_schedule import pipedream_2bw as pipedream_2bw
from sharding.pipeline.asynchronous._async_schedule import pipemare as pipemare

_INTERNAL = {"asynchronous"}  # modules
__all__ = [name for name in dir() if not name.startswith("_") and name not in _INTERNAL]
__dir__ = __all__.copy
