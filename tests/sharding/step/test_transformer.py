"""A complete transformer's step: wire bytes and memory beside the theory, and tensor parallelism.

The cases and the theory are those of ``benchmarks/zero.py``, which makes the table of accelerators
by the same code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zero as benchmark
from _transformer import Config, apply_block, init, make_loss
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from zero import Case

import optax_ext
import sharding as shd
from sharding.plan.program._wire import collectives

from ...compilers import need
from .runs import STEPS, assert_close, draw, train_alone

CPU = functools.partial(Case, "cpu:8")
STORED, RESHARDED = CPU(3, "adafactor", reshard=False), CPU(3, "adafactor")
CASES = [
    CPU(2, microbatches=4),
    pytest.param(CPU(1, "came", hybrid=True, everywhere=True), marks=pytest.mark.slow),
    STORED,
    RESHARDED,
    CPU(3, "came", hybrid=True, everywhere=True, microbatches=4),
]


@functools.cache
def compiled(case):
    zero, layout, lowered = benchmark.lower(case)
    return zero, layout, lowered.compile()


def temporaries(case):
    return compiled(case)[2].memory_analysis().temp_size_in_bytes


@pytest.mark.usefixtures("scopes_in_cache_key")
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"stage {case.stage}, {case.optimizer}, {case.microbatches}"
)
def test_a_step_sends_and_holds_what_theory_says(case):
    zero, layout, program = compiled(case)
    found = benchmark.read(case, zero, layout, program)
    assert found.wire == pytest.approx(found.wire_theory, rel=0.05)
    assert found.arguments == pytest.approx(found.arguments_theory, rel=0.02)
    batch = case.microbatches * (benchmark.LENGTH + 1) * 4
    assert found.aliased == found.arguments - batch  # all of the state is updated in place
    # The update sends vectors alone: row and column statistics of the stacked layers, all together
    # in one collective at most. Nothing of a parameter's size is gathered or reduced.
    update = [c for c in collectives(program) if "/update/" in c.scope]
    assert {c.op for c in update} <= {"all-reduce"}
    assert all(c.elements < 0.01 * case.config.num_params for c in update)
    assert bool(update) == (case.optimizer != "adamw")


def test_gathered_weights_do_not_add_up_with_the_layers():
    """Those of three of four layers are not there; the last one's are."""
    assert temporaries(STORED) - temporaries(RESHARDED) > 2.8 * 4 * 12 * 256**2


@pytest.mark.parametrize("optimizer", ["came", "adafactor"])
@pytest.mark.parametrize(
    ("target", "stage", "bound"),
    [
        ("v5e:4x4", 1, 1.02),
        # Of AdamW's program the compiler places the gradient of the embedding on chip, 32 MiB.
        ("v5e:4x4", 2, 1.06),
        # The shards are beside the unreduced gradients, where AdamW's program has its peak.
        ("h200x8", 1, 1.025),
        ("h200x8", 2, 0.92),
    ],
)
def test_an_update_that_waits_for_all_gradients_holds_no_more(target, stage, bound, optimizer):
    """Its shards of the parameters are taken before the loss, not from parameters that it holds."""
    need(target)
    found, adamw = (temporaries(Case(target, stage, name)) for name in (optimizer, "adamw"))
    assert found <= bound * adamw


@pytest.mark.parametrize(("target", "bound"), [("v5e:4x4", 0.65), ("h200x8", 0.82)])
def test_stage_2_reduces_each_layer_in_its_backward_pass(target, bound):
    need(target)
    at_once, by_layer = (temporaries(Case(target, stage, "came")) for stage in (1, 2))
    assert by_layer < bound * at_once


# --- Beside tensor parallelism: attention sharded by heads, MLPs by hidden features ---------------

BLOCK_SPECS = {
    "attention_norm": P(),
    "qkv": P(None, None, "model"),
    "out": P("model"),
    "mlp_norm": P(),
    "up": P(None, "model"),
    "down": P("model"),
}


def specs(config):
    blocks = [BLOCK_SPECS] * config.layers
    if config.scan:
        blocks = {name: P(None, *spec) for name, spec in BLOCK_SPECS.items()}
    return {"embed": P("model"), "blocks": blocks, "norm": P()}


def mesh_of(*axes):
    return jax.make_mesh(
        *zip(*((n, a) for a, n in axes), strict=True), (AxisType.Auto,) * len(axes)
    )


@pytest.mark.usefixtures("x64")
def test_exact_beside_replicas_and_tensor_parallelism():
    """Every spec that the user gave is kept."""
    config = Config(layers=2, width=32, heads=2, vocabulary=48)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
    shapes = jax.eval_shape(lambda: init(config, jnp.float64))
    params = jax.tree.map(lambda x: 0.1 + 0.5 * x, draw(shapes))
    batch = lambda step: np.random.default_rng(step).integers(0, 48, (8, 7))  # noqa: E731
    make = lambda: (jax.tree.map(jnp.array, params), tx.init(params))  # noqa: E731
    create = lambda: TrainState.create(apply_fn=None, params=make()[0], tx=tx)  # noqa: E731
    expected = train_alone(create, lambda p, x, *_: (make_loss()(p, x), None), batch)
    zero = shd.Zero(
        mesh_of(("replica", 2), ("data", 2), ("model", 2)),
        stage=3,
        replica_axis="replica",
        shard_state_over_replicas=True,
        min_shard_size=0,
    )
    state = zero.init(make, tx=tx, param_specs=specs(config))
    before = jax.tree.map(lambda x: x.sharding.spec, state)
    step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    assert_close(state, (expected[0].params, expected[0].opt_state))
    assert jax.tree.map(lambda x: x.sharding.spec, state) == before
    assert before[0]["blocks"]["up"] == P(None, "data", "model")
    # The first moment is sharded over all axes.
    assert state[1][1][0].mu["blocks"]["up"].addressable_shards[0].data.size == 2 * 32 * 128 // 8


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_gathered_over_the_model_axis(stage):
    """What the partitioner does when left alone: it gathers every gradient over ``model`` first."""
    config = Config(layers=1, width=128, heads=4, vocabulary=256, scan=False)
    tx = optax_ext.came(1e-3)
    zero = shd.Zero(mesh_of(("data", 4), ("model", 2)), stage=stage, min_shard_size=0)
    make = lambda: (params := init(config), tx.init(params))  # noqa: E731
    state = zero.abstract_state(make, tx=tx, param_specs=specs(config))
    step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
    lowered = step.lower(state, jax.ShapeDtypeStruct((8, 9), jnp.int32))
    found = collectives(lowered.compile())
    large = [c for c in found if c.op == "all-gather" and c.elements >= 128 * 128 // 2]
    assert large
    assert {c.group_size for c in large} == {4}
    scattered = sum(c.elements for c in found if c.op == "reduce-scatter")
    matrices = [x for x in jax.tree.leaves(state[0]) if x.ndim > 1]
    norms = 128 * 3  # their vectors are sharded, too, and replicated over the model axis
    assert scattered == sum(x.size for x in matrices) // 2 + norms
