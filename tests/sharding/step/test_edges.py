"""What users do that is wrong, or unusual: an error that says what to do, or it works."""

import contextlib
import dataclasses
import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext

from .. import model
from ..model import mean_loss

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TX = optax.adamw(1e-2)


def zero_of(*shape, kind=EXPLICIT, **options):
    return model.zero_on(*(shape or (4,)), kind=kind, offload_min_size=0, **options)


def initial():
    w = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)
    return {"w": w, "b": np.ones(16, np.float32)}


make_pair = model.make_of(initial, TX)
batch = functools.partial(model.regression_batch, 16)


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


def test_a_state_that_a_step_returned_is_not_walked_again(monkeypatch):
    """Of 600 arrays that takes longer than the rest of a call; what jax would crash on is found."""
    zero = zero_of()
    tx = optax.sgd(1e-2)
    params = {"a": np.ones((8, 16), np.float32), "b": np.ones((8, 16), np.float32)}
    loss = lambda p, batch: (jnp.square(batch["x"] @ (p["a"] - 2 * p["b"]))).mean()  # noqa: E731
    state, data = zero.init(lambda: (params, tx.init(params)), tx=tx), zero.put(batch())
    step = zero.train_step(loss, tx=tx)
    for _ in range(2):
        state, _ = step(state, data)
    with monkeypatch.context() as patch:
        patch.setattr(type(zero._layout), "place_scalars", lambda *_: pytest.fail("walked"))
        old, (state, _) = state, step(state, data)
    with pytest.raises(ValueError, match=r"the state was donated .*'0/a'"):
        step(old, data)
    with pytest.raises(ValueError, match="'0/a' of the state and '0/b' of the call are one array"):
        step(({**state[0], "b": state[0]["a"]}, state[1]), data)
    with pytest.raises(ValueError, match=r"batch array 'x' of shape \(6, 8\)"):
        step(state, {"x": np.ones((6, 8), np.float32)})
    step(state, data)


def test_what_is_not_donated_is_used_again_and_what_was_deleted_is_not():
    zero = zero_of()
    state, data = zero.init(make_pair, tx=TX), zero.put(batch())
    step = zero.train_step(mean_loss, tx=TX, donate=False)
    assert step(state, data)[1]["loss"] == step(state, data)[1]["loss"]
    data["y"].delete()
    with pytest.raises(ValueError, match=r"argument 'batch': 'y' \(float32.*was deleted"):
        step(state, data)


BAD_BATCHES = [
    (
        {"x": (16, 64), "y": (16,), "class_weights": (8,)},
        r"'class_weights' of shape \(8,\) and 'x' of shape \(16, 64\) differ .* model_state",
    ),
    ({"x": (16, 8), "z": (1,)}, r"'x' of shape \(16, 8\) and 'z' of shape \(1,\)"),
    ({"x": (0, 8), "y": (0,)}, r"the batch is empty: 'x' has shape \(0, 8\)"),
    ({"x": (6, 8)}, r"'x' of shape \(6, 8\).* 4 devices"),
]


