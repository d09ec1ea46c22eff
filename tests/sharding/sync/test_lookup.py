"""Tables whose rows a loss looks up: values, training and bytes sent."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sharding as shd
from sharding import sync
from sharding.collectives._permutation import Permutation
from sharding.collectives._sparse_rows import RowOwners, unique_lookups
from sharding.plan.program._wire import collectives

from ...flax_nnx import needs_nnx, nnx

TOKENS = 64  # of a batch, on all devices


def mesh_of(num, kind=AxisType.Auto):
    return jax.make_mesh((num,), ("data",), axis_types=(kind,), devices=jax.devices()[:num])


def zero_of(method, stage, num=8, kind=AxisType.Auto, **options):
    return shd.Zero(mesh_of(num, kind), stage, sync=method, min_shard_size=16, **options)


def ids_of(step, rows, how="zipf"):
    """(sequences, 4); of one step, of all devices."""
    rng = np.random.default_rng(step)
    if how == "zipf":
        ids = np.minimum(rng.zipf(1.5, TOKENS) - 1, rows - 1)
    elif how == "one":
        ids = np.full(TOKENS, rows - 1)
    elif how == "last owner":
        ids = rows - 1 - rng.integers(0, max(1, rows // 8), TOKENS)
    else:
        ids = rng.integers(0, rows, TOKENS)
    return jnp.asarray(ids.reshape(-1, 4), jnp.int32)


def batch_of(step, rows, how="zipf"):
    scale = 10.0 ** np.repeat(np.arange(8) / 4, TOKENS // 32)  # devices of different scale
    return {"ids": ids_of(step, rows, how), "scale": jnp.asarray(scale)}


def initial(shape, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    width = int(np.prod(shape[1:]))
    table = jnp.asarray(rng.normal(size=shape), dtype)
    return {"table": table, "out": jnp.asarray(0.2 * rng.normal(size=(width, 24)), dtype)}


def loss_by(look):
    """Of parameters and a batch, ``look`` finding rows; its gradients have full rank."""

    def loss(params, batch):
        x = look(params["table"], batch["ids"])
        x = jnp.tanh(x.reshape(*batch["ids"].shape, -1) @ params["out"])
        x = jnp.cumsum(x, axis=1) * batch["scale"][:, None, None].astype(x.dtype)
        return jnp.mean((x - 1) ** 2)

    return loss


def take(table, ids):
    return jnp.take(table, ids, axis=0)


def train(zero, look, shape, steps=4, how="zipf", tx=None, table=None, **options):
    tx = tx or optax.adamw(1e-2)
    params = initial(shape) | ({} if table is None else {"table": table})

    def loss(params, batch):
        return loss_by(look)(params | {"out": zero.gather(params["out"])}, batch)

    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    step = zero.train_step(loss, tx=tx, **options)
    for i in range(steps):
        state, _ = step(state, zero.put(batch_of(i, shape[0], how)))
    return state[0]


@functools.cache
def alone(shape, how="zipf"):
    """One device, and ``take``."""
    return jax.device_get(train(zero_of(None, 0, 1), take, shape, how=how))


def assert_same(have, want, start, tolerance=1e-12):
    for k in want:
        path = np.linalg.norm(np.asarray(want[k] - start[k]))
        assert path > 0
        off = np.linalg.norm(np.asarray(jax.device_get(have[k])) - np.asarray(want[k]))
        assert off < tolerance * path, (k, off / path)


CASES = [  # method, stage, devices, shape, ids, why
    (sync.zen(0.2, min_size=1), 0, 8, (96, 16), "zipf", "full means"),
    (sync.zen(0.2, min_size=1), 1, 8, (96, 16), "zipf", "a shard, without a pull"),
    (sync.zen(0.2, min_size=1), 2, 4, (96, 16), "zipf", "a shard"),
    (sync.zen(0.2, min_size=1), 3, 8, (96, 16), "zipf", "rows are fetched"),
    (sync.zen(0.9, min_size=1), 3, 2, (96, 16), "uniform", "duplicates on both devices"),
    (sync.zen(0.05, min_size=1), 2, 8, (1024, 16), "last owner", "all rows to one owner: rounds"),
    (sync.zen(0.05, min_size=1), 3, 8, (1024, 16), "last owner", "rounds at stage 3"),
    (sync.zen(0.001, min_size=1), 3, 8, (1024, 16), "uniform", "more than four rounds: dense"),
    (sync.zen(0.1, min_size=1), 3, 8, (96, 16), "one", "one row, by all devices"),
    (sync.zen(0.2, min_size=1), 2, 8, (99, 16), "zipf", "columns are sharded"),
    (sync.zen(0.2, min_size=1), 3, 8, (99, 16), "zipf", "columns are fetched"),
    (sync.zen(0.2, min_size=1), 3, 8, (99, 4, 16), "zipf", "columns of rows of two dims"),
    (sync.agsparse(0.2, min_size=1), 3, 8, (99, 16), "zipf", "columns of agsparse"),
    (sync.zen(0.2, min_size=1), 2, 8, (99, 13), "zipf", "nothing divides"),
    (sync.zen(0.2, min_size=1), 3, 8, (99, 13), "zipf", "nothing divides at stage 3"),
    (sync.zen(0.2, min_size=1), 3, 8, (96, 3, 5), "zipf", "rows of two dims"),
    (sync.agsparse(0.2, min_size=1), 0, 4, (96, 16), "zipf", "agsparse"),
    (sync.agsparse(0.2, min_size=1), 2, 8, (96, 16), "zipf", "a shard of agsparse"),
    (sync.agsparse(0.2, min_size=1), 3, 8, (96, 16), "zipf", "rows are fetched with agsparse"),
    (sync.dense(), 2, 8, (96, 16), "zipf", "dense"),
    (sync.dense(), 3, 8, (96, 16), "zipf", "dense at stage 3"),
    (None, 3, 8, (96, 16), "zipf", "no sync method at stage 3"),
]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"stage {c[1]}, {c[5]}")
def test_equals_one_device_with_take(case, x64):
    method, stage, num, shape, how, _ = case
    want = alone(shape, how)
    have = train(zero_of(method, stage, num), shd.lookup, shape, how=how)
    assert_same(have, want, initial(shape))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_shuffled_tables(stage, x64):
    shape = (96, 16)
    want = alone(shape)
    mixed = shd.shuffle_rows(initial(shape)["table"])
    assert np.any(mixed != initial(shape)["table"])
    zero = zero_of(sync.zen(0.3, min_size=1), stage)

    def look(table, ids):
        return shd.lookup(table, ids, shuffled=True)

    have = jax.device_get(train(zero, look, shape, table=mixed))
    have["table"] = shd.unshuffle_rows(have["table"])
    assert_same(have, want, initial(shape))


def twice(look):
    return lambda table, ids: look(table, ids) - 0.5 * look(table, ids[:, ::-1])


@functools.cache
def twice_alone(shape):
    return jax.device_get(train(zero_of(None, 0, 1), twice(take), shape))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_micro_batches_and_two_lookups(stage, kind, x64):
    shape, method = (96, 16), sync.zen(0.2, min_size=1)
    zero = zero_of(method, stage, 4, kind)
    have = train(zero, twice(shd.lookup), shape, microbatches=2)
    assert_same(have, twice_alone(shape), initial(shape))


def test_in_loops_and_checkpoints(x64):
    """As a loss may use it: in a scan over positions, computed again in the backward pass."""

    def scanned(look):
        def one(carry, ids):
            return carry, look(ids)

        return lambda table, ids: jnp.moveaxis(
            jax.lax.scan(
                lambda c, i: (c, jax.checkpoint(lambda t, i: look(t, i))(table, i)), 0, ids.T
            )[1],
            0,
            1,
        )

    shape = (96, 16)
    want = alone(shape)
    for stage in (2, 3):
        have = train(zero_of(sync.zen(0.2, min_size=1), stage), scanned(shd.lookup), shape)
        assert_same(have, want, initial(shape))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_replicas(stage, x64):
    """By rows inside a replica, by dense shards between replicas."""
    mesh = jax.make_mesh((2, 4), ("replicas", "data"), axis_types=(AxisType.Auto,) * 2)
    method, shape = sync.by_path({"table": sync.zen(0.2, min_size=1)}), (96, 16)
    zero = shd.Zero(mesh, stage, replica_axis="replicas", sync=method, min_shard_size=16)
    want = alone(shape)
    assert_same(train(zero, shd.lookup, shape), want, initial(shape))


@pytest.mark.parametrize("stage", [2, 3])
def test_stacks_of_tables(stage, x64):
    """Looked up in a scan over the stack, whose first dim may be sharded."""
    shape, method = (8, 12, 4), sync.zen(0.5, min_size=1)
    zero, tx = zero_of(method, stage), optax.sgd(0.1)
    params = {"table": initial(shape)["table"]}

    def loss(look):
        def run(params, ids):
            def add(total, table):
                return total + jnp.sum(jnp.tanh(look(table, ids))) ** 2, None

            return jax.lax.scan(add, 0.0, params["table"])[0]

        return run

    specs = {"table": jax.sharding.PartitionSpec(None, "data")} if stage == 3 else None
    if stage == 3:  # rows are sharded: 12 over 4
        zero = zero_of(method, stage, 4)
    state = zero.init(lambda: (params, tx.init(params)), tx=tx, param_specs=specs)
    ids = np.arange(16) % 12
    have = jax.device_get(zero.train_step(loss(shd.lookup), tx=tx)(state, zero.put(ids))[0][0])
    parts = jnp.asarray(ids).reshape(zero.num_devices, -1)
    grads = jax.vmap(jax.grad(loss(take)), (None, 0))(params, parts)
    want = params["table"] - 0.1 * grads["table"].mean(0)
    np.testing.assert_allclose(have["table"], want, rtol=1e-12)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_tables(stage, x64):
    zero = zero_of(sync.zen(0.2, min_size=1), stage)
    trainable = {"table": False, "out": True}
    have = train(zero, shd.lookup, (96, 16), trainable=trainable)
    np.testing.assert_array_equal(have["table"], initial((96, 16))["table"])
    assert np.any(np.asarray(have["out"]) != np.asarray(initial((96, 16))["out"]))


@pytest.mark.parametrize("stage", [2, 3])
def test_narrow_dtypes(stage):
    """Rows and their gradients are sent as precision says, and summed in float32."""
    shape, tx = (96, 16), optax.sgd(1e-2)
    params = initial(shape, jnp.float32)
    plain, rows = (
        zero_of(method, stage, precision=shd.Precision(compute=jnp.bfloat16))
        for method in (None, sync.zen(0.2, min_size=1))
    )

    def updated(zero, look):
        def loss(params, batch):
            params = {"table": params["table"], "out": zero.gather(params["out"])}
            return loss_by(look)(params, batch).astype(jnp.float32)

        state = zero.init(lambda: (params, tx.init(params)), tx=tx)
        state, _ = zero.train_step(loss, tx=tx)(state, zero.put(batch_of(0, shape[0])))
        return np.asarray(jax.device_get(state[0]["table"])) - params["table"]

    want = updated(plain, lambda table, ids: take(plain.gather(table), ids))
    have = updated(rows, shd.lookup)
    assert 0 < np.linalg.norm(have - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("rows", "num", "mixed"), [(64, 8, False), (99, 8, True), (5, 1, False)])
@pytest.mark.parametrize("how", ["zipf", "one", "uniform"])
def test_every_row_is_sent_once_with_consecutive_ranks(rows, num, mixed, how):
    owners = RowOwners(rows, num, Permutation(rows) if mixed else None)
    ids = np.array(ids_of(0, rows, how)).ravel()
    ids[[3, 7]] = rows, -1  # outside the table
    send_list, first = unique_lookups(jnp.asarray(ids), owners)
    sent = np.flatnonzero(send_list.rank >= 0)
    inside = (ids >= 0) & (ids < rows)
    assert sorted(ids[sent]) == sorted(set(ids[inside]))
    np.testing.assert_array_equal(ids[first][inside], ids[inside])
    assert set(first[inside].tolist()) == set(sent.tolist())
    place = np.asarray(owners.slot_of(jnp.asarray(ids[sent])))
    np.testing.assert_array_equal(send_list.owner[sent], place // owners.num_slots)
    np.testing.assert_array_equal(send_list.slot[sent], place % owners.num_slots)
    for owner in range(num):
        ranks = np.sort(send_list.rank[sent][send_list.owner[sent] == owner])
        np.testing.assert_array_equal(ranks, np.arange(ranks.size))


# --- Modules --------------------------------------------------------------------------------------


def of_linen(embed):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, batch):
            x = embed(96, 16, dtype=jnp.float64, param_dtype=jnp.float64, name="embed")(
                batch["ids"]
            )
            return jnp.mean(
                (nn.Dense(24, param_dtype=jnp.float64)(x) * batch["scale"][:, None, None] - 1) ** 2
            )

    model = Model()
    make = lambda: model.init(jax.random.key(0), batch_of(0, 96))["params"]  # noqa: E731
    return make, lambda params, batch: model.apply({"params": params}, batch)


def of_nnx(embed):
    class Model(nnx.Module):
        def __init__(self, rngs):
            kinds = {"dtype": jnp.float64, "param_dtype": jnp.float64, "rngs": rngs}
            self.embed, self.out = embed(96, 16, **kinds), nnx.Linear(16, 24, **kinds)

        def __call__(self, batch):
            x = self.out(self.embed(batch["ids"]))
            return jnp.mean((x * batch["scale"][:, None, None] - 1) ** 2)

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    return lambda: params, lambda params, batch: nnx.merge(graph, params)(batch)


@pytest.mark.slow(keep=2)
@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("model", [of_linen, pytest.param(of_nnx, marks=needs_nnx)])
def test_flax_modules(model, stage, x64):
    embed = nn.Embed if model is of_linen else nnx.Embed
    tx = optax.adamw(1e-2)
    found = []
    for zero, cls in (
        (zero_of(None, 0, 1), embed),
        (zero_of(sync.zen(0.2, min_size=1), stage), shd.sparse_embedding(embed)),
    ):
        make, loss = model(cls)
        state = zero.init(lambda make=make: (make(), tx.init(make())), tx=tx)
        start = jax.device_get(state[0])
        step = zero.train_step(loss, tx=tx)
        jaxpr = str(jax.make_jaxpr(zero.value_and_grad(loss))(start, batch_of(0, 96)))
        for i in range(4):
            state, _ = step(state, zero.put(batch_of(i, 96)))
        leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state[0]))
        found.append((start, {jax.tree_util.keystr(k): x for k, x in leaves}, jaxpr))
    (start, want, _), (again, have, jaxpr) = found
    assert "all_to_all" in jaxpr
    for x, y in zip(jax.tree.leaves(start), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    assert list(want) == list(have)
    for (k, x), first in zip(want.items(), jax.tree.leaves(start), strict=True):
        assert np.linalg.norm(have[k] - x) < 1e-12 * np.linalg.norm(x - first), k


def test_an_embedding_by_itself():
    ids = ids_of(0, 50, "uniform")
    embed, sparse = (
        cls(50, 8, dtype=jnp.bfloat16) for cls in (nn.Embed, shd.sparse_embedding(nn.Embed))
    )
    params = embed.init(jax.random.key(0), ids)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, sparse.init(jax.random.key(0), ids)))
    assert jnp.array_equal(embed.apply(params, ids), sparse.apply(params, ids))
    assert sparse.apply(params, ids).dtype == jnp.bfloat16
    query = jnp.ones((3, 8))
    assert jnp.array_equal(
        embed.apply(params, query, method="attend"), sparse.apply(params, query, method="attend")
    )


# --- By itself ------------------------------------------------------------------------------------


def test_outside_a_step():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)), jnp.float32)
    ids = jnp.array([[0, 6, -1], [-7, 3, 3]])
    np.testing.assert_array_equal(shd.lookup(table, ids), table[ids])
    np.testing.assert_array_equal(shd.lookup(table, jnp.array(2)), table[2])
    assert np.all(np.isnan(shd.lookup(table, jnp.array([7, -8]))))
    want = jax.grad(lambda t: jnp.sum(t[ids] ** 3))(table)
    have = jax.grad(lambda t: jnp.sum(shd.lookup(t, ids) ** 3))(table)
    np.testing.assert_allclose(have, want, rtol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_rows_outside_the_table(stage, x64):
    """They are NaN, and add to the gradient of no row."""
    zero, tx = zero_of(sync.zen(0.2, min_size=1), stage), optax.sgd(1.0)
    params = {"table": initial((96, 16))["table"]}

    def loss(params, ids):
        rows = shd.lookup(params["table"], ids)
        return jnp.sum(jnp.where(jnp.isnan(rows), 7.0, rows))

    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    step = zero.train_step(loss, tx=tx)
    ids = np.full(8, 96)
    ids[3], ids[5] = 4, -97
    state, metrics = step(state, zero.put(ids))
    changed = np.asarray(jax.device_get(state[0]["table"])) - params["table"]
    assert np.flatnonzero(np.any(changed != 0, 1)).tolist() == [4]
    want = (7 * 16 * 7 + np.sum(params["table"][4])) / 8
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint32, jnp.int64])
def test_ids_of_any_integer_dtype(dtype, x64):
    table = jnp.arange(600.0).reshape(300, 2)
    ids = jnp.asarray([3, 100, jnp.iinfo(dtype).max], dtype)
    np.testing.assert_array_equal(shd.lookup(table, ids), take(table, ids))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_interface_of_a_handle(stage, x64):
    """No ids, the table's shape and dtype; all else is an error that says what it is."""
    zero, tx = zero_of(sync.zen(0.2, min_size=1), stage), optax.sgd(1.0)
    params = {"table": initial((96, 16))["table"]}

    def loss(params, ids):
        table = params["table"]
        assert (table.shape, table.ndim, table.size) == ((96, 16), 2, 96 * 16)
        ids = jnp.minimum(ids, table.shape[0] - 1)
        empty = shd.lookup(table, ids[:0])
        assert empty.shape == (0, 16)
        return jnp.sum(shd.lookup(table.astype(table.dtype), ids)) + jnp.sum(empty)

    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    ids = zero.put(np.arange(8) * 20)
    _, metrics = zero.train_step(loss, tx=tx, donate=False)(state, ids)
    rows = params["table"][np.minimum(np.arange(8) * 20, 95)]
    np.testing.assert_allclose(metrics["loss"], jnp.sum(rows) / 8, rtol=1e-12)

    def careless(params, ids):
        jnp.asarray(params["table"])  # of which nothing is traced when the loss is looked at
        return loss(params, ids)

    with pytest.raises(TypeError, match="is sharded, and not an array"):
        zero.train_step(careless, tx=tx)(state, ids)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_shuffling_is_undone(size):
    table = jnp.arange(2.0 * size).reshape(size, 2)
    np.testing.assert_array_equal(shd.unshuffle_rows(shd.shuffle_rows(table)), table)
    ids = jnp.arange(size)
    found = shd.lookup(shd.shuffle_rows(table), ids, shuffled=True)
    np.testing.assert_array_equal(found, table)


