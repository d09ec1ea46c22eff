"""The families of asynchronous schedules: which version of the parameters each operation reads."""

from collections.abc import Callable

import numpy as np

from sharding.pipeline._operations import Entry, Op, table_from_orders
from sharding.pipeline._schedules import check_sizes, one_f_one_b_order, straight
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule

# The version that an operation reads: of its minibatch, the latest version of the stage, what the
# micro-batch's forward pass read on this stage (None before it), and what it read on the first one.
Rule = Callable[[int, int, int | None, int], int]


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
    name, total = name + "-aligned" * aligned, microbatches * minibatches
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
        own = forward.get((stage, m))
        version[tick, stage] = read(m // microbatches, latest[stage], own, first)
        if kind == Op.FORWARD:
            forward[stage, m] = int(version[tick, stage])
    return AsyncSchedule(
        name, op, microbatch, chunk, routes, tuple(route_of), version, microbatches
    )
