"""Low-precision state under ZeRO: the same numbers on every mesh, nothing sent to store them."""

import functools
import re

import jax
import numpy as np
import optax

import optax_ext
from optax_ext import Float8

from .. import model

STEPS = 4
# What each is there for.
SHAPES = {
    "up": (128, 768),  # over 8 devices the shards of the last dim would have 96: rows are sharded
    "embed": (101, 768),  # only the last dim can be sharded
    "out": (12, 128, 96),  # attention: heads divide by 4, head_dim by 8
    "bias": (768,),
}
FP8 = Float8()


def initial(shapes):
    rng = np.random.default_rng(0)
    return {k: 0.1 * rng.normal(size=s) for k, s in shapes.items()}


def make_state(tx, shapes=SHAPES):
    return model.make_of(lambda: initial(shapes), tx)


def run(zero, tx, shapes=SHAPES):
    batch = functools.partial(model.gradients, shapes)
    return model.run(zero, make_state(tx, shapes), tx, model.linear_loss, batch, STEPS)


def zero_of(num, stage, min_shard_size=1024):
    return model.zero_on(num, stage=stage, min_shard_size=min_shard_size)


def paths(state, shapes):
    """The way that each parameter went."""
    return {k: state[0][k] - x for k, x in initial(shapes).items()}


def sent(zero, tx, shapes):
    """The collectives to store the state: kind, and elements of the largest array."""
    batch = model.gradients(shapes, 0)
    lowered = model.lowered(zero, make_state(tx, shapes), tx, model.linear_loss, batch)
    found = []
    for line in lowered.compile().as_text().splitlines():
        kind = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)\(", line)
        if kind and "low_precision" in line:
            sizes = re.findall(r"\[([\d,]+)\]", kind[1])
            found.append((kind[2], max(np.prod(list(map(int, s.split(",")))) for s in sizes)))
    return found


def test_sharded_equals_unsharded_and_nothing_is_gathered(x64):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = optax_ext.low_precision_state(inner, 4, min_size=1024)
    one, eight = zero_of(1, 0), zero_of(8, 1)
    state = run(eight, tx)
    have, want = jax.device_get((state, run(one, tx)))
    model.assert_close(paths(have, SHAPES), paths(want, SHAPES), 1e-12)
    model.assert_codes_close(have[1], want[1], others=1e-4, rtol=1e-9)

    # To store the state only maxima of rows and columns are sent, for moments in 4 bits.
    found = sent(eight, tx, SHAPES)
    assert found
    assert all(kind == "all-reduce" and size <= 768 for kind, size in found), found


STRADDLED = {"heads": (4, 32, 128), "rows": (4, 24, 100), "vector": (520,)}


def test_blocks_that_straddle_shards(x64):
    """Codes are sharded as the parameter, scales replicated; no moment is sent."""
    tx = optax_ext.low_precision_state(optax.adamw(1e-2), FP8, min_size=16)
    want, have = (run(zero, tx, STRADDLED) for zero in (zero_of(1, 0, 16), zero_of(8, 2, 16)))
    for k, moment in have[1].inner_state[0].mu.items():
        assert "data" in moment.codes.sharding.spec, k
    found = [paths(jax.device_get(state), STRADDLED) for state in (have, want)]
    model.assert_close(*found, 1e-12)
    # Maxima of rows that no device splits.
    found = sent(zero_of(8, 2, 16), tx, {"rows": STRADDLED["rows"]})
    assert max(size for _, size in found) <= 4 * 24 * 7
