"""What users do that is wrong, or unusual: an error that says what to do, or it works."""

import contextlib
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd

from ...flax_nnx import needs_nnx, nnx

KINDS = [AxisType.Auto, AxisType.Explicit]
TX = optax.adamw(1e-2)


def zero_of(n=4, stage=2, kind=AxisType.Explicit, shape=None, axes=("data",), **kwargs):
    """On a mesh of ``n`` devices, or of a ``shape`` with ``axes``."""
    shape = shape or (n,)
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes), devices=devices)
    return shd.Zero(mesh, stage=stage, min_shard_size=0, offload_min_size=0, **kwargs)


def make_pair():
    params = {"w": jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16), "b": jnp.ones(16)}
    return params, TX.init(params)


def batch(rows=16):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=(rows, 16)).astype(np.float32),
    }


def mean_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2)


# --- A state that was donated -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 4])
def test_a_donated_state_is_not_used_again(n, kind):
    """Without the check the second call ends the process with a segmentation fault."""
    zero = zero_of(n, kind=kind)
    old = zero.init(make_pair, tx=TX)
    step = zero.train_step(mean_loss, tx=TX)
    data = zero.put(batch())
    new, _ = step(old, data)
    calls = {
        "step": lambda: step(old, data),
        "eval_step": lambda: zero.eval_step(mean_loss)(old, data),
        "value_and_grad": lambda: zero.value_and_grad(mean_loss)(old[0], data),
        "apply_gradients": lambda: zero.apply_gradients(old, new[0], tx=TX),
        "full_params": lambda: zero.full_params(old),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"the state was donated .*'(0/)?b'.* donate=False"):
            call()
    assert zero.describe(old, tx=TX).rows == zero.describe(new, tx=TX).rows
    step(new, data)


def test_a_state_that_is_not_donated_is_used_again():
    zero = zero_of()
    state, data = zero.init(make_pair, tx=TX), zero.put(batch())
    step = zero.train_step(mean_loss, tx=TX, donate=False)
    assert step(state, data)[1]["loss"] == step(state, data)[1]["loss"]


def test_a_batch_that_was_deleted():
    zero = zero_of()
    state, data = zero.init(make_pair, tx=TX), zero.put(batch())
    data["y"].delete()
    with pytest.raises(ValueError, match=r"argument 'batch': 'y' \(float32.*was deleted"):
        zero.train_step(mean_loss, tx=TX)(state, data)


# --- Batches ----------------------------------------------------------------------------------


