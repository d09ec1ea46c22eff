"""Tables of asynchronous pipelines: updates in the table, and versions of the parameters."""

import dataclasses
from typing import ClassVar

import numpy as np

from sharding.pipeline._operations import Op, ScheduleError
from sharding.pipeline._schedule import Figures, Schedule


@dataclasses.dataclass(frozen=True, eq=False)
class AsyncSchedule(Schedule):
    """A table in which each stage updates its parameters without waiting for the others.

    It holds many minibatches. After the backward passes of minibatch t, ``UPDATE``, whose
    ``microbatch`` is the last one of its minibatch, makes version t + 1 of a stage's parameters
    from version t. Forward and backward passes read the version that the table names. One route
    leads through one group of layers per stage.

    Raises:
      ScheduleError: as ``Schedule``; also if the last minibatch is not complete.
    """

    #: how many updates are in the parameters that an operation reads, and for ``UPDATE`` in those
    #: that it makes; 0 where idle; of shape (ticks, stages)
    version: np.ndarray
    microbatches_per_update: int  #: micro-batches of a minibatch

    _OPS: ClassVar = (Op.FORWARD, Op.BACKWARD, Op.UPDATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        version = np.array(self.version, np.int32)
        if version.shape != self.op.shape:
            raise ScheduleError(
                f"version must be a table of shape {self.op.shape}, as op, got {version.shape}."
            )
        self._set_tables(version=version)
        if self.microbatches_per_update < 1 or len(self.route_of) % self.microbatches_per_update:
            raise ScheduleError(
                f"{self.name}: {len(self.route_of)} micro-batches are not a multiple of the "
                f"{self.microbatches_per_update} of an update."
            )

    @property
    def num_updates(self) -> int:
        """The number of minibatches."""
        return self.num_microbatches // self.microbatches_per_update

    @property
    def stashes_weights(self) -> bool:
        """Whether forward and backward pass of a micro-batch always read one version."""
        forward = {}
        for tick, stage, (op, microbatch, _) in self.tasks():
            if op == Op.FORWARD:
                forward[stage, microbatch] = self.version[tick, stage]
            elif op == Op.BACKWARD and forward[stage, microbatch] != self.version[tick, stage]:
                return False
        return True

    def check(self) -> Figures:
        """Verifies operations, updates and versions, and counts what they cost.

        Raises:
          ScheduleError: as ``Schedule.check``; if a stage does not have each update once, between
            the backward passes of its minibatch and of the next one; if an operation reads a
            version that is not there; if the two passes of the last stage read different ones.
        """
        if len(self.routes) != 1 or self.num_chunks != 1:
            raise ScheduleError(
                f"{self.name}: an asynchronous pipeline has one route and one group of layers per "
                f"stage, got {len(self.routes)} and {self.num_chunks}."
            )
        figures = super().check()
        per_update = self.microbatches_per_update
        updates = [0] * self.num_stages  # of each stage, so far
        forward: dict[tuple[int, int], int] = {}
        for tick, stage, task in self.tasks():
            op, microbatch, v = task
            version, latest = int(self.version[tick, stage]), updates[stage]
            where = f"{self.name}: tick {tick}, stage {stage}: {task}"
            if op == Op.UPDATE:
                expected = (latest + 1) * per_update - 1
                if microbatch != expected or version != latest + 1:
                    raise ScheduleError(
                        f"{where} makes version {version}, after version {latest}, whose next "
                        f"update is that of micro-batch {expected}."
                    )
                updates[stage] = latest + 1
                continue
            if not 0 <= version <= latest:
                raise ScheduleError(
                    f"{where} reads version {version} of the parameters; {latest} is the latest."
                )
            if op == Op.FORWARD:
                forward[stage, microbatch] = version
                continue
            if microbatch // per_update != latest:
                raise ScheduleError(f"{where} is of another minibatch than update {latest}.")
            if v == self.num_virtual_stages - 1 and forward[stage, microbatch] != version:
                raise ScheduleError(
                    f"{where} reads version {version}, its forward pass version "
                    f"{forward[stage, microbatch]}: on the last stage they run together."
                )
        for stage, count in enumerate(updates):
            if count != self.num_updates:
                raise ScheduleError(
                    f"{self.name}: stage {stage} has {count} of {self.num_updates} updates."
                )
        stored = np.zeros((self.num_ticks, self.num_stages), np.int64)  # versions
        for (stage, _), (start, end) in self.version_ends().items():
            stored[start + 1 : end + 1, stage] += 1
        return figures._replace(weight_versions=tuple(np.max(stored, axis=0).tolist()))

    def version_ends(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each stage and version, the tick that makes it and the last one that reads it."""
        # Version 0 is there from tick -1 on, the last one until the end.
        ends = {(stage, 0): (-1, -1) for stage in range(self.num_stages)}
        for tick, stage, task in self.tasks():
            version = int(self.version[tick, stage])
            if task.op == Op.UPDATE:
                ends[stage, version] = (tick, tick)
                version -= 1
            ends[stage, version] = (ends[stage, version][0], tick)
        for stage in range(self.num_stages):
            start, _ = ends[stage, self.num_updates]
            ends[stage, self.num_updates] = (start, self.num_ticks)
        return ends

    def delays(self) -> tuple[np.ndarray, np.ndarray]:
        """How many updates old the parameters of forward and of backward passes are: [stages].

        Means over the last minibatch; in the first ones, which start with version 0, smaller.
        """
        per_update, last = self.microbatches_per_update, self.num_updates - 1
        sums = np.zeros((2, self.num_stages), np.int64)  # integers, so that means are exact
        for tick, stage, (op, microbatch, _) in self.tasks():
            if op != Op.UPDATE and microbatch // per_update == last:
                sums[int(op == Op.BACKWARD), stage] += last - self.version[tick, stage]
        return sums[0] / per_update, sums[1] / per_update
