"""Large batches through ``Zero``: the noise scale as by hand on every mesh, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan.audit._program_collectives import collectives

from .. import model
from .runs import zero_of

ROWS, DECAY, STEPS = 48, 0.9, 3
SHAPES = {"w": (16, 8), "table": (24, 8), "small": (3,), "odd": (5, 7)}
zero_of = functools.partial(zero_of, min_shard_size=40)  # "small" and "odd" are unsharded
x64 = pytest.mark.usefixtures("x64")


def make_params():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s)) for k, s in SHAPES.items()}


def losses_of(params, batch):
    """A gradient of its own for each example, in every array."""
    y = jnp.tanh(batch["x"] @ params["w"]) + params["table"][batch["row"]]
    y = y.sum(axis=1) + jnp.sin(batch["x"][:, :3] @ params["small"])
    return y**2 + (batch["x"][:, :5] @ params["odd"]).sum(axis=1)


def loss_of(zero, weighted=False):
    """With arrays gathered where they are used."""

    def loss_fn(params, batch):
        losses = losses_of(params | zero.gather({k: params[k] for k in ("w", "table")}), batch)
        mask = batch["mask"]
        return ((losses * mask).sum(), mask.sum()) if weighted else losses.mean()

    return loss_fn


def make_batch(step, empty=(), rows=ROWS):
    """``mask`` is of any size, and 0 in the eighths of the batch that are ``empty``."""
    rng = np.random.default_rng(step)
    mask = rng.uniform(0.1, 3.0, rows)
    mask[np.isin(np.arange(rows) * 8 // rows, empty)] = 0
    return {"x": rng.normal(size=(rows, 16)), "row": rng.integers(0, 24, rows), "mask": mask}


def tx_of(rows=ROWS):
    return optax.chain(optax_ext.gradient_noise_scale(rows, decay=DECAY), optax.sgd(1e-2))


def train(zero, weighted=False, empty=(), **options):
    """The parameters before each step, its batch, and the state of the measure after it."""
    tx, params = tx_of(), make_params()
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    step = zero.train_step(loss_of(zero, weighted), tx=tx, weighted=weighted, **options)
    seen = []
    for i in range(STEPS):
        before, batch = jax.device_get(state[0]), make_batch(i, empty)
        state, metrics = step(state, zero.put(batch))
        assert set(metrics) == {"loss", "weight"} - ({"weight"} if not weighted else set())
        opt_state = getattr(state[1], "inner_state", state[1])
        seen.append((before, batch, jax.device_get(opt_state[0])))
    return seen


@jax.jit
def grads_by_example(params, batch):
    def loss(params, example):
        return losses_of(params, jax.tree.map(lambda x: x[None], example))[0]

    return jax.vmap(jax.grad(loss), (None, 0))(params, batch)


def by_hand(seen, of_steps, weighted=False):
    """The two averages after each step, by the paper's formulas on the gradients of its groups."""
    found, out = [], []
    for (params, batch, _), groups in zip(seen, of_steps, strict=True):
        rows = len(batch["mask"])
        mask = batch["mask"] if weighted else np.ones(rows)
        grads = grads_by_example(params, batch)
        grads = np.concatenate([np.reshape(g, (rows, -1)) for g in jax.tree.leaves(grads)], axis=1)
        sums = [mask[group] @ grads[group] for group in groups]
        weights = [mask[group].sum() for group in groups]
        full = np.sum((sum(sums) / sum(weights)) ** 2)
        used = [(g, w) for g, w in zip(sums, weights, strict=True) if w]
        local = sum(np.sum(g**2) / w for g, w in used) / sum(weights)
        big, small = rows, rows / len(used)
        squared_norm = (big * full - small * local) / (big - small)
        found.append([squared_norm, (local - full) / (1 / small - 1 / big)])
        powers = DECAY ** np.arange(len(found))[::-1]
        out.append(powers @ np.array(found) / powers.sum())
    return out


def local_batches(devices, microbatches, replicas=None, rows=ROWS):
    """The examples of each local gradient; of a replica, those of its devices in a micro-batch."""
    shape = replicas or devices, -1, microbatches, rows // devices // microbatches
    parts = np.arange(rows).reshape(shape)
    if replicas:
        return parts.swapaxes(1, 2).reshape(replicas * microbatches, -1)
    return parts.reshape(devices * microbatches, -1)


DENSE, ROWWISE = sync.dense(), sync.by_path({"table": sync.zen(0.5, min_size=0)})
# stage, mesh, kind of axes, micro-batches, empty eighths (None: not weighted), options
CASES = [
    (0, "replicas", AxisType.Auto, 1, (0, 1, 5), {"sync": ROWWISE}),
    (1, "four", AxisType.Explicit, 2, (), {"sync": DENSE}),
    (2, "three", AxisType.Explicit, 1, None, {"sync": ROWWISE}),
    (2, "tensor", AxisType.Auto, 2, None, {}),
    (3, "four", AxisType.Explicit, 2, (0, 2, 5), {}),
    (3, "replicas", AxisType.Auto, 2, None, {"shard_state_over_replicas": True}),
]


