"""What users call: losses of every kind, both kinds of state, placement and its description."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

from ..tiers import slow
from . import model
from .model import mean_loss, regression_batch, residual

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TX = optax.sgd(0.1)
PARAMS = {"w": np.arange(24.0, dtype=np.float32).reshape(8, 3) / 10, "b": np.ones(3, np.float32)}


def zero_of(n=4, **options):
    return model.zero_on(n, **options)


def make_pair(tx=TX):
    return model.make_of(lambda: PARAMS, tx)()


def batch():
    mask = np.random.default_rng(1).integers(0, 2, (16, 3))
    return regression_batch(3) | {"mask": mask.astype(np.float32)}


def errors(params, batch):
    return residual(params, batch) ** 2


class WithStats(TrainState):
    batch_stats: dict


# --- Losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "kind"), [(1, EXPLICIT), (2, AUTO)])
def test_aux_scalars_are_averaged_and_arrays_concatenated(microbatches, kind):
    def loss_fn(params, batch):
        error = errors(params, batch)
        aux = {"max": error.max(), "count": jnp.asarray(3, jnp.int32), "rows": error.sum(1)}
        return error.mean(), aux

    zero = zero_of(kind=kind)
    step = zero.train_step(loss_fn, tx=TX, has_aux=True, microbatches=microbatches)
    _, metrics = step(zero.init(make_pair, tx=TX), zero.put(batch()))
    error = errors(PARAMS, batch())
    parts = error.reshape(4, microbatches, -1)  # micro-batches have rows of every device
    np.testing.assert_allclose(metrics["aux"]["max"], parts.max((0, 2)).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["aux"]["count"], 3)
    np.testing.assert_allclose(metrics["aux"]["rows"], error.sum(1), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], error.mean(), rtol=1e-6)


def test_weighted_losses_are_divided_once():
    """Devices with few tokens must not weigh as much as devices with many."""

    def masked_loss(params, batch):
        return (errors(params, batch) * batch["mask"]).sum(), batch["mask"].sum()

    uneven = batch()
    uneven["mask"][:10] = 0  # the first devices have no token at all
    mask = uneven["mask"]
    shares = residual(PARAMS, uneven) * mask / mask.sum()
    grads = {"w": 2 * uneven["x"].T @ shares, "b": 2 * shares.sum(0)}
    zero = zero_of(kind=EXPLICIT)
    step = zero.train_step(masked_loss, tx=TX, weighted=True, microbatches=4)
    state, metrics = step(zero.init(make_pair, tx=TX), zero.put(uneven))
    loss = (errors(PARAMS, uneven) * mask).sum() / mask.sum()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert metrics["weight"] == mask.sum()
    for name in PARAMS:
        np.testing.assert_allclose(state[0][name], PARAMS[name] - 0.1 * grads[name], rtol=1e-5)
    # A weight of zero changes nothing.
    before = jax.device_get(state[0])
    state, metrics = step(state, zero.put(uneven | {"mask": np.zeros_like(mask)}))
    assert metrics["loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state[0]), before)


def test_the_transformation_receives_the_loss():
    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda u: -value * jnp.ones_like(u), updates), state

    tx = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    zero = zero_of()
    state = zero.init(lambda: make_pair(tx), tx=tx)
    (new, _), metrics = zero.train_step(mean_loss, tx=tx)(state, zero.put(batch()))
    np.testing.assert_allclose(new["b"], 1 - metrics["loss"], rtol=1e-6)


def test_bfloat16_parameters_keep_their_dtypes():
    """And sums are wider: of losses and gradients of micro-batches, and the norm."""
    tx, zero = optax_ext.came(1e-3), zero_of()
    make = model.make_of(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS), tx)
    state = zero.init(make, tx=tx)
    types = jax.tree.map(jax.typeof, state)
    step = zero.train_step(mean_loss, tx=tx, microbatches=4, grad_norm=True)
    state, metrics = step(state, zero.put(batch()))
    assert jax.tree.map(jax.typeof, state) == types
    assert state[1][0].mu["w"].dtype == jnp.float32
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32


# --- States, and the parts of a step --------------------------------------------------------------


def test_flax_train_state():
    """With a further field, leaves that are None, and state of one parameter alone."""
    tx = optax.masked(optax.adamw(1e-3), {"w": True, "b": False})

    def make():
        stats = {"mean": jnp.arange(3.0), "var": None}
        params = jax.tree.map(jnp.array, PARAMS)
        return WithStats.create(apply_fn=None, params=params, tx=tx, batch_stats=stats)

    @jax.jit
    def alone(state, batch):
        return state.apply_gradients(grads=jax.grad(mean_loss)(state.params, batch))

    @jax.jit
    def own_step(state, batch):
        _, grads = zero.value_and_grad(mean_loss)(state.params, batch)
        return zero.apply_gradients(state, grads, batch_stats={"mean": jnp.ones(3), "var": None})

    zero = zero_of(stage=1, kind=EXPLICIT)
    state = zero.init(make)
    expected, step = jax.device_get(state), zero.train_step(mean_loss)
    state, expected = step(state, zero.put(batch()))[0], alone(expected, batch())
    np.testing.assert_array_equal(state.batch_stats["mean"], np.arange(3.0))
    state, expected = own_step(state, zero.put(batch())), alone(expected, batch())
    assert state.step == 2
    np.testing.assert_array_equal(state.batch_stats["mean"], np.ones(3))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_value_and_grad_returns_reduced_shards_and_eval_step_all_rows():
    zero = zero_of(kind=EXPLICIT)
    state = zero.init(make_pair, tx=TX)
    loss_fn = lambda p, b: (mean_loss(p, b), errors(p, b).sum(1))  # noqa: E731
    run = jax.jit(zero.value_and_grad(loss_fn, has_aux=True))
    (loss, aux), grads = run(state[0], zero.put(batch()))
    error = errors(PARAMS, batch())
    np.testing.assert_allclose(loss, error.mean(), rtol=1e-6)
    np.testing.assert_allclose(aux, error.sum(1), rtol=1e-5)
    wanted = 2 * batch()["x"].T @ residual(PARAMS, batch()) / error.size
    np.testing.assert_allclose(grads["w"], wanted, rtol=1e-5)
    assert grads["w"].addressable_shards[0].data.shape == (2, 3)
    evaluate = zero.eval_step(lambda p, b: {"loss": mean_loss(p, b), "rows": errors(p, b)})
    for _ in range(2):  # the state is not donated
        out = evaluate(state, zero.put(batch()))
    np.testing.assert_allclose(out["loss"], error.mean(), rtol=1e-6)
    np.testing.assert_allclose(out["rows"], error, rtol=1e-5)


def test_put_shards_the_batch_and_replicates_scalars():
    placed = zero_of().put({"x": np.arange(8), "temperature": np.float32(0.5), "none": None})
    assert placed["x"].sharding.spec == P("data")
    assert placed["temperature"].sharding.spec == P()
    assert placed["x"].addressable_shards[1].data.tolist() == [2, 3]


def test_replicas_have_memory_of_their_own():
    """A step that donated what it shares with another argument would end the process."""
    zero = zero_of()
    one = zero.replicate(np.ones((8, 3), np.float32))
    other = zero.replicate(one)
    assert one.sharding.is_fully_replicated
    for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
        assert a.data.unsafe_buffer_pointer() != b.data.unsafe_buffer_pointer()


# --- The description ------------------------------------------------------------------------------


def describe(make, tx, **options):
    return zero_of(**options).describe(jax.eval_shape(make), tx=tx)


def test_describe_counts_bytes_and_names_what_stays_unsharded():
    tx = optax.adamw(1e-3)
    found = describe(lambda: make_pair(tx), tx, min_shard_size=4)
    unsharded, sharded = (24 + 3) * 4, (24 // 4 + 3) * 4
    opt_state = 2 * sharded + 4
    assert found.bytes_per_device == {"params": unsharded, "grads": sharded, "opt_state": opt_state}
    note = "unsharded: 3 elements, min_shard_size is 4"
    assert {row.path: row.note for row in found.fallbacks} == {"b": note}
    assert "ZeRO stage 2 over data on the mesh (data=4)" in str(found)
    assert "b (1 array, 12 bytes of gradients): 3 elements, min_shard_size is 4" in str(found)
    assert note in found.table()
    stage_0 = describe(lambda: make_pair(tx), tx, stage=0)
    assert stage_0.bytes_per_device["opt_state"] == 2 * unsharded + 4
    assert not stage_0.fallbacks


def test_describe_counts_gradients_of_what_is_trained():
    """Of adapters, not of what they adapt, nor of integers; a step knows which."""
    shapes = {"base": (256, 128), "a": (256, 8), "b": (8, 128)}
    params = {k: np.ones(shape, np.float32) for k, shape in shapes.items()}
    params["ids"] = np.zeros((64, 8), np.int32)
    make = model.make_of(lambda: params, TX)
    zero, trainable = zero_of(min_shard_size=0), lambda p: {k: k in ("a", "b") for k in p}
    found = zero.describe(jax.eval_shape(make), tx=TX, trainable=trainable)
    adapters = 4 * (256 * 8 + 8 * 128)
    assert found.bytes_per_device["grads"] == adapters // 4
    assert {row.path for row in found.rows if row.part == "grads"} == {"a", "b"}
    assert sum(row.bytes_per_device for row in found.rows if row.part == "params") == (
        adapters + 4 * (256 * 128 + 64 * 8)
    )
    every = zero.describe(jax.eval_shape(make), tx=TX).bytes_per_device["grads"]
    assert every == (adapters + 4 * 256 * 128) // 4
    step = zero.train_step(mean_loss, tx=TX, trainable=trainable)
    assert step.describe(jax.eval_shape(make)) == found


@pytest.mark.parametrize("stage", [0, 3])
def test_describe_groups_like_parameters(stage):
    """One line for the kernels of all layers; its numbers are sums of the rows."""
    tx, layer = optax_ext.came(1e-3), {"kernel": np.ones((64, 32)), "scale": np.ones(32)}
    params = {f"layer_{i}": layer for i in range(12)} | {"head": {"kernel": np.ones((64, 32))}}
    make = model.make_of(lambda: params, tx)
    found = describe(make, tx, stage=stage, min_shard_size=100)
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
    assert lines["total"][1] == f"{sum(found.bytes_per_device.values()):,}"
    if stage == 3:
        assert len(found.fallbacks) == 12  # once for all parts of a parameter
    assert ("layer_*/scale (12 arrays, " in str(found)) == (stage > 0)


@pytest.mark.parametrize(
    ("n", "shape", "spec"),
    [
        (4, (9, 8, 4), P(None, "data")),  # the longest does not divide
        (4, (9, 7), P()),
        # The last dim has shards of multiples of 256 elements, or another is taken.
        (8, (256, 2048), P(None, "data")),
        (8, (256, 3072), P("data")),  # shards would have 384
        (8, (12, 64, 768), P(None, "data")),
    ],
)
def test_which_dim_is_sharded(n, shape, spec):
    make = model.make_of(lambda: {"w": np.ones(shape)}, TX)
    assert zero_of(n, stage=3).specs(jax.eval_shape(make), tx=TX)[0]["w"] == spec
    (row,) = [row for row in describe(make, TX, n=n).rows if row.part == "grads"]
    reason = "" if any(spec) else f"unsharded: no free dim of {shape} divides by {n}"
    assert row.note == reason


@pytest.mark.parametrize(
    ("sizes", "names", "options", "spec", "expected"),
    [
        ((8, 1), ("data", "fsdp"), {}, P(("data", "fsdp")), P("data")),
        ((8, 1), ("data", "model"), {}, P("data", "model"), P("data", "model")),
        ((1, 8), ("model", "data"), {}, P(None, ("model", "data")), P(None, "data")),
        ((1, 8), ("data", "fsdp"), {"axis": ("data", "fsdp")}, P("fsdp"), P(("data", "fsdp"))),
        ((1, 8), ("slice", "data"), {"replica_axis": "slice"}, P(("slice", "data")), P("data")),
        ((1, 8), ("data", "model"), {}, P(("data", "model")), P("model", "data")),
        ((1, 8), ("data", "model"), {"stage": 2}, P(("data", "model")), P("model")),
        ((1,), ("data",), {"stage": 2}, P("data"), P()),
    ],
)
def test_an_axis_of_one_device_shards_nothing(sizes, names, options, spec, expected):
    zero = model.zero_on(*sizes, names=names, **{"stage": 3} | options)
    params = {"w": np.ones((16, 8), np.float32)}
    assert zero.specs((params, TX.init(params)), tx=TX, param_specs=spec)[0]["w"] == expected


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"axis": "dp"}, "axis 'dp' is not in the mesh .'data',.: name axes of the mesh in Zero"),
        ({"min_shard_size": -1}, "min_shard_size must not be negative, got -1"),
        ({"min_shard_size": "4"}, "min_shard_size must be a whole number, got '4'"),
        ({"offload": "params"}, "offload must be 'optimizer', 'all' or None, got 'params'"),
        ({"offload_min_size": -1}, "offload_min_size must not be negative, got -1"),
        ({"replica_axis": "data"}, "axis 'data' is named twice: axis='data', replica_axis='data'"),
        ({"shard_state_over_replicas": True}, "needs a replica_axis and stage 1, 2 or 3"),
        ({"sync": "powersgd"}, "sync must be a GradientSync or None, got 'powersgd'"),
    ],
)
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        zero_of(**kwargs)


def test_bad_arguments():
    zero = zero_of()
    step = zero.train_step(mean_loss, tx=TX)
    with pytest.raises(ValueError, match="microbatches must be at least 1, got 0"):
        zero.train_step(mean_loss, tx=TX, microbatches=0)
    for make in (zero.train_step, zero.value_and_grad):
        for value in ("2", 2.0, True, None):
            with pytest.raises(
                ValueError, match=f"microbatches must be a whole number, got {value!r}"
            ):
                make(mean_loss, microbatches=value)
        with pytest.raises(
            ValueError, match=r"a function of \(params, batch\), got a tuple, which"
        ):
            make(make_pair())
    for mesh in (8, None, ("data",)):
        with pytest.raises(ValueError, match=r"^Zero takes a mesh, got .*jax\.make_mesh\("):
            shd.Zero(mesh)
    for name in ("init", "abstract_state"):
        with pytest.raises(
            ValueError, match=rf"^zero\.{name} takes a function, .* got a tuple\. Call"
        ):
            getattr(zero, name)(make_pair(), tx=TX)
    for call, fn in ((zero.train_step, mean_loss), (zero.init, make_pair)):
        with pytest.raises(
            ValueError, match=r"^tx must be an optax\.GradientTransformation, .*adamw"
        ):
            call(fn, tx=optax.adamw)
    with pytest.raises(ValueError, match=r"'0/b' has the placement .* Make the state with"):
        step(make_pair(), zero.put(batch()))
    with pytest.raises(ValueError, match="needs the argument tx"):
        zero.train_step(mean_loss)(make_pair(), batch())
    for call in (zero.specs, zero.full_params):
        with pytest.raises(ValueError, match=r"must be a Flax TrainState or a pair .* got dict"):
            call({"params": 1})
    pair = make_pair()
    for state, found in ((optax.EmaState(*pair), "EmaState of 2"), ((0, *pair), "tuple of 3")):
        with pytest.raises(ValueError, match=rf"a pair .*, a plain tuple, got {found}\. Make one"):
            zero.init(lambda state=state: state, tx=TX)
    with pytest.raises(ValueError, match=r"not that of tx\.init.*Expected .*; found 0/count"):
        zero.specs(make_pair(optax.adam(1.0)), tx=TX)
    with pytest.raises(ValueError, match=r"got <class 'dict'>.* wrap the method"):
        zero.gathered(dict)


def test_a_foreign_state_raises_in_every_call():
    """Also where the step has run before, on a state of the same shapes."""
    tx = optax.adam(0.1)
    zero, other = zero_of(), model.zero_on(4, 2, names=("data", "model"), stage=2)
    state, x = zero.init(lambda: make_pair(tx), tx=tx), zero.put(batch())
    foreign = {
        "eager": make_pair(tx),
        "NumPy": jax.tree.map(np.asarray, make_pair(tx)),
        "replicated": zero.replicate(make_pair(tx)),
        "another mesh": other.init(lambda: make_pair(tx), tx=tx),
    }
    step, evaluate = zero.train_step(mean_loss, tx=tx, donate=False), zero.eval_step(mean_loss)
    for calls in range(2):
        for name, wrong in foreign.items():
            runs = (step, evaluate) if name != "replicated" else (step,)  # parameters are as here
            for run in runs:
                with pytest.raises(ValueError, match=r"has the placement .* Make the state with"):
                    run(wrong, x)
        assert not calls or len(step._programs) == len(evaluate._programs) == 1
        step(state, x)
        evaluate(state, x)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        # As that of a Pipeline.
        (
            lambda p, b: (mean_loss(p, b), 3.0),
            {},
            "is (float32[], .* needs weighted=True",
        ),
        (lambda p, b: errors(p, b).mean(1), {}, "is float32[16], .* return the mean"),
        (lambda p, b: b["n"], {}, "is int32[], and must be one floating scalar"),
        (mean_loss, {"weighted": True}, "return (sum, weight), as weighted says; .* float32[]"),
        (mean_loss, {"has_aux": True}, "must return (loss, aux), as has_aux says; .* float32[]"),
        (mean_loss, {"rngs": True}, "mean_loss(params, batch, key), and it takes (params, batch)"),
        (mean_loss, {"model_state": True}, "mean_loss(params, batch, model_state), and it takes"),
        (lambda p, b, key: 0.0, {}, "<lambda>(params, batch), .* a required argument: 'key'"),
    ],
)
def test_losses_that_are_not_what_the_options_say(loss, options, message):
    message = re.escape(message).replace(r"\.\*", ".*")
    rows = batch() | {"n": np.int32(3)}
    with pytest.raises(ValueError, match=message):
        model.lowered(zero_of(), make_pair, TX, loss, rows, **options)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jax.random.split(jax.random.key(0), 16), r"'x' has dtype key<fry>.* jax.random.key_data"),
        (np.array(["a", "b"] * 8), "'x' has dtype <U1, which no device holds. Leave it out"),
        (["a"] * 16, "'x/0' has dtype <U1, which no device holds"),
        (np.array([None] * 16), "'x' has dtype object, which no device holds"),
    ],
)
def test_batches_without_numbers(leaf, message):
    zero, rows = zero_of(), batch() | {"x": leaf}
    with pytest.raises(ValueError, match=f"batch array {message}"):
        zero.put(rows)
    if "key" not in message:  # a step takes keys
        with pytest.raises(ValueError, match=f"batch array {message}"):
            zero.train_step(mean_loss, tx=TX).lower(jax.eval_shape(make_pair), rows)


@pytest.mark.parametrize(
    ("stage", "specs", "message"),
    [
        (3, {"w": P("dp"), "b": P()}, r"P\('dp',\) for 'w': axis 'dp' is not in the mesh"),
        (3, {"v": P()}, "param_specs does not match the parameters"),
        (3, {"w": P("data", "data"), "b": P()}, "for 'w' names axis 'data' twice"),
        (3, {"w": P(("data", "model")), "b": P()}, "along one dim that no other axis shards"),
    ],
)
def test_bad_specs(stage, specs, message):
    zero = model.zero_on(2, 2, names=("data", "model"), stage=stage)
    with pytest.raises(ValueError, match=message):
        zero.specs(make_pair(), tx=TX, param_specs=specs)


@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("n", "view", "times"), [(4, "device", 4), (4, None, 1), (1, None, 1)])
def test_callbacks_run_as_often_as_under_jit(n, view, times, kind):
    """Of the loss of each device on each; in the order of ``jit``, where that has one."""
    calls, options = [], {"view": view} if view else {}

    def call(name, *args):
        jax.debug.callback(lambda *_: calls.append(name), *args, ordered=n == 1)

    def loss_fn(params, x):
        call("parameter", params["w"])
        call("value", jnp.mean(x))

        def layer(x, w):
            call("layer", w, x[0])
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, params["w"])
        call("nothing")
        return jnp.mean(x)

    def called(run):
        calls.clear()
        jax.block_until_ready(run())
        jax.effects_barrier()
        return calls if n == 1 else sorted(calls)

    params = {"w": np.ones((3, 4, 4), np.float32)}
    x, make = np.ones((8, 4), np.float32), model.make_of(lambda: params, TX)
    once = list(called(lambda: jax.jit(jax.grad(loss_fn))(params, x)))

    def repeated(count):
        return once * count if n == 1 else sorted(once * count)

    for stage, microbatches in ((2, 1), (3, 2)):
        zero = zero_of(n, kind=kind, stage=stage, min_shard_size=0, **options)
        state = zero.init(make, tx=TX)
        evaluate = functools.partial(zero.eval_step(loss_fn), state, x)
        assert called(evaluate) == repeated(times)
        differentiate = zero.value_and_grad(loss_fn, microbatches=microbatches)
        assert called(functools.partial(differentiate, state[0], x)) == repeated(
            times * microbatches
        )
        step = zero.train_step(loss_fn, tx=TX, microbatches=microbatches)
        assert called(functools.partial(step, state, x)) == repeated(times * microbatches)


def test_gather_outside_of_the_loss():
    """Nothing is changed there."""
    params, zero = {"w": np.ones((8, 16))}, zero_of(stage=3)
    assert zero.gather(params)["w"] is params["w"]
    assert zero.gathered(lambda p: p["w"].shape)(params) == (8, 16)


def test_gather_in_a_loss_of_one_device_that_updates_in_its_backward_pass():
    make = model.make_of(lambda: {"w": np.full((4, 8, 8), 0.5, np.float32)}, TX)
    zero, found = zero_of(1, stage=3, min_shard_size=0), []

    def loss_fn(params, x):
        layer = lambda x, w: (jnp.tanh(x @ zero.gather(w)), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0])

    for update in ("after", "backward"):
        step = zero.train_step(loss_fn, tx=TX, update=update)
        found.append(step(zero.init(make, tx=TX), np.ones((4, 8), np.float32)))
    np.testing.assert_allclose(found[0][0][0]["w"], found[1][0][0]["w"], rtol=1e-6)


def test_a_parameter_sharded_along_the_dim_that_a_scan_slices_off():
    zero, make = zero_of(stage=3), model.make_of(lambda: {"w": np.ones((8, 3))}, TX)
    block = zero.gathered(lambda p, x: x * p[None])

    def loss_fn(params, x):
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, params["w"])[0].mean()

    with pytest.warns(UserWarning, match="another dim than the one that a loop slices off"):
        model.lowered(zero, make, TX, loss_fn, np.ones((8, 3), np.float32))


@pytest.mark.parametrize(("stage", "kind"), [slow((1, EXPLICIT)), (3, AUTO)])
def test_two_models_and_their_averages(x64, stage, kind):
    """A GAN: each model stays sharded in the loss of the other one."""
    zero = zero_of(stage=stage, kind=kind)
    txs = optax.contrib.schedule_free_sgd(0.1), optax.adam(1e-2)
    rng = np.random.default_rng(0)
    made = {"w": rng.normal(size=(16, 8)), "b": np.ones(8)}, {"v": rng.normal(size=(8, 16))}
    x = rng.normal(size=(32, 16)) * 10.0 ** rng.uniform(-2, 0, (32, 1))
    one = zero.gathered(lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None]))
    other = zero.gathered(lambda p, h: h @ p["v"])

    def loss_fn(models, x):
        return jnp.mean((other(models[1], one(models[0], x)) - x) ** 2)

    def against(models, x):
        return -loss_fn(models, x)

    def trained(states, x, value_and_grad, update):
        """Three steps, the average of the first model, and what schedule-free evaluates."""

        @jax.jit
        def step(one, other, x):
            grads = value_and_grad(loss_fn, trainable=(True, False))((one[0], other[0]), x)[1]
            one = update(one, grads[0], tx=txs[0])
            grads = value_and_grad(against, trainable=(False, True))((one[0], other[0]), x)[1]
            return one, update(other, grads[1], tx=txs[1])

        average = zero.place(states[0][0])
        for _ in range(3):
            states = step(*states, x)
            average = jax.jit(optax.incremental_update)(states[0][0], average, 0.1)
        free = optax.contrib.schedule_free_eval_params(states[0][1], states[0][0])
        return states, average, zero.place(free)

    def plain_update(state, grads, tx):
        updates, opt = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt

    plain = lambda loss_fn, trainable: jax.value_and_grad(loss_fn)  # noqa: E731
    make = [model.make_of(lambda i=i: made[i], tx) for i, tx in enumerate(txs)]
    expected = trained([make[0](), make[1]()], x, plain, plain_update)
    states = [zero.init(make[i], tx=tx) for i, tx in enumerate(txs)]
    found = trained(states, zero.put(x), zero.value_and_grad, zero.apply_gradients)
    model.assert_close(found, expected, 1e-12)
    (state, second), *averages = found
    assert second[0]["v"].sharding.is_fully_replicated == (stage < 3)
    evaluate = zero.eval_step(loss_fn)
    for params, alike in zip(averages, expected[1:], strict=True):
        assert params["w"].sharding.is_equivalent_to(state[0]["w"].sharding, 2)
        found = evaluate(((params, second[0]), None), zero.put(x))
        np.testing.assert_allclose(found, loss_fn((alike, second[0]), x), rtol=1e-12)
    if stage == 3:
        step = zero.train_step(lambda p, x, t: (loss_fn((t, p), x), t), tx=txs[1], model_state=True)
        message = r"model state 'b' has the placement .* zero\.replicate"
        with pytest.raises(ValueError, match=message):
            step(second, x, model_state=averages[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_what_place_keeps(stage):
    """The specs on other axes, also those of shards; the data axes where the stage has them."""
    zero = model.zero_on(2, 2, names=("data", "model"), stage=stage)
    data = "data" if stage == 3 else None
    given = jax.device_put(np.ones((4, 8)), NamedSharding(zero.mesh, P("data", "model")))
    placed = zero.place({"w": given})["w"]
    assert placed.sharding.is_equivalent_to(NamedSharding(zero.mesh, P(data, "model")), 2)
    like = jax.eval_shape(lambda: {"w": jnp.ones((4, 8))})
    types = zero.place(like, param_specs=P(None, "model"))
    assert types["w"].sharding.spec == placed.sharding.spec
