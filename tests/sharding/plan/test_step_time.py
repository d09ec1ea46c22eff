"""The time of a step in closed form: beside published steps, the planner, and its own limits."""

import dataclasses
import math
import pathlib
import re

import _published_steps as published
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_time_model import errors, place_of_best, rank_correlation, sweeps

import optax_ext
import sharding as shd
from sharding.plan import MODELS, estimate, kind_of
from sharding.plan.cost import _pipeline_schedules as by_name
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._step_time import passes, step_seconds
from sharding.plan.cost._wire_and_flops import decoder_products, tensor_row
from sharding.plan.machine import _collective_time
from sharding.plan.machine._collective_time import Machine, NodeGroup, TorusGroup
from sharding.plan.model._layer_costs import Implementation, head_work, layer_costs, layer_work
from sharding.plan.model._models import Decoder
from sharding.plan.model._traced_work import update_bytes

from ..pipeline.families import seconds_in_lockstep

RESULTS = pathlib.Path(published.__file__).parent / "results"
A100, H100, V5E = (kind_of(name) for name in ("a100-80", "h100", "v5e"))
SMALL = Decoder(4, 1024, 16, 16, 4096, 32000, 1024)
TORUS = Machine(V5E, 256, (16, 16))


def test_published_models_have_their_parameters():
    """Those of MPT exactly (NumParams), as others by name; the rest as their names have them."""
    sizes = {"1b": 1315950592, "3b": 2651837440, "7b": 6658859008, "13b": 12853954560}
    sizes |= {"30b": 29975214080, "70b": 64862437376}
    sizes |= {"gpt2-small": 124_439_808, "llama2-7b": 6_738_415_616}
    sizes |= {"llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}
    models = published.MPT | MODELS
    assert {name: num_params(models[name]) for name in sizes} == sizes
    leaves = jax.tree.leaves([model.abstract(jnp.bfloat16) for model in MODELS.values()])
    assert {x.dtype for x in leaves} == {jnp.dtype("bfloat16")}
    for row in [*published.korthikanti(), *published.maxtext("v4", "v5e", "v5p")]:
        size, unit = re.search(r"(\d+)([BT])", row.name).groups()
        size = int(size) * {"B": 1e9, "T": 1e12}[unit]
        assert num_params(row.model) == pytest.approx(size, rel=0.04), row.name


def num_params(model):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model.abstract()))


@pytest.mark.parametrize(("target", "gpu"), [("h200x1", True), ("v5e:1x1", False)])
def test_updates_move_what_their_programs_do(target, gpu):
    """Bytes a parameter of a large matrix, of which compilers keep nothing on the chip."""
    text = (RESULTS / "step_bytes.md").read_text().split(f"parameter on {target} ")[1]
    line = next(line for line in text.splitlines() if "4096 x 11008" in line)
    compiled = [float(cell.split()[0]) for cell in line.split("|")[2:7]]
    optimizers = [
        optax.adamw(1e-3),
        optax_ext.came(1e-3),
        optax_ext.adafactor(1e-3, multiply_by_parameter_scale=False),
        optax_ext.adafactor(1e-3),
    ]
    params = {"w": jax.ShapeDtypeStruct((4096, 11008), jnp.float32)}
    found = [update_bytes(tx, params, gpu=gpu) for tx in optimizers]
    np.testing.assert_allclose(found, compiled[:4], rtol=0.01)


def test_the_eight_steps_of_korthikanti_et_al():
    """3.0 % on average, 5.6 % at most; Calculon's own validation: 3.65 and 8.87 %."""
    found = np.abs(errors(published.korthikanti()))
    assert found.mean() < 0.031
    assert found.max() < 0.06


@pytest.mark.parametrize(
    ("name", "number", "correlation", "mean"),
    [("single", 1440, 0.98, 0.09), ("multi", 109, 0.96, 0.08)],
)
def test_the_measured_steps_of_vtrain(name, number, correlation, mean):
    rows = published.vtrain(name)
    assert len(rows) == number
    assert rank_correlation(rows) > correlation
    assert np.abs(errors(rows)).mean() < mean


