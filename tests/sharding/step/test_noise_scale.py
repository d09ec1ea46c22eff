"""The gradient noise scale through ``Zero``: the same as by hand, on every mesh; and none wrong."""

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
from sharding.plan.program._wire import collectives

from .. import model

BATCH = 48
SHAPES = {"w": (16, 8), "table": (24, 8), "small": (3,), "odd": (5, 7)}


def make_params():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s)) for k, s in SHAPES.items()}


def loss_per_example(params, batch):
    """A gradient of its own for each example, in every array."""
    y = jnp.tanh(batch["x"] @ params["w"]) + params["table"][batch["row"]]
    y = y.sum(axis=1) + jnp.sin(batch["x"][:, :3] @ params["small"])
    return y**2 + (batch["x"][:, :5] @ params["odd"]).sum(axis=1)


def loss_fn(params, batch):
    return loss_per_example(params, batch).mean()


def weighted_loss(params, batch):
    losses = loss_per_example(params, batch) * batch["mask"]
    return losses.sum(), batch["mask"].sum()


def make_batch(step, empty=()):
    """``mask`` is of any size, and 0 in the eighths of the batch that are ``empty``."""
    rng = np.random.default_rng(step)
    mask = rng.uniform(0.1, 3.0, BATCH)
    for i in empty:
        mask[i * BATCH // 8 : (i + 1) * BATCH // 8] = 0
    return {
        "x": rng.normal(size=(BATCH, 16)),
        "row": rng.integers(0, 24, BATCH),
        "mask": mask,
    }


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(kind,), devices=jax.devices()[:n])


def hybrid_mesh():
    return jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)


def tx_of(decay=0.9):
    return optax.chain(optax_ext.gradient_noise_scale(BATCH, decay=decay), optax.sgd(1e-2))


def train(zero, loss, steps=4, tx=None, make=make_batch, **options):
    """The states of the measure after each step, and the parameters before it."""
    tx = tx or tx_of()

    def make_state():
        params = make_params()
        return params, tx.init(params)

    state = zero.init(make_state, tx=tx)
    step = zero.train_step(loss, tx=tx, **options)
    seen = []
    for i in range(steps):
        before = jax.device_get(state[0])
        state, metrics = step(state, zero.put(make(i)))
        assert set(metrics) == {"loss"} | ({"weight"} if options.get("weighted") else set())
        opt_state = getattr(state[1], "inner_state", state[1])
        seen.append((before, jax.device_get(opt_state[0])))
    return seen


def local_batches(batch, devices, microbatches, replicas=None):
    """The batch of each local gradient; of a replica, that of its devices in each micro-batch."""
    parts = np.arange(BATCH).reshape(devices, microbatches, -1)
    if replicas:  # the mesh is (replicas, devices of a replica)
        parts = parts.reshape(replicas, -1, microbatches, parts.shape[-1])
        groups = parts.swapaxes(1, 2).reshape(replicas * microbatches, -1)
    else:
        groups = parts.reshape(devices * microbatches, -1)
    return [jax.tree.map(lambda x, g=g: x[g], batch) for g in groups]


def squared(tree):
    return sum(float((np.asarray(x) ** 2).sum()) for x in jax.tree.leaves(tree))


grad_of_sum = jax.jit(jax.grad(lambda p, b: (loss_per_example(p, b) * b["mask"]).sum()))


def by_hand(seen, devices, microbatches, replicas=None, weighted=False, make=make_batch, decay=0.9):
    """The two averages after each step, with the paper's formulas on the local gradients."""
    found, out = [], []
    for i, (params, _) in enumerate(seen):
        batch = make(i)
        if not weighted:
            batch = batch | {"mask": np.ones(BATCH)}
        batches = local_batches(batch, devices, microbatches, replicas)
        weights = np.array([p["mask"].sum() for p in batches])
        grads = [jax.device_get(grad_of_sum(params, p)) for p in batches]
        full = squared(jax.tree.map(lambda *g: sum(g), *grads)) / weights.sum() ** 2
        used = [(g, w) for g, w in zip(grads, weights, strict=True) if w]
        local = sum(w * squared(jax.tree.map(lambda g, w=w: g / w, g)) for g, w in used)
        local /= weights.sum()
        big, small = BATCH, BATCH / len(used)
        found.append(
            [
                (big * full - small * local) / (big - small),
                (local - full) / (1 / small - 1 / big),
            ]
        )
        powers = decay ** np.arange(len(found))[::-1]
        out.append(powers @ np.array(found) / powers.sum())
    return out