BAD_BATCHES = {
    "other rows": (
        {"x": (16, 64), "y": (16,), "class_weights": (8,)},
        r"'class_weights' of shape \(8,\) and 'x' of shape \(16, 64\) differ .* model_state",
    ),
    "one row": ({"x": (16, 8), "z": (1,)}, r"'x' of shape \(16, 8\) and 'z' of shape \(1,\)"),
    "no rows": ({"x": (0, 8), "y": (0,)}, r"the batch is empty: 'x' has shape \(0, 8\)"),
    "no array": ({"x": None}, r"the batch is empty: it holds no arrays, only \{'x': None\}"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_bad_batches(n, name):
    """Class weights that are sharded with the batch changed the loss, in silence."""
    shapes, message = BAD_BATCHES[name]
    bad = jax.tree.map(np.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    zero = zero_of(n)
    state = zero.init(make_pair, tx=TX)
    for call in (
        zero.put,
        lambda b: zero.train_step(mean_loss, tx=TX)(state, b),
        lambda b: zero.eval_step(mean_loss)(state, b),
        lambda b: zero.value_and_grad(mean_loss)(state[0], b),
    ):
        with pytest.raises(ValueError, match=message):
            call(bad)


def test_scalars_of_a_batch_are_replicated():
    data = zero_of(4).put({"x": np.ones((8, 2)), "scale": 3.0, "none": None})
    assert data["scale"].sharding.is_fully_replicated
    assert not data["x"].sharding.is_fully_replicated


# --- A mesh in the context --------------------------------------------------------------------

MESHES = {
    "one device": ((1,), ("data",), None),
    "two devices": ((2,), ("data",), None),
    "one axis": ((8,), ("data",), None),
    "a model axis": ((4, 2), ("data", "model"), {"w": P(None, "model"), "b": P("model")}),
    "two axes": ((2, 4), ("x", "y"), None),
}


def run_all(zero, context, param_specs):
    """What everything returns inside a context, and how often a loss was traced for a step."""
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return mean_loss(params, batch)

    loss_fn = zero.gathered(loss_fn)
    out = {}
    step = zero.train_step(loss_fn, tx=TX, microbatches=2)
    with context():
        abstract = zero.abstract_state(make_pair, tx=TX, param_specs=param_specs)
        specs = jax.tree.map(lambda x: x.sharding.spec, abstract[0])
        state, data = zero.init(make_pair, tx=TX, param_specs=param_specs), zero.put(batch())
        out["eval_step"] = zero.eval_step(loss_fn)(state, data)
        out["value_and_grad"] = zero.value_and_grad(loss_fn)(state[0], data)
        grads = out["value_and_grad"][1]
        out["apply_gradients"] = zero.apply_gradients(state, grads, tx=TX)

        @jax.jit
        def own_step(state, data):
            loss, grads = zero.value_and_grad(loss_fn, param_specs=specs)(state[0], data)
            return zero.apply_gradients(state, grads, tx=TX, param_specs=specs), loss

        out["own_step"] = own_step(state, data)
        out["full_params"] = zero.full_params(state)
        out["describe"] = jnp.asarray(
            [row.bytes_per_device for row in zero.describe(state, tx=TX).rows]
        )
        traces.clear()
        state, _ = step(state, data)
        once = len(traces)
        for _ in range(2):
            state, out["metrics"] = step(state, data)
    # The same function outside of the context.
    out["state"], _ = step(state, data)
    assert len(traces) == once
    return jax.tree.map(np.asarray, out)


# Each mesh, and each pair of a stage and a kind of axes: the mesh of the context meets axis names,
# axis types and gathers one by one, and nothing in the code looks at all three.
CASES = [
    ("one device", 3, KINDS[0], None),
    ("two devices", 2, KINDS[1], None),
    ("one axis", 3, KINDS[1], None),
    ("a model axis", 2, KINDS[0], None),
    ("a model axis", 3, KINDS[1], None),
    ("two axes", 2, KINDS[1], None),
    ("two axes", 3, KINDS[0], None),
    ("one axis", 2, KINDS[0], "optimizer"),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("mesh", "stage", "kind", "offload"), CASES)
def test_under_set_mesh(mesh, stage, kind, offload):
    """The same numbers, and no more compilations, whether the user sets the mesh or not."""
    shape, axes, specs = MESHES[mesh]
    axis = axes if "x" in axes else "data"
    zero = zero_of(stage=stage, kind=kind, shape=shape, axes=axes, axis=axis, offload=offload)
    expected = run_all(zero, contextlib.nullcontext, specs)
    found = run_all(zero, lambda: jax.set_mesh(zero.mesh), specs)
    chex.assert_trees_all_equal(found, expected, strict=True)


OTHERS = {
    "other axis types": ((4,), ("data",), None),
    "another shape": ((2, 2), ("a", "b"), AxisType.Explicit),
    "other devices": ((2,), ("data",), AxisType.Explicit),
    "other devices, Auto": ((2,), ("data",), AxisType.Auto),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", OTHERS)
def test_under_another_mesh(other, kind):
    """Zero uses its own mesh; what cannot be is an error that names both."""
    zero = zero_of(kind=kind)
    opposite = KINDS[1 - KINDS.index(kind)]
    shape, axes, other_kind = OTHERS[other]
    kind_of_other = other_kind or opposite
    mesh = zero_of(kind=kind_of_other, shape=shape, axes=axes, axis=axes[0]).mesh
    step = zero.train_step(mean_loss, tx=TX)
    expected, metrics = step(zero.init(make_pair, tx=TX), zero.put(batch()))
    with jax.set_mesh(mesh):
        state = zero.init(lambda key: make_pair(), jax.random.key(0), tx=TX)
        # Arrays that are made here are on the mesh of the context.
        state, found = step(state, jax.tree.map(jnp.asarray, batch()))
        loss, _ = zero.value_and_grad(mean_loss)(state[0], zero.put(batch()))
        with pytest.raises(ValueError, match=r"mesh of the context is .* that of Zero is \(data=4"):
            jax.jit(lambda p: zero.value_and_grad(mean_loss, param_specs=P())(p, batch()))(
                zero.full_params(state)
            )
    np.testing.assert_array_equal(found["loss"], metrics["loss"])
    np.testing.assert_array_equal(state[0]["w"], expected[0]["w"])
    assert loss < metrics["loss"]


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(32, kernel_init=kernel)(x)
        return nn.Dense(4)(nn.relu(x))


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_under_set_mesh(kind):
    """Flax's constraints are no assertions, and replicated types do not hide the metadata."""
    zero = zero_of(stage=3, kind=kind, shape=(2, 2), axes=("data", "model"))

    def make(key):
        params = Partitioned().init(key, jnp.ones((1, 8)))["params"]
        return params, TX.init(params)

    expected = zero.init(make, jax.random.key(0), tx=TX)
    with jax.set_mesh(zero.mesh):
        found = zero.init(make, jax.random.key(0), tx=TX)
    assert found[0]["Dense_0"]["kernel"].value.sharding.spec == P("data", "model")
    same = lambda x, y: x.sharding.spec == y.sharding.spec  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, found, expected))
    # Equal up to what XLA fuses.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@needs_nnx
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [False, True])
def test_nnx_under_set_mesh(kind, other):
    zero = zero_of(kind=kind)

    def make():
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def losses(context):
        with context():
            model, optimizer = zero.nnx_init(make)
            step = zero.nnx_train_step(lambda model, b: jnp.mean((model(b["x"]) - b["y"]) ** 2))
            return [float(step(model, optimizer, zero.put(batch()))["loss"]) for _ in range(3)]

    mesh = zero_of(2, axes=("other",), axis="other").mesh if other else zero.mesh
    assert losses(lambda: jax.set_mesh(mesh)) == losses(contextlib.nullcontext)


# --- Arrays that are elsewhere ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_on_other_devices_are_moved(kind):
    """A batch, and pretrained parameters, on one device; a batch that is on the mesh in full."""
    zero = zero_of(kind=kind)
    pretrained = jax.device_put(make_pair()[0], jax.devices()[7])
    state = zero.init(lambda params: (params, TX.init(params)), pretrained, tx=TX)
    step = zero.train_step(mean_loss, tx=TX, donate=False)
    expected, metrics = step(state, zero.put(batch()))
    for place in (jax.devices()[7], zero.replicate(0).sharding):
        new, found = step(state, jax.device_put(batch(), place))
        np.testing.assert_array_equal(found["loss"], metrics["loss"])
        np.testing.assert_array_equal(new[0]["w"], expected[0]["w"])
        value_and_grad = zero.value_and_grad(mean_loss)
        loss, _ = value_and_grad(state[0], jax.device_put(batch(), place))
        np.testing.assert_array_equal(loss, metrics["loss"])


def test_a_state_that_is_placed_otherwise_after_the_first_step():
    """And one on a mesh with Explicit axes, where those of Zero are Auto."""
    zero = zero_of(kind=AxisType.Auto)
    step = zero.train_step(mean_loss, tx=TX)
    state, _ = step(zero.init(make_pair, tx=TX), zero.put(batch()))
    messages = {
        zero_of(stage=3): "'b' is sharded over axis 'data' already",
        zero_of(): "'0/b' has the placement",
    }
    for other, message in messages.items():
        elsewhere = jax.device_put(jax.device_get(state), other.shardings(make_pair(), tx=TX))
        for one in (step, zero.train_step(mean_loss, tx=TX)):
            with pytest.raises(ValueError, match=message):
                one(elsewhere, zero.put(batch()))
    step(state, zero.put(batch()))


# --- Trees of parameters that are matched with others -------------------------------------------


class EqxBlock(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.linear, self.norm = eqx.nn.Linear(16, 16, key=key), eqx.nn.LayerNorm(16)

    def __call__(self, x):
        return x + jax.nn.relu(self.linear(self.norm(x)))


def eqx_parts(stacked):
    """(parameters, all else) of three blocks: a list, or one whose arrays are stacked."""
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = eqx.filter_vmap(EqxBlock)(keys) if stacked else [EqxBlock(key) for key in keys]
    return eqx.partition(blocks, eqx.is_inexact_array)


EQX_FORMS = {
    "combine": lambda params, static: eqx.combine(params, static),
    "partition": lambda params, static: eqx.combine(
        *eqx.partition(eqx.combine(params, static), eqx.is_array)
    ),
    "tree_at": lambda params, static: eqx.tree_at(
        lambda blocks: blocks[0].linear.bias, eqx.combine(params, static), replace_fn=lambda b: b
    ),
    "tree.map": lambda params, static: jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x, eqx.combine(params, static)
    ),
}


# Each form with each kind of axes; the number of devices is no part of how trees are matched.
@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("form", EQX_FORMS)
@pytest.mark.parametrize(("n", "kind"), [(4, KINDS[0]), (4, KINDS[1])])
def test_equinox_trees_at_stage_3(n, kind, form):
    zero = zero_of(n, stage=3, kind=kind)
    params, static = eqx_parts(stacked=False)
    x = batch()["y"]

    def loss_of(block):
        def loss_fn(params, x):
            for one in EQX_FORMS[form](params, static):
                x = jax.vmap(lambda x, one=one: block(one, x))(x)
            return jnp.mean(x**2)

        return loss_fn

    expected, grads = jax.value_and_grad(loss_of(EqxBlock.__call__))(params, x)
    state = zero.init(lambda: (params, TX.init(params)), tx=TX)
    loss_fn = loss_of(zero.gathered(EqxBlock.__call__))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # blocks gather their own parameters
        loss, found = zero.value_and_grad(loss_fn)(state[0], zero.put(x))
        evaluated = zero.eval_step(loss_fn)(state, zero.put(x))
    np.testing.assert_allclose([loss, evaluated], [expected] * 2, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, grads)


@pytest.mark.parametrize("static_first", [True, False])
def test_equinox_under_scan_at_stage_3(static_first):
    """Where trees are matched and looped over, static parts come first, and the error says so."""
    zero = zero_of(stage=3)
    params, static = eqx_parts(stacked=True)
    block = zero.gathered(EqxBlock.__call__)

    def loss_fn(params, x):
        def body(x, layer):
            trees = (static, layer) if static_first else (layer, static)
            return jax.vmap(lambda x: block(eqx.combine(*trees), x))(x), None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    state = zero.init(lambda: (params, TX.init(params)), tx=TX)
    step, data = zero.train_step(loss_fn, tx=TX), zero.put(batch()["y"])
    if static_first:
        assert step(state, data)[1]["loss"] > 0
    else:
        with pytest.raises(ValueError, match=r"equinox\.combine\(static, params\), not"):
            step(state, data)


@pytest.mark.parametrize("stage", [2, 3])
def test_axes_of_both_kinds(stage):
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    plain = zero_of(shape=(4, 2), axes=("data", "model"), kind=AxisType.Auto, stage=stage)
    losses = []
    for zero in (shd.Zero(mesh, stage=stage, min_shard_size=0), plain):
        specs = {"w": P(None, "model"), "b": P()}
        state = zero.init(make_pair, tx=TX, param_specs=specs)
        step = zero.train_step(zero.gathered(mean_loss), tx=TX)
        for _ in range(2):
            state, metrics = step(state, zero.put(batch()))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_two_placements_in_one_step():
    zero = zero_of(shape=(4, 2), axes=("data", "model"), kind=AxisType.Auto)
    step = zero.train_step(zero.gathered(mean_loss), tx=TX)
    losses = []
    for specs in ({"w": P(None, "model"), "b": P()}, {"w": P(), "b": P()}):
        state = zero.init(make_pair, tx=TX, param_specs=specs)
        state, metrics = step(state, zero.put(batch()))
        state, _ = step(state, zero.put(batch()))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)
