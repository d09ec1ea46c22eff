"""Wire bytes and memory of a complete transformer's step, by stage, beside the theory.

The cases and the theory are those of ``benchmarks/zero.py``, which makes the table of accelerators
by the same code.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
import zero as benchmark
from _transformer import Config, apply_block, init, make_loss
from zero import Case

import sharding as shd
from sharding.plan.program._wire import collectives

from ...compilers import need

pytestmark = pytest.mark.usefixtures("scopes_in_cache_key")

CPU = functools.partial(Case, "cpu:8")
CASES = [
    *(CPU(stage, optimizer) for stage in (0, 1, 3) for optimizer in ("adamw", "adafactor", "came")),
    CPU(2, "came", scan=False),
    CPU(3, "adafactor", reshard=False),
    *(CPU(stage, microbatches=4) for stage in (1, 2, 3)),
    CPU(0, hybrid=True),
    CPU(1, "came", hybrid=True, everywhere=True),
    CPU(2, "adafactor", hybrid=True, microbatches=4),
    CPU(3, "came", hybrid=True),
    CPU(3, "came", hybrid=True, everywhere=True),
]


def name_of(case):
    words = [f"stage{case.stage}", case.optimizer]
    words += [
        f"{key}={getattr(case, key)}" for key in ("scan", "reshard") if not getattr(case, key)
    ]
    words += [key for key in ("hybrid", "everywhere") if getattr(case, key)]
    return "-".join([*words, f"k{case.microbatches}"])


@functools.cache
def compiled(case):
    zero, layout, lowered = benchmark.lower(case)
    return zero, layout, lowered.compile()


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_step_sends_and_holds_what_theory_says(case):
    zero, layout, program = compiled(case)
    found = benchmark.read(case, zero, layout, program)
    assert found.wire == pytest.approx(found.wire_theory, rel=0.05)
    assert found.arguments == pytest.approx(found.arguments_theory, rel=0.02)
    batch = case.microbatches * (benchmark.LENGTH + 1) * 4
    assert found.aliased == found.arguments - batch  # all of the state is updated in place


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("case", [c for c in CASES if c.stage and c.microbatches == 1], ids=name_of)
def test_the_update_sends_vectors_alone(case):
    """Nothing of a parameter's size is gathered or reduced in the optimizer."""
    _, _, program = compiled(case)
    update = [c for c in collectives(program) if "/update/" in c.scope]
    assert {c.op for c in update} <= {"all-reduce"}
    # Row and column statistics of the stacked layers, all together in one collective at most.
    assert all(c.elements < 0.01 * case.config.num_params for c in update)
    assert bool(update) == (case.optimizer != "adamw")


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
    temporaries = {
        name: compiled(Case(target, stage, name))[2].memory_analysis().temp_size_in_bytes
        for name in (optimizer, "adamw")
    }
    assert temporaries[optimizer] <= bound * temporaries["adamw"]


@pytest.mark.parametrize(("target", "bound"), [("v5e:4x4", 0.65), ("h200x8", 0.82)])
def test_stage_2_reduces_each_layer_in_its_backward_pass(target, bound):
    need(target)
    temporaries = {
        stage: compiled(Case(target, stage, "came"))[2].memory_analysis().temp_size_in_bytes
        for stage in (1, 2)
    }
    assert temporaries[2] < bound * temporaries[1]


def test_gradients_accumulate_as_shards_from_stage_2_on():
    size = 4 * Config(4, 256, 2, 1024).num_params
    temp = {
        stage: compiled(CPU(stage, microbatches=4))[2].memory_analysis().temp_size_in_bytes
        for stage in (1, 2, 3)
    }
    assert temp[1] - temp[2] > 0.8 * size * 7 / 8
    assert temp[3] < temp[2]


def test_gathered_weights_do_not_add_up_with_the_layers():
    """Four more layers cost their activations and shards, not their unsharded weights."""

    def temporaries(layers, reshard):
        config = Config(layers, 256, 2, 512)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        zero = shd.Zero(mesh, stage=3, min_shard_size=1024, reshard_after_forward=reshard)
        tx = benchmark.OPTIMIZERS["adamw"]()

        def make_state():
            params = init(config)
            return params, tx.init(params)

        step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
        batch = jax.ShapeDtypeStruct((8, 17), jnp.int32)
        lowered = step.lower(zero.abstract_state(make_state, tx=tx), batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    layer = 4 * 12 * 256**2
    stored, resharded = (
        (temporaries(8, reshard) - temporaries(4, reshard)) / 4 for reshard in (False, True)
    )
    assert stored > layer
    assert resharded < 0.5 * layer


@pytest.mark.parametrize("stage", [0, 2])
def test_below_stage_3_gathered_costs_nothing(stage):
    """A scan keeps no copy of its layers' parameters."""
    case = CPU(stage)
    zero = case.zero()
    tx = benchmark.OPTIMIZERS["adamw"]()

    def make_state():
        params = init(case.config)
        return params, tx.init(params)

    state = zero.abstract_state(make_state, tx=tx)
    tokens = jax.ShapeDtypeStruct((8, benchmark.LENGTH + 1), jnp.int32)
    plain = zero.train_step(make_loss(apply_block), tx=tx).lower(state, tokens).compile()
    _, _, program = compiled(case)
    memory = [each.memory_analysis().temp_size_in_bytes for each in (plain, program)]
    if stage == 2:
        assert memory[1] < memory[0]
    else:
        assert memory[0] == memory[1]