def test_published_steps_that_nothing_fits():
    """Held-out rows, but odd ones, and those of vTrain and of experts, which have own tests."""
    held = [
        row
        for rows in published.sources().values()
        for row in rows
        if not row.fitted
        and not row.odd
        and row.implementation != published.EAGER
        and not row.model.experts
    ]
    on_torus = np.array([bool(row.machine.torus) for row in held])
    found = np.abs(errors(held))
    assert (~on_torus).sum() == 175
    assert on_torus.sum() == 34
    assert np.median(found[~on_torus]) < 0.03
    assert np.median(found[on_torus]) < 0.08
    assert found.max() < 0.19
    assert rank_correlation(held) > 0.99


@pytest.mark.parametrize("place", [0, 3])
def test_the_best_plan_of_a_sweep_is_among_the_first(place):
    group = list(sweeps(published.vtrain("multi")).values())[place]
    assert rank_correlation(group) > 0.89
    assert place_of_best(group) <= 4


def test_collectives_beside_products_take_the_rest():
    """One of eight shards is waited for; on slow links, what the products do not hide."""
    model = MODELS["llama2-7b"]
    plan = ParallelPlan(tensor=8, microbatch=4, recompute="none", sequence_parallel=True)

    def tensor(link, overlap):
        machine = Machine(dataclasses.replace(H100, link=link), 8)
        implementation = Implementation(collective_matmul=overlap)
        return step_seconds(model, plan, machine, implementation=implementation).tensor

    waited, hidden = tensor(H100.link, False), tensor(H100.link, True)
    ends = waited - 8 / 7 * (waited - hidden)  # collectives of tables and the loss
    assert 0 < ends < 0.02 * waited
    assert tensor(1e9, True) > 0.9 * tensor(1e9, False)


def test_sums_over_replicas_follow_the_gradients():
    """Nothing hides them, unlike the collectives of shards."""
    model, machine = MODELS["llama2-7b"], Machine(H100, 64)
    plan = ParallelPlan(data=64, replicas=8, stage=3, microbatch=4, recompute="none")
    found = step_seconds(model, plan, machine)
    alone = step_seconds(model, dataclasses.replace(plan, data=8, replicas=1), Machine(H100, 8))
    matrices = sum(math.prod(x.shape) for x in jax.tree.leaves(model.abstract()) if x.ndim > 1)
    matrices -= 2 * model.layers * model.width  # scales of norms, stacked
    collective = _collective_time.collective_seconds
    summed = collective("all-reduce", 2 * matrices / 8, NodeGroup(8, 1), H100)
    assert found.exposed == pytest.approx(summed)
    assert found.data == pytest.approx(alone.data + summed)
    assert found.seconds == pytest.approx(alone.seconds + summed)


@pytest.mark.parametrize(("stage", "microbatches"), [(0, 1), (1, 4), (2, 4), (3, 1), (3, 4)])
def test_bytes_of_zero_are_those_of_the_planner(stage, microbatches):
    """At the peak of the links, without latency; scales and biases are not counted here."""
    model = MODELS["llama2-7b"]
    zero = shd.Zero(jax.sharding.AbstractMesh((8,), ("data",)), stage=stage)
    params, options = model.abstract(jnp.bfloat16), {"microbatches": microbatches}
    options["gathered_once"] = model.gathered_once  # as stage 3 gathers its tables
    plan = estimate(params, optax.adam(1e-3), zero, **options)
    parallel = ParallelPlan(data=8, stage=stage, microbatches=microbatches)
    found = step_seconds(model, parallel, Machine(A100, 8), ideal=True)
    assert found.data * A100.link == pytest.approx(plan.stage(plan.requested).wire, rel=0.01)


