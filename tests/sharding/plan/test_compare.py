"""Plans side by side; memory of the stages of a pipeline; seconds and bytes of ``search``."""

import dataclasses
import random
import re

import optax
import pytest

from sharding.plan import (
    MODELS,
    NoPlanFits,
    compare,
    estimate,
    kind_of,
    layer_costs,
    search,
    step_seconds,
)
from sharding.plan._format import seconds, size
from sharding.plan.cost._plan_costs import PlanCosts, zero_of
from sharding.plan.model._models import Decoder
from sharding.plan.search._plan_space import KEPT
from sharding.plan.search._search import machine_of

from ...tiers import tiers

ADAMW = optax.adamw(1e-3)


def best_of(model, target, sequences, keep, **options):
    """The fastest plan that fits, or the smallest."""
    try:
        options |= {"sequences": sequences, "keep": keep, "top": 1}
        return search(model, ADAMW, target, **options).best
    except NoPlanFits as error:
        return error.smallest


@pytest.mark.parametrize(
    ("stage", "kind", "schedule", "batch"),
    [
        (0, "h100x8", "aligned", 2),
        (1, "v5e:2x4", "aligned", 2),
        (2, "h100x8", "1f1b", 64),
        (3, "h100x8", "aligned", 2),
        (3, "v5e:2x4", "1f1b", 64),
    ],
)
def test_memory_of_a_stage(stage, kind, schedule, batch):
    """AdamW with bfloat16 parameters, on four stages with two replicas."""
    on_gpus = kind == "h100x8"
    number = 13 if on_gpus else 12  # not shared equally on GPUs
    model = Decoder(number, 128, 4, 4, 256, 1024, 64)
    keep = {"stage": stage, "microbatch": batch, "microbatches": 8, "schedule": schedule}
    keep |= {"replicas": 1, "recompute": "full", "offload": False}
    keep |= {"pipe": 4, "tensor": 1}
    plan = best_of(model, kind, 16 * batch, keep)
    found = PlanCosts(model, ADAMW, machine_of(kind)).pipeline(plan.plan).by_part()
    costs = layer_costs(model, kind_of(kind), batch=batch)
    numbers = plan.layers
    rows = max(numbers)
    assert rows == (4 if on_gpus else 3)
    shared = costs[0].param_bytes + costs[-1].param_bytes
    layers = rows * costs[1].param_bytes
    params = layers + shared
    held = number / 4 * costs[1].param_bytes + shared  # no optimizer sees padding
    shard = held / 2
    norms = 8 * 16 * 128 * rows  # whose few elements may stay unsharded, or fill tiles
    # Parameters; at stage 3 the shard and what is gathered. The rows of unequal stages.
    moved = layers if on_gpus else 0
    full = params + shard if stage == 3 else held
    assert found["params"] == pytest.approx(full + moved, abs=norms)
    # Float32 accumulators; what branches return of them is copied, but not on TPUs.
    copied = 2 * params if on_gpus else 0
    assert found["grads"] == 2 * params + copied
    # Two moments.
    assert found["state"] == pytest.approx(2 * (held if stage == 0 else shard), abs=2 * norms)
    # Inputs of each layer: on the first stage of 2 (S - 1) + 1 or of S micro-batches, and one slot
    # more; three messages.
    stream = 2 * batch * 64 * 128
    in_flight = 7 if schedule == "aligned" else 4
    residuals, logits = rows * stream, 4 * batch * 64 * 1024
    head = logits + max(0, logits / 2 - copied)  # logits and their gradient
    working = layers + costs[1].working_bytes - (2 * layers if on_gpus else 0)
    backward = residuals + max(head, working)
    if schedule == "1f1b":  # backward passes return zeros beside their own residuals, but on TPUs
        of_head = (2 if on_gpus else 1) * residuals + 1.5 * logits - copied
        backward = max(backward, of_head)
    expected = (in_flight + 1) * residuals + 3 * stream + backward
    assert found["activations"] == pytest.approx(expected)


MACHINES = {"h100x8": 16, "v5e:2x4": 8, "a100-80x16": 32}  # and sequences