def test_bad_input():
    table = jnp.ones((4, 2))
    with pytest.raises(ValueError, match="ids must be integers, got float32"):
        shd.lookup(table, jnp.ones(3))
    for shape in ((), (0, 4)):
        with pytest.raises(ValueError, match=r"the table, of shape .* has no rows"):
            shd.lookup(jnp.ones(shape), jnp.zeros(3, int), shuffled=True)
    with pytest.raises(ValueError, match=r"takes flax.linen.Embed, .* got <class .*Dense"):
        shd.sparse_embedding(nn.Dense)

    class Scaled(nn.Embed):
        def __call__(self, ids):
            return 4 * super().__call__(ids)

    class Extra(nn.Embed):
        def setup(self):
            super().setup()

    for cls, name in ((Scaled, "__call__"), (Extra, "setup")):
        with pytest.raises(ValueError, match=f"has a {name} of its own"):
            shd.sparse_embedding(cls)


@needs_nnx
def test_rows_of_an_nnx_module_lie_as_their_ids():
    embed = shd.sparse_embedding(nnx.Embed)(4, 2, rngs=nnx.Rngs(0))
    assert embed(jnp.zeros(3, int), out_sharding=None).shape == (3, 2)
    with pytest.raises(ValueError, match="does not support out_sharding"):
        embed(jnp.zeros(3, int), out_sharding=jax.sharding.PartitionSpec())


