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
from jax.sharding import PartitionSpec as P
from zero import Case

from sharding.plan.program._wire import collectives

from ...compilers import need
from ..model import zero_on
from .runs import STEPS, assert_close, draw, train_alone

CPU = functools.partial(Case, "cpu:8")
STORED, RESHARDED = CPU(3, "adafactor", reshard=False), CPU(3, "adafactor")
CASES = [
    CPU(2, microbatches=4),
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


@pytest.mark.parametrize(
    ("target", "bound", "by_layer"), [("v5e:4x4", 1.06, 0.65), ("h200x8", 0.92, 0.82)]
)
def test_an_update_that_waits_for_all_gradients_holds_no_more(target, bound, by_layer):
    """Its shards of the parameters are taken before the loss, not from parameters that it holds.

    And stage 2 reduces each layer in its backward pass.
    """
    need(target)
    held = {name: temporaries(Case(target, 2, name)) for name in ("came", "adafactor", "adamw")}
    assert max(held["came"], held["adafactor"]) <= bound * held["adamw"]
    assert held["came"] < by_layer * temporaries(Case(target, 1, "came"))


BLOCK_SPECS = {
    "attention_norm": P(),
    "qkv": P(None, None, "model"),
    "out": P("model"),
    "mlp_norm": P(),
    "up": P(None, "model"),
    "down": P("model"),
}


SPECS = {
    "embed": P("model"),
    "blocks": {name: P(None, *spec) for name, spec in BLOCK_SPECS.items()},
    "norm": P(),
}


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
    names = ("replica", "data", "model")
    options = {"replica_axis": "replica", "shard_state_over_replicas": True}
    zero = zero_on(2, 2, 2, names=names, stage=3, **options)
    state = zero.init(make, tx=tx, param_specs=SPECS)
    before = jax.tree.map(lambda x: x.sharding.spec, state)
    step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    assert_close(state, (expected[0].params, expected[0].opt_state))
    assert jax.tree.map(lambda x: x.sharding.spec, state) == before
    assert before[0]["blocks"]["up"] == P(None, "data", "model")
    # The first moment is sharded over all axes.
    assert state[1][1][0].mu["blocks"]["up"].addressable_shards[0].data.size == 2 * 32 * 128 // 8
