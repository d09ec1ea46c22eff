"""The families of asynchronous schedules: which version of the parameters each operation reads."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sharding.pipeline._operations import Entry, Op
from sharding.pipeline._schedules import check_sizes, one_f_one_b_order, straight
from sharding.pipeline._ticks import table_from_orders
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule


class Reader(NamedTuple):
    """An operation that reads parameters, and versions that it could read."""

    op: Op
    minibatch: int
    latest: int  # of the stage
    forward: int  # what the micro-batch's forward pass read on this stage
    first: int  # and on the first stage


Rule = Callable[[Reader], int]  # the version that an operation reads


def pipedream(
    stages: int, minibatches: int, *, vertical_sync: bool = False, aligned: bool = False
) -> AsyncSchedule:
    r"""1F1B without flushes: each stage updates after each backward pass, and stores old versions.

    A backward pass reads the version of its forward pass (*weight stashing*). Stage i of P, counted
    from 1, stores P - i + 1 versions, and its gradients are P - i updates late:

    .. math:: w^{t+1} = w^t - \eta \nabla f(w_1^{t - P + 1}, w_2^{t - P + 2}, \ldots, w_P^t)

    Versions before the first are :math:`w^0`. With *vertical sync* a minibatch reads on all stages
    the version that it read on the first one, :math:`w^{t - P + 1}`, and each stores P of them.

    Args:
      stages: devices along the pipeline's mesh axis.
      minibatches: updates of one run.
      vertical_sync: whether a minibatch reads one version on all stages.
      aligned: whether forward passes, backward passes and updates have ticks of their own. Lockstep
        time is shorter; delays are 2 (P - i), and versions one more.

    Raises:
      ValueError: if a number is below 1.

    Example:
      >>> schedule = pipedream(stages=4, minibatches=8)
      >>> schedule.check().weight_versions, schedule.delays()[0].tolist()
      ((4, 3, 2, 1), [3.0, 2.0, 1.0, 0.0])

    References:
      Narayanan, Harlap, Phanishayee, Seshadri, Devanur, Ganger, Gibbons, Zaharia: PipeDream:
      Generalized Pipeline Parallelism for DNN Training, SOSP 2019, arXiv 1806.03377.
    """
    check_sizes(stages=stages, minibatches=minibatches)

    def read(reader: Reader) -> int:
        if reader.op == Op.BACKWARD:
            return reader.forward
        return reader.first if vertical_sync else reader.latest

    name = "pipedream" + "-vertical" * vertical_sync + "-aligned" * aligned
    return _asynchronous(name, stages, 1, minibatches, minibatches, aligned, read)


def pipedream_2bw(
    stages: int, microbatches: int, minibatches: int, *, aligned: bool = True
) -> AsyncSchedule:
    r"""Gradients that are one update late on every stage, and two versions of the parameters.

    .. math:: w^{t+1} = w^t - \eta \nabla f(w^{t-1}), \quad w^{-1} = w^0

    Gradients are summed over the micro-batches of an update, of which there should be as many as a
    stage has in flight: P, and 2P - 1 if aligned. With fewer of them stages wait. If ``aligned``,
    more activations are stored; the delay is 1 either way. Arguments and errors are otherwise those
    of ``pipedream``.

    Example:
      >>> schedule = pipedream_2bw(stages=4, microbatches=8, minibatches=5)
      >>> schedule.check().weight_versions, schedule.delays()[0].tolist()
      ((2, 2, 2, 2), [1.0, 1.0, 1.0, 1.0])

    References:
      Narayanan, Phanishayee, Shi, Chen, Zaharia: Memory-Efficient Pipeline-Parallel DNN Training,
      ICML 2021, arXiv 2006.09503.
    """
    check_sizes(stages=stages, microbatches=microbatches, minibatches=minibatches)

    def read(reader: Reader) -> int:
        return max(reader.minibatch - 1, 0)

    name = "pipedream-2bw" + "-aligned" * aligned
    return _asynchronous(name, stages, microbatches, minibatches, microbatches, aligned, read)


def pipemare(
    stages: int, microbatches: int, minibatches: int, *, aligned: bool = True
) -> AsyncSchedule:
    r"""Every operation reads the latest parameters of its stage: one version, and no flushes.

    Forward and backward pass of a micro-batch read different versions. With ``recompute=False`` the
    backward pass has the activations of the one and the parameters of the other, as in the paper:
    this is no gradient of any parameters. With ``recompute=True`` a stage computes its forward pass
    again with the parameters of its backward pass: the gradient of this stage there, for an input
    and a cotangent of other parameters.

    With N micro-batches per update, stage i of P has a forward delay of 2 (P - i) / N updates on
    average, and (P - i) / N if not aligned (``AsyncSchedule.delays``). The paper, where an update
    is between the passes of the last stage, counts :math:`(2 (P - i) + 1) / N`. Its techniques
    against instability are ``optax_ext.scale_by_delay`` and ``optax_ext.discrepancy_correction``.
    Arguments and errors are those of ``pipedream_2bw``; the paper's tables are aligned.

    Example:
      >>> schedule = pipemare(stages=4, microbatches=2, minibatches=8)
      >>> schedule.check().weight_versions, schedule.delays()[0].tolist()
      ((1, 1, 1, 1), [3.0, 2.0, 1.0, 0.0])

    References:
      Yang, Zhang, Li, Ré, Aberger, De Sa: PipeMare: Asynchronous Pipeline Parallel DNN Training,
      MLSys 2021, arXiv 1910.05124.
    """
    check_sizes(stages=stages, microbatches=microbatches, minibatches=minibatches)

    def read(reader: Reader) -> int:
        return reader.latest

    name = "pipemare" + "-aligned" * aligned
    total = microbatches * minibatches
    return _asynchronous(name, stages, microbatches, minibatches, total, aligned, read)


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
    routes, route_of = straight(stages), [0] * total
    op, microbatch, chunk = table_from_orders(name, orders, routes, route_of, aligned=aligned)
    version = np.zeros_like(op)
    latest = [0] * stages
    forward: dict[tuple[int, int], int] = {}  # by stage and micro-batch
    for tick, stage in np.argwhere(op != Op.IDLE).tolist():
        kind, m = Op(int(op[tick, stage])), int(microbatch[tick, stage])
        if kind == Op.UPDATE:
            latest[stage] += 1
            version[tick, stage] = latest[stage]
            continue
        first = forward.get((0, m), latest[0])
        own = forward.get((stage, m), 0)
        read_version = read(Reader(kind, m // microbatches, latest[stage], own, first))
        version[tick, stage] = read_version
        if kind == Op.FORWARD:
            forward[stage, m] = read_version
    return AsyncSchedule(
        name, op, microbatch, chunk, routes, tuple(route_of), version, microbatches
    )