@pytest.mark.parametrize(
    ("look", "match"),
    [
        (lambda t, i: shd.lookup(t, i) + 0.1 * jnp.mean(t), "'table', and uses it otherwise too"),
        (lambda t, i: shd.lookup(2.0 * t, i), r"shape \(96, 16\) that is not an unmodified"),
        (
            lambda t, i: jax.lax.cond(
                i.sum() > 30, lambda: shd.lookup(t, i), lambda: jnp.ones((*i.shape, 16))
            ),
            "'table' in a branch",
        ),
    ],
    ids=["tied", "scaled", "in a branch"],
)
def test_uses_that_need_the_full_gradient(look, match, x64):
    """Its full gradient is synchronized, and a warning is issued."""
    shape = (96, 16)
    want = train(zero_of(None, 2), look, shape)
    with pytest.warns(UserWarning, match=f"{match}.*: its full gradient is synchronized"):
        have = train(zero_of(sync.zen(0.2, min_size=1), 2), look, shape)
    assert_same(have, want, initial(shape))


# --- On the wire ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("scopes_in_cache_key")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_are_those_of_the_rows(stage):
    """Of a table of 4 MiB, two tokens on a device: gradients, and at stage 3 the rows."""
    shape, num, lookups = (2**14, 64), 8, 32
    zero, tx = zero_of(sync.zen(0.5, min_size=1), stage), optax.sgd(1e-2)
    params = {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = zero.abstract_state(lambda: (params_of(params), tx.init(params_of(params))), tx=tx)

    def loss(params, ids):
        return jnp.mean(shd.lookup(params["table"], ids) ** 2)

    ids = jax.ShapeDtypeStruct((num * lookups,), jnp.int32)
    compiled = zero.train_step(loss, tx=tx).lower(state, ids).compile()
    found = [c for c in collectives(compiled, branches="cheapest") if c.wire_bytes > 64]
    scopes = ("reduce_gradients", "reduce_scatter", "gather")
    sent = {s: sum(c.wire_bytes for c in found if re.search(rf"\b{s}\b", c.scope)) for s in scopes}
    spread = 2 * np.log(100 * num**2) * lookups / num * (1 - lookups / 2**14)
    room = int(np.ceil(lookups / num + np.sqrt(spread)))
    rows, indices = ((num - 1) * room * 4 * width for width in (64, 1))
    push = "reduce_scatter" if stage == 3 else "reduce_gradients"
    assert sent[push] == rows + indices
    if stage == 3:
        assert sent["gather"] == rows + indices
    assert not any(c.op == "all-reduce" for c in found)
    if stage == 3:  # and no device has memory for the full table
        assert compiled.memory_analysis().temp_size_in_bytes < 2**14 * 64 * 4 / 2


def params_of(types):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)


