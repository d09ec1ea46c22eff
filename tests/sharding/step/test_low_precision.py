"""Low-precision state under ZeRO: the same numbers on every mesh, nothing sent to store them."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from optax_ext import Float8, Quantized

STEPS = 5
# What each is there for.
SHAPES = {
    "up": (128, 768),  # over 8 devices the shards of the last dim would have 96: rows are sharded
    "down": (768, 128),
    "embed": (101, 768),  # only the last dim can be sharded
    "out": (12, 128, 96),  # attention: heads divide by 4, head_dim by 8
    "bias": (768,),
}
FORMATS = {"8 bits": 8, "4 bits": 4, "fp8": Float8()}


def transformation(bits, rounding="stochastic"):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return optax_ext.low_precision_state(inner, bits, rounding=rounding, min_size=1024)


def loss(params, batch):
    """Full-rank gradients for every parameter."""
    x = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    logits = x @ params["embed"].T
    x = x @ params["down"]
    heads = jnp.tanh(jnp.einsum("bi,hio->bho", x, params["out"]))
    return jnp.mean((logits - batch["y"]) ** 2) + jnp.mean((heads - 1) ** 2)


def batch_of(seed, dtype):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** np.repeat(np.arange(8) / 4, 2)[:, None]  # shards of different size
    return {
        "x": jnp.asarray(rng.normal(size=(16, 128)) * scale, dtype),
        "y": jnp.asarray(rng.normal(size=(16, 101)), dtype),
    }


def initial(dtype):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.1 * rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def zero_of(num, stage, kind=AxisType.Auto, **options):
    mesh = jax.make_mesh((num,), ("data",), axis_types=(kind,), devices=jax.devices()[:num])
    return shd.Zero(mesh, stage, min_shard_size=1024, **options)


def run(zero, tx, dtype=jnp.float64):
    """The state on the host after some steps."""
    state = zero.init(lambda: (initial(dtype), tx.init(initial(dtype))), tx=tx)
    params_loss = loss
    if zero.stage == 3:
        params_loss = lambda params, batch: loss(zero.gather(params), batch)  # noqa: E731
    step = zero.train_step(params_loss, tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch_of(i, dtype)))
    return jax.device_get(state)


def assert_same(have, want):
    start = initial(jnp.float64)
    for k in SHAPES:
        path = np.linalg.norm(want[0][k] - start[k])
        assert path > 0
        assert np.linalg.norm(have[0][k] - want[0][k]) < 1e-12 * path, k
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(have[1]), jax.tree.leaves(want[1]), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, name
        if a.dtype == np.uint8:  # a sum in another order may be across the middle of two codes
            assert np.mean(a != b) < 1e-4, name
        else:
            np.testing.assert_allclose(a, b, rtol=1e-9, err_msg=name)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("bits", "rounding", "meshes"),
    [
        (8, "stochastic", [(8, 1, AxisType.Auto), (4, 2, AxisType.Explicit)]),
        (4, "stochastic", [(8, 3, AxisType.Auto)]),
        (Float8(), "compensated", [(8, 2, AxisType.Auto)]),
    ],
    ids=str,
)
def test_sharded_equals_unsharded(bits, rounding, meshes, x64):
    tx = transformation(bits, rounding)
    want = run(zero_of(1, 0), tx)
    for num, stage, kind in meshes:
        assert_same(run(zero_of(num, stage, kind), tx), want)


@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
def test_codes_and_scales_lie_as_their_parameter(bits):
    zero, tx = zero_of(8, 1), transformation(bits)
    params = initial(jnp.float32)
    _, specs = zero.specs((params, jax.eval_shape(tx.init, params)), tx=tx)
    adam = specs.inner_state[1][0]
    sharded = {"up": P("data"), "down": P("data"), "embed": P(None, "data"), "out": P(None, "data")}
    for k, spec in sharded.items():
        assert adam.mu[k].codes == spec, k
        if bits == 4:  # a scale for each place along each dim
            entries = [*spec, *[None] * (len(SHAPES[k]) - len(spec))]
            assert adam.mu[k].scale == tuple(P(e) if e else P() for e in entries), k
        else:
            assert adam.mu[k].scale[0] == spec, k
    assert specs.key == P()


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
def test_nothing_is_gathered_to_store_the_state(bits):
    """Only maxima of rows and columns are sent, for moments in 4 bits."""
    zero, tx = zero_of(8, 1), transformation(bits)
    state = zero.abstract_state(
        lambda: (initial(jnp.float32), tx.init(initial(jnp.float32))), tx=tx
    )
    batch = jax.eval_shape(lambda: batch_of(0, jnp.float32))
    compiled = zero.train_step(loss, tx=tx).lower(state, batch).compile()
    found = 0
    for line in compiled.as_text().splitlines():
        kind = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)\(", line)
        if kind and "low_precision" in line:
            found += 1
            sizes = [
                np.prod([int(n) for n in shape.split(",")])
                for shape in re.findall(r"\[([\d,]+)\]", kind[1])
            ]
            assert kind[2] == "all-reduce", line
            assert max(sizes) <= 768, line
    assert bool(found) == (bits == 4)


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


def test_a_checkpoint_of_one_mesh_is_read_on_another(tmp_path):
    import orbax.checkpoint as ocp

    tx = transformation(4)
    make = lambda: (initial(jnp.float32), tx.init(initial(jnp.float32)))  # noqa: E731
    one, eight = zero_of(1, 0), zero_of(8, 1)
    state = eight.init(make, tx=tx)
    state, _ = eight.train_step(loss, tx=tx)(state, eight.put(batch_of(0, jnp.float32)))
    saved = jax.device_get(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", one.abstract_state(make, tx=tx))
    chex.assert_trees_all_equal(jax.device_get(restored), saved, strict=True)
    stored = jax.tree.leaves(restored[1], is_leaf=lambda x: isinstance(x, Quantized))
    assert any(isinstance(x, Quantized) for x in stored)
    one.train_step(loss, tx=tx)(restored, one.put(batch_of(1, jnp.float32)))


STRADDLED = {"heads": (4, 32, 128), "rows": (4, 24, 100), "vector": (520,)}


def straddled_loss(params, batch):
    """Full-rank gradients for every parameter."""
    heads = jnp.tanh(jnp.einsum("bi,hio->bho", batch["x"][:, :32], params["heads"]))
    rows = jnp.tanh(jnp.einsum("bho,hio->bhi", heads[..., :100], params["rows"]))
    wide = jnp.tanh(batch["x"].sum(1)[:, None] * params["vector"][None])
    return jnp.mean((heads - 1) ** 2) + jnp.mean((rows - 0.5) ** 2) + jnp.mean((wide - 0.1) ** 2)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
def test_blocks_that_straddle_shards(bits, x64):
    """Codes are sharded as the parameter, scales replicated; no warning, the same numbers."""
    rng = np.random.default_rng(0)
    start = {k: jnp.asarray(0.1 * rng.normal(size=s)) for k, s in STRADDLED.items()}
    tx = optax_ext.low_precision_state(optax.adamw(1e-2), bits, min_size=16)
    found = []
    for zero in (zero_of(1, 0), zero_of(8, 2)):
        zero = shd.Zero(zero.mesh, zero.stage, min_shard_size=16)
        state = zero.init(lambda: (start, tx.init(start)), tx=tx)
        step = zero.train_step(straddled_loss, tx=tx)
        for i in range(STEPS):
            state, _ = step(state, zero.put(batch_of(i, jnp.float64)))
        found.append(state)
    for k, moment in found[1][1].inner_state[0].mu.items():
        assert "data" in moment.codes.sharding.spec, k
    want, have = jax.device_get(found)
    for k, x in want[0].items():
        path = np.linalg.norm(x - start[k])
        assert np.linalg.norm(have[0][k] - x) < 1e-12 * path, k


@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("dim", [-1, -2])
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