@pytest.mark.parametrize(
    ("recompute", "compiled", "times"), [("none", True, 4), ("full", True, 5), ("full", False, 6)]
)
@pytest.mark.parametrize("vocabulary", [32000, 32001])
def test_tensor_parallelism_sends_the_stream_four_times_a_layer(
    recompute, compiled, times, vocabulary
):
    """Once more with recomputation, twice where the last sum is repeated; and twice for tables.

    A loss over shards of the tokens sends three numbers of 32 bits for each.
    """
    model = dataclasses.replace(SMALL, vocabulary=vocabulary)
    plan = ParallelPlan(tensor=8, microbatch=2, microbatches=3, recompute=recompute)
    options = {"implementation": Implementation(lockstep=compiled), "ideal": True}
    found = step_seconds(model, plan, Machine(A100, 8), **options).tensor
    tokens = 3 * 2 * SMALL.length
    tables = 1 if vocabulary == 32000 else 0
    nbytes = 2 * (SMALL.layers * times + 2 * tables) * SMALL.width + 12 * tables
    assert found * A100.link == pytest.approx(tokens * nbytes * 2 * 7 / 8)
    if compiled:
        row = tensor_row(model, plan, itemsize=2)
        assert found * A100.link == pytest.approx(row.sent({"model": 8}))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", by_name.SCHEDULES)
def test_a_step_takes_the_ticks_of_its_table(schedule, recompute):
    """Computing and bubble, by the table and the seconds of a layer; all chunks as the largest."""
    if schedule in by_name.SPLIT_SCHEDULES and recompute != "none":
        pytest.skip("computes nothing again")
    chunks = by_name.chunks_of(schedule)
    plan = ParallelPlan(
        pipe=4, microbatches=8, schedule=schedule, chunks=chunks, recompute=recompute
    )
    model, machine = dataclasses.replace(SMALL, layers=19), Machine(H100, 4)
    found = passes(model, plan, machine, length=model.length, ideal=True)
    layer = layer_work(model, H100, microbatch=1, ideal=True)
    head = sum(it.seconds for it in head_work(model, H100, microbatch=1, ideal=True))
    again = layer.forward.seconds - layer.products["down"].seconds if recompute == "full" else 0.0
    weight = layer.weight.seconds if schedule in by_name.SPLIT_SCHEDULES else 0.0
    expected = seconds_in_lockstep(
        by_name.schedule_of(schedule, 4, 8, chunks),
        [max(found.chunks[:-1])] * (4 * chunks - 1) + [found.chunks[-1]],
        forward=layer.forward.seconds,
        backward=layer.backward.seconds + again - weight,
        weight=weight,
        head=head,
    )
    assert found.work.seconds + found.bubble == pytest.approx(expected)
    assert found.bubble > 0
    assert len(found.chunks) == 4 * chunks
    assert sum(found.chunks) == 19


@pytest.mark.parametrize("tied", [True, False])
def test_stages_of_one_program_sum_the_gradients_of_both_tables(tied):
    """Which all devices hold, in 32 bits; elsewhere the first stage has one, the last the other."""
    plan, machine = ParallelPlan(pipe=4, microbatches=8), Machine(H100, 4)
    model = dataclasses.replace(SMALL, tied=tied)
    compiled, eager = (
        step_seconds(model, plan, machine, implementation=Implementation(lockstep=each), ideal=True)
        for each in (True, False)
    )
    tables = SMALL.vocabulary * SMALL.width * (1 if tied else 2)
    group = machine.groups((1, 1, 1, 4))[3]
    summed = _collective_time.collective_seconds("all-reduce", 4 * tables, group, H100, ideal=True)
    assert compiled.transfers - eager.transfers == pytest.approx(summed)
    assert compiled.update > eager.update


def test_gpus_slow_down_while_they_send():
    """By Mist's factors where computing takes longer; TPUs do not."""
    plan = ParallelPlan(data=16, stage=3, microbatch=16)
    found = step_seconds(SMALL, plan, Machine(H100, 16))
    assert found.hideable == found.compute > 2 * found.data
    hidden = found.compute + found.data * 1.039 * (1 - 1 / 1.286)
    assert found.seconds == pytest.approx(hidden + found.update)
    tpu = step_seconds(SMALL, plan, Machine(V5E, 16, (4, 4)))
    assert tpu.seconds == pytest.approx(tpu.compute + tpu.update)


