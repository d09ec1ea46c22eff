"""What users call: losses of every kind, both kinds of state, batches, errors."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

KINDS = [AxisType.Auto, AxisType.Explicit]
TX = optax.sgd(0.1)


def mesh_of(n=4, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(kind,), devices=jax.devices()[:n])


def zero_of(n=4, stage=2, kind=AxisType.Auto, **kwargs):
    return shd.Zero(mesh_of(n, kind), stage=stage, **{"min_shard_size": 0} | kwargs)


def make_pair(tx=TX):
    params = {"w": jnp.arange(24.0).reshape(8, 3) / 10, "b": jnp.ones(3)}
    return params, tx.init(params)


def batch(rows=16):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=(rows, 3)).astype(np.float32),
        "mask": rng.integers(0, 2, (rows, 3)).astype(np.float32),
    }


def errors(params, batch):
    return (batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2


def mean_loss(params, batch):
    return errors(params, batch).mean()


def masked_loss(params, batch):
    return (errors(params, batch) * batch["mask"]).sum(), batch["mask"].sum()


class Net(nn.Module):
    """A Flax model whose first kernel carries partition metadata."""

    partitioned: bool = False

    @nn.compact
    def __call__(self, x):
        kernel = nn.initializers.lecun_normal()
        if self.partitioned:
            kernel = nn.with_partitioning(kernel, (None, "model"))
        x = nn.relu(nn.Dense(32, kernel_init=kernel)(x))
        return nn.Dense(3)(x)


def make_train_state(key, model=None, tx=None):
    model = model or Net()
    params = model.init(key, jnp.zeros((1, 8)))["params"]
    return TrainState.create(
        apply_fn=model.apply, params=params, tx=tx or optax_ext.came(1e-3, weight_decay=0.1)
    )


def net_loss(params, batch):
    return ((Net().apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


# --- Losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux_scalars_are_averaged_and_arrays_concatenated(microbatches, kind):
    def loss_fn(params, batch):
        error = errors(params, batch)
        aux = {"max": error.max(), "count": jnp.asarray(3, jnp.int32), "rows": error.sum(1)}
        return error.mean(), aux

    zero = zero_of(kind=kind)
    state = zero.init(make_pair, tx=TX)
    step = zero.train_step(loss_fn, tx=TX, has_aux=True, microbatches=microbatches, donate=False)
    _, metrics = step(state, zero.put(batch()))
    error = np.asarray(errors(make_pair()[0], batch()))
    parts = error.reshape(4 * microbatches, -1)
    np.testing.assert_allclose(metrics["aux"]["max"], parts.max(1).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["aux"]["count"], 3)
    np.testing.assert_allclose(metrics["aux"]["rows"], error.sum(1), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], error.mean(), rtol=1e-6)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_weighted_losses_are_divided_once(stage, microbatches, kind):
    """Devices with few tokens must not weigh as much as devices with many."""
    uneven = batch()
    uneven["mask"][:10] = 0  # the first devices have no token at all
    params, _ = make_pair()

    def full_loss(params):
        total, weight = masked_loss(params, uneven)
        return total / weight

    loss, grads = jax.value_and_grad(full_loss)(params)
    zero = zero_of(stage=stage, kind=kind)
    state = zero.init(make_pair, tx=TX)
    loss_fn = zero.gathered(masked_loss)
    step = zero.train_step(loss_fn, tx=TX, weighted=True, microbatches=microbatches)
    (new, _), metrics = step(state, zero.put(uneven))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert metrics["weight"] == uneven["mask"].sum()
    for name in params:
        np.testing.assert_allclose(new[name], params[name] - 0.1 * grads[name], rtol=1e-5)


def test_a_weight_of_zero_changes_nothing():
    empty = batch()
    empty["mask"][:] = 0
    zero = zero_of()
    state = zero.init(make_pair, tx=TX)
    (new, _), metrics = zero.train_step(masked_loss, tx=TX, weighted=True)(state, zero.put(empty))
    assert metrics["loss"] == 0
    np.testing.assert_array_equal(new["w"], make_pair()[0]["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_keys_differ_by_step_device_and_micro_batch(kind):
    def loss_fn(params, batch, key):
        return params["b"].sum(), jax.random.uniform(key, (batch["x"].shape[0] // 2, 1))

    zero = zero_of(kind=kind)

    def make(key):
        return make_train_state(key, tx=optax.sgd(0.0))

    state = zero.init(make, jax.random.key(0))
    draws = []

    def with_bias(params, batch, key):
        return loss_fn({"b": params["Dense_0"]["bias"]}, batch, key)

    step = zero.train_step(with_bias, has_aux=True, rngs=True, microbatches=2)
    for _ in range(2):
        state, metrics = step(state, zero.put(batch(16)))
        draws.append(np.asarray(metrics["aux"]).ravel())
    drawn = np.concatenate(draws)
    assert drawn.size == 2 * 4 * 2 * 1
    assert np.unique(drawn).size == drawn.size
    # Another run draws the same, another key draws others.
    again = zero.init(make, jax.random.key(0))
    again, metrics = step(again, zero.put(batch(16)))
    np.testing.assert_array_equal(metrics["aux"].ravel(), draws[0])
    _, metrics = step(again, zero.put(batch(16)), jax.random.key(7))
    assert not np.isin(np.asarray(metrics["aux"]), drawn).any()


def test_a_pair_needs_a_key():
    zero = zero_of()
    step = zero.train_step(lambda p, b, k: p["b"].sum(), tx=TX, rngs=True, donate=False)
    state = zero.init(make_pair, tx=TX)
    with pytest.raises(ValueError, match="needs a new key in each call"):
        step(state, zero.put(batch()))
    step(state, zero.put(batch()), jax.random.key(0))


def test_the_transformation_receives_the_loss():
    seen = {}

    def update(updates, state, params=None, *, value, **extra_args):
        seen["value"] = value
        return jax.tree.map(lambda u: -value * jnp.ones_like(u), updates), state

    tx = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    zero = zero_of()
    state = zero.init(lambda: make_pair(tx), tx=tx)
    (new, _), metrics = zero.train_step(mean_loss, tx=tx)(state, zero.put(batch()))
    assert seen
    np.testing.assert_allclose(new["b"], 1 - metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16_parameters_keep_their_dtypes(stage, microbatches):
    """And the accumulator is wider: a sum of bfloat16 would lose the small parts."""
    tx = optax_ext.came(1e-3)

    def make():
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_pair()[0])
        return params, tx.init(params)

    zero = zero_of(stage=stage)
    state = zero.init(make, tx=tx)
    types = jax.tree.map(jax.typeof, state)
    state, metrics = zero.train_step(mean_loss, tx=tx, microbatches=microbatches)(
        state, zero.put(batch())
    )
    assert jax.tree.map(jax.typeof, state) == types
    assert state[1][0].mu["w"].dtype == jnp.float32
    assert metrics["loss"].dtype == jnp.float32


# --- States -----------------------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_flax_train_state(stage, kind):
    """The step is that of ``TrainState.apply_gradients``, and the step count goes up."""
    expected = make_train_state(jax.random.key(0))
    for _ in range(3):
        expected = expected.apply_gradients(grads=jax.grad(net_loss)(expected.params, batch()))
    zero = zero_of(stage=stage, kind=kind)
    state = zero.init(make_train_state, jax.random.key(0))
    step = zero.train_step(net_loss)
    for _ in range(3):
        state, _ = step(state, zero.put(batch()))
    assert state.step == 3
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_flax_metadata_places_parameters():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, min_shard_size=0)
    model = Net(partitioned=True)
    tx = optax.adamw(1e-3)
    state = zero.init(lambda key: make_train_state(key, model, tx), jax.random.key(0))
    kernel = state.params["Dense_0"]["kernel"].value
    assert kernel.sharding.spec == P(None, "model")
    moment = state.opt_state[0].mu["Dense_0"]["kernel"].value
    assert moment.sharding.spec == P("data", "model")

    def loss_fn(params, batch):
        return ((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

    step = zero.train_step(loss_fn)
    state, first = step(state, zero.put(batch()))
    state, second = step(state, zero.put(batch()))
    assert second["loss"] < first["loss"]
    assert state.params["Dense_0"]["kernel"].value.sharding.spec == P(None, "model")


def test_values_do_not_depend_on_the_mesh():
    states = [
        zero_of(n).init(make_train_state, jax.random.key(3)).params["Dense_0"]["kernel"]
        for n in (1, 4, 8)
    ]
    for other in states[1:]:
        np.testing.assert_array_equal(states[0], other)


def test_further_fields_and_none_leaves_pass_through():
    class WithStats(TrainState):
        batch_stats: dict

    def make(key):
        state = make_train_state(key, tx=optax.masked(TX, {"Dense_0": True, "Dense_1": False}))
        return WithStats(
            step=0,
            apply_fn=state.apply_fn,
            params=state.params,
            tx=state.tx,
            opt_state=state.opt_state,
            batch_stats={"mean": jnp.arange(3.0), "var": None},
        )

    zero = zero_of()
    state = zero.init(make, jax.random.key(0))
    state, _ = zero.train_step(net_loss)(state, zero.put(batch()))
    np.testing.assert_array_equal(state.batch_stats["mean"], np.arange(3.0))

    @jax.jit
    def step(state, batch):
        _, grads = zero.value_and_grad(net_loss)(state.params, batch)
        return zero.apply_gradients(state, grads, batch_stats={"mean": jnp.ones(3), "var": None})

    state = step(state, zero.put(batch()))
    assert state.step == 2
    np.testing.assert_array_equal(state.batch_stats["mean"], np.ones(3))


# --- The parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_grad_returns_reduced_shards(kind):
    zero = zero_of(kind=kind)
    params, _ = zero.init(make_pair, tx=TX)
    loss_fn = lambda p, b: (mean_loss(p, b), errors(p, b).sum(1))  # noqa: E731
    run = jax.jit(zero.value_and_grad(loss_fn, has_aux=True))
    (loss, aux), grads = run(params, zero.put(batch()))
    expected, expected_grads = jax.value_and_grad(mean_loss)(make_pair()[0], batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], expected_grads["w"], rtol=1e-5)
    assert grads["w"].addressable_shards[0].data.shape == (2, 3)
    assert aux.shape == (16,)


@pytest.mark.parametrize("kind", KINDS)
def test_eval_step(kind):
    zero = zero_of(kind=kind)
    state = zero.init(make_pair, tx=TX)
    evaluate = zero.eval_step(lambda p, b: {"loss": mean_loss(p, b), "rows": errors(p, b)})
    for _ in range(2):  # the state is not donated
        out = evaluate(state, zero.put(batch()))
    np.testing.assert_allclose(out["loss"], mean_loss(make_pair()[0], batch()), rtol=1e-6)
    np.testing.assert_allclose(out["rows"], errors(make_pair()[0], batch()), rtol=1e-5)


def test_put_lays_the_batch_and_replicates_scalars():
    placed = zero_of().put({"x": np.arange(8), "temperature": np.float32(0.5)})
    assert placed["x"].sharding.spec == P("data")
    assert placed["temperature"].sharding.spec == P()
    assert placed["x"].addressable_shards[1].data.tolist() == [2, 3]


def test_shardings_are_restore_targets():
    """A state moved to the host and back through ``shardings`` trains on, equal."""
    zero = zero_of()
    state = zero.init(make_train_state, jax.random.key(0))
    abstract = jax.eval_shape(make_train_state, jax.random.key(0))
    host = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, jax.tree.leaves(state))))
    restored = jax.tree.unflatten(jax.tree.structure(state), host)
    restored = jax.device_put(restored, zero.shardings(abstract))
    step = zero.train_step(net_loss, donate=False)
    a, _ = step(state, zero.put(batch()))
    b, _ = step(restored, zero.put(batch()))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_describe_counts_bytes_and_names_what_stays_whole():
    zero = zero_of(min_shard_size=4)
    tx = optax.adamw(1e-3)
    abstract = jax.eval_shape(lambda: make_pair(tx))
    found = zero.describe(abstract, tx=tx)
    unsharded, sharded = (24 + 3) * 4, (24 // 4 + 3) * 4
    assert found.bytes_per_device == {
        "params": unsharded,
        "grads": sharded,
        "opt_state": 2 * sharded + 4,
    }
    assert {row.path: row.note for row in found.fallbacks} == {
        "b": "unsharded: 3 elements, min_shard_size is 4"
    }
    text = str(found)
    assert "ZeRO stage 2 over data on the mesh (data=4)" in text
    assert "b (1 array, 12 bytes of gradients): 3 elements, min_shard_size is 4" in text
    assert "unsharded: 3 elements, min_shard_size is 4" in found.table()
    # What it says is what the arrays hold.
    state = zero.init(lambda: make_pair(tx), tx=tx)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    sizes = found.bytes_per_device
    assert held == sizes["params"] + sizes["opt_state"]
    stage_0 = zero_of(stage=0).describe(abstract, tx=tx)
    assert stage_0.bytes_per_device["opt_state"] == 2 * unsharded + 4
    assert not stage_0.fallbacks


def layered(tx, num=12):
    layer = {"kernel": jnp.ones((64, 32)), "scale": jnp.ones(32)}
    params = {f"layer_{i}": layer for i in range(num)} | {"head": {"kernel": jnp.ones((64, 32))}}
    return params, tx.init(params)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_describe_groups_like_parameters(stage):
    """One line for the kernels of all layers; its numbers are sums of the rows."""
    zero, tx = zero_of(stage=stage, min_shard_size=100), optax_ext.came(1e-3)
    found = zero.describe(jax.eval_shape(lambda: layered(tx)), tx=tx)
    lines = {line.split()[0]: line.split() for line in str(found).splitlines()}
    kernels = [row for row in found.rows if re.search(r"layer_\d+/kernel", row.path)]
    assert len(kernels) > 24
    sums = dict.fromkeys(found.bytes_per_device, 0)
    for row in kernels:
        sums[row.part] += row.bytes_per_device
    assert lines["layer_*/kernel"][1] == "12"
    assert lines["layer_*/kernel"][-3:] == [f"{size:,}" for size in sums.values()]
    assert lines["head/kernel"][1] == "1"  # alike but for its name
    assert ("('data',)" in lines["head/kernel"]) == (stage > 0)
    assert len(str(found).splitlines()) < 14 < len(found.table().splitlines())
    total = found.bytes_per_device
    assert lines["total"][1] == f"{sum(total.values()):,}"
    assert [lines[part][1] for part in total] == [f"{size:,}" for size in total.values()]
    params, _ = jax.eval_shape(lambda: layered(tx))
    unsharded = sum(4 * x.size for x in jax.tree.leaves(params))
    if stage >= 2:
        assert lines["grads"][2:] == ["of", f"{unsharded:,}", "unsharded"]
    assert ("layer_*/scale (12 arrays, " in str(found)) == (stage > 0)


def test_parameters_of_stage_3_have_reasons():
    def notes(stage):
        zero, tx = zero_of(stage=stage, min_shard_size=100), optax.sgd(0.1)
        found = zero.describe(jax.eval_shape(lambda: layered(tx, 1)), tx=tx)
        rows = {row.path: row.note for row in found.rows if row.part == "params"}
        assert [row.path for row in found.fallbacks] == ["layer_0/scale"]  # once
        return rows

    kernels = {"head/kernel": "", "layer_0/kernel": ""}
    assert notes(3) == kernels | {"layer_0/scale": "unsharded: 32 elements, min_shard_size is 100"}
    assert notes(2) == kernels | {"layer_0/scale": ""}  # none is to be sharded


def test_whose_state_an_array_is():
    """By the longest path that its own ends with; lists and chains are distinguished."""

    def make():
        params = [jnp.ones((64, 32)), {"0": jnp.ones((64, 32)), "mu": jnp.ones((8, 8))}]
        tx = optax.adam(1e-3)
        return params, tx.init(params)

    zero = zero_of(min_shard_size=0)
    found = zero.describe(jax.eval_shape(make), tx=optax.adam(1e-3))
    lines = {line.split()[0]: line.split() for line in str(found).splitlines()}
    assert lines["0"][-1] == f"{2 * 4 * 64 * 32 // 4:,}"
    assert lines["1/0"][-1] == f"{2 * 4 * 64 * 32 // 4:,}"
    assert lines["1/mu"][-1] == f"{2 * 4 * 8 * 8 // 4:,}"
    assert lines["opt_state/0/count"][-1] == "4"


def test_another_dim_is_taken_where_the_longest_does_not_divide():
    def make():
        params = {"w": jnp.zeros((9, 8, 4)), "odd": jnp.zeros((9, 7))}
        return params, TX.init(params)

    found = zero_of(4).describe(jax.eval_shape(make), tx=TX)
    grads = {row.path: row for row in found.rows if row.part == "grads"}
    assert grads["w"].spec == P(None, "data")
    assert grads["odd"].note == "unsharded: no free dim of (9, 7) divides by 4"


# --- Errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"axis": "dp"}, r"axis 'dp' is not in the mesh \('data',\)"),
        ({"axis": ()}, "axis must name at least one"),
        ({"min_shard_size": -1}, "min_shard_size must not be negative, got -1"),
        ({"axis": ("data", "data")}, "axis 'data' is named twice"),
        ({"replica_axis": "data"}, "axis 'data' is named twice: axis='data', replica_axis='data'"),
        ({"replica_axis": "slice"}, r"axis 'slice' is not in the mesh \('data',\)"),
        ({"shard_state_over_replicas": True}, "needs a replica_axis and stage 1, 2 or 3"),
        ({"scatter": "tree"}, "scatter must be 'auto' or one of native, axes, ring, all_to_all"),
    ],
)
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        shd.Zero(mesh_of(), **kwargs)


def test_bad_microbatches():
    with pytest.raises(ValueError, match="microbatches must be at least 1, got 0"):
        zero_of().train_step(mean_loss, tx=TX, microbatches=0)


def test_bad_states():
    zero = zero_of()
    step = zero.train_step(mean_loss, tx=TX)
    with pytest.raises(ValueError, match=r"'0/b' has the placement .* Make the state with"):
        step(make_pair(), zero.put(batch()))
    with pytest.raises(ValueError, match="needs the argument tx"):
        zero.train_step(mean_loss)(make_pair(), batch())
    with pytest.raises(ValueError, match=r"must be a Flax TrainState or a pair .* got dict"):
        zero.specs({"params": 1})
    with pytest.raises(ValueError, match=r"not that of tx\.init"):
        zero.specs(make_pair(optax.adam(1.0)), tx=TX)
    with pytest.raises(ValueError, match="is sharded over axis 'data' already"):
        zero.specs(make_pair(), tx=TX, param_specs={"w": P("data"), "b": P()})


def test_a_state_of_another_stage_is_refused():
    """Not silently moved: that would hide a gather in every step."""
    tx = optax.adamw(1e-3)
    state = zero_of(stage=0).init(lambda: make_pair(tx), tx=tx)
    zero = zero_of(stage=2)
    with pytest.raises(ValueError, match=r"mu/w' has the placement"):
        zero.train_step(mean_loss, tx=tx)(state, zero.put(batch()))


def test_bad_batches():
    zero = zero_of()
    state = zero.init(make_pair, tx=TX)
    step = zero.train_step(mean_loss, tx=TX, microbatches=2)
    with pytest.raises(ValueError, match=r"'mask' of shape \(12, 3\).* 4 devices times 2 micro"):
        step(state, batch(12))
    with pytest.raises(ValueError, match=r"'mask' of shape \(6, 3\).* 4 devices"):
        zero.put(batch(6))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"w": P("dp"), "b": P()}, r"P\('dp',\) for 'w': axis 'dp' is not in the mesh"),
        ({"w": P(None, None, "data"), "b": P()}, "for 'w' has more entries than its shape"),
        ({"v": P()}, "param_specs does not match the parameters"),
        ({"w": P("data", "data"), "b": P()}, "for 'w' names axis 'data' twice"),
    ],
)
def test_bad_specs(specs, message):
    with pytest.raises(ValueError, match=message):
        zero_of(stage=3).specs(make_pair(), tx=TX, param_specs=specs)


def test_a_spec_that_shards_a_dim_over_the_users_axes_as_well():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    zero = shd.Zero(mesh, stage=3, min_shard_size=0)
    with pytest.raises(ValueError, match="along one dim that no other axis shards"):
        zero.specs(make_pair(), tx=TX, param_specs={"w": P(("data", "model")), "b": P()})


def test_a_spec_may_choose_the_dim_of_stage_3():
    make = lambda: ({"w": jnp.ones((16, 8))}, TX.init({"w": jnp.ones((16, 8))}))  # noqa: E731
    zero = zero_of(stage=3)
    assert zero.specs(jax.eval_shape(make), tx=TX)[0]["w"] == P("data")
    state = zero.init(make, tx=TX, param_specs={"w": P(None, "data")})
    step = zero.train_step(lambda p, x: jnp.mean(zero.gather(p)["w"]) * x.mean(), tx=TX)
    state, _ = step(state, zero.put(np.ones(8, np.float32)))
    assert state[0]["w"].sharding.spec == P(None, "data")


def test_the_last_dim_is_cut_into_multiples_of_256_or_another_is():
    shapes = {
        "near": (256, 512),
        "wide": (256, 2048),
        "uneven": (256, 3072),  # shards of 384
        "short": (12, 64, 768),
        "stack": (8, 512),
        "only": (7, 512),
    }
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    specs = zero_of(8, stage=3).specs((params, TX.init(params)), tx=TX)[0]
    assert specs == {
        "near": P("data"),
        "wide": P(None, "data"),
        "uneven": P("data"),
        "short": P(None, "data"),
        "stack": P(None, "data"),
        "only": P(None, "data"),
    }


def test_gather_outside_of_the_loss():
    params = {"w": jnp.ones((8, 16))}
    zero = zero_of(stage=3)
    for call in (zero.gather, jax.jit(zero.gather)):
        with pytest.raises(ValueError, match=r"called outside, on .* For unsharded parameters"):
            call(params)
    # A gathered function is itself there; and below stage 3 there is nothing to gather.
    assert zero.gathered(lambda p: p["w"].shape)(params) == (8, 16)
    assert zero_of(stage=2).gather(params)["w"].shape == (8, 16)


def test_a_class_that_cannot_be_gathered():
    with pytest.raises(ValueError, match=r"got <class 'dict'>.* wrap the method"):
        zero_of(stage=3).gathered(dict)


def test_a_parameter_sharded_along_the_dim_that_a_scan_slices_off():
    zero = zero_of(stage=3)
    block = zero.gathered(lambda p, x: x * p[None])

    def loss_fn(params, x):
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, params["w"])[0].mean()

    def make():
        params = {"w": jnp.ones((8, 3))}
        return params, TX.init(params)

    state = zero.init(make, tx=TX)
    with pytest.raises(ValueError, match="sharded along a dim that a loop over layers slices off"):
        zero.train_step(loss_fn, tx=TX)(state, zero.put(np.ones((8, 3), np.float32)))


def test_full_params_of_what_is_no_state():
    with pytest.raises(ValueError, match=r"must be a Flax TrainState or a pair .* got dict"):
        zero_of().full_params({"w": jnp.ones(3)})
