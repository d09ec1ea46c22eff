"""Every family of schedules, in the sizes that tests run over."""

import functools

from sharding.pipeline import chimera, gpipe, interleaved, one_f_one_b, zb_h1, zb_v

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
SIZES = [
    *[(1, 1), (1, 3), (2, 1), (4, 1), (4, 2), (8, 3)],
    *[(3, 3), (3, 6), (4, 7), (2, 4), (4, 4), (4, 8), (8, 16)],
]


def takes(name, stages, microbatches):
    """Whether a family has a table of this size."""
    if name == "chimera":
        return stages % 2 == 0 and microbatches % stages == 0
    return not name.startswith("interleaved") or microbatches % stages == 0


CASES = [(name, *size) for name in FAMILIES for size in SIZES if takes(name, *size)]
