"""The families of schedules, each from the order of operations on every stage."""

from collections.abc import Callable, Mapping
from typing import Any

from sharding.pipeline._operations import Entry, Op, Place, Route, table_from_orders
from sharding.pipeline._schedule import Schedule

F = Op.FORWARD
B = Op.BACKWARD
W = Op.WEIGHT


def straight(stages: int) -> tuple[Route, ...]:
    """One route: virtual stage v on stage v."""
    return (tuple(Place(stage, 0) for stage in range(stages)),)


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes.

    Bubble (S - 1) / (M + S - 1) with S stages and M micro-batches; every stage stores the
    activations of all M micro-batches.

    Args:
      stages: devices along the pipeline's mesh axis.
      microbatches: of one step.

    Raises:
      ValueError: if a number is below 1.

    Example:
      >>> print(gpipe(stages=2, microbatches=2))
      gpipe: 2 stages, 2 micro-batches, 6 ticks, bubble 33.3 %, live activations 2 2
      0  F0 F1 .  .  B0 B1
      1  .  F0 F1 B0 B1 .

    References:
      Huang et al.: GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism,
      NeurIPS 2019, arXiv 1811.06965.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    order = [(op, m, 0) for op in (F, B) for m in range(microbatches)]
    return Schedule.from_orders("gpipe", [order] * stages, straight(stages), [0] * microbatches)


def one_f_one_b(stages: int, microbatches: int, *, aligned: bool = True) -> Schedule:
    """A few forward passes, then one forward and one backward pass in turn (1F1B).

    Bubble (S - 1) / (M + S - 1), as GPipe's; stage s stores the activations of min(S - s, M)
    micro-batches. In one SPMD program a tick takes as long as its slowest operation: the aligned
    form keeps forward and backward passes in ticks of their own, (M + S - 1) (F + B) in all, and
    stores at most min(2 (S - 1 - s) + 1, M). Other arguments, and errors, are those of ``gpipe``.

    Example:
      >>> print(one_f_one_b(stages=2, microbatches=2))
      1f1b-aligned: 2 stages, 2 micro-batches, 8 ticks, bubble 33.3 %, live activations 2 1
      0  F0 .  F1 .  .  B0 .  B1
      1  .  .  F0 B0 F1 B1 .  .

    References:
      Fan et al.: DAPPLE: A Pipelined Data Parallel Approach for Training Large Models, PPoPP 2021,
      arXiv 2007.01045. Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training, ICML
      2021, arXiv 2006.09503 (PipeDream-flush).
    """
    check_sizes(stages=stages, microbatches=microbatches)
    units = [(m, 0) for m in range(microbatches)]
    warmups = [min(microbatches, (stages - 1 - s) * (2 if aligned else 1)) for s in range(stages)]
    orders = [one_f_one_b_order(warmup, units) for warmup in warmups]
    name = "1f1b-aligned" if aligned else "1f1b"
    return Schedule.from_orders(name, orders, straight(stages), [0] * microbatches, aligned=aligned)


