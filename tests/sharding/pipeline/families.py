"""Every family of schedules, in the sizes that tests run over."""

import functools

from sharding.pipeline import Op, chimera, gpipe, interleaved, one_f_one_b, zb_h1, zb_v

FAMILIES = {
    "gpipe": gpipe,
    "1f1b": functools.partial(one_f_one_b, aligned=False),
    "1f1b-aligned": one_f_one_b,
    "interleaved-2": functools.partial(interleaved, aligned=False),
    "interleaved-2-aligned": interleaved,
    "interleaved-3-aligned": functools.partial(interleaved, chunks=3),
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "chimera": chimera,
}

# Stages and micro-batches: one stage, one micro-batch, fewer micro-batches than stages, an odd
# number of stages, micro-batches that the stages do not divide, and the usual case.
SIZES = [(1, 1), (1, 3), (4, 1), (4, 2), (8, 3), (3, 6), (4, 7), (2, 4), (4, 4), (4, 8), (8, 8)]


def takes(name, stages, microbatches):
    """Whether a family has a table of this size."""
    if name == "chimera":
        return stages % 2 == 0 and microbatches % stages == 0
    return not name.startswith("interleaved") or microbatches % stages == 0


CASES = [(name, *size) for name in FAMILIES for size in SIZES if takes(name, *size)]


def ticks_of(program):
    """The phase of each tick that a program of instructions runs, and a column of each stage."""
    for segment in program.segments:
        iterations, _, stages = segment.tables["code"].shape
        for iteration in range(iterations):
            for i, phase in enumerate(segment.phases):
                tick = {name: x[iteration, i] for name, x in segment.tables.items()}
                yield phase, [{k: int(x[s]) for k, x in tick.items()} for s in range(stages)]


def seconds_in_lockstep(table, layers, *, forward, backward, weight=0.0, head=0.0):
    """The time of a table whose ticks last as long as their slowest operation.

    ``layers`` are those of each virtual stage, of which the last runs its forward pass and the head
    in its backward pass; the others are seconds of a layer, and of the head. Updates take none.
    """
    last, longest = len(layers) - 1, [0.0] * table.num_ticks
    for tick, _, task in table.tasks():
        v = task.virtual_stage
        if task.op == Op.UPDATE:
            continue
        taken = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.WEIGHT: weight}[task.op] * layers[v]
        if v == last and task.op == Op.FORWARD:
            taken = 0.0
        elif v == last and task.op == Op.BACKWARD:
            taken += forward * layers[v] + head
        longest[tick] = max(longest[tick], taken)
    return sum(longest)
