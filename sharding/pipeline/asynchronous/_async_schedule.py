"""Asynchronous pipelines: updates in the table, versions of the parameters; the families."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from sharding.pipeline._operations import Entry, Op, ScheduleError, table_from_orders
from sharding.pipeline._schedule import Figures, Schedule
from sharding.pipeline._schedules import check_sizes, one_f_one_b_order, straight

# The version that an operation reads: of its minibatch, the latest version of the stage, what the
# micro-batch's forward pass read on this stage (None before it), and what it read on the first one.
Rule = Callable[[int, int, int | None, int], int]


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
            version = int(self.version[tick, stage])
            latest = updates[stage]
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
        per_update = self.microbatches_per_update
        last = self.num_updates - 1
        sums = np.zeros((2, self.num_stages), np.int64)  # integers, so that means are exact
        for tick, stage, (op, microbatch, _) in self.tasks():
            if op != Op.UPDATE and microbatch // per_update == last:
                sums[int(op == Op.BACKWARD), stage] += last - self.version[tick, stage]
        return sums[0] / per_update, sums[1] / per_update


def pipedream(
    stages: int, minibatches: int, *, vertical_sync: bool = False, aligned: bool = False
) -> AsyncSchedule:
    r"""1F1B without flushes: each stage updates after each backward pass, and stores old versions.

    A backward pass reads the version of its forward pass (*weight stashing*). Stage i of P, counted
    from 1, stores P - i + 1 versions, and its gradients are P - i updates late:

    .. math:: w^{t+1} = w^t - \eta \nabla f(w_1^{t - P + 1}, w_2^{t - P + 2}, \ldots, w_P^t)


    Args:
      stages: devices along the pipeline's mesh axis.
      minibatches: updates of one run.
      vertical_sync: whether a minibatch reads on all stages the version that it read on the first,
        :math:`w^{t - P + 1}`, so that each stores P.
      aligned: whether forward passes, backward passes and updates have ticks of their own. Lockstep
        time is shorter; delays are 2 (P - i), and versions one more.

    Raises:
      ValueError: if a number is below 1.

    Example:
      >>> schedule = pipedream(stages=4, minibatches=8)
      >>> schedule.check().weight_versions, schedule.delays()[0].tolist()
      ((4, 3, 2, 1), [3.0, 2.0, 1.0, 0.0])

    References:
      Narayanan et al.: PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019,
      arXiv 1806.03377.
    """

    def read(minibatch: int, latest: int, forward: int | None, first: int) -> int:
        if forward is not None:
            return forward
        return first if vertical_sync else latest

    name = "pipedream" + "-vertical" * vertical_sync
    return _asynchronous(name, stages, 1, minibatches, minibatches, aligned, read)


def pipedream_2bw(
    stages: int, microbatches: int, minibatches: int, *, aligned: bool = True
) -> AsyncSchedule:
    r"""Gradients that are one update late on every stage, and two versions of the parameters.

    .. math:: w^{t+1} = w^t - \eta \nabla f(w^{t-1}), \quad w^{-1} = w^0

    Gradients are summed over the micro-batches of an update, of which there should be as many as a
    stage has in flight: P, and 2P - 1 if ``aligned``, which stores more activations. Arguments and
    errors are otherwise those of ``pipedream``.

    Example:
      >>> schedule = pipedream_2bw(stages=4, microbatches=8, minibatches=5)
      >>> schedule.check().weight_versions, schedule.delays()[0].tolist()
      ((2, 2, 2, 2), [1.0, 1.0, 1.0, 1.0])

    References:
      Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, arXiv
      2006.09503.
    """
    sizes = stages, microbatches, minibatches, microbatches
    return _asynchronous("pipedream-2bw", *sizes, aligned, lambda batch, *_: max(batch - 1, 0))


def pipemare(
    stages: int, microbatches: int, minibatches: int, *, aligned: bool = True
) -> AsyncSchedule:
    """Every operation reads the latest parameters of its stage: one version, and no flushes.

    With ``recompute=False`` the backward pass has the activations of one version and the parameters
    of another, as in the paper: this is no gradient of any parameters. With N micro-batches per
    update, stage i of P has a forward delay of 2 (P - i) / N updates on average, and (P - i) / N if
    not aligned. The paper, where an update is between the passes of the last stage and tables are
    aligned, counts :math:`(2 (P - i) + 1) / N`. Arguments and errors are those of
    ``pipedream_2bw``.

    Example:
      >>> schedule = pipemare(stages=4, microbatches=2, minibatches=8)
      >>> schedule.check().weight_versions, schedule.delays()[0].tolist()
      ((1, 1, 1, 1), [3.0, 2.0, 1.0, 0.0])

    References:
      Yang et al.: PipeMare: Asynchronous Pipeline Parallel DNN Training, MLSys 2021, arXiv
      1910.05124.
    """
    sizes = stages, microbatches, minibatches, microbatches * minibatches
    return _asynchronous("pipemare", *sizes, aligned, lambda _, latest, *__: latest)


def _asynchronous(
    name: str,
    stages: int,
    microbatches: int,
    minibatches: int,
    most_warmup: int,
    aligned: bool,
    read: Rule,
) -> AsyncSchedule:
    """1F1B over all minibatches; at most ``most_warmup`` forward passes come first."""
    check_sizes(stages=stages, microbatches=microbatches, minibatches=minibatches)
    name = name + "-aligned" * aligned
    total = microbatches * minibatches
    orders: list[list[Entry]] = []
    for stage in range(stages):
        warmup = min(total, most_warmup, (stages - 1 - stage) * (2 if aligned else 1))
        order: list[Entry] = []
        for entry in one_f_one_b_order(warmup, [(m, 0) for m in range(total)]):
            order.append(entry)
            if entry[0] == Op.BACKWARD and (entry[1] + 1) % microbatches == 0:
                order.append((Op.UPDATE, *entry[1:]))
        orders.append(order)
    routes = straight(stages)
    route_of = [0] * total
    op, microbatch, chunk = table_from_orders(name, orders, routes, route_of, aligned=aligned)
    version = np.zeros_like(op)
    latest = [0] * stages
    forward: dict[tuple[int, int], int] = {}  # by stage and micro-batch
    for tick, stage in np.argwhere(op != Op.IDLE).tolist():
        kind = Op(int(op[tick, stage]))
        m = int(microbatch[tick, stage])
        if kind == Op.UPDATE:
            latest[stage] += 1
            version[tick, stage] = latest[stage]
            continue
        first = forward.get((0, m), latest[0])
        own = forward.get((stage, m))
        version[tick, stage] = read(m // microbatches, latest[stage], own, first)
        if kind == Op.FORWARD:
            forward[stage, m] = int(version[tick, stage])
    return AsyncSchedule(
        name, op, microbatch, chunk, routes, tuple(route_of), version, microbatches
    )