@pytest.mark.parametrize("target", tiers(MACHINES, ["v5e:2x4"]))
def test_all_commands_have_the_same_seconds_and_bytes(target):
    """Of 70 plans of a machine, with pipelines and without: as ``search`` lists them."""
    model, machine = Decoder(8, 256, 4, 4, 512, 1000, 128), machine_of(target)
    options = {"sequences": MACHINES[target], "headroom": 0.0}
    every = [x for pipe in (1, 2, 4) for x in search(
        *(model, ADAMW, target), keep={"pipe": pipe}, top=400, **options
    ).plans]  # fmt: skip
    chosen = random.Random(0).sample(every, 70)
    assert len({it.plan.schedule for it in chosen if it.plan.pipe > 1}) > 3
    assert {it.plan.stage for it in chosen if it.plan.pipe == 1} >= {1, 2, 3}
    costs = PlanCosts(model, ADAMW, machine)
    for it in chosen:
        assert step_seconds(model, it.plan, machine, each=costs.each(it.plan)) == it.seconds
    zeros = [it for it in chosen if it.plan.pipe * it.plan.tensor == 1]
    for it in random.Random(1).sample(zeros, 6):
        flops = model.flops(it.tokens, model.length) / machine.num_devices
        zero, params = zero_of(it.plan), model.abstract("bfloat16")
        bounds = estimate(params, ADAMW, zero, device=machine.device, flops=flops)
        least = bounds.seconds(bounds.stage(bounds.requested))
        assert 0 < max(least.values()) < it.seconds.seconds
    pipelines = [it for it in chosen if it.plan.pipe > 1]
    for it in random.Random(1).sample(pipelines, 6):
        keep = {name: getattr(it.plan, name) for name in KEPT}
        assert best_of(model, target, MACHINES[target], keep, headroom=0.0) == it
        assert costs.pipeline(it.plan).peak < it.memory


def test_a_pipeline_of_any_number_of_stages():
    """The fastest of all numbers that are kept."""
    model, options = Decoder(8, 256, 4, 4, 512, 1000, 128), {"headroom": 0.0}
    each = [best_of(model, "h100x8", 16, {"pipe": n, "tensor": 1}, **options) for n in (2, 4, 8)]
    found = best_of(model, "h100x8", 16, {"pipe": (2, 4, 8), "tensor": 1}, **options)
    assert found == min(each, key=lambda plan: plan.seconds.seconds)


def columns_of(text):
    """Cells of the rows of a table, by the name of the row."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip()]
    return {row[0]: row[1:] for row in rows if len(row) > 2}


def test_plans_side_by_side():
    """Inside one node ZeRO alone is faster, though it holds more; the table has figures of both."""
    model, keep = MODELS["llama2-7b"], {"tensor": 1, "offload": False}
    of_pipeline = {"pipe": 4, "schedule": "aligned", "stage": 1, "replicas": 1}
    pipeline = best_of(model, "h100x8", 32, keep | of_pipeline)
    alone = best_of(model, "h100x8", 32, keep | {"pipe": 1})
    found = compare(pipeline, alone)
    assert found.fastest is alone
    assert found.to_dict()["fastest"] == 1
    assert [row["plan"]["pipe"] for row in found.to_dict()["plans"]] == [4, 1]
    shown = str(found)
    rows = columns_of(shown)
    assert rows["pipeline"] == ["4 aligned", "-"]
    assert rows["step"] == [seconds(x.seconds.seconds) for x in (pipeline, alone)]
    assert rows["memory"] == [size(x.memory) for x in (pipeline, alone)]
    assert rows["bubble"][1] == seconds(0.0)
    assert re.search(r"^ +1 +2 \*$", shown, re.MULTILINE)
    assert f"1: {pipeline.summary}. 2: {alone.summary}." in " ".join(shown.split())
    assert "measure" not in shown.replace("not measured", "")
    # Any number, in any order; a pipeline pays on a slow network, if its wires are not hidden.
    assert compare(alone, pipeline, alone).fastest is alone
    with pytest.raises(ValueError, match="compare needs plans"):
        compare()
    slow = dataclasses.replace(kind_of("l40s"), network=1.25e9)
    model, options = MODELS["llama2-13b"], {"device": slow}
    for sequences, is_first, is_certain in ((64, True, True), (128, False, False)):
        each = (best_of(model, "l40sx64", sequences, keep | {"pipe": n}, **options) for n in (8, 1))
        found = compare(*each)
        assert (found.fastest is found.plans[0]) == is_first
        assert ("depends on how much of the wires" not in str(found)) == is_certain
