"""Tables whose rows a loss looks up: values, training and bytes sent."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync
from sharding.plan.audit._program_collectives import collectives

from ...flax_nnx import needs_nnx, nnx
from .. import model as models
from .harness import mesh_of, norm, room

TOKENS, STEPS = 64, 4  # of a batch, on all devices
ZEN = sync.zen(0.2, min_size=1)


def zero_of(method, stage, num=8, **options):
    return shd.Zero(mesh_of(data=num), stage, sync=method, min_shard_size=16, **options)


def ids_of(step, rows, how="zipf"):
    """(sequences, 4); of one step, of all devices."""
    rng = np.random.default_rng(step)
    if how == "zipf":
        ids = np.minimum(rng.zipf(1.5, TOKENS) - 1, rows - 1)
    elif how == "last owner":
        ids = rows - 1 - rng.integers(0, max(1, rows // 8), TOKENS)
    else:
        ids = rng.integers(0, rows, TOKENS)
    return ids.reshape(-1, 4).astype(np.int32)


def take(table, ids):
    return jnp.take(table, ids, axis=0)


def scanned(look):
    """In a scan over positions, computed again in the backward pass."""

    def one(table):
        return lambda c, i: (c, jax.checkpoint(look)(table, i))

    return lambda table, ids: jnp.moveaxis(jax.lax.scan(one(table), 0, ids.T)[1], 0, 1)


class Table(NamedTuple):
    """A table, and how its rows are looked up and synchronized."""

    shape: tuple[int, ...]
    method: sync.GradientSync = ZEN
    ids: str = "zipf"
    use: Callable = lambda look: look
    shuffled: bool = False
    spec: P | None = None  # on other axes; replicated


TABLES = {
    "rows": Table((96, 16), use=lambda look: lambda t, i: look(t, i) - look(t, i[:, ::-1]) / 2),
    "rounds": Table((1024, 16), sync.zen(0.05, min_size=1), "last owner"),
    "dense fallback": Table((1024, 8), sync.zen(0.001, min_size=1), "uniform"),
    "columns": Table((99, 4, 16)),
    "undivided": Table((99, 13)),
    "gathered": Table((96, 16), sync.agsparse(0.2, min_size=1)),
    "plain": Table((96, 16), sync.dense()),
    "shuffled": Table((96, 16), sync.zen(0.3, min_size=1), shuffled=True),
    "scanned": Table((96, 16), use=scanned),
    "frozen": Table((96, 16)),
    "sharded columns": Table((512, 16), sync.zen(0.05), "uniform", spec=P(None, "model")),
}


class Config(NamedTuple):
    """How tables are trained together."""

    stage: int
    tables: tuple[str, ...]
    axes: dict[str, int]
    microbatches: int = 1

    def zero(self):
        method = sync.by_path({f"^{k}$": TABLES[k].method for k in self.tables})
        kind = AxisType.Explicit if "model" in self.axes else AxisType.Auto
        return shd.Zero(mesh_of(kind, **self.axes), self.stage, sync=method, min_shard_size=16)


# Pulls of full means, and at stage 3 fetches, compile slowly: each table in one or two configs.
AT_2 = ("undivided", "gathered", "scanned", "plain", "frozen")
AT_3 = ("rows", "rounds", "dense fallback", "columns", "shuffled")
CONFIGS = {
    "stage 1, micro-batches": Config(1, ("scanned",), {"data": 8}, microbatches=2),
    "stage 2": Config(2, AT_2, {"data": 8}),
    "stage 3, micro-batches": Config(3, AT_3, {"data": 4}, microbatches=2),
    "stage 3, sharded columns": Config(3, ("sharded columns",), {"data": 4, "model": 2}),
}


def initial(shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def batch_of(step, tables):
    scale = 10.0 ** np.repeat(np.arange(8) / 4, TOKENS // 32)  # devices of different scale
    ids = {k: ids_of(step, TABLES[k].shape[0], TABLES[k].ids) for k in tables}
    return {"ids": ids, "scale": scale}


def loss_of(x, scale):
    """Of looked-up rows; its gradients have full rank."""
    x = x.reshape(*x.shape[:2], -1)
    out = 0.2 * np.random.default_rng(1).normal(size=(x.shape[-1], 24))
    x = jnp.cumsum(jnp.tanh(x @ out), axis=1)
    return jnp.mean((x * scale[:, None, None] - 1) ** 2)


def loss_by(tables, look_of):
    """Of all tables, ``look_of(table)`` finding rows."""

    def loss(params, batch):
        found = {k: TABLES[k].use(look_of(TABLES[k]))(params[k], batch["ids"][k]) for k in tables}
        return sum(loss_of(x, batch["scale"]) for x in found.values())

    return loss


@functools.cache
def alone():
    """One device, and ``take``."""
    tx, loss = optax.adamw(1e-2), loss_by(TABLES, lambda table: take)
    make = models.make_of(lambda: {k: initial(t.shape) for k, t in TABLES.items()}, tx)
    state, _ = models.alone(make, tx, loss, lambda i: batch_of(i, TABLES), STEPS)
    return jax.device_get(state[0])


@functools.cache
def step_of(name):
    """The step, a state and a batch."""
    config = CONFIGS[name]
    zero, tx = config.zero(), optax.adamw(1e-2)
    start = {k: initial(TABLES[k].shape) for k in config.tables}
    mixed = {k: jax.jit(shd.shuffle_rows)(x) for k, x in start.items() if k == "shuffled"}

    def look_of(table):
        return functools.partial(shd.lookup, shuffled=table.shuffled)

    specs = {k: TABLES[k].spec or P() for k in start} if "model" in zero.mesh.shape else None
    state = zero.init(lambda: (start | mixed, tx.init(start)), tx=tx, param_specs=specs)
    trainable = {k: k != "frozen" for k in start}
    loss, options = loss_by(start, look_of), {"microbatches": config.microbatches}
    step = zero.train_step(loss, tx=tx, trainable=trainable, donate=False, **options)
    return step, state, zero.put(batch_of(0, start))


@functools.cache
def run_of(name):
    """The tables after training, in their own order."""
    config, (step, state, _) = CONFIGS[name], step_of(name)
    for i in range(STEPS):
        state, _ = step(state, config.zero().put(batch_of(i, config.tables)))
    return {
        k: np.asarray(jax.jit(shd.unshuffle_rows)(x) if k == "shuffled" else x)
        for k, x in state[0].items()
    }


@pytest.mark.parametrize(
    ("config", "name"), [(k, table) for k, config in CONFIGS.items() for table in config.tables]
)
@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
def test_equals_one_device_with_take(config, name, x64):
    have, want, start = run_of(config)[name], alone()[name], initial(TABLES[name].shape)
    if name == "frozen":
        np.testing.assert_array_equal(have, start)
        return
    assert norm(want - start) > 0
    assert norm(have - want) < 1e-12 * norm(want - start)


def test_sharded_columns_are_not_gathered(x64):
    """Over the axis that shards them activations alone are summed."""
    step, state, batch = step_of("stage 3, sharded columns")
    compiled = step.lower(state, batch).compile()
    groups = [(c.op, group) for c in collectives(compiled) for group in c.groups]
    crossing = {op for op, group in groups if len({device % 2 for device in group}) > 1}
    assert crossing == {"all-reduce"}


def of_linen(embed):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = embed(96, 16, dtype=jnp.float64, param_dtype=jnp.float64, name="embed")(ids)
            return jnp.mean(nn.Dense(24, param_dtype=jnp.float64)(x) ** 2)

    model = Model()
    make = lambda: model.init(jax.random.key(0), ids_of(0, 96))["params"]  # noqa: E731
    return make, lambda params, ids: model.apply({"params": params}, ids)


def of_nnx(embed):
    class Model(nnx.Module):
        def __init__(self, rngs):
            kinds = {"dtype": jnp.float64, "param_dtype": jnp.float64, "rngs": rngs}
            self.embed, self.out = embed(96, 16, **kinds), nnx.Linear(16, 24, **kinds)

        def __call__(self, ids):
            return jnp.mean(self.out(self.embed(ids)) ** 2)

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    return lambda: params, lambda params, ids: nnx.merge(graph, params)(ids)


@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize(
    ("model", "stage"), [(of_linen, 3), pytest.param(of_nnx, 2, marks=needs_nnx)]
)
def test_flax_modules(model, stage, x64):
    """The same parameters and losses, of which a step sends rows."""
    embed, tx, ids = nn.Embed if model is of_linen else nnx.Embed, optax.sgd(0.1), ids_of(0, 96)
    (plain, loss), (make, sparse_loss) = model(embed), model(shd.sparse_embedding(embed))

    @jax.jit
    def run():
        return [(m(), fn(m(), ids)) for m, fn in ((plain, loss), (make, sparse_loss))]

    want, have = run()
    assert jax.tree.structure(want) == jax.tree.structure(have)
    assert jax.tree.all(jax.tree.map(np.array_equal, want, have))
    zero = zero_of(ZEN, stage)
    lowered = models.lowered(zero, models.make_of(make, tx), tx, sparse_loss, ids)
    assert "all_to_all" in lowered.as_text()


def test_outside_a_step(x64):
    """Ids of any integer dtype, of which negative ones count from the end."""
    table = np.random.default_rng(0).normal(size=(300, 3))
    ids = np.array([[0, 6, -1], [-300, 3, 3]])
    other = [jnp.asarray([3, 100, jnp.iinfo(d).max], d) for d in ("u1", "i1", "u4", "i8")]

    @jax.jit
    def run(table):
        grad = jax.grad(lambda t: jnp.sum(shd.lookup(t, ids) ** 3))(table)
        found = [(shd.lookup(table, i), take(table, i)) for i in other]
        mixed = shd.shuffle_rows(table)
        found.append((shd.unshuffle_rows(mixed), table))
        found.append((shd.lookup(mixed, ids, shuffled=True), table[ids]))
        return shd.lookup(table, ids), grad, shd.lookup(table, np.array([300, -301])), found

    rows, grad, outside, found = run(table)
    np.testing.assert_array_equal(rows, table[ids])
    want = np.zeros_like(table)
    np.add.at(want, ids.ravel(), 3 * table[ids.ravel()] ** 2)
    np.testing.assert_allclose(grad, want, rtol=1e-12)
    assert np.isnan(outside).all()
    for have, taken in found:
        np.testing.assert_array_equal(have, taken)


def test_rows_that_are_not_there(x64):
    """The table's shape and dtype, and no ids; rows outside the table are NaN, and trained by none.

    All else is an error that says what it is; at stage 3, not what nothing uses.
    """
    zero, tx = zero_of(ZEN, 3), optax.sgd(1.0)
    params = {"table": initial((96, 16))}

    def loss(params, ids):
        table = params["table"]
        assert (table.shape, table.ndim, table.size) == ((96, 16), 2, 96 * 16)
        empty = shd.lookup(table, ids[:0])
        assert empty.shape == (0, 16)
        rows = shd.lookup(table.astype(table.dtype), ids)
        return jnp.sum(jnp.where(jnp.isnan(rows), 7.0, rows)) + jnp.sum(empty)

    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    ids = np.full(8, 96)
    ids[3], ids[5] = 4, -97
    after, metrics = zero.train_step(loss, tx=tx, donate=False)(state, zero.put(ids))
    changed = np.asarray(jax.device_get(after[0]["table"])) - params["table"]
    assert np.flatnonzero(np.any(changed != 0, 1)).tolist() == [4]
    want = 7 * 16 * 7 + np.sum(params["table"][4])
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-12)


def test_bad_input():
    table = jnp.ones((4, 2))
    with pytest.raises(ValueError, match="ids must be integers, got float32"):
        shd.lookup(table, jnp.ones(3))
    with pytest.raises(ValueError, match=r"the table, of shape .* has no rows"):
        shd.lookup(jnp.ones((0, 4)), jnp.zeros(3, int))
    with pytest.raises(ValueError, match=r"takes flax.linen.Embed, .* got <class .*Dense"):
        shd.sparse_embedding(nn.Dense)

    class Scaled(nn.Embed):
        def __call__(self, ids):
            return 4 * super().__call__(ids)

    with pytest.raises(ValueError, match="has a __call__ of its own"):
        shd.sparse_embedding(Scaled)


def test_uses_that_need_the_full_gradient(x64):
    """Full gradients are synchronized, as those of any array, and warnings are issued."""
    uses = {  # how a table is used, and what the warning says
        "tied": (lambda t, i: shd.lookup(t, i) + 0.1 * jnp.mean(t), "and uses it otherwise too"),
        "scaled": (lambda t, i: shd.lookup(2.0 * t, i), r"(97, 16) that is not an unmodified"),
    }
    tx, params = optax.sgd(0.1), {k: initial((96 + (k == "scaled"), 16)) for k in uses}
    zero = zero_of(ZEN, 2, 4)

    def loss(params, ids):
        return sum(jnp.mean(look(params[k], ids) ** 2) for k, (look, _) in uses.items())

    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    with pytest.warns(UserWarning, match="its full gradient is synchronized") as warned:
        state, _ = zero.train_step(loss, tx=tx)(state, zero.put(ids_of(0, 96)))
    texts = [str(w.message) for w in warned if "full gradient" in str(w.message)]
    assert len(texts) == 2
    assert all(any(told in text for text in texts) for _, told in uses.values())
    parts = ids_of(0, 96).reshape(4, -1, 4)
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, parts)
    for k in uses:
        want = 0.1 * np.mean(grads[k], 0)
        assert norm(params[k] - state[0][k] - want) < 1e-12 * norm(want)


@pytest.mark.usefixtures("scopes_in_cache_key")
def test_bytes_are_those_of_the_rows():
    """Of a table of 4 MiB at stage 3, two tokens on a device: gradients and rows."""
    shape, num, lookups = (2**14, 64), 8, 32
    zero, tx = zero_of(sync.zen(0.5, min_size=1), 3), optax.sgd(1e-2)
    make = models.make_of(lambda: {"table": np.zeros(shape)}, tx)

    def loss(params, ids):
        return jnp.mean(shd.lookup(params["table"], ids) ** 2)

    compiled = models.lowered(zero, make, tx, loss, np.zeros(num * lookups, np.int32)).compile()
    found = [c for c in collectives(compiled, branches="cheapest") if c.wire_bytes > 64]
    scopes = ("reduce_scatter", "gather")
    sent = [sum(c.wire_bytes for c in found if re.search(rf"\b{s}\b", c.scope)) for s in scopes]
    slots = room(lookups / 2**14, 2**14 / num, num**2)
    rows, indices = ((num - 1) * slots * 4 * width for width in (64, 1))
    assert sent == [rows + indices] * 2
    assert not any(c.op == "all-reduce" for c in found)
    # No device has memory for the full table.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**14 * 64 * 4 / 2


@pytest.mark.parametrize(("what", "rows"), [("frozen", 4096), ("eval", 4099), ("replicas", 4099)])
def test_no_step_of_stage_3_gathers_the_table(what, rows):
    """Whichever dim is sharded, for training, evaluation, frozen tables and replicas."""
    mesh, replicas = mesh_of(data=8), None
    if what == "replicas":
        mesh, replicas = mesh_of(replicas=2, data=4), "replicas"
    method, tx = sync.zen(0.01), optax.sgd(0.1)
    zero = shd.Zero(mesh, 3, replica_axis=replicas, sync=method)
    params = {"table": np.ones((rows, 16), "f4"), "w": np.ones((64, 64), "f4")}
    state = zero.abstract_state(lambda: (params, tx.init(params)), tx=tx)

    def loss(params, ids):
        return jnp.mean(shd.lookup(params["table"], ids)) + jnp.mean(zero.gather(params["w"]))

    ids = jax.ShapeDtypeStruct((8 * 16,), jnp.int32)
    if what == "eval":
        lowered = zero.eval_step(loss).lower(state, ids)
    else:
        trainable = {"table": what != "frozen", "w": True}
        lowered = zero.train_step(loss, tx=tx, trainable=trainable).lower(state, ids)
    text = lowered.as_text()
    assert not re.search(rf"all_gather.*-> tensor<{rows}x16xf32>", text)
    assert "all_to_all" in text