def check(seen, want, rtol=1e-5):
    """To the rounding of a state in float32."""
    for i, ((_, state), (squared_norm, variance)) in enumerate(zip(seen, want, strict=True)):
        assert int(state.count) == i + 1
        np.testing.assert_allclose(state.squared_norm, squared_norm, rtol=rtol)
        np.testing.assert_allclose(state.variance, variance, rtol=rtol)


# --- The same as by hand --------------------------------------------------------------------------


@pytest.mark.slow(keep=4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize(
    ("stage", "devices", "microbatches", "kind"),
    [
        (0, 8, 1, AxisType.Auto),
        (0, 1, 4, AxisType.Auto),
        (1, 4, 2, AxisType.Explicit),
        (2, 8, 1, AxisType.Explicit),
        (2, 8, 3, AxisType.Auto),
        (2, 3, 1, AxisType.Auto),
    ],
)
def test_each_device_and_microbatch_has_a_local_gradient(
    stage, devices, microbatches, kind, weighted
):
    zero = shd.Zero(mesh_of(devices, kind), stage=stage, min_shard_size=20)
    loss = weighted_loss if weighted else loss_fn
    seen = train(zero, loss, weighted=weighted, microbatches=microbatches)
    check(seen, by_hand(seen, devices, microbatches, weighted=weighted))


def stage_3_loss(zero, loss):
    """With arrays gathered where they are used; ``small`` and ``odd`` are unsharded."""

    def run(params, batch):
        return loss(params | zero.gather({k: params[k] for k in ("w", "table")}), batch)

    return run


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize(
    ("devices", "microbatches", "kind"),
    [(8, 2, AxisType.Auto), (8, 3, AxisType.Explicit), (3, 4, AxisType.Auto)],
)
def test_at_stage_3_each_microbatch_has_a_local_gradient(devices, microbatches, kind, weighted):
    zero = shd.Zero(mesh_of(devices, kind), stage=3, min_shard_size=20)
    loss = stage_3_loss(zero, weighted_loss if weighted else loss_fn)
    seen = train(zero, loss, weighted=weighted, microbatches=microbatches)
    want = by_hand(seen, devices, microbatches, replicas=1, weighted=weighted)
    check(seen, want)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stage", "microbatches", "everywhere"),
    [(0, 1, False), (1, 2, True), (2, 1, False), (2, 2, True), (3, 1, False), (3, 2, True)],
)
def test_hybrid(stage, microbatches, everywhere):
    """At stage 3 each replica has a local gradient of each micro-batch."""
    zero = shd.Zero(
        hybrid_mesh(),
        stage=stage,
        replica_axis="replica",
        shard_state_over_replicas=everywhere,
        min_shard_size=20,
    )
    loss = stage_3_loss(zero, loss_fn)
    seen = train(zero, loss, microbatches=microbatches)
    check(seen, by_hand(seen, 8, microbatches, replicas=2 if stage == 3 else None))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [2, 3])
def test_beside_a_model_axis(stage):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, stage=stage, min_shard_size=20)
    loss = stage_3_loss(zero, loss_fn)
    seen = train(zero, loss, microbatches=2)
    check(seen, by_hand(seen, 4, 2, replicas=1 if stage == 3 else None))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("stage", "devices"), [(2, 8), (3, 4)])