@x64
@pytest.mark.parametrize(
    ("stage", "mesh", "kind", "microbatches", "empty", "options"),
    CASES,
    ids=lambda x: "" if isinstance(x, dict) else str(x),
)
def test_the_noise_scale_is_that_by_hand(stage, mesh, kind, microbatches, empty, options):
    """Of local gradients with a weight: of a device, at stage 3 a replica, and a micro-batch."""
    zero, weighted = zero_of(stage, mesh, kind, **options), empty is not None
    seen = train(zero, weighted, empty or (), microbatches=microbatches)
    replicas = zero.num_devices // zero.num_shards if stage == 3 else None
    groups = local_batches(zero.num_devices, microbatches, replicas)
    check_averages(seen, by_hand(seen, [groups] * STEPS, weighted))


def check_averages(seen, want):
    """To the rounding of a state in float32."""
    for i, ((_, _, state), (squared_norm, variance)) in enumerate(zip(seen, want, strict=True)):
        assert int(state.count) == i + 1
        np.testing.assert_allclose(state.squared_norm, squared_norm, rtol=1e-5)
        np.testing.assert_allclose(state.variance, variance, rtol=1e-5)


@x64
def test_batches_that_grow_have_one_program_for_each_size():
    """Micro-batches of 24 rows; each size is measured by a transformation of its own."""
    batches, zero = optax_ext.BatchSchedule({0: 24, 48: 48}), zero_of(2, "three")
    params, seen, compiled = make_params(), [], []
    txs = {n: tx_of(n) for n in batches.sizes.values()}
    state = zero.init(lambda: (params, txs[24].init(params)), tx=txs[24])
    steps = {
        n: zero.train_step(loss_of(zero), tx=tx, microbatches=n // 24) for n, tx in txs.items()
    }

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(len(seen))

    jax.monitoring.register_event_duration_secs_listener(listen)
    for i in range(6):
        before, batch = jax.device_get(state[0]), make_batch(i, rows=batches.size(i))
        state, _ = steps[batches.size(i)](state, zero.put(batch))
        seen.append((before, batch, jax.device_get(state[1][0])))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert set(compiled) == {0, 2}
    groups = [local_batches(3, len(x["mask"]) // 24, rows=len(x["mask"])) for _, x, _ in seen]
    check_averages(seen, by_hand(seen, groups))


def lowered(zero, tx, loss=None, **options):
    make, loss = model.make_of(make_params, tx), loss or loss_of(zero)
    return model.lowered(zero, make, tx, loss, make_batch(0), **options)


@pytest.mark.parametrize(("stage", "microbatches"), [(0, 1), (2, 2)])
def test_it_costs_one_float_in_the_sum_of_the_loss(stage, microbatches):
    """And one for each array of which devices have shards: the norm of the full gradient."""
    plain, requested = (
        [
            c.elements
            for c in collectives(lowered(zero_of(stage), tx, microbatches=microbatches).compile())
            if c.op == "all-reduce"
        ]
        for tx in (optax.sgd(1e-2), tx_of())
    )
    assert sum(requested) == sum(plain) + 1 + (2 if stage else 0)
    assert len(requested) == len(plain)  # on CPUs, which combine them


def test_who_does_not_ask_pays_nothing():
    """Extra arguments alone are no question; a wrapper passes the question on."""

    def asks(tx, zero=None):
        return "local_norm/" in lowered(zero or zero_of(2), tx).as_text(debug_info=True)

    def tolerant(updates, state, params=None, *, value, **extra_args):
        assert extra_args.keys() <= {"local_squared_norm", "num_pieces"}
        return jax.tree.map(lambda u: -0.01 * value * u, updates), state

    assert not asks(optax.GradientTransformationExtraArgs(optax.init_empty_state, tolerant))
    # One that passes them on to what does not read them does not require them.
    plain = optax.with_extra_args_support(optax.adam(1e-2))
    passing = optax.GradientTransformationExtraArgs(plain.init, jax.jit(plain.update))
    assert not asks(passing, zero_of(0, "one"))
    noise = optax_ext.gradient_noise_scale(ROWS)
    assert asks(optax.masked(optax.chain(noise, optax.adam(1e-2)), True))
    assert asks(optax.inject_hyperparams(lambda rate: optax.chain(noise, optax.sgd(rate)))(1e-2))


def test_one_local_gradient_is_refused():
    with pytest.raises(ValueError, match=r"this is one device with one micro-batch\. Use microb"):
        lowered(zero_of(2, "one"), tx_of())
    with pytest.raises(ValueError, match="at stage 3 the backward pass sums gradients over"):
        lowered(zero_of(3), tx_of())


def test_rows_that_are_summed_in_the_backward_pass_are_refused():
    def loss(params, batch):
        y = batch["x"] @ params["w"] + shd.lookup(params["table"], batch["row"])
        return (y**2).mean()

    zero = zero_of(2, sync=ROWWISE)
    with pytest.raises(ValueError, match="that of 'table' is synchronized by rows in the backward"):
        lowered(zero, tx_of(), loss)
    lowered(zero, optax.sgd(1e-2), loss)
    # At stage 3 what is compared are micro-batches, after the rows were summed.
    lowered(zero_of(3, sync=ROWWISE), tx_of(), loss, microbatches=2)
