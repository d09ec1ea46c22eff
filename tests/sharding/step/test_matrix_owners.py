"""by_owner: each matrix is updated on one device, with the numbers of one device alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from sharding.placement._matrix_form import MatrixForm
from sharding.plan.audit._program_collectives import collectives

from ...tiers import slow
from .. import model

STEPS = 4
# (shape, its dims as (stack, rows, cols), dim of the heads).
PARAMS = {
    # The rows, embed, are sharded: sent together with the two below, which have the same matrices.
    "layers/query/kernel": ((5, 40, 4, 16), ((0,), (1,), (2, 3)), 2),
    # Fused, a stack of three between rows and columns.
    "qkv/kernel": ((40, 3, 4, 16), ((1,), (0,), (2, 3)), 2),
    # Fused and stacked, heads before embed.
    "layers/kv_einsum/w": ((2, 2, 4, 40, 16), ((0, 1), (3,), (2, 4)), 2),
    # Head_dim is sharded, a minor dim of the rows: moved to embed.
    "layers/out/kernel": ((5, 4, 64, 40), ((0,), (1, 2), (3,)), 1),
    # The heads are sharded, a major dim.
    "layers/attn_vec_einsum/w": ((5, 8, 5, 35), ((0,), (1, 2), (3,)), 1),
    # Head_dim is sharded and no other dim divides: replicated. One matrix: it has no owner.
    "out/kernel": ((6, 64, 35), ((), (0, 1), (2,)), 0),
    "layers/up/kernel": ((5, 40, 48), ((0,), (1,), (2,)), None),
    # The stack itself is sharded: each device has the matrices that it owns.
    "layers/owned/kernel": ((8, 33, 35), ((0,), (1,), (2,)), None),
    # Nothing divides: replicated, and the results of the owners are gathered.
    "layers/odd/kernel": ((9, 35, 37), ((0,), (1,), (2,)), None),
}
RULE = optax_ext.flax_transformer(stacked="^layers/")  # of several lengths
ALL = tuple(PARAMS)
# For what compiles slowly: moved and not, with an owner and without, on its owner already.
ATTENTION = ("layers/query/kernel", "layers/out/kernel", "qkv/kernel", "out/kernel")
FEW = ("layers/query/kernel", "layers/odd/kernel", "layers/owned/kernel")


def preconditioned(learning_rate):
    """As Shampoo, statistics of rows and columns that the update is multiplied with."""

    def init(p):
        return tuple(jnp.zeros((n, n), p.dtype) for n in p.shape)

    def update(g, state, p=None):
        del p
        left, right = state[0] + g @ g.T, state[1] + g.T @ g
        scale = learning_rate / (jnp.trace(left) * jnp.trace(right)) ** 0.5
        return -scale * left @ g @ right / jnp.linalg.norm(g), (left, right)

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(1e-2, weight_decay=0.1),
    "statistics": lambda: optax.chain(optax.trace(0.9), preconditioned(1e-2)),
}


def make_tx(name, **options):
    return shd.by_owner(OPTIMIZERS[name](), factoring=RULE, **options)


def initial(names=ALL):
    rng = np.random.default_rng(0)
    drawn = {k: rng.normal(size=s) / s[-1] ** 0.5 for k, (s, *_) in PARAMS.items()}
    return {k: drawn[k] for k in names}


def make_state(tx, names=ALL):
    return model.make_of(lambda: initial(names), tx)


def loss(params, batch):
    """Its gradients have full rank, and each device's has another scale."""
    total = 0.0
    for name, x in params.items():
        seen = jnp.cos(x[None] + batch[name] * x[None] ** 2)
        total += jnp.sum(seen, axis=tuple(range(1, seen.ndim)))
    return jnp.mean(total * 10.0 ** batch["scale"])


def batch(step):
    rng = np.random.default_rng(step)
    found = {k: rng.normal(size=(8, *s)) for k, (s, *_) in PARAMS.items()}
    return found | {"scale": rng.uniform(-2, 1, 8)}


