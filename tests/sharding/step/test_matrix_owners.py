"""by_owner: each matrix is updated on one device, with the numbers of one device alone."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sharding as shd
from sharding.plan.program._wire import collectives
from sharding.step._matrix_owners import _Job

from .. import model

SHAPES = {
    "stack": (5, 40, 48),  # no dim of the stack divides by the devices
    "twice": (2, 3, 40, 48),  # two leading dims
    "single": (40, 48),
    "tall": (6, 64, 24),
    "other": (3, 24, 64),
    "owned": (8, 33, 35),  # the stack itself is sharded
    "odd": (9, 35, 37),  # nothing divides
    "bias": (48,),
}
STEPS = 10


def inverse_fourth_root(x):
    """By a coupled Newton iteration. (jaxlib's eigh waits for threads of a pool that devices block
    which wait for it, where there are fewer cores than devices.)
    """
    eye = jnp.eye(len(x), dtype=x.dtype)
    x = x + 1e-3 * jnp.trace(x) * eye
    scale = 2.5 / jnp.linalg.norm(x)

    def step(_, pair):
        m, h = pair
        factor = 1.25 * eye - 0.25 * m
        return jnp.linalg.matrix_power(factor, 4) @ m, h @ factor

    return jax.lax.fori_loop(0, 25, step, (x * scale, eye * scale**0.25))[1]


def shampoo(learning_rate):
    """Shampoo of one matrix."""

    def init(p):
        return tuple(jnp.zeros((n, n), p.dtype) for n in p.shape)

    def update(g, state, p=None):
        del p
        left, right = state[0] + g @ g.T, state[1] + g.T @ g
        update = inverse_fourth_root(left) @ g @ inverse_fourth_root(right)
        return -learning_rate * update, (left, right)

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(1e-2, weight_decay=0.1),
    "shampoo": lambda: optax.chain(optax.trace(0.9), shampoo(1e-2)),
}


def make_tx(name):
    matrices = {k: "other" if k == "bias" else "matrix" for k in SHAPES}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {"matrix": shd.by_owner(OPTIMIZERS[name]()), "other": optax.adamw(1e-2)}, matrices
        ),
    )


def make_state(tx):
    def make():
        rng = np.random.default_rng(0)
        params = {k: jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5) for k, s in SHAPES.items()}
        return params, tx.init(params)

    return make


def loss(params, batch):
    """Its gradients have full rank, and each device's has another scale."""
    total = 0.0
    for name, x in params.items():
        seen = jnp.cos(x[None] + batch[name] * x[None] ** 2)
        total += jnp.sum(seen, axis=tuple(range(1, seen.ndim)))
    return jnp.mean(total * 10.0 ** batch["scale"])


def batch(step):
    rng = np.random.default_rng(step)
    found = {k: rng.normal(size=(8, *s)) for k, s in SHAPES.items()}
    return found | {"scale": rng.uniform(-2, 1, 8)}


@functools.cache
def reference(name):
    tx = make_tx(name)
    state = jax.jit(make_state(tx))()

    @jax.jit
    def step(state, batch):
        grads = jax.grad(loss)(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    for i in range(STEPS):
        state = step(state, batch(i))
    return jax.device_get(state)


MESHES = {
    "flat": ((8,), ("data",), AxisType.Auto, {}),
    "torus": ((2, 4), ("x", "y"), AxisType.Auto, {"axis": ("x", "y")}),
    "explicit": ((4,), ("data",), AxisType.Explicit, {}),
    "replicas": (
        (2, 4),
        ("replica", "data"),
        AxisType.Auto,
        {"replica_axis": "replica"},
    ),
    "tensor parallel": ((4, 2), ("data", "model"), AxisType.Auto, {}),
}


def zero_on(mesh, stage, **options):
    shape, names, kind, more = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(shape))]
    made = jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)
    return shd.Zero(made, stage=stage, **({"axis": "data"} | more | options))


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "mesh", "stage"),
    [
        ("muon", "flat", 1),
        ("muon", "flat", 2),
        ("muon", "flat", 3),
        ("muon", "torus", 2),
        ("muon", "explicit", 2),
        ("muon", "replicas", 3),
        ("muon", "tensor parallel", 2),
        ("shampoo", "flat", 2),
        ("shampoo", "torus", 3),
    ],
)
def test_equals_one_device(name, mesh, stage):
    tx = make_tx(name)
    zero = zero_on(mesh, stage)
    state = zero.init(make_state(tx), tx=tx)
    step = zero.train_step(zero.gathered(loss), tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = model.worst_leaf(jax.device_get(state), reference(name))
    assert distance < 1e-11, leaf


def compiled_step(name, zero):
    tx = make_tx(name)
    state = zero.abstract_state(make_state(tx), tx=tx)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    return zero.train_step(zero.gathered(loss), tx=tx).lower(state, shapes).compile()


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64", "scopes_in_cache_key")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrices_are_sent_to_their_owners_and_nothing_is_gathered(stage):
    program = compiled_step("muon", zero_on("flat", stage))
    update = [c for c in collectives(program) if "/update/" in c.scope and c.elements > 1000]
    moved = [c for c in update if "/by_owner/" in c.scope]
    sent = [c for c in moved if c.op == "all-to-all"]
    # By shape: matrices, padded to a multiple of the devices, there and back. "other" has fewer
    # than half as many as devices, and each device has those of "owned" that it updates.
    padded = {(40, 48): 16, (64, 24): 8}
    elements = sum(n * a * b for (a, b), n in padded.items())
    assert sum(c.wire_bytes for c in sent) == 2 * 8 * elements / 8 * (7 / 8)
    # Of "odd" no dim divides: it is replicated, and the results of its owners are gathered.
    assert [c.elements for c in moved if c not in sent] == [16 * 35 * 37]
    assert all(c.elements <= 3 * 24 * 64 for c in update if c not in moved)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_are_updated_as_single_ones(name):
    tx = shd.by_owner(OPTIMIZERS[name]())
    rng = np.random.default_rng(0)
    stack, grads = (jnp.asarray(rng.normal(size=(4, 40, 48))) for _ in range(2))
    single = {i: stack[i] for i in range(4)}
    updates, state = tx.update(stack, tx.init(stack), stack)
    each, states = tx.update({i: grads[i] for i in single}, tx.init(single), single)
    updates, state = tx.update(grads, tx.init(stack), stack)
    for i in single:
        np.testing.assert_allclose(updates[i], each[i], rtol=1e-12, atol=1e-15)
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-12, atol=1e-15),
            state,
            states[i],
        )


