"""What users do that is wrong, or unusual: an error that says what to do, or it works."""

import contextlib
import dataclasses
from typing import Any

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

from ...flax_nnx import needs_nnx, nnx
from .. import model

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TX = optax.adamw(1e-2)


def zero_of(*shape, kind=EXPLICIT, **options):
    return model.zero_on(*(shape or (4,)), kind=kind, offload_min_size=0, **options)


def initial():
    w = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)
    return {"w": w, "b": np.ones(16, np.float32)}


make_pair = model.make_of(initial, TX)


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def batch(rows=16):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=(rows, 16)).astype(np.float32),
    }


def mean_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2)


# --- A state that was donated -----------------------------------------------------------------


@pytest.mark.parametrize(("n", "kind"), [(1, EXPLICIT), (4, AUTO)])
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


def test_what_is_not_donated_is_used_again_and_what_was_deleted_is_not():
    zero = zero_of()
    state, data = zero.init(make_pair, tx=TX), zero.put(batch())
    step = zero.train_step(mean_loss, tx=TX, donate=False)
    assert step(state, data)[1]["loss"] == step(state, data)[1]["loss"]
    data["y"].delete()
    with pytest.raises(ValueError, match=r"argument 'batch': 'y' \(float32.*was deleted"):
        step(state, data)


# --- Batches ----------------------------------------------------------------------------------


BAD_BATCHES = {
    "other rows": (
        {"x": (16, 64), "y": (16,), "class_weights": (8,)},
        r"'class_weights' of shape \(8,\) and 'x' of shape \(16, 64\) differ .* model_state",
    ),
    "one row": ({"x": (16, 8), "z": (1,)}, r"'x' of shape \(16, 8\) and 'z' of shape \(1,\)"),
    "no rows": ({"x": (0, 8), "y": (0,)}, r"the batch is empty: 'x' has shape \(0, 8\)"),
    "no array": ({"x": None}, r"the batch is empty: it holds no arrays, only \{'x': None\}"),
    "rows left": ({"x": (6, 8)}, r"'x' of shape \(6, 8\).* 4 devices"),
}


@pytest.mark.parametrize("n", [1, 4])
def test_bad_batches(n):
    """Class weights that are sharded with the batch changed the loss, in silence."""
    zero = zero_of(n)
    state = zero.init(make_pair, tx=TX)
    for name, (shapes, message) in BAD_BATCHES.items():
        if name == "rows left" and n == 1:
            continue
        bad = jax.tree.map(np.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
        for call in (
            zero.put,
            lambda b: zero.train_step(mean_loss, tx=TX)(state, b),
            lambda b: zero.eval_step(mean_loss)(state, b),
            lambda b: zero.value_and_grad(mean_loss)(state[0], b),
        ):
            with pytest.raises(ValueError, match=message):
                call(bad)


def test_a_batch_that_does_not_divide_by_micro_batches():
    zero = zero_of()
    step = zero.train_step(mean_loss, tx=TX, microbatches=2)
    with pytest.raises(ValueError, match=r"'x' of shape \(12, 8\).* 4 devices times 2 micro"):
        step(zero.init(make_pair, tx=TX), batch(12))


# --- A mesh in the context --------------------------------------------------------------------


def run_all(zero, context, param_specs):
    """What everything returns inside a context, and how often a loss was traced for a step."""
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return mean_loss(params, batch)

    loss_fn = zero.gathered(loss_fn)
    step = zero.train_step(loss_fn, tx=TX, microbatches=2)
    with context():
        abstract = zero.abstract_state(make_pair, tx=TX, param_specs=param_specs)
        specs = jax.tree.map(lambda x: x.sharding.spec, abstract[0])

        @jax.jit
        def own_step(state, data):
            loss, grads = zero.value_and_grad(loss_fn, param_specs=specs)(state[0], data)
            return zero.apply_gradients(state, grads, tx=TX, param_specs=specs), loss

        state, data = zero.init(make_pair, tx=TX, param_specs=param_specs), zero.put(batch())
        grads = zero.value_and_grad(loss_fn)(state[0], data)
        out = {
            "value_and_grad": grads,
            "eval_step": zero.eval_step(loss_fn)(state, data),
            "apply_gradients": zero.apply_gradients(state, grads[1], tx=TX),
            "own_step": own_step(state, data),
            "full_params": zero.full_params(state),
            "describe": [row.bytes_per_device for row in zero.describe(state, tx=TX).rows],
        }
        traces.clear()
        state, _ = step(state, data)
        once = len(traces)
        for _ in range(2):
            state, out["metrics"] = step(state, data)
    # The same function outside of the context.
    out["state"], _ = step(state, data)
    assert len(traces) == once
    return jax.tree.map(np.asarray, out)


OVER_MODEL = {"w": P(None, "model"), "b": P("model")}


# The mesh of the context meets axis names, axis types and gathers one by one, and nothing in the
# code looks at all three.
@pytest.mark.parametrize(
    ("shape", "axes", "specs", "stage", "kind", "offload"),
    [
        ((4, 2), ("data", "model"), OVER_MODEL, 3, EXPLICIT, None),
        ((8,), ("data",), None, 2, AUTO, "optimizer"),
        *slow(((1,), ("data",), None, 3, AUTO, None), ((8,), ("data",), None, 3, EXPLICIT, None)),
        *slow(((2, 4), ("x", "y"), None, 2, EXPLICIT, None)),
    ],
)
def test_under_set_mesh(shape, axes, specs, stage, kind, offload):
    """The same numbers, and no more compilations, whether the user sets the mesh or not."""
    axis = axes if "x" in axes else "data"
    zero = zero_of(*shape, names=axes, axis=axis, stage=stage, kind=kind, offload=offload)
    expected = run_all(zero, contextlib.nullcontext, specs)
    found = run_all(zero, lambda: jax.set_mesh(zero.mesh), specs)
    chex.assert_trees_all_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    ("kind", "shape", "axes", "other_kind"),
    [
        (AUTO, (4,), ("data",), EXPLICIT),
        (EXPLICIT, (2, 2), ("a", "b"), EXPLICIT),
        (EXPLICIT, (2,), ("data",), AUTO),
    ],
)
def test_under_another_mesh(kind, shape, axes, other_kind):
    """Zero uses its own mesh; what cannot be is an error that names both."""
    zero = zero_of(kind=kind)
    mesh = zero_of(*shape, kind=other_kind, names=axes, axis=axes[0]).mesh
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