def to_matrices(name, x):
    """A parameter as (matrices, rows, columns)."""
    stack, rows, cols = PARAMS[name][1]
    x = np.transpose(x, (*stack, *rows, *cols))
    return x.reshape(-1, *(np.prod([PARAMS[name][0][d] for d in g]) for g in (rows, cols)))


def matrices(tree):
    return {name: to_matrices(name, np.asarray(x)) for name, x in tree.items()}


def gradients(params, batch):
    """Of ``loss``, in NumPy, for parameters in matrix form."""
    grads = {}
    for name, x in params.items():
        b = np.stack([to_matrices(name, one) for one in batch[name]])
        each = -np.sin(x + b * x**2) * (1 + 2 * b * x)
        grads[name] = np.tensordot(10.0 ** batch["scale"] / 8, each, 1)
    return grads


@functools.cache
def reference(name, names=ALL):
    """The matrices and the state of each after every step, one matrix updated after the other."""
    tx = OPTIMIZERS[name]()

    @jax.jit
    def update(grads, states, params):
        one = lambda args: tx.update(*args)  # noqa: E731
        return {k: lax.map(one, (grads[k], states[k], params[k])) for k in params}

    params = matrices(initial(names))
    states = jax.jit(lambda params: {k: jax.vmap(tx.init)(p) for k, p in params.items()})(params)
    found = []
    for i in range(STEPS):
        new = jax.device_get(update(gradients(params, batch(i)), states, params))
        params = {k: p + new[k][0] for k, p in params.items()}
        states = {k: new[k][1] for k in params}
        found.append((params, states))
    return found


MESHES = {
    "flat": ((8,), {}),
    "explicit": ((4,), {"kind": AxisType.Explicit}),
    "tensor parallel": ((4, 2), {"names": ("data", "model")}),
}


def run(mesh, stage, tx, names, steps=STEPS):
    shape, options = MESHES[mesh]
    zero = model.zero_on(*shape, stage=stage, min_shard_size=4096, **options)
    specs = None
    if mesh == "tensor parallel":
        dims = {k: PARAMS[k][2] for k in names}
        specs = {k: P() if d is None else P(*[None] * d, "model") for k, d in dims.items()}
    loss_fn = zero.gathered(loss)
    return model.run(zero, make_state(tx, names), tx, loss_fn, batch, steps, specs)


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "names"),
    [
        pytest.param("muon", "flat", 2, ALL, marks=pytest.mark.slow),
        ("muon", "explicit", 3, ATTENTION),
        slow(("muon", "tensor parallel", 2, ATTENTION)),
        ("statistics", "flat", 2, FEW),
    ],
)
def test_equals_the_matrices_on_one_device(name, mesh, stage, names, x64):
    params, states = run(mesh, stage, make_tx(name), names)
    for key in names:
        for x in jax.tree.leaves(states[key]):
            may_be = x.size >= 4096 and any(n % 8 == 0 for n in x.shape) and key != "out/kernel"
            assert x.sharding.is_fully_replicated <= (not may_be), key
    found = reference(name, ALL if name == "muon" else names)[-1]
    want, want_states = ({k: x[k] for k in names} for x in found)
    model.assert_close(matrices(jax.device_get(params)), want, 1e-11)
    check_states(states, want_states)


def check_states(states, want):
    """State has the form of the matrices."""
    states = jax.tree.map(lambda a, b: np.reshape(a, b.shape), jax.device_get(states), want)
    model.assert_close(states, want, 1e-11)


# By shape: matrices, padded to a multiple of the devices.
PADDED = {(40, 64): 8 + 8, (256, 40): 8, (40, 35): 8, (40, 48): 8}