@pytest.mark.usefixtures("x64")
def test_state_is_sharded_and_its_shapes_do_not_depend_on_the_mesh():
    tx = make_tx("shampoo")
    zero = zero_on("flat", 2, min_shard_size=0)
    state = zero.init(make_state(tx), tx=tx)
    alone = jax.eval_shape(make_state(tx))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, alone)
    for path, x in jax.tree_util.tree_leaves_with_path(state[1]):
        divides = any(n % 8 == 0 for n in x.shape)
        if x.size >= 1024 and divides:
            assert not x.sharding.is_fully_replicated, jax.tree_util.keystr(path)


def test_vectors_are_no_matrices():
    with pytest.raises(ValueError, match=r"'bias' of shape \(4,\) is neither a matrix nor a stack"):
        shd.by_owner(optax.contrib.muon(1e-2)).init({"bias": jnp.zeros(4)})


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_owner_receives_the_inputs_of_the_matrix_products_alone(name):
    """Of Muon one matrix goes and one comes; of Shampoo gradient and statistics, and all back."""
    tx = optax.with_extra_args_support(OPTIMIZERS[name]())
    p = jnp.ones((40, 48))
    split = _Job(tx, "w", (p, tx.init(p), p), {}).split()
    large = [
        [math.prod(split.graph.shape(v)) >= 1024 for v in values]
        for values in (split.ins, split.outs)
    ]
    assert [sum(x) for x in large] == {"muon": [1, 1], "shampoo": [3, 3]}[name]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_random_numbers_and_any_extra_arguments(kind):
    """On Explicit axes random numbers are resharded, but for those inside a shard_map."""

    def scale(updates, state, params=None, *, value, mode, **extra_args):
        del params, extra_args
        assert mode == "halve"
        return jax.tree.map(lambda u: u * value / 2, updates), state

    noise = optax.add_noise(0.1, 0.5, key=0)
    last = optax.GradientTransformationExtraArgs(lambda params: (), scale)
    tx = shd.by_owner(optax.chain(noise, optax.contrib.muon(1e-2), last))
    rng = np.random.default_rng(0)
    params, grads = ({"w": jnp.asarray(rng.normal(size=(5, 40, 48)))} for _ in range(2))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    zero = shd.Zero(mesh, stage=2)

    def update(extra):
        return optax.GradientTransformationExtraArgs(
            tx.init, lambda g, s, p=None, **_: tx.update(g, s, p, mode="halve", **extra)
        )

    placed = update({"value": 3.0})
    state = zero.init(lambda: (params, placed.init(params)), tx=placed)
    step = zero.train_step(lambda p, x: jnp.sum(p["w"] * grads["w"]) + 0 * jnp.sum(x), tx=placed)
    (new, _), _ = step(state, zero.put(np.ones(4)))
    updates, _ = placed.update(grads, placed.init(params), params)
    np.testing.assert_allclose(new["w"], params["w"] + updates["w"], rtol=1e-11)
