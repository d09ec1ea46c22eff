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
from sharding.plan.program._wire import collectives
from sharding.step._matrix_form import MatrixForm
from sharding.step._matrix_owners import _Job

from .. import model
from .test_matrix_owners import OPTIMIZERS, zero_on

# (shape, order of its dims as (stack, rows, cols), dim of the heads); what each is there for.
ATTENTION = {
    # embed is sharded, the rows
    "layers/query/kernel": ((5, 40, 4, 16), ((0,), (1,), (2, 3)), 2),
    # head_dim is sharded, a minor dim of the rows: moved to embed
    "layers/out/kernel": ((5, 4, 64, 40), ((0,), (1, 2), (3,)), 1),
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


@pytest.mark.slow(keep=4)
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


def lowered_step(zero, tx):
    state = zero.abstract_state(make_state(tx), tx=tx)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    return zero.train_step(zero.gathered(loss), tx=tx).lower(state, shapes)


@pytest.mark.usefixtures("x64", "scopes_in_cache_key")
@pytest.mark.parametrize(("wire", "itemsize"), [(None, 8), (jnp.float32, 4)])
def test_the_wire_dtype_sets_the_bytes_of_matrices(wire, itemsize):
    """What moves shards to another dim keeps its dtype: gradients are part of the state."""
    program = lowered_step(zero_on("flat", 2), make_tx(wire_dtype=wire)).compile()
    update = [c for c in collectives(program) if "/update/" in c.scope and "/by_owner/" in c.scope]
    assert {c.op for c in update} == {"all-to-all"}
    # By shape: matrices, padded to a multiple of the devices, there and back.
    padded = {(40, 64): 8 + 8, (256, 40): 8, (40, 35): 8, (40, 48): 8}
    sent = sum(n * a * b for (a, b), n in padded.items()) * 2 * 7 / 64
    # Gradient, parameter and update of layers/out, between head_dim and embed.
    moved = 5 * 4 * 64 * 40 * 3 * 7 / 64
    assert sum(c.wire_bytes for c in update) == sent * itemsize + moved * 8


@pytest.mark.usefixtures("x64")
def test_outside_of_a_step_each_matrix_is_updated_as_a_parameter():
    muon = optax.contrib.muon(1e-2, weight_decay=0.1)
    tx = shd.by_owner(muon, factoring=RULE)
    params, grads = initial(), jax.tree.map(jnp.cos, initial())
    updates, state = tx.update(grads, tx.init(params), params)
    single, single_grads = matrices(params), matrices(grads)
    wanted, wanted_state = muon.update(single_grads, muon.init(single), single)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    found = matrices(jax.device_get(updates))
    assert model.worst_leaf(found, jax.device_get(wanted))[0] < 1e-13
    count = sum(len(flat_stack(momentum_of(s))) for s in state.values())
    assert count == len(momentum_of(wanted_state))


WRAPPED = {
    "micro-steps": lambda: optax.MultiSteps(make_tx(), 2).gradient_transformation(),
    "8-bit state": lambda: optax_ext.low_precision_state(
        make_tx(), optax_ext.STATE_FORMATS["8bit"]
    ),
    "8-bit state of a matrix": lambda: shd.by_owner(
        optax_ext.low_precision_state(optax.contrib.muon(1e-2), optax_ext.STATE_FORMATS["8bit"]),
        factoring=RULE,
    ),
}


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", WRAPPED)
def test_in_and_around_other_transformations(name):
    tx = WRAPPED[name]()
    state = jax.jit(make_state(tx))()

    @jax.jit
    def step(state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(state[0], batch), state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    for i in range(4):
        state = step(state, batch(i))
    found = run(zero_on("flat", 2), "flat", tx, steps=4)
    distance, leaf = model.worst_leaf(jax.device_get(found), jax.device_get(state))
    assert distance < 1e-11, leaf


@pytest.mark.usefixtures("x64")
def test_a_checkpoint_resumes_on_another_mesh_and_stage(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = make_tx()
    first = run(zero_on("flat", 2), "flat", tx, steps=STEPS // 2)
    zero = zero_on("explicit", 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", first)
        checkpointer.wait_until_finished()
        target = zero.abstract_state(make_state(tx), tx=tx)
        state = checkpointer.restore(tmp_path / "state", target)
    step = zero.train_step(zero.gathered(loss), tx=tx)
    for i in range(STEPS // 2, STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = model.worst_leaf(matrices(jax.device_get(state[0])), reference()[0])
    assert distance < 1e-11, leaf


# --- The wire dtype -------------------------------------------------------------------------------


def preconditioned():
    """Muon, after a product with a state that nothing updates, and a statistic of the gradient."""
    muon = optax.contrib.muon(1e-2)

    def init(p):
        return jnp.eye(p.shape[0], dtype=p.dtype), jnp.zeros((p.shape[1],) * 2, p.dtype)

    def update(g, state, p=None):
        del p
        return state[0] @ g, (state[0], state[1] + g.T @ g)

    return optax.chain(muon, optax.GradientTransformation(init, update))


@pytest.mark.usefixtures("x64")
def test_what_state_is_and_depends_on_is_not_rounded():
    p = jnp.ones((40, 48))

    def exact(tx):
        tx = optax.with_extra_args_support(tx)
        split = _Job(tx, "w", (p, tx.init(p), p), {}).split()
        return [
            [(x, v in split.exact) for v in values if len(x := split.graph.shape(v)) == 2]
            for values in (split.ins, split.outs)
        ]

    muon, shampoo, both = map(
        exact, (optax.contrib.muon(1e-2), OPTIMIZERS["shampoo"](), preconditioned())
    )
    assert muon == [[((40, 48), False)], [((40, 48), False)]]
    # The gradient is sent as it is: the statistics are sums of its products.
    assert sorted(shampoo[0]) == [((40, 40), True), ((40, 48), True), ((48, 48), True)]
    assert sorted(shampoo[1]) == [((40, 40), True), ((40, 48), False), ((48, 48), True)]
    assert ((40, 40), True) in both[0]
    assert ((40, 48), False) in both[1]


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_wire_dtype_rounds_updates_and_no_state(name):
    def after_a_step(wire):
        tx = shd.by_owner(OPTIMIZERS[name](), factoring=RULE, wire_dtype=wire)
        return jax.device_get(run(zero_on("flat", 2), "flat", tx, steps=1))

    (params, state), (rounded, rounded_state) = map(after_a_step, (None, jnp.bfloat16))
    # Two programs, hence float64's last bit; rounding to bfloat16 would be 4e-3.
    assert model.worst_leaf(rounded_state, state)[0] < 1e-14
    start = jax.device_get(initial())
    moved, wanted = (jax.tree.map(np.subtract, x, start) for x in (rounded, params))
    distances = {k: np.linalg.norm(moved[k] - wanted[k]) / np.linalg.norm(wanted[k]) for k in moved}
    assert distances.pop("out/kernel") < 1e-10  # one matrix, which nothing moves
    assert all(1e-4 < d < 2e-2 for d in distances.values()), distances


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tx": optax.contrib.muon}, "tx must be a transformation of one matrix"),
        ({"factoring": None}, "factoring must be a Factoring or a rule .*; got None"),
        ({"factoring": optax_ext.flax_transformer}, "factoring must be a Factoring or a rule"),
        ({"wire_dtype": "bf17"}, "wire_dtype must be a floating dtype.*got 'bf17'"),
        ({"wire_dtype": jnp.int8}, "wire_dtype must be a floating dtype"),
        ({"wire_dtype": jnp.float16}, "float16 has a smaller range than float32"),
    ],
)
def test_bad_arguments(options, message):
    tx = options.pop("tx", optax.contrib.muon(1e-2))
    with pytest.raises(ValueError, match=message):
        shd.by_owner(tx, **options)


def test_a_parameter_that_the_rule_does_not_factor():
    params = {"layers": {"query": {"bias": jnp.zeros((3, 4, 16))}}}
    with pytest.raises(ValueError, match=r"'layers/query/bias' of shape \(3, 4, 16\) is neither"):
        shd.by_owner(optax.contrib.muon(1e-2), factoring=RULE).init(params)


# --- Forms and specs ------------------------------------------------------------------------------

MESH = jax.sharding.AbstractMesh((8, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("name", "shape", "spec", "mergeable", "of_matrices"),
    [
        # As it is: the default rule's form.
        ("up/kernel", (5, 40, 48), P(None, "data"), None, P(None, "data")),
        ("query/kernel", (40, 8, 16), P(None, "data"), None, P(None, "data")),
        ("query/kernel", (40, 1, 16), P(None, None, "data"), None, P(None, "data")),
        ("out/kernel", (4, 64, 40), P(None, "data"), P(None, None, "data"), P(None, "data")),
        # Columns have an axis, heads do not divide by 8: nowhere.
        ("out/kernel", (4, 64, 40), P(None, "data", "model"), P(None, None, "model"),
         P(None, "model")),
        ("out/kernel", (4, 64, 40), P("model", "data"), P("model", None, "data"),
         P("model", "data")),
        ("qkv/kernel", (40, 3, 4, 16), P("data", None, "model"), None, P(None, "data", "model")),
        ("q_einsum/w", (4, 40, 16), P("model", "data"), None, P("data", "model")),
    ],
)  # fmt: skip
def test_specs_of_matrices(name, shape, spec, mergeable, of_matrices):
    form = MatrixForm.of(RULE, name, shape)
    assert form.mergeable(spec, MESH) == (spec if mergeable is None else mergeable)
    assert form.spec(spec, MESH) == of_matrices


def test_the_default_rule_is_the_identity():
    for shape in ((3, 4), (2, 3, 4), (2, 5, 3, 4)):
        assert MatrixForm.of(optax_ext.last_two_dims(), "w", shape).is_identity
    assert not MatrixForm.of(RULE, "out/kernel", (2, 3, 4)).is_identity


def test_any_order_of_dims_there_and_back():
    form = MatrixForm.of(optax_ext.Factoring((3,), (0, 2)), "w", (3, 4, 5, 6))
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    y = form.to_matrices(jnp.asarray(x))
    np.testing.assert_array_equal(y, np.einsum("abcd->bdac", x).reshape(4, 6, 15))
    np.testing.assert_array_equal(form.from_matrices(y, y), x)


@pytest.mark.usefixtures("x64")
def test_arrays_whose_types_hold_shardings():
    """On Explicit axes outside of a step, there and back, placed as before."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    form = MatrixForm.of(RULE, "layers/out/kernel", (5, 4, 64, 40))
    spec = P(None, "model", "data")
    with jax.set_mesh(mesh):
        x = jax.device_put(np.random.default_rng(0).normal(size=(5, 4, 64, 40)), spec)
        y = form.to_matrices(x)
        assert jax.typeof(y).sharding.spec == P(None, "model", "data")
        np.testing.assert_array_equal(y, np.reshape(x, (5, 256, 40)))
        back = form.from_matrices(y, x)
        assert jax.typeof(back).sharding.spec == jax.typeof(x).sharding.spec
        np.testing.assert_array_equal(back, x)
