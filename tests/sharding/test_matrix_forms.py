"""by_owner with a factoring rule: attention kernels are updated as the matrices that they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from sharding.plan._wire import collectives
from sharding.step._matrix_form import MatrixForm

from . import model
from .test_matrix_owners import zero_on

# (shape, order of its dims as (stack, rows, cols), dim of the heads); what each is there for.
ATTENTION = {
    # embed is sharded, the rows
    "layers/query/kernel": ((5, 40, 4, 16), ((0,), (1,), (2, 3)), 2),
    # head_dim is sharded, a minor dim of the rows: moved to embed
    "layers/out/kernel": ((3, 4, 64, 40), ((0,), (1, 2), (3,)), 1),
    # fused, a stack of three between rows and columns
    "qkv/kernel": ((40, 3, 4, 16), ((1,), (0,), (2, 3)), 2),
    # fused and stacked, heads before embed
    "layers/kv_einsum/w": ((2, 2, 4, 40, 16), ((0, 1), (3,), (2, 4)), 2),
    # the heads are sharded, a major dim
    "layers/attn_vec_einsum/w": ((5, 8, 5, 35), ((0,), (1, 2), (3,)), 1),
    # head_dim is sharded, and no other dim divides: moved nowhere, so replicated
    "out/kernel": ((6, 64, 35), ((), (0, 1), (2,)), 0),
    "layers/up/kernel": ((5, 40, 48), ((0,), (1,), (2,)), None),
}
STEPS = 10
RULE = optax_ext.flax_transformer()


def make_tx(**options):
    muon = optax.contrib.muon(1e-2, weight_decay=0.1)
    return optax.chain(
        optax.clip_by_global_norm(1.0), shd.by_owner(muon, factoring=RULE, **options)
    )


def initial():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5) for k, (s, *_) in ATTENTION.items()}


def make_state(tx):
    return lambda: (initial(), tx.init(initial()))


def loss(params, batch):
    """Its gradients have full rank, and each device's has another scale."""
    total = 0.0
    for name, x in params.items():
        seen = jnp.cos(x[None] + batch[name] * x[None] ** 2)
        total += jnp.sum(seen, axis=tuple(range(1, seen.ndim)))
    return jnp.mean(total * 10.0 ** batch["scale"])


def batch(step):
    rng = np.random.default_rng(step)
    found = {k: rng.normal(size=(8, *s)) for k, (s, *_) in ATTENTION.items()}
    return found | {"scale": rng.uniform(-2, 1, 8)}


def matrices(tree):
    """Every matrix of the parameters as an array of two dims."""
    found = {}
    for name, x in tree.items():
        stack, rows, cols = ATTENTION[name][1]
        x = np.transpose(x, (*stack, *rows, *cols))
        x = x.reshape(-1, *(int(np.prod([ATTENTION[name][0][d] for d in g])) for g in (rows, cols)))
        found |= {f"{name}/{i}": jnp.asarray(matrix) for i, matrix in enumerate(x)}
    return found


@functools.cache
def reference():
    """The matrices after ten steps of ``optax.contrib.muon`` on them, and its momentum."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-2, weight_decay=0.1))

    def of_params(flat):
        found = {}
        for name, (shape, groups, _) in ATTENTION.items():
            order = sum(groups, ())
            x = jnp.stack([v for k, v in flat.items() if k.rpartition("/")[0] == name])
            x = x.reshape([shape[d] for d in order])
            found[name] = x.transpose(np.argsort(order))
        return found

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda flat: loss(of_params(flat), batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = matrices(initial())
    state = tx.init(params)
    for i in range(STEPS):
        params, state = step(params, state, batch(i))
    return jax.device_get((params, momentum_of(state[1])))


def momentum_of(muon_state):
    return muon_state.inner_states["muon"].inner_state[0].mu


def flat_stack(x):
    return x.reshape(-1, *x.shape[-2:])


CASES = [
    *(("flat", stage, {}) for stage in (1, 2, 3)),
    ("torus", 2, {}),
    ("torus", 3, {}),
    ("explicit", 2, {}),
    ("explicit", 3, {}),
    ("replicas", 3, {}),
    ("replicas", 2, {"shard_state_over_replicas": True}),
    ("tensor parallel", 2, {}),
    ("tensor parallel", 3, {}),
]


def run(zero, mesh, tx, steps=STEPS):
    specs = None
    if mesh == "tensor parallel":
        specs = {
            k: P() if dim is None else P(*[None] * dim, "model")
            for k, (_, _, dim) in ATTENTION.items()
        }
    state = zero.init(make_state(tx), tx=tx, param_specs=specs)
    step = zero.train_step(zero.gathered(loss), tx=tx)
    for i in range(steps):
        state, _ = step(state, zero.put(batch(i)))
    return state


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("mesh", "stage", "options"), CASES)
def test_attention_equals_its_matrices_on_one_device(mesh, stage, options):
    params, opt_state = run(zero_on(mesh, stage, **options), mesh, make_tx())
    found = jax.device_get(params)
    wanted, momentum = reference()
    distance, leaf = model.worst_leaf(matrices(found), wanted)
    assert distance < 1e-11, leaf
    # State has the form of the matrices.
    mu = {
        f"{name}/{i}": x
        for name, state in jax.device_get(opt_state)[1].items()
        for i, x in enumerate(flat_stack(momentum_of(state)))
    }
    distance, leaf = model.worst_leaf(mu, momentum)
    assert distance < 1e-11, leaf