def gathered_tables(lowered, rows):
    """All-gathers of the full table, by rows or by columns, in an unoptimized program."""
    return len(re.findall(rf"all_gather.*-> tensor<{rows}x16xf32>", lowered.as_text()))


@pytest.mark.parametrize("rows", [4096, 4099])
@pytest.mark.parametrize("what", ["train", "frozen", "evaluate", "replicas"])
def test_no_step_of_stage_3_gathers_the_table(what, rows):
    """Whichever dim is sharded, for training, evaluation, frozen tables and replicas."""
    mesh = jax.make_mesh((2, 4), ("replicas", "data"), axis_types=(AxisType.Auto,) * 2)
    if what != "replicas":
        mesh = mesh_of(8)
    replicas = "replicas" if what == "replicas" else None
    method, tx = sync.zen(0.01), optax.sgd(0.1)
    zero = shd.Zero(mesh, 3, replica_axis=replicas, sync=method)
    params = {"table": jnp.ones((rows, 16)), "w": jnp.ones((64, 64))}
    state = zero.abstract_state(lambda: (params, tx.init(params)), tx=tx)

    def loss(params, ids):
        return jnp.mean(shd.lookup(params["table"], ids)) + jnp.mean(zero.gather(params["w"]))

    ids = jax.ShapeDtypeStruct((8 * 16,), jnp.int32)
    if what == "evaluate":
        lowered = zero.eval_step(loss).lower(state, ids)
    else:
        trainable = {"table": what != "frozen", "w": True}
        lowered = zero.train_step(loss, tx=tx, trainable=trainable).lower(state, ids)
    assert not gathered_tables(lowered, rows)
    assert "all_to_all" in lowered.as_text()


