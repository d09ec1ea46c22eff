"""A complete transformer's step: wire bytes and memory beside the theory.

The cases and the theory are those of ``benchmarks/zero.py``, which makes the table of accelerators
by the same code.
"""

import functools

import pytest
import zero as benchmark
from zero import Case

from sharding.plan.audit._program_collectives import collectives

from ...compilers import need

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
    ("target", "bound", "by_layer"), [("v5e:4x4", 1.06, 0.4), ("h200x8", 0.92, 1.0)]
)
def test_an_update_that_waits_for_all_gradients_holds_no_more(target, bound, by_layer):
    """Its shards of the parameters are taken before the loss; layers are reduced one by one."""
    need(target)
    cases = {name: Case(target, 2, name) for name in ("came", "adafactor", "adamw")}
    held = {name: temporaries(case) for name, case in cases.items()}
    assert max(held["came"], held["adafactor"]) <= bound * held["adamw"]
    assert held["came"] < by_layer * 2 * cases["came"].config.num_params  # of all gradients
