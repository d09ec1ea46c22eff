"""Local steps against NumPy-like loops on one device, and the bytes that they send."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan import estimate

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"a": (32, 64), "b": (64,), "c": (64, 32)}
ROWS = 32


def initial():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.3 * rng.normal(size=s)) for k, s in SHAPES.items()}


def loss(params, x):
    hidden = jnp.tanh(x @ params["a"] + params["b"][None])
    return jnp.mean((hidden @ params["c"] - x) ** 2)


def batch_of(step):
    """Rows of different scale: replicas see other losses."""
    x = np.random.default_rng(step + 1).normal(size=(ROWS, 32))
    return x * 2.0 ** (np.arange(ROWS) // 8 - 1)[:, None]


def zero_of(replicas=4, data=2, stage=2, **options):
    devices = jax.devices()[: replicas * data]
    mesh = jax.make_mesh((replicas, data), ("slice", "data"), devices=devices)
    return shd.Zero(mesh, stage, replica_axis="slice", min_shard_size=256, **options)


def trained(local, tx, steps, state=None):
    state = local.init(lambda: (initial(), tx.init(initial())), tx=tx) if state is None else state
    step, metrics = local.train_step(loss, tx=tx), []
    for i in steps:
        state, found = step(state, local.put(batch_of(i)))
        metrics.append(found)
    return state, metrics


def by_hand(tx, outer, every, steps, replicas=4, groups=((0, 1, 2),)):
    """The algorithm of the paper, replica by replica, on one device."""
    names = list(SHAPES)
    theta, own = initial(), [initial() for _ in range(replicas)]
    inner = [tx.init(params) for params in own]
    parts = [{names[i]: theta[names[i]] for i in group} for group in groups]
    outers = [outer.init(part) for part in parts]
    grad = jax.jit(jax.grad(loss))
    for count, i in enumerate(steps, 1):
        for r, rows in enumerate(np.split(batch_of(i), replicas)):
            updates, inner[r] = tx.update(grad(own[r], rows), inner[r], own[r])
            own[r] = optax.apply_updates(own[r], updates)
        for g, part in enumerate(parts):
            if (count + g * every // len(groups)) % every:
                continue
            moved = {k: sum(part[k] - params[k] for params in own) / replicas for k in part}
            updates, outers[g] = outer.update(moved, outers[g], part)
            parts[g] = part = optax.apply_updates(part, updates)
            own = [params | part for params in own]
    return {k: x for part in parts for k, x in part.items()}, own


def close(have, want, tolerance=1e-12):
    for k, x in want.items():
        x = np.asarray(x)
        assert np.linalg.norm(np.asarray(have[k]) - x) < tolerance * np.linalg.norm(x), k


def test_one_local_step_is_the_ordinary_step():
    """With an outer SGD of rate 1 and an inner one with momentum, which is linear in gradients."""
    tx = optax.sgd(0.1, momentum=0.9)
    zero = zero_of()
    state, metrics = trained(shd.LocalSteps(zero, optax.sgd(1.0), every=1), tx, range(20))
    ordinary = zero.init(lambda: (initial(), tx.init(initial())), tx=tx)
    step = zero.train_step(loss, tx=tx)
    for i in range(20):
        ordinary, found = step(ordinary, zero.put(batch_of(i)))
        mean = np.mean([x["loss"] for x in metrics[i]])
        assert mean == pytest.approx(float(found["loss"]), rel=1e-12)
    merged = shd.LocalSteps(zero, every=1).merged(state)
    close(merged[0], ordinary[0])
    close(merged[1][0].trace, ordinary[1][0].trace)


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize(
    ("groups", "stage", "tx", "outer"),
    [
        (1, 1, optax.adam(1e-2), NESTEROV),
        (3, 2, optax.adam(1e-2), NESTEROV),
        (2, 3, CLIPPED, optax.adamw(3e-2)),
    ],
)
def test_diloco_by_hand(groups, stage, tx, outer):
    """Any transformation within and between, 40 steps; groups meet in different steps."""
    local = shd.LocalSteps(zero_of(stage=stage), outer, every=6, groups=groups)
    state, _ = trained(local, tx, range(40))
    split = {1: ((0, 1, 2),), 2: ((0,), (1, 2)), 3: ((0,), (1,), (2,))}[groups]
    want, own = by_hand(tx, outer, 6, range(40), groups=split)
    close(local.merged(state)[0], want)
    for replica, params in zip(state.replicas, own, strict=True):
        close(replica[0], params, 1e-11)
    assert np.any(np.asarray(own[0]["a"]) != np.asarray(own[1]["a"]))


def test_states_are_sharded_within_replicas():
    """At stage 3 all of it, and what all replicas share."""
    state = started(shd.LocalSteps(zero_of(stage=3)), optax.adam(1e-2))
    matrices = [x for x in jax.tree.leaves(state) if np.ndim(x) == 2]
    assert len(matrices) == 4 * 3 * 2 + 2 * 2  # replicas: parameters and moments; anchor and outer
    assert all(2 * x.addressable_shards[0].data.size == x.size for x in matrices)


def test_a_checkpoint_goes_on_exactly(tmp_path):
    """Between synchronizations: replicas differ, and the count says which group is next."""
    tx, method = optax.adam(1e-2), sync.top_k(0.25, min_size=1)

    def make():
        local = shd.LocalSteps(zero_of(sync=method), every=4, groups=2)
        return local, started(local, tx)

    local, state = make()
    state, _ = trained(local, tx, range(5), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    want, _ = trained(local, tx, range(5, 11), state)
    again, like = make()
    with ocp.StandardCheckpointer() as checkpointer:
        read = checkpointer.restore(tmp_path / "state", like)
    have, _ = trained(again, tx, range(5, 11), read)
    for a, b in zip(*(jax.tree.leaves(x) for x in (have, want)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_number_of_replicas_goes_on():
    """With outer momentum, residuals and count; what all replicas share is the same."""
    tx, method = optax.adam(1e-2), sync.top_k(0.25, min_size=1)
    local = shd.LocalSteps(zero_of(sync=method), every=4)
    state, _ = trained(local, tx, range(8))
    fewer = shd.LocalSteps(zero_of(replicas=2, sync=method), every=4)
    one = jax.device_get(local.merged(state))
    shardings = zero_of(replicas=2).shardings(one, tx=tx)
    again = fewer.start(jax.tree.map(jax.device_put, one, shardings), state)
    for a, b in zip(*(jax.tree.leaves(x.outer) for x in (again, state)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*(jax.tree.leaves(x.sync) for x in (again, state)), strict=True):
        by_replica = np.asarray(b).reshape(4, 2, *b.shape[1:]).mean(0)
        np.testing.assert_allclose(np.asarray(a)[:2], by_replica, rtol=1e-12)
    assert again.num_steps == 8
    after, _ = trained(fewer, tx, range(8, 12), again)
    assert np.any(np.asarray(fewer.merged(after)[0]["a"]) != np.asarray(one[0]["a"]))


@pytest.mark.parametrize("method", [None, sync.qsgd(8, min_size=1)])
def test_bytes_between_replicas(method):
    """Of a group, those of an all-reduce of the shards in float64, or of the codes; as planned."""
    local = shd.LocalSteps(zero_of(sync=method), every=4)
    tx = optax.sgd(0.1)
    state = local.init(lambda: (initial(), tx.init(initial())), tx=tx)
    held = 8 * sum(x.addressable_shards[0].data.size for x in state.anchor[0])
    plain = 2 * 3 / 4 * held
    sent = shd.wire_bytes(local.lower_sync(state).compile())
    if method is None:
        assert sent == pytest.approx(plain, rel=1e-12)
        stage = estimate(initial(), tx, local.zero, local_steps=4).stage("2 hybrid")
        assert stage.sent["all-reduce over slice"] == pytest.approx(sent / 4, rel=1e-12)
        assert stage.sync == 2 * held  # the anchor, and the momentum of Nesterov
        ordinary = estimate(initial(), tx, local.zero).stage("2 hybrid")
        assert stage.wire < ordinary.wire
        assert stage.memory > ordinary.memory
    else:
        assert 0.1 * plain < sent < 0.2 * plain


def test_shapes_without_arrays():
    """Those of ``init``, as a restore of a checkpoint needs them."""
    local, tx = shd.LocalSteps(zero_of(), every=2, groups=2), optax.adam(1e-2)
    found = jax.eval_shape(lambda: started(local, tx))
    real = started(local, tx)
    assert jax.tree.structure(found) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(real), strict=True):
        assert (np.shape(a), jnp.result_type(a)) == (np.shape(b), jnp.result_type(b))


def started(local, tx):
    return local.init(lambda: (initial(), tx.init(initial())), tx=tx)


@pytest.mark.parametrize("names", [("slice", "data"), ("data", "slice")])
def test_merged_is_a_state_of_zero_and_shares_no_memory(names):
    """On its mesh, whatever the order and type of its axes; both go on, and donate their own."""
    tx = optax.sgd(0.1)
    sizes = tuple({"slice": 2, "data": 4}[name] for name in names)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * 2)
    zero = shd.Zero(mesh, 2, replica_axis="slice", min_shard_size=256)
    local = shd.LocalSteps(zero, every=2)
    state, _ = trained(local, tx, range(2), started(local, tx))
    merged = local.merged(state)
    kept = jax.device_get(merged[0])
    state, _ = trained(local, tx, range(2, 4), state)
    close(merged[0], kept, 1e-15)
    step = zero.train_step(loss, tx=tx)
    goes_on, _ = step(local.merged(state), zero.put(batch_of(4)))
    close(local.merged(state)[0], jax.device_get(state.replicas[0][0]), 1e-15)
    trained(local, tx, range(5, 7), local.start(goes_on, state))


def test_states_in_few_bits_are_those_of_the_first_replica():
    """The mean of scales would be those of no codes."""
    tx = optax_ext.low_precision_state(optax.adam(1e-2), bits=8, min_size=1)
    local = shd.LocalSteps(zero_of(), every=3)
    state, _ = trained(local, tx, range(2), started(local, tx))
    merged, first, second = (x[1] for x in (local.merged(state), *state.replicas[:2]))
    scales = [jax.tree.leaves(x.inner_state[0].nu["a"].scale)[0] for x in (first, second)]
    assert np.any(np.asarray(scales[0]) != np.asarray(scales[1]))
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_not_trained_is_not_averaged():
    """An outer transformation that decays weights leaves it as it is, and it is not sent."""
    mask = {"a": False, "b": True, "c": True}
    tx, outer = optax.sgd(0.1), optax.adamw(0.1, weight_decay=0.5)
    local = shd.LocalSteps(zero_of(replicas=3), outer, every=1, trainable=mask)
    rows = {"x": batch_of(0)[:24]}
    step = local.train_step(lambda params, x: loss(params, x["x"]), tx=tx)
    state, _ = step(started(local, tx), local.put(rows))
    merged = local.merged(state)[0]
    np.testing.assert_array_equal(merged["a"], initial()["a"])
    assert np.any(np.asarray(merged["c"]) != np.asarray(initial()["c"]))
    assert sorted(x.shape for x in state.anchor[0]) == [SHAPES["b"], SHAPES["c"]]


def test_methods_are_chosen_by_names_of_parameters():
    grad_sync = sync.by_path({"^a$": sync.top_k(0.25, min_size=1)}, default=sync.dense())
    local = shd.LocalSteps(zero_of(sync=grad_sync), every=1)
    tx = optax.sgd(0.1)
    state, _ = trained(local, tx, range(2), started(local, tx))
    held = state.anchor[0][0].addressable_shards[0].data.size
    assert [x.size // 8 for x in jax.tree.leaves(state.sync) if x.ndim > 1] == [held]


def test_a_state_that_is_kept():
    """``donate=False`` is of the synchronization too."""
    local, tx = shd.LocalSteps(zero_of(), every=1), optax.sgd(0.1)
    state, batch = started(local, tx), local.put(batch_of(0))
    step = local.train_step(loss, tx=tx, donate=False)
    once, again = (local.merged(step(state, batch)[0])[0] for _ in range(2))
    close(once, again, 1e-15)


@pytest.mark.parametrize("memory", [None, "optimizer"])
def test_replicas_made_one_by_one_and_memory(memory):
    """A TrainState has the functions of its own tx; state in host memory stays there."""
    zero = zero_of(offload=memory)
    local = shd.LocalSteps(zero, every=1)

    def make():
        return TrainState.create(apply_fn=None, params=initial(), tx=optax.adam(1e-2))

    state, _ = local.train_step(loss)(local.init(make), local.put(batch_of(0)))
    merged = local.merged(state)
    for a, b in zip(*(jax.tree.leaves(x) for x in (merged, state.replicas[0])), strict=True):
        assert a.sharding.memory_kind == b.sharding.memory_kind
    local.train_step(loss)(local.start(merged, state), local.put(batch_of(1)))
    zero.train_step(loss)(merged, zero.put(batch_of(1)))


def called_with(**given):
    local, tx = shd.LocalSteps(zero_of()), optax.sgd(0.1)
    have = {"state": started(local, tx), "batch": local.put(batch_of(0))} | given
    return local.train_step(loss, tx=tx)(**have)


def started_after(groups):
    tx, local = optax.sgd(0.1), shd.LocalSteps(zero_of())
    previous = started(local, tx)
    return shd.LocalSteps(zero_of(), groups=groups).start(local.merged(previous), previous)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shd.LocalSteps(shd.Zero(jax.make_mesh((8,), ("data",)))), "one replica_axis"),
        (lambda: shd.LocalSteps(zero_of(), every=2, groups=3), "groups=3 and every=2"),
        (
            lambda: shd.LocalSteps(zero_of()).put(np.ones((6, 32))),
            "6.* cannot be divided among 4 replicas",
        ),
        (
            lambda: shd.LocalSteps(zero_of()).train_step(loss, model_state=True),
            "the name of its field",
        ),
        (
            lambda: shd.LocalSteps(zero_of()).train_step(loss, trainable={"a": False}),
            "trainable differs",
        ),
        (lambda: called_with(state=None), "the state that init or start of LocalSteps returned"),
        (lambda: called_with(batch=np.ones((4, 32))), "part for each of its 4 replicas"),
        (
            lambda: shd.LocalSteps(zero_of()).start((initial(), ())),
            "'0/a' is not on the devices of its mesh",
        ),
        (
            lambda: started(shd.LocalSteps(zero_of(), trainable=False), optax.sgd(0.1)),
            "none is trained",
        ),
        (lambda: started_after(groups=2), "has 1 groups, and LocalSteps has groups=2"),
        (
            lambda: started(
                shd.LocalSteps(
                    zero_of(sync=sync.by_path({"^a$": sync.dense()})), every=2, groups=2
                ),
                optax.sgd(0.1),
            ),
            "group 1 of 2, which has 'b', 'c' alone.*is the first match of no path",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
