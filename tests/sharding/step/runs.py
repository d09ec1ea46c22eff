"""What tests of losses and layers share: meshes, uneven data, parameters that NumPy drew."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import sharding as shd

from .. import model

STEPS, ROWS, WIDTH, TOLERANCE = 4, 32, 16, 1e-12
F64 = {"param_dtype": jnp.float64}
TX = optax.sgd(0.05, momentum=0.9)  # its state shows the scale of the gradients
MESHES = {
    "flat": ((8,), ("data",), {}),
    "four": ((4,), ("data",), {}),
    "three": ((3,), ("data",), {}),
    "one": ((1,), ("data",), {}),
    "replicas": ((2, 4), ("replica", "data"), {"replica_axis": "replica"}),
    "torus": ((2, 4), ("x", "y"), {"axis": ("x", "y")}),
    "tensor": ((4, 2), ("data", "model"), {}),
}


def zero_of(stage, mesh="flat", kind=AxisType.Auto, **options):
    shape, names, more = MESHES[mesh]
    return model.zero_on(*shape, names=names, kind=kind, stage=stage, **more, **options)


def batch(step):
    """Eighths that differ in scale by up to 30: their own statistics are not those of all."""
    rng = np.random.default_rng(step)
    scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), ROWS // 8)[:, None]
    return {"x": rng.normal(size=(ROWS, WIDTH)) * scale, "y": rng.normal(size=(ROWS, 8))}


def draw(shapes):
    """Of the shapes of ``init``, whose random bits compile slowly."""
    rng = np.random.default_rng(0)
    scale = lambda x: x.shape[-2] ** -0.5 if x.ndim > 1 else 0.3  # noqa: E731
    return jax.tree.map(lambda x: rng.normal(0.0, scale(x), x.shape), shapes)


def make_train_state_of(make_params, tx=TX):
    """As ``make_of``, of Flax."""

    def make():
        params = jax.tree.map(jnp.asarray, make_params())
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    return make


def train(zero, make, loss_fn, tx=None, data=batch, steps=STEPS, param_specs=None, **options):
    """The state and the metrics of each step."""
    if "coupled" in options:  # which no keyword says
        own = ("coupled", "weighted", "has_aux", "rngs")
        loss_fn = shd.Loss(loss_fn, **{k: options.pop(k) for k in own if k in options})
    state, found = zero.init(make, tx=tx, param_specs=param_specs), []
    step = zero.train_step(loss_fn, tx=tx, **options)
    for i in range(steps):
        state, metrics = step(state, zero.put(data(i)))
        found.append(metrics)
    return state, found


def train_alone(make, mean, data=batch, steps=STEPS, key=0):
    """As ``train``, by plain jax and optax on one device.

    ``mean(params, batch, state, key)`` is the loss of a ``TrainState``, and new statistics or aux.
    """

    @jax.jit
    def step(state, batch):
        folded = jax.random.fold_in(jax.random.key(key), state.step)
        run = jax.value_and_grad(mean, has_aux=True)
        (loss, aux), grads = run(state.params, batch, state, folded)
        new = {"batch_stats": aux} if getattr(state, "batch_stats", None) else {}
        metrics = {"loss": loss, "aux": aux, "grad_norm": optax.tree.norm(grads)}
        return state.apply_gradients(grads=grads, **new), metrics

    state, found = jax.jit(make)(), []  # eager initializers round otherwise
    for i in range(steps):
        state, metrics = step(state, data(i))
        found.append(metrics)
    return state, found


def assert_same(found, expected):
    """States, pairs or of Flax, and losses of ``train``."""
    assert_close(*map(_arrays, (found[0], expected[0])))
    losses = [[float(metrics["loss"]) for metrics in each] for _, each in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)


def _arrays(state):
    if isinstance(state, tuple):
        return state
    return state.params, state.opt_state, getattr(state, "batch_stats", None)


def assert_close(found, expected, tolerance=TOLERANCE):
    """Leaf by leaf, whatever nodes they are in."""
    model.assert_close(*map(jax.tree.leaves, (found, expected)), tolerance)


def gathers_behind(program, shape):
    """Of each all-gather of a lowered step: whether a barrier holds it back until an array of this
    shape exists.
    """
    found, barriers = [], {}
    for line in program.splitlines():
        if "func.func " in line:
            barriers = {}
        if barrier := re.match(r"\s*(%\d+):\d+ = stablehlo.optimization_barrier", line):
            barriers[barrier[1]] = f"tensor<{shape}>" in line
        if gather := re.search(r'"stablehlo.all_gather"\((%\w+)', line):
            found.append(barriers.get(gather[1], False))
    return found


def reduced_before(program, shape):
    """How many reduce-scatters of a lowered step a barrier puts before an array of this shape."""
    found, reduced = 0, set()
    for line in program.splitlines():
        if "func.func " in line:
            reduced = set()
        if scatter := re.match(r'\s*(%\d+) = "stablehlo.reduce_scatter"', line):
            reduced.add(scatter[1])
        if "stablehlo.optimization_barrier" in line and f"tensor<{shape}>" in line:
            found += len(reduced.intersection(re.findall(r"%\d+", line)))
    return found