def test_local_gradients_without_weight_do_not_count(stage, devices):
    def make(step):
        return make_batch(step, empty=(0, 1, 5))

    zero = shd.Zero(mesh_of(devices), stage=stage, min_shard_size=20)
    loss = stage_3_loss(zero, weighted_loss)
    seen = train(zero, loss, make=make, weighted=True, microbatches=2)
    replicas = 1 if stage == 3 else None
    check(seen, by_hand(seen, devices, 2, replicas, weighted=True, make=make))

    # One local gradient with weight has no information: the averages stay.
    def one(step):
        return make_batch(step, empty=range(1, 8))

    zero = shd.Zero(mesh_of(8), stage=2, min_shard_size=20)
    seen = train(zero, weighted_loss, make=one, weighted=True)
    assert [int(state.count) for _, state in seen] == [0] * len(seen)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("method", ["dense", "zen"])
def test_with_lossless_syncs(stage, method):
    method = {"dense": sync.dense(), "zen": sync.by_path({"table": sync.zen(0.5, min_size=0)})}[
        method
    ]
    zero = shd.Zero(mesh_of(8), stage=stage, min_shard_size=20, sync=method)
    seen = train(zero, loss_fn)
    check(seen, by_hand(seen, 8, 1))


@pytest.mark.usefixtures("x64")
def test_a_lossy_sync_does_not_change_local_gradients():
    """They are compared with the synchronized mean."""
    exact, lossy = (
        train(shd.Zero(mesh_of(8), stage=1, min_shard_size=20, sync=s), loss_fn, steps=1)[0][1]
        for s in (None, sync.top_k(0.1, min_size=0))
    )
    assert abs(lossy.squared_norm - exact.squared_norm) > 0.01 * exact.squared_norm
    # The local norms follow from the two estimates.
    local = [s.squared_norm + s.variance * 8 / BATCH for s in (exact, lossy)]
    np.testing.assert_allclose(local[1], local[0], rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_frozen_parameters_have_no_noise():
    trainable = {"w": True, "table": False, "small": True, "odd": False}
    zero = shd.Zero(mesh_of(8), stage=2, min_shard_size=20)
    seen = train(zero, loss_fn, trainable=trainable)

    def frozen(params, batch):
        stop = jax.lax.stop_gradient
        return loss_fn({k: v if trainable[k] else stop(v) for k, v in params.items()}, batch)

    want = train(shd.Zero(mesh_of(8), stage=0), frozen)
    for (_, have), (_, same) in zip(seen, want, strict=True):
        np.testing.assert_allclose(have, same, rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [0, 2])
def test_a_problem_whose_noise_is_known(stage):
    """A loss with gradient mean + noise: tr(Sigma) / |G|^2 is found, within 5 %."""
    mean = np.linspace(-0.4, 0.9, 40)
    deviation = np.geomspace(0.1, 3.0, 40)
    tx = optax.chain(optax_ext.gradient_noise_scale(BATCH, decay=0.9999), optax.set_to_zero())

    def loss(params, batch):
        return jnp.mean((batch @ params["w"][:, None])[:, 0])

    def make_state():
        params = {"w": jnp.zeros(40)}
        return params, tx.init(params)

    zero = shd.Zero(mesh_of(8), stage=stage, min_shard_size=0)
    state = zero.init(make_state, tx=tx)
    step = zero.train_step(loss, tx=tx, microbatches=2)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        state, metrics = step(state, zero.put(mean + rng.normal(size=(BATCH, 40)) * deviation))
        metrics["loss"].block_until_ready()  # or virtual devices starve each other
    found = optax_ext.noise_scale(state)
    want = (deviation**2).sum() / (mean**2).sum()
    np.testing.assert_allclose(found, want, rtol=0.05)
    assert optax_ext.batch_advice(found, want) == "near"


# --- What it costs, and who gets it ---------------------------------------------------------------


def lowered(zero, tx, loss, **options):
    params = jax.eval_shape(make_params)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    state = (params, jax.eval_shape(tx.init, params))
    types = {"x": ((BATCH, 16), "f4"), "row": ((BATCH,), "i4"), "mask": ((BATCH,), "f4")}
    batch = {k: jax.ShapeDtypeStruct(s, d) for k, (s, d) in types.items()}
    return zero.train_step(loss, tx=tx, **options).lower(state, batch)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_it_costs_one_float_in_the_sum_of_the_loss(stage, microbatches):
    """And one for each array of which devices have shards: the norm of the full gradient."""
    zero = shd.Zero(mesh_of(8), stage=stage, min_shard_size=20)
    plain, requested = (
        [
            c.elements
            for c in collectives(lowered(zero, tx, loss_fn, microbatches=microbatches).compile())
            if c.op == "all-reduce"
        ]
        for tx in (optax.sgd(1e-2), tx_of())
    )
    sharded = 2 if stage else 0
    assert sum(requested) == sum(plain) + 1 + sharded
    assert len(requested) == len(plain)  # on CPUs, which combine them


def test_who_does_not_ask_pays_nothing():
    """Extra arguments alone are no question: the program is the same text."""
    zero = shd.Zero(mesh_of(8), stage=2, min_shard_size=20)

    def tolerant(updates, state, params=None, *, value, **extra_args):
        assert extra_args.keys() <= {"local_squared_norm", "num_pieces"}
        return jax.tree.map(lambda u: -0.01 * value * u, updates), state

    def strict(updates, state, params=None, *, value, local_squared_norm=None, **extra_args):
        return jax.tree.map(lambda u: -0.01 * value * u, updates), state

    texts = [
        lowered(zero, optax.GradientTransformationExtraArgs(optax.init_empty_state, f), loss_fn)
        for f in (tolerant, strict)
    ]
    have, want = (x.as_text() for x in texts)
    assert have == want
    for program in texts:
        assert "local_norm/" not in program.as_text(debug_info=True)
    assert "local_norm/" in lowered(zero, tx_of(), loss_fn).as_text(debug_info=True)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("wrap", ["masked", "finite", "low precision", "injected", "jitted"])
def test_wrapped_transformations_ask_too(wrap):
    noise = optax_ext.gradient_noise_scale(BATCH)
    adam = optax.chain(noise, optax.adam(1e-2))
    inner = optax.with_extra_args_support(adam)
    tx = {
        "masked": optax.masked(adam, True),
        "finite": optax.apply_if_finite(adam, 3),
        "low precision": optax_ext.low_precision_state(adam, min_size=0),
        "injected": optax.inject_hyperparams(
            lambda learning_rate: optax.chain(noise, optax.sgd(learning_rate))
        )(1e-2),
        "jitted": optax.GradientTransformationExtraArgs(
            inner.init, jax.jit(inner.update, static_argnames="num_pieces")
        ),
    }[wrap]
    zero = shd.Zero(mesh_of(8), stage=2, min_shard_size=20)
    state = zero.init(lambda: (make_params(), tx.init(make_params())), tx=tx)
    state, _ = zero.train_step(loss_fn, tx=tx)(state, zero.put(make_batch(0)))
    assert np.isfinite(optax_ext.noise_scale(state))
    # One that passes them on to what does not read them does not require them.
    plain = optax.with_extra_args_support(optax.adam(1e-2))
    passing = optax.GradientTransformationExtraArgs(plain.init, jax.jit(plain.update))
    zero = shd.Zero(mesh_of(1), stage=0)
    state = zero.init(lambda: (make_params(), passing.init(make_params())), tx=passing)
    zero.train_step(loss_fn, tx=passing)(state, zero.put(make_batch(0)))


def test_any_transformation_gets_it():
    """By the name of the argument; nothing is registered."""

    def update(updates, state, params=None, *, local_squared_norm, num_pieces, **extra_args):
        return jax.tree.map(jnp.zeros_like, updates), (local_squared_norm, num_pieces * 1.0)

    def init(params):
        return jnp.zeros(()), jnp.zeros(())

    tx = optax.GradientTransformationExtraArgs(init, update)
    zero = shd.Zero(mesh_of(4), stage=2, min_shard_size=20)
    state = zero.init(lambda: (make_params(), tx.init(make_params())), tx=tx)
    (params, found), _ = zero.train_step(loss_fn, tx=tx)(state, zero.put(make_batch(0)))
    grads = [jax.grad(loss_fn)(params, p) for p in local_batches(make_batch(0), 4, 1)]
    np.testing.assert_allclose(found[0], np.mean([squared(g) for g in grads]), rtol=1e-5)
    assert found[1] == 4


# --- Errors ---------------------------------------------------------------------------------------


def test_one_piece_is_refused():
    tx = tx_of()
    for zero, match in (
        (shd.Zero(mesh_of(1), stage=2), "this is one device with one micro-batch. Use microb"),
        (shd.Zero(mesh_of(8), stage=3), "at stage 3 the backward pass sums gradients over"),
        (shd.Zero(mesh_of(1), stage=3), "this is one device with one micro-batch"),
    ):
        with pytest.raises(ValueError, match=match.replace(".", r"\.")):
            lowered(zero, tx, loss_fn)


def test_rows_that_are_summed_in_the_backward_pass_are_refused():
    method = sync.by_path({"table": sync.zen(0.5, min_size=0)})
    zero = shd.Zero(mesh_of(8), stage=2, min_shard_size=20, sync=method)

    def loss(params, batch):
        y = batch["x"] @ params["w"] + shd.lookup(params["table"], batch["row"])
        return (y**2).mean()

    with pytest.raises(ValueError, match="that of 'table' is synchronized by rows in the backward"):
        lowered(zero, tx_of(), loss)
    lowered(zero, optax.sgd(1e-2), loss)
    # At stage 3 what is compared are micro-batches, after the rows were summed.
    zero = shd.Zero(mesh_of(8), stage=3, min_shard_size=20, sync=method)
    lowered(zero, tx_of(), loss, microbatches=2)


def test_parts_by_hand_say_what_is_missing():
    tx, zero = tx_of(), shd.Zero(mesh_of(8), stage=2)
    state = zero.init(lambda: (make_params(), tx.init(make_params())), tx=tx)
    _, grads = zero.value_and_grad(loss_fn)(state[0], zero.put(make_batch(0)))
    with pytest.raises(ValueError, match="missing: local_squared_norm, num_pieces"):
        zero.apply_gradients(state, grads, tx=tx)
    extra_args = {"local_squared_norm": 1.0, "num_pieces": 8}
    state = zero.apply_gradients(state, grads, tx=tx, extra_args=extra_args)
    assert int(state[1][0].count) == 1


# --- LARS and LAMB under ZeRO ---------------------------------------------------------------------

LAYERWISE = {
    "lars": lambda: optax_ext.lars(1.0, weight_decay=1e-3),
    "lamb": lambda: optax_ext.lamb(1e-3, weight_decay=1e-2),
    "lamb, stacked": lambda: optax_ext.lamb(
        1e-3, stacked=optax_ext.by_path({"mlp": optax_ext.Factoring(batch=(0,))}, default=None)
    ),
}


@functools.cache
def layerwise_alone(name):
    """The state after 10 steps on one device; the caller has set the precision."""
    return model.train_alone(LAYERWISE[name](), jnp.float64, 10)[0]


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("lamb", 1),
        ("lamb", 2),
        ("lamb", 3),
        ("lars", 2),
        ("lamb, stacked", 1),
        ("lamb, stacked", 3),
    ],
)
def test_layerwise_rates_are_those_of_one_device(name, stage):
    """Norms are of full arrays, however they are sharded."""
    tx = LAYERWISE[name]()
    zero = shd.Zero(mesh_of(8), stage=stage, min_shard_size=0)
    state = zero.init(model.make_state(tx, jnp.float64), tx=tx)
    step = zero.train_step(model.make_loss(zero), tx=tx)
    for i in range(10):
        state, _ = step(state, zero.put(model.batch(i)))
    distance, leaf = model.worst_leaf(state, layerwise_alone(name))
    assert distance < 1e-12, leaf