@pytest.mark.parametrize(
    ("machine", "sizes", "groups"),
    [
        (Machine(H100, 64), (8, 8), [NodeGroup(8, 8), NodeGroup(8, 1)]),
        (Machine(H100, 64), (2, 2, 16), [NodeGroup(2, 2), NodeGroup(2, 2), NodeGroup(16, 2)]),
        (TORUS, (1, 256), [TorusGroup(()), TorusGroup(((16, True), (16, True)))]),
        (TORUS, (4, 64), [TorusGroup(((4, False),)), TorusGroup(((4, False), (16, True)))]),
        (
            Machine(kind_of("v5p"), 128, (4, 4, 4), slices=2),
            (4, 32),
            [TorusGroup(((4, True),)), TorusGroup(((4, True), (4, True)), slices=2)],
        ),
    ],
)
def test_groups_of_a_machine(machine, sizes, groups):
    assert machine.groups(sizes) == groups


def test_streamed_layers_are_read_twice_for_all_microbatches():
    plan = ParallelPlan(data=8, stage=3, microbatches=2, offload=True, update_in_backward=True)
    machine, options = Machine(H100, 8), {"ideal": True, "each": (2.0, 2.0, 10.0)}
    of_layers = SMALL.layers * SMALL.layer_elements / 8
    found = step_seconds(SMALL, plan, machine, **options).host
    assert found == pytest.approx(of_layers * (10 + 2 * 2) / H100.host_link)
    for moved, other in ((10 + 2 * 2 * 8, {"stage": 2}), (10 + 2 * 2, {"microbatches": 1})):
        step = step_seconds(SMALL, dataclasses.replace(plan, **other), machine, **options)
        assert step.host == pytest.approx(of_layers * moved / H100.host_link)


def test_an_update_on_the_host_waits_for_gradients_and_parameters_for_it():
    machine = Machine(H100, 8)
    plan = ParallelPlan(data=8, stage=2, offload="update", weights="master")
    found, least = (step_seconds(SMALL, plan, machine, ideal=x) for x in (False, True))
    params = (SMALL.layers * SMALL.layer_elements + 2 * SMALL.vocabulary * SMALL.width) / 8
    linked, updated = params * 4 / H100.host_link, params * 30 / H100.host_bandwidth
    assert found.host == pytest.approx(linked / 0.88 + updated / 0.72)
    assert least.host == pytest.approx(max(linked / 2, updated))
    assert found.update == least.update == 0
    streamed = step_seconds(SMALL, dataclasses.replace(plan, offload=True), machine)
    assert found.seconds - found.host == pytest.approx(streamed.seconds - streamed.host)
    unknown = Machine(dataclasses.replace(H100, host_bandwidth=None), 8)
    with pytest.raises(ValueError, match="the host bandwidth of an h100 is not known"):
        step_seconds(SMALL, plan, unknown)