def test_a_table_of_a_gathered_block_is_gathered():
    """And the user hears that it could be otherwise."""
    zero, tx = zero_of(sync.zen(0.01), 3), optax.sgd(0.1)
    params = {"table": jnp.ones((4096, 16))}
    block = zero.gathered(lambda params, ids: jnp.mean(shd.lookup(params["table"], ids)))
    state = zero.abstract_state(lambda: (params, tx.init(params)), tx=tx)
    ids = jax.ShapeDtypeStruct((8 * 16,), jnp.int32)
    with pytest.warns(UserWarning, match=r"shape \(4096, 16\) that is not an unmodified"):
        lowered = zero.train_step(block, tx=tx).lower(state, ids)
    assert gathered_tables(lowered, 4096)


@pytest.mark.usefixtures("scopes_in_cache_key")
def test_partition_metadata_hides_no_table():
    """Flax lays a constraint on what it takes out of its boxes."""
    zero, tx = zero_of(sync.zen(0.01), 2), optax.sgd(0.1)
    init = nn.with_partitioning(nn.initializers.ones, (None, None))
    model = shd.sparse_embedding(nn.Embed)(4096, 16, embedding_init=init)

    def make():
        params = model.init(jax.random.key(0), jnp.zeros(8, int))
        return params, tx.init(params)

    ids = jax.ShapeDtypeStruct((8 * 16,), jnp.int32)
    step = zero.train_step(lambda params, ids: jnp.mean(model.apply(params, ids)), tx=tx)
    with jax.set_mesh(zero.mesh):
        compiled = step.lower(zero.abstract_state(make, tx=tx), ids).compile()
    found = [c for c in collectives(compiled) if "reduce_gradients" in c.scope]
    assert found
    assert not [c for c in found if c.op == "reduce-scatter"]