@pytest.mark.usefixtures("x64", "scopes_in_cache_key")
def test_matrices_are_sent_to_their_owners_and_nothing_is_gathered():
    zero, tx = model.zero_on(8, min_shard_size=4096), make_tx("muon", wire_dtype=jnp.float32)
    lowered = model.lowered(zero, make_state(tx), tx, zero.gathered(loss), batch(0))
    found = collectives(lowered.compile())
    update = [c for c in found if "/update/" in c.scope and c.elements > 1000]
    moved = [c for c in update if "/by_owner/" in c.scope]
    sent = sum(n * a * b for (a, b), n in PADDED.items()) * 2 * 7 / 64  # there and back
    # Gradient, parameter and update of layers/out, between head_dim and embed: what moves shards to
    # another dim keeps its dtype, as gradients are part of the state.
    between_dims = 5 * 4 * 64 * 40 * 3 * 7 / 64
    to_all = [c.wire_bytes for c in moved if c.op == "all-to-all"]
    assert sum(to_all) == sent * 4 + between_dims * 8
    assert [c.elements for c in moved if c.op != "all-to-all"] == [16 * 35 * 37]  # of "odd"
    # Of the one that has no owner.
    assert all(c.elements <= 6 * 64 * 35 for c in update if c not in moved)


def test_a_wrapper_that_drops_extra_arguments_keeps_the_owners():
    zero, tx = model.zero_on(8, min_shard_size=4096), optax.MultiSteps(make_tx("muon"), 2)
    make = make_state(tx, FEW)
    inputs = {k: x for k, x in batch(0).items() if k in (*FEW, "scale")}
    assert "by_owner/" in model.lowered(zero, make, tx, loss, inputs).as_text(debug_info=True)


def test_a_wire_dtype_rounds_updates_and_no_state(x64):
    tx = make_tx("statistics", wire_dtype=jnp.bfloat16)
    params, states = jax.device_get(run("flat", 2, tx, FEW, steps=1))
    wanted, wanted_states = reference("statistics", FEW)[0]
    check_states(states, wanted_states)  # rounding would be 4e-3
    start = matrices(initial())
    parts = {
        k: np.linalg.norm(x - wanted[k]) / np.linalg.norm(wanted[k] - start[k])
        for k, x in matrices(params).items()
    }
    assert parts.pop("layers/owned/kernel") < 1e-10  # nothing moves it
    assert all(1e-4 < part < 2e-2 for part in parts.values()), parts


def test_bad_arguments():
    for options, message in (
        ({"tx": optax.contrib.muon}, "tx must be a transformation of one matrix"),
        ({"factoring": None}, "factoring must be a Factoring or a rule .*; got None"),
        ({"wire_dtype": jnp.int8}, "wire_dtype must be a floating dtype"),
        ({"wire_dtype": jnp.float16}, "float16 has a smaller range than float32"),
    ):
        with pytest.raises(ValueError, match=message):
            shd.by_owner(**({"tx": optax.contrib.muon(1e-2)} | options))
    with pytest.raises(ValueError, match=r"'bias' of shape \(4,\) is neither a matrix nor a stack"):
        shd.by_owner(optax.contrib.muon(1e-2)).init({"bias": np.zeros(4)})


def test_any_order_of_dims_there_and_back():
    form = MatrixForm.of(optax_ext.Factoring((3,), (0, 2)), "w", (3, 4, 5, 6))
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    y = jax.jit(form.to_matrices)(x)
    np.testing.assert_array_equal(y, np.einsum("abcd->bdac", x).reshape(4, 6, 15))
    np.testing.assert_array_equal(jax.jit(form.from_matrices)(y, y), x)


def test_layers_in_a_module_called_blocks_are_no_stack():
    """Each has its own matrices, as under another name: query is (embed, heads * head_dim)."""
    tx = shd.by_owner(optax.trace(0.9), factoring=optax_ext.flax_transformer())
    layer = {"query": {"kernel": np.ones((8, 2, 3))}, "out": {"kernel": np.ones((2, 3, 8))}}
    layer["up"] = {"kernel": np.ones((8, 8))}
    for name in ("blocks", "trunk"):
        params = {name: {"block_0": layer, "block_1": layer}}
        state = tx.init(params)
        _, state = tx.update(params, state)
        shapes = {x.shape for x in jax.tree.leaves(state)}
        assert shapes == {(8, 6), (6, 8), (8, 8)}