LATE = {"pipe": 4, "microbatches": 8, "schedule": "2bw"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ParallelPlan(data=3), r"groups of 1 x 1 x 3 x 1 need 3 devices, there are 8"),
        (ParallelPlan(tensor=32), "32 devices cannot share 16 heads equally"),
        (ParallelPlan(pipe=8, microbatches=8), "8 stages with 1 groups of layers each need as"),
        (ParallelPlan(data=8, weights="wide"), "weights must be one of 'plain', .* got 'wide'"),
        (ParallelPlan(data=4, pipe=2, microbatches=2, sync="qsgd(8)"), "without pipe, tensor and"),
        (ParallelPlan(pipe=4, microbatches=8, schedule="zb-h1"), "splits backward .* got 'full'"),
        (ParallelPlan(data=2, **LATE), "needs all 8 devices as stages, got data=2"),
        (ParallelPlan(weights="master", **LATE), "neither offload nor other weights"),
        (ParallelPlan(**LATE | {"pipe": 3}), "as many layers on each of its 3 stages; .* has 4"),
        (ParallelPlan(**LATE | {"microbatches": 6}), "needs 7 micro-batches to fill its 4 stages"),
        (ParallelPlan(data=8, sync="qsgd(8)"), r"the time of qsgd\(8\) depends: search does"),
        (ParallelPlan(data=8, offload=True), "the host link of an h100 is not known"),
        (ParallelPlan(data=8, offload="all"), "offload must be one of .* got 'all'"),
        (ParallelPlan(update_in_backward=True, offload="update"), "offload='update' on the CPU"),
        (ParallelPlan(data=4, tensor=2, update_in_backward=True), "is for plans without pipe"),
    ],
)
def test_errors(plan, message):
    machine = Machine(dataclasses.replace(H100, host_link=None), 8)
    with pytest.raises(ValueError, match=message):
        step_seconds(SMALL, plan, machine)


def test_layer_costs_sum_to_the_model():
    """Their seconds are those of a step on one device; their bytes those of the parameters."""
    device = kind_of("h100x8")
    for name in ("gpt2-small", "llama2-7b"):
        model = MODELS[name]
        costs = layer_costs(model, device, batch=2, length=512)
        plain = layer_costs(model, device, batch=2, length=512, recompute=False)
        partly = layer_costs(model, device, batch=2, length=512, recompute="minimal")
        for layers, form in ((costs, "full"), (plain, "none"), (partly, "minimal")):
            plan = ParallelPlan(microbatch=2, recompute=form)
            step = step_seconds(model, plan, Machine(device, 1), length=512)
            seconds = sum(layer.forward + layer.backward for layer in layers)
            assert seconds == pytest.approx(step.compute, rel=1e-12)
        assert costs[-1].backward == plain[-1].backward  # nothing of the head is computed again
        params = 2 * sum(x.size for x in jax.tree.leaves(model.abstract()))
        tied = 2 * model.vocabulary * model.width if model.tied else 0
        assert sum(layer.param_bytes for layer in costs) == params + tied
        assert costs[1].activation_bytes == costs[1].output_bytes == 2 * 1024 * model.width
        # A layer that is computed again has no more temporaries than it would store.
        assert plain[1].activation_bytes > costs[1].working_bytes > 10 * costs[1].output_bytes
        assert len(costs) == model.layers + 2


def test_products_in_few_bits_have_their_own_rate():
    """Those of layers take half the time on an H100, attention's own and the head what they did."""
    model = MODELS["llama2-7b"]
    options = {"microbatch": 1, "ideal": True}
    plain, low = (layer_work(model, H100, **options, matmuls=x) for x in (None, "fp8"))
    matrices = 6 * model.length * model.layer_elements / H100.flops
    saved = plain.forward + plain.backward - low.forward - low.backward
    assert saved.matmul == pytest.approx(matrices * (1 - H100.flops / H100.fp8))
    # Codes are written, and read in the place of 16 bits.
    wide, codes = (layer_work(model, H100, microbatch=1, matmuls=x) for x in (None, "fp8"))
    assert codes.forward.elementwise > wide.forward.elementwise
    plan = ParallelPlan(data=8, microbatch=1, recompute="none", matmuls="fp8")
    rows = decoder_products(model, plan)
    assert {row.on: row.amount for row in rows}["fp8",] == pytest.approx(
        matrices * model.layers * H100.flops
    )
    everything = decoder_products(model, dataclasses.replace(plan, matmuls=None))
    assert sum(row.amount for row in rows) == pytest.approx(everything[0].amount)
    small = dataclasses.replace(model, width=128, heads=1, kv_heads=1, hidden=128)
    assert layer_work(small, H100, **options, matmuls="fp8") == layer_work(small, H100, **options)