def one_f_one_b_order(
    warmup: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]] | None = None
) -> list[Entry]:
    """``warmup`` forward passes, pairs of a forward and a backward pass, the other backwards."""
    backwards = forwards if backwards is None else backwards
    order: list[Entry] = [(F, *unit) for unit in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [(F, *forward), (B, *backward)]
    return order + [(B, *unit) for unit in backwards[len(forwards) - warmup :]]


def interleaved(
    stages: int, microbatches: int, chunks: int = 2, *, aligned: bool = True
) -> Schedule:
    """1F1B in which every stage runs several groups of layers: a shorter bubble, more messages.

    Bubble (S - 1) / (V M + S - 1) with V chunks; stage s stores at most
    2 (S - 1 - s) + (V - 1) S + 1 chunks of activations. Virtual stage v runs on stage v mod S. The
    other arguments are those of ``one_f_one_b``.

    Raises:
      ValueError: if a number is below 1, or the micro-batches are not a multiple of the stages.

    Example:
      >>> print(interleaved(stages=2, microbatches=2, chunks=2, aligned=False))
      interleaved-2: 2 stages, 2 micro-batches, 10 ticks, bubble 20.0 %, live activations 4 3
      0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
      1  .   F0a F1a F0b B0b F1b B1b B0a B1a .

    References:
      Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using
      Megatron-LM, SC 2021, arXiv 2104.04473.
    """
    check_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    if microbatches % stages:
        raise ValueError(
            f"the interleaved schedule takes micro-batches in groups of one per stage: got "
            f"{microbatches} micro-batches for {stages} stages. Use a multiple of {stages}."
        )
    group = stages * chunks

    def unit(k: int, forward: bool) -> tuple[int, int]:
        """The micro-batch and chunk of the k-th forward or backward pass of every stage."""
        chunk = k % group // stages
        return k // group * stages + k % stages, chunk if forward else chunks - 1 - chunk

    num_units = microbatches * chunks
    units = [[unit(k, forward) for k in range(num_units)] for forward in (True, False)]
    orders = []
    for stage in range(stages):
        warmup = min(num_units, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
        orders.append(one_f_one_b_order(warmup, *units))
    route = tuple(Place(v % stages, v // stages) for v in range(group))
    name = f"interleaved-{chunks}" + "-aligned" * aligned
    return Schedule.from_orders(name, orders, (route,), [0] * microbatches, aligned=aligned)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Zero bubble, ZB-H1: 1F1B with a split backward pass, whose second half fills the bubble.

    ``BACKWARD`` is the gradient of the input, ``WEIGHT`` that of the parameters. Bubble
    (S - 1) (F + B - W); every stage stores the activations of up to S micro-batches until
    ``WEIGHT``. Arguments and errors are those of ``gpipe``.

    Example:
      >>> print(zb_h1(stages=2, microbatches=3))
      zb-h1: 2 stages, 3 micro-batches, 10 ticks, bubble 10.0 %, live activations 2 2
      0  F0 F1 .  B0 W0 F2 B1 W1 B2 W2
      1  .  F0 B0 F1 B1 W0 F2 B2 W1 W2

    References:
      Qi, Wan, Huang, Lin: Zero Bubble (Almost) Pipeline Parallelism, ICLR 2024, arXiv 2401.10241.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    orders = []
    for stage in range(stages):
        warmup = min(microbatches, stages - 1 - stage)
        order: list[Entry] = [(F, m, 0) for m in range(warmup)]
        for m in range(microbatches):
            order += [(F, warmup + m, 0)] if warmup + m < microbatches else []
            order += [(B, m, 0)]
            order += [(W, m - stage, 0)] if m >= stage else []
        order += [(W, m, 0) for m in range(max(0, microbatches - stage), microbatches)]
        orders.append(order)
    return Schedule.from_orders("zb-h1", orders, straight(stages), [0] * microbatches)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Zero bubble, ZB-V: a split backward pass over layers in a V; a bubble at the start alone.

    Stage s has virtual stages s and 2S - 1 - s: the first one has embedding and head. With
    M >= 2S - 2 the table has 6M + S - 1 ticks, each of half a stage's layers, and bubble
    (S - 1) / (6M + S - 1); with fewer micro-batches it is longer. A stage stores at most 2S chunks
    of activations until ``WEIGHT``. Arguments and errors are those of ``gpipe``.

    Example:
      >>> print(zb_v(stages=2, microbatches=3))
      zb-v: 2 stages, 3 micro-batches, 19 ticks, bubble 5.3 %, live activations 4 4
      0  F0a F1a F2a F0b B0b W0b F1b B1b W1b B0a W0a F2b B2b W2b B1a W1a B2a W2a .
      1  .   F0a F0b F1a F1b B0b W0b F2a B0a W0a F2b B1b W1b B1a B2b B2a W1a W2b W2a

    References:
      ``zb_h1``'s, section 6. Qi et al.: Pipeline Parallelism with Controllable Memory, NeurIPS
      2024, arXiv 2405.15362.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    route = tuple(Place(s, 0) for s in range(stages))
    route += tuple(Place(s, 1) for s in reversed(range(stages)))
    orders = [_zb_v_order(stage, stages, microbatches) for stage in range(stages)]
    return Schedule.from_orders("zb-v", orders, (route,), [0] * microbatches)


def _zb_v_order(stage: int, stages: int, microbatches: int) -> list[Entry]:
    order: list[Entry] = []
    count = dict.fromkeys([(op, chunk) for op in (F, B, W) for chunk in (0, 1)], 0)

    def run(*what: tuple[Op, int]) -> None:
        """The next micro-batch of each operation and chunk, if there is one."""
        for op, chunk in what:
            if count[op, chunk] < (count[B, chunk] if op == W else microbatches):
                order.append((op, count[op, chunk], chunk))
                count[op, chunk] += 1

    # Until the first backward pass arrives.
    after = stages - stage
    run(*[(F, 0)] * (2 * after - 1))
    run(*[(F, 1), (F, 0)] * stage)
    run(*[(F, 1), (B, 1), (W, 1)] * after)
    # All three operations of both chunks in turn.
    while min(count[F, 0], count[F, 1]) < microbatches:
        run((F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    # Other stages wait for the backward passes; what is left of the weights is last.
    run(*[(B, 0), (B, 1)] * stage)
    run(*[(B, 0), (W, 0)] * after)
    run(*[(B, 1), (B, 0)] * microbatches)
    run(*[(W, 1), (W, 0)] * microbatches)
    return order


def chimera(stages: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions over two replicas of the layers: half the bubble.

    Of every S micro-batches the first half runs down the stages and the second half up. Bubble
    (S - 2) / (2M + S - 2); a stage stores the activations of at most S micro-batches, and twice the
    parameters. Arguments are those of ``gpipe``.

    Raises:
      ValueError: if the stages are not even, or do not divide the micro-batches.

    Example:
      >>> print(chimera(stages=2, microbatches=2))
      chimera: 2 stages, 2 micro-batches, 4 ticks, bubble 0.0 %, live activations 2 2
      0  F0a F1b B1b B0a
      1  F1b F0a B0a B1b

    References:
      Li, Hoefler: Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
      Pipelines, SC 2021, arXiv 2107.06925.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    if stages % 2 or microbatches % stages:
        raise ValueError(
            "chimera takes an even number of stages and a multiple of it in micro-batches, got "
            f"{stages} stages and {microbatches} micro-batches."
        )
    down = tuple(Place(v, 0) for v in range(stages))
    up = tuple(Place(stages - 1 - v, 1) for v in range(stages))
    route_of = [int(m % stages >= stages // 2) for m in range(microbatches)]

    def preference(entry: Entry) -> tuple[int, ...]:
        """Groups of S micro-batches in order; backward passes first; both directions in turn."""
        op, m, _ = entry
        return m // stages, int(op == F), m % (stages // 2), m

    # A stage is in both routes: every micro-batch passes it once each way.
    order = [(op, m, route_of[m]) for m in range(microbatches) for op in (F, B)]
    orders = [sorted(order, key=preference)] * stages
    op, m, chunk = table_from_orders("chimera", orders, (down, up), route_of, in_order=False)
    return Schedule("chimera", op, m, chunk, (down, up), tuple(route_of))


# Names of plans and of the command line: the constructor, and its options.
SCHEDULES: Mapping[str, tuple[Callable[..., Schedule], Mapping[str, Any]]] = {
    "gpipe": (gpipe, {}),
    "1f1b": (one_f_one_b, {"aligned": False}),
    "aligned": (one_f_one_b, {}),
    "interleaved": (interleaved, {}),  # takes a number of chunks, too
    "zb-h1": (zb_h1, {}),
    "zb-v": (zb_v, {}),
    "chimera": (chimera, {}),
}


def make_schedule(name: str, *sizes: int) -> Schedule:
    """The schedule of a name, for stages, micro-batches, and chunks where it takes them."""
    constructor, options = SCHEDULES[name]
    return constructor(*sizes, **options)