def test_bad_batches():
    """Class weights that are sharded with the batch changed the loss, in silence."""
    zero = zero_of()
    state = zero.init(make_pair, tx=TX)
    for shapes, message in BAD_BATCHES:
        bad = jax.tree.map(np.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
        for call in (
            zero.put,
            lambda b: zero.train_step(mean_loss, tx=TX)(state, b),
            lambda b: zero.eval_step(mean_loss)(state, b),
            lambda b: zero.value_and_grad(mean_loss)(state[0], b),
        ):
            with pytest.raises(ValueError, match=message):
                call(bad)


def run_all(zero, context, specs):
    """What everything returns inside a context, and how often a loss was traced for a step."""
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return mean_loss(params, batch)

    loss_fn = zero.gathered(loss_fn)
    step = zero.train_step(loss_fn, tx=TX, microbatches=2)
    with context():
        state, data = zero.init(make_pair, tx=TX, param_specs=specs), zero.put(batch())
        grads = zero.value_and_grad(loss_fn)(state[0], data)
        out = {
            "value_and_grad": grads,
            "eval_step": zero.eval_step(loss_fn)(state, data),
            "apply_gradients": zero.apply_gradients(state, grads[1], tx=TX),
            "full_params": zero.full_params(state),
        }
        traces.clear()
        state, _ = step(state, data)
        once = len(traces)
        state, out["metrics"] = step(state, data)
    # The same function outside of the context.
    out["state"], _ = step(state, data)
    assert len(traces) == once
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize(("kind", "stage"), [(EXPLICIT, 3), (AUTO, 2)])
def test_under_set_mesh(kind, stage):
    """The same numbers, and no more compilations, whether the user sets the mesh or not."""
    zero = zero_of(4, 2, names=("data", "model"), stage=stage, kind=kind)
    specs = {"w": P(None, "model"), "b": P("model")}
    expected = run_all(zero, contextlib.nullcontext, specs)
    found = run_all(zero, lambda: jax.set_mesh(zero.mesh), specs)
    chex.assert_trees_all_equal(found, expected, strict=True)


def test_under_another_mesh():
    """Zero uses its own mesh; what cannot be is an error that names both."""
    zero, other = zero_of(), zero_of(2, kind=AUTO)
    state, data = zero.init(make_pair, tx=TX), zero.put(batch())
    step = zero.train_step(mean_loss, tx=TX, donate=False)
    expected, _ = step(state, data)
    with jax.set_mesh(other.mesh):
        found, _ = step(state, data)
        with pytest.raises(ValueError, match=r"mesh of the context is .* that of Zero is \(data=4"):
            jax.jit(lambda p: zero.value_and_grad(mean_loss, param_specs=P())(p, batch()))(
                zero.full_params(state)
            )
    np.testing.assert_array_equal(found[0]["w"], expected[0]["w"])


def test_arrays_on_other_devices_are_moved():
    """A batch, and pretrained parameters, on one device; a batch that is on the mesh in full."""
    zero = zero_of()
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
    for other in (zero_of(stage=3), zero_of()):
        elsewhere = jax.device_put(jax.device_get(state), other.shardings(make_pair(), tx=TX))
        for one in (step, zero.train_step(mean_loss, tx=TX)):
            with pytest.raises(ValueError, match="'0/b' has the placement"):
                one(elsewhere, zero.put(batch()))
    here = jax.device_put(jax.device_get(state), zero.shardings(make_pair(), tx=TX))
    step(here, zero.put(batch()))


@pytest.mark.parametrize(
    "tx", [optax.lbfgs(), optax.chain(TX, optax.scale_by_backtracking_linesearch(5))]
)
@pytest.mark.parametrize("options", [{}, {"update": "backward"}])
def test_a_line_search_is_refused_in_words(tx, options):
    """It needs the loss as a function, which no step can give."""
    zero, update = zero_of(kind=AUTO), options.get("update", "after")
    params, _ = make_pair()
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    said = "tx.update gets gradients, state, parameters, and the loss as value=, and failed: .*"
    with pytest.raises(ValueError, match=f"{said}'value_fn'. A step cannot give the loss"):
        zero.train_step(mean_loss, tx=tx, update=update)(state, zero.put(batch()))


@pytest.mark.parametrize(("memory", "offload"), [("device", "optimizer"), ("pinned_host", None)])
def test_a_state_in_another_memory(memory, offload):
    """The error names both: that of the array, and that in which the step has it."""
    zero = zero_of(kind=AUTO, offload=offload)
    state = zero.init(make_pair, tx=TX)
    there = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory)), state)
    needed = "pinned_host" if offload else "device"
    said = rf"memory_kind={memory}\); the step requires PartitionSpec\(.*\) in {needed} memory"
    said = said.replace("PartitionSpec", r"\w+")
    with pytest.raises(ValueError, match=said):
        zero.train_step(mean_loss, tx=TX)(there, zero.put(batch()))


def test_a_learning_rate_that_is_set_between_steps(x64):
    """As optax says, before the first step and after others, of whatever type."""
    make = optax.inject_hyperparams(optax_ext.came, static_args="weight_decay_mask")
    tx = make(0.1, weight_decay=0.1, weight_decay_mask=optax_ext.decay_mask)
    rates = [0.05, np.float64(0.2), None, np.array(0.01), jnp.asarray(0.3), np.float32(0.125), 1]
    params = jax.tree.map(lambda x: x.astype(float), initial())
    rows = [jax.tree.map(lambda x: x.astype(float), batch()) for _ in rates]

    @jax.jit
    def alone(params, opt_state, data):
        grads = jax.grad(mean_loss)(params, data)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    zero = zero_of()
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    expected = params, tx.init(params)
    step = zero.train_step(mean_loss, tx=tx)
    for i, rate in enumerate(rates):
        if rate is not None:
            for each in (state, expected):
                each[1].hyperparams["learning_rate"] = rate
        if i % 3 == 2:
            grads = zero.value_and_grad(mean_loss)(state[0], zero.put(rows[i]))[1]
            state = zero.apply_gradients(state, grads, tx=tx)
        else:
            state, _ = step(state, zero.put(rows[i]))
        expected = alone(*expected, rows[i])
        for found, want in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-10)


class Block(eqx.Module):
    w: jax.Array
    act: Any = jnp.tanh  # a leaf that is no array


@pytest.mark.parametrize("static_first", [False, True])
def test_equinox_under_scan_at_stage_3(static_first):
    """Trees are matched in either order."""
    params, static = eqx.partition(Block(jnp.ones((3, 16, 16))), eqx.is_array)
    zero, make = zero_of(stage=3), model.make_of(lambda: params, TX)
    block = zero.gathered(lambda block, x: x + block.act(x @ block.w))

    def body(x, layer):
        trees = (static, layer) if static_first else (layer, static)
        return block(eqx.combine(*trees), x), None

    loss_fn = lambda params, x: jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)  # noqa: E731
    model.lowered(zero, make, TX, loss_fn, np.ones((16, 16), np.float32))


@pytest.mark.parametrize("mixed", [False, True])
def test_two_placements_in_one_step(mixed):
    """Also where the axes of the mesh are of both kinds."""
    zero = zero_of(4, 2, names=("data", "model"), kind=AUTO)
    if mixed:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, EXPLICIT))
        zero = dataclasses.replace(zero, mesh=mesh, stage=3)
    step = zero.train_step(zero.gathered(mean_loss), tx=TX)
    losses = []
    for w in (P(None, "model"), P()):
        state = zero.init(make_pair, tx=TX, param_specs={"w": w, "b": P()})
        state, metrics = step(state, zero.put(batch()))
        step(state, zero.put(batch()))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)
