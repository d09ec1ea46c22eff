"""What users do that is wrong, or unusual: an error that says what to do, or it works."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sharding as shd

KINDS = [AxisType.Auto, AxisType.Explicit]
TX = optax.adamw(1e-2)


def zero_of(n=4, stage=2, kind=AxisType.Explicit, shape=None, axes=("data",), **kwargs):
    """On a mesh of ``n`` devices, or of a ``shape`` with ``axes``."""
    shape = shape or (n,)
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes), devices=devices)
    return shd.Zero(mesh, stage=stage, min_shard_size=0, **kwargs)


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