@pytest.mark.parametrize("kind", [EXPLICIT, *slow((AUTO,))])
def test_metadata_under_set_mesh(kind):
    """Flax's constraints are no assertions, and replicated types do not hide the metadata."""
    zero = zero_of(2, 2, names=("data", "model"), stage=3, kind=kind)

    def make(key):
        params = Partitioned().init(key, jnp.ones((1, 8)))["params"]
        return params, TX.init(params)

    expected = zero.init(make, jax.random.key(0), tx=TX)
    with jax.set_mesh(zero.mesh):
        found = zero.init(make, jax.random.key(0), tx=TX)
    for params in (found[0], found[1][0].mu):
        assert params["Dense_0"]["kernel"].value.sharding.spec == P("data", "model")
    same = lambda x, y: x.sharding.spec == y.sharding.spec  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, found, expected))
    # Equal up to what XLA fuses.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@needs_nnx
@pytest.mark.parametrize(("kind", "other"), [(EXPLICIT, True), *slow((AUTO, False))])
def test_nnx_under_set_mesh(kind, other):
    zero = zero_of(kind=kind)

    def make():
        net = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        return net, nnx.Optimizer(net, TX, wrt=nnx.Param)

    def losses(context):
        with context():
            net, optimizer = zero.nnx_init(make)
            step = zero.nnx_train_step(lambda net, b: jnp.mean((net(b["x"]) - b["y"]) ** 2))
            return [float(step(net, optimizer, zero.put(batch()))["loss"]) for _ in range(3)]

    mesh = zero_of(2, names=("other",), axis="other").mesh if other else zero.mesh
    assert losses(lambda: jax.set_mesh(mesh)) == losses(contextlib.nullcontext)


# --- Arrays that are elsewhere ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
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
    zero = zero_of(kind=AUTO)
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
    here = jax.device_put(jax.device_get(state), zero.shardings(make_pair(), tx=TX))
    step(here, zero.put(batch()))


# --- Trees of parameters that are matched with others -------------------------------------------


class Block(eqx.Module):
    w: jax.Array
    act: Any = jnp.tanh  # a leaf that is no array

    def __call__(self, x):
        return x + self.act(x @ self.w)


EQX_FORMS = {
    "partition": lambda tree: eqx.combine(*eqx.partition(tree, eqx.is_array)),
    "tree_at": lambda tree: eqx.tree_at(lambda blocks: blocks[0].w, tree, replace_fn=lambda w: w),
    "tree.map": lambda tree: jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x, tree
    ),
}


def lower_blocks(blocks, apply):
    """Blocks gather their own parameters at stage 3: none of the warnings that there are errors."""
    params, static = eqx.partition(blocks, eqx.is_array)
    zero, make = zero_of(stage=3), model.make_of(lambda: params, TX)
    block = zero.gathered(Block.__call__)
    loss_fn = lambda params, x: jnp.mean(apply(block, params, static, x) ** 2)  # noqa: E731
    model.lowered(zero, make, TX, loss_fn, np.ones((16, 16), np.float32))


@pytest.mark.parametrize("form", EQX_FORMS)
def test_equinox_trees_at_stage_3(form):
    """That losses of combined trees are exact is in ``test_gathered_layers``."""

    def apply(block, params, static, x):
        for one in EQX_FORMS[form](eqx.combine(params, static)):
            x = block(one, x)
        return x

    lower_blocks([Block(jnp.ones((16, 16))) for _ in range(3)], apply)


@pytest.mark.parametrize("static_first", [True, False])
def test_equinox_under_scan_at_stage_3(static_first):
    """Where trees are matched and looped over, static parts come first, and the error says so."""

    def apply(block, params, static, x):
        def body(x, layer):
            trees = (static, layer) if static_first else (layer, static)
            return block(eqx.combine(*trees), x), None

        return jax.lax.scan(body, x, params)[0]

    error = pytest.raises(ValueError, match=r"equinox\.combine\(static, params\), not")
    with contextlib.nullcontext() if static_first else error:
        lower_blocks(Block(jnp.ones((3, 16, 16))), apply)


@pytest.mark.parametrize("stage", [3, *slow((2,))])
def test_axes_of_both_kinds(stage):
    plain = zero_of(4, 2, names=("data", "model"), kind=AUTO, stage=stage)
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, EXPLICIT))
    specs = {"w": P(None, "model"), "b": P()}
    states = [
        model.run(zero, make_pair, TX, zero.gathered(mean_loss), lambda i: batch(), 2, specs)
        for zero in (plain, dataclasses.replace(plain, mesh=mixed))
    ]
    model.assert_close(*jax.device_get(states), 1e-6)


def test_two_placements_in_one_step():
    zero = zero_of(4, 2, names=("data", "model"), kind=AUTO)
    step = zero.train_step(zero.gathered(mean_loss), tx=TX)
    losses = []
    for w in (P(None, "model"), P()):
        state = zero.init(make_pair, tx=TX, param_specs={"w": w, "b": P()})
        state, metrics = step(state, zero.put(batch()))
        step(state, zero.put(batch()))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)
