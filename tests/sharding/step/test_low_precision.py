"""Low-precision state under ZeRO: the same numbers on every mesh, nothing sent to store them."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from optax_ext import Float8, Quantized

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
FORMATS = {"8 bits": 8, "4 bits": 4, "fp8": FP8}


def transformation(bits, rounding="stochastic"):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return optax_ext.low_precision_state(inner, bits, rounding=rounding, min_size=1024)


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


def assert_same(have, want):
    model.assert_close(paths(have, SHAPES), paths(want, SHAPES), 1e-12)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(have[1]), jax.tree.leaves(want[1]), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, name
        if a.dtype == np.uint8:  # a sum in another order may be across the middle of two codes
            assert np.mean(a != b) < 1e-4, name
        else:
            np.testing.assert_allclose(a, b, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("bits", "rounding"),
    [
        (4, "stochastic"),
        pytest.param(8, "stochastic", marks=pytest.mark.slow),
        pytest.param(FP8, "compensated", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharded_equals_unsharded_and_nothing_is_gathered(bits, rounding, x64, tmp_path):
    tx, one, eight = transformation(bits, rounding), zero_of(1, 0), zero_of(8, 1)
    state = run(eight, tx)
    assert_same(*jax.device_get((state, run(one, tx))))

    # To store the state only maxima of rows and columns are sent, for moments in 4 bits.
    batch = model.gradients(SHAPES, 0)
    lowered = model.lowered(eight, make_state(tx), tx, model.linear_loss, batch)
    found = 0
    for line in lowered.compile().as_text().splitlines():
        kind = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)\(", line)
        if kind and "low_precision" in line:
            found += 1
            shapes = re.findall(r"\[([\d,]+)\]", kind[1])
            assert kind[2] == "all-reduce", line
            assert max(np.prod(list(map(int, s.split(",")))) for s in shapes) <= 768, line
    assert bool(found) == (bits == 4)

    # A checkpoint of one mesh is read on another.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = one.abstract_state(make_state(tx), tx=tx)
        restored = checkpointer.restore(tmp_path / "state", target)
    chex.assert_trees_all_equal(*jax.device_get((restored, state)), strict=True)
    stored = jax.tree.leaves(restored[1], is_leaf=lambda x: isinstance(x, Quantized))
    assert any(isinstance(x, Quantized) for x in stored)


@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
def test_codes_and_scales_lie_as_their_parameter(bits):
    zero, tx = zero_of(8, 1), transformation(bits)
    _, specs = zero.specs(jax.eval_shape(make_state(tx)), tx=tx)
    adam = specs.inner_state[1][0]
    sharded = {"up": P("data"), "embed": P(None, "data"), "out": P(None, "data")}
    for k, spec in sharded.items():
        assert adam.mu[k].codes == spec, k
        if bits == 4:  # a scale for each place along each dim
            entries = [*spec, *[None] * (len(SHAPES[k]) - len(spec))]
            assert adam.mu[k].scale == tuple(P(e) if e else P() for e in entries), k
        else:
            assert adam.mu[k].scale[0] == spec, k
    assert specs.key == P()


def test_bytes_of_one_device():
    """(768, 3072) over 8 devices, which a careless layout breaks."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    zero = shd.Zero(mesh, 1)
    params = {"w": jax.ShapeDtypeStruct((768, 3072), jnp.float32)}
    size = 768 * 3072 // 8
    for bits, nbytes in ((8, 2 * (size + size // 64)), (4, size + 2 * 4 * (96 + 3072))):
        tx = optax_ext.low_precision_state(optax.adamw(1e-3), bits)
        found = zero.describe((params, jax.eval_shape(tx.init, params)), tx=tx)
        scalars = 4 + 8  # count, key
        assert found.bytes_per_device["opt_state"] == nbytes + scalars


STRADDLED = {"heads": (4, 32, 128), "rows": (4, 24, 100), "vector": (520,)}


@pytest.mark.parametrize("bits", [FP8, *(pytest.param(b, marks=pytest.mark.slow) for b in (4, 8))])
def test_blocks_that_straddle_shards(bits, x64):
    """Codes are sharded as the parameter, scales replicated; no warning, the same numbers."""
    tx = optax_ext.low_precision_state(optax.adamw(1e-2), bits, min_size=16)
    want, have = (run(zero, tx, STRADDLED) for zero in (zero_of(1, 0, 16), zero_of(8, 2, 16)))
    for k, moment in have[1].inner_state[0].mu.items():
        assert "data" in moment.codes.sharding.spec, k
    found = [paths(jax.device_get(state), STRADDLED) for state in (have, want)]
    model.assert_close(*found, 1e-12)


@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("rounding", "dim"), [("stochastic", -1), ("compensated", -2)])
def test_blocks_that_straddle_shards_of_an_explicit_mesh(bits, rounding, dim):
    """Types are the same after ``init`` and after each update, and updates are as gradients."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    tx = optax_ext.low_precision_state(optax.adamw(1e-2), bits, rounding=rounding, min_size=16)
    with jax.set_mesh(mesh):
        spec = P(None, "x", None) if dim == -2 else P(None, None, "x")
        sharding = jax.NamedSharding(mesh, spec)
        params = {
            k: jax.ShapeDtypeStruct(STRADDLED[k], jnp.float32, sharding=sharding)
            for k in ("heads", "rows")
        }
        state = jax.eval_shape(tx.init, params)
        updates, new = jax.eval_shape(tx.update, params, state, params)
        updates, state, new = (
            jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
            for tree in (updates, state, new)
        )
    assert updates == dict.fromkeys(params, spec)
    assert state == new
    assert all(moment.codes == spec for moment in state.inner_state[0].mu.values())
