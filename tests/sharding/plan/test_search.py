"""The search: equal to exhaustive search by the planner's functions, and above its bound."""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
from sharding.plan import MODELS, activations_of, estimate, kind_of, layer_costs, search
from sharding.plan.cost import _pipeline_schedules as by_name
from sharding.plan.cost._parallel_plan import ParallelPlan, short
from sharding.plan.cost._plan_costs import PlanCosts, zero_of
from sharding.plan.cost._step_time import step_seconds
from sharding.plan.model._layer_costs import COMPILED, Roofline
from sharding.plan.model._models import Decoder
from sharding.plan.model._traced_work import work_of
from sharding.plan.search._plan_file import PlanFile
from sharding.plan.search._plan_space import KEPT, PlanSpace
from sharding.plan.search._search import _simpler_first, machine_of

H100 = kind_of("h100")
SMALL = Decoder(8, 1024, 16, 16, 4096, 32000, 512)
TX = optax.adamw(1e-3)
SHARDED = {(stage, spread) for stage in (1, 2, 3) for spread in (False, True)}  # of replicas


@functools.cache
def memory_of(model=SMALL, target="h100x8", tx=TX, device=None):
    return PlanCosts(model, tx, machine_of(target, device))


@pytest.mark.parametrize("target", [pytest.param("h100x8", marks=pytest.mark.slow), "v5e:2x4"])
def test_memory_is_that_of_estimate(target):
    """To the byte, of 42 plans of all stages, replicas, formats and micro-batches."""
    device, memory = kind_of(target), memory_of(target=target)
    params = SMALL.abstract(jnp.bfloat16)
    formats = {"state_formats": (None, "bfloat16"), "weights": ("plain", "master")}
    places = (False, True, "update")
    plans = list(PlanSpace(SMALL, 8, 16, offload=places, **formats).plans({"pipe": 1}))
    random.Random(0).shuffle(plans)
    kinds = ([p for p in plans if (p.stage, p.spread) == kind] for kind in [(0, False), *SHARDED])
    for plan in itertools.chain(*(alike[:6] for alike in kinds)):
        options = {"recompute": plan.recompute, "tensor": plan.tensor}
        costs = layer_costs(SMALL, device, batch=plan.microbatch, **options)
        found = estimate(
            *(params, memory._tx(plan.state_format, plan.weights), zero_of(plan)),
            param_specs=SMALL.specs("model", plan.tensor) if plan.tensor > 1 else None,
            microbatches=plan.microbatches,
            batch=memory.batch(plan),
            device=device,
            gathered_once=SMALL.gathered_once,
            activations=activations_of(SMALL, device, costs, plan.tensor),
        )
        assert found.stage(found.requested).peak == memory.fullest(plan), plan


def test_plans_use_all_devices_and_all_sequences_once():
    plans = list(PlanSpace(SMALL, 8, 16).plans())
    assert len(set(plans)) == len(plans)
    for plan in plans:
        plan.check(SMALL)
        assert plan.num_devices == 8
        assert plan.sequences == 16
    assert {plan.stage for plan in plans} == {0, 1, 2, 3}
    assert {plan.replicas for plan in plans} == {1, 2, 4}
    assert {plan.tensor for plan in plans if plan.pipe == 1} == {1, 2, 4, 8}
    assert {(plan.stage, plan.spread) for plan in plans if plan.replicas > 1} == SHARDED
    # Devices that share a layer have equal shards of it.
    for fields, sizes in (({"kv_heads": 2}, {1, 2}), ({"vocabulary": 32001}, {1, 2, 4, 8})):
        model = dataclasses.replace(SMALL, **fields)
        assert {plan.tensor for plan in PlanSpace(model, 8, 16).plans({"pipe": 1})} == sizes


def test_schedules_of_plans():
    """Those that split backward passes compute nothing again; without a flush only if asked for."""
    keep = {"offload": False, "tensor": 1, "replicas": 1}
    found = list(PlanSpace(SMALL, 4, 16).plans(keep))
    split = [plan for plan in found if plan.schedule in by_name.SPLIT_SCHEDULES]
    assert {plan.schedule for plan in found} == set(by_name.SCHEDULES)
    assert {(plan.recompute, plan.pipe) for plan in split} == {("none", 2), ("none", 4)}
    assert not any(plan.lossy for plan in found)

    more = set(PlanSpace(SMALL, 4, 16, asynchronous=True).plans(keep)) - set(found)
    for plan in more:
        plan.check(SMALL)
        assert plan.lossy
        assert (plan.schedule, plan.pipe, plan.data) == ("2bw", 4, 1)
    assert {plan.microbatches for plan in more} == {8, 16}
    tied = dataclasses.replace(SMALL, tied=True)
    assert not any(p.lossy for p in PlanSpace(tied, 4, 16, asynchronous=True).plans())


def every_plan(machine, memory, keep, sequences=16, **options):
    """All plans of a search, and the seconds of their steps."""
    space = PlanSpace(SMALL, machine.num_devices, sequences, costs=memory, **options)
    plans = space.plans(keep)
    return {plan: step_seconds(SMALL, plan, machine, each=memory.each(plan)) for plan in plans}


@pytest.mark.parametrize(
    ("target", "gigabytes", "sequences", "keep"),
    [
        ("h100x8", 1, 4, {"tensor": 4}),
        ("v5e:2x4", 3, 8, {"offload": False, "recompute": "save_qkv_proj"}),
        ("h100x4", 80, 16, {"pipe": 4, "recompute": "full"}),  # with and without a flush
        pytest.param("h100x8", 80, 16, {"recompute": "minimal"}, marks=pytest.mark.slow),
        pytest.param("h100x4", 1.5, 8, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("h100x4", 1.6, 8, {"pipe": 4}, marks=pytest.mark.slow),
        pytest.param("h100x8", 3, 1, {}, marks=pytest.mark.slow),
    ],
)
def test_it_equals_exhaustive_search(target, gigabytes, sequences, keep):
    device = dataclasses.replace(kind_of(target), memory=gigabytes * 1e9)
    machine, memory = machine_of(target, device), memory_of(target=target, device=device)
    options = {"sequences": sequences, "device": device, "keep": keep, "headroom": 0.1}
    found = search(SMALL, TX, target, top=100, asynchronous=True, **options)
    plans = every_plan(machine, memory, keep, sequences, asynchronous=True)
    assert all(getattr(plan, name) == value for plan in plans for name, value in keep.items())
    fit = [plan for plan in plans if memory.fullest(plan) <= 0.9 * device.memory]
    assert found.compared == len(plans) >= len(fit) > 3
    times = sorted(plans[plan].seconds for plan in fit)
    assert [plan.seconds.seconds for plan in found.plans] == times[:100]
    bounds = (
        step_seconds(SMALL, plan, machine, ideal=True, each=memory.each(plan)) for plan in fit
    )
    assert found.bound == min(bound.full_overlap for bound in bounds)
    for plan in found.plans:
        assert plan.memory == memory.fullest(plan.plan) <= found.memory


def test_products_of_an_update_are_shared_as_the_state_is():
    """Muon's; at stage 0 each device computes all of them."""
    muon, plain = memory_of(tx=optax.contrib.muon(1e-3)), memory_of()
    params = SMALL.abstract(jnp.bfloat16)
    tables = {name: x for name, x in params.items() if name != "layers"}
    update = optax.contrib.muon(1e-3)
    products, of_tables = (
        work_of(update.update, tree, jax.eval_shape(update.init, tree), tree, kind=H100).flops
        for tree in (params, tables)
    )
    assert products > of_tables > 0
    unit = Roofline(H100, COMPILED, ideal=True).flops
    for plan, shards, stages, of_table in (
        (ParallelPlan(data=8), 1, 1, 1),
        (ParallelPlan(data=8, stage=2), 8, 1, 1),
        (ParallelPlan(data=8, stage=3, replicas=2), 4, 1, 1),
        (ParallelPlan(data=8, stage=1, replicas=2, spread=True), 8, 1, 1),
        (ParallelPlan(data=2, pipe=4, microbatches=4, stage=1), 2, 4, 1),
        (ParallelPlan(data=4, tensor=2, stage=0), 1, 2, 2),
    ):
        found, without = (
            x.seconds(plan, x.passes(plan, ideal=True), ideal=True, each=plain.each(plan))
            for x in (muon, plain)  # of equal states
        )
        added = found.update - without.update
        flops = ((products - of_tables) / stages + of_tables / of_table) / shards
        assert added == pytest.approx(flops / unit)
        assert (muon.products(plan), plain.products(plan)) == (pytest.approx(flops), 0)
        assert found.seconds >= without.seconds + 0.99 * added


def test_pipelines_without_a_flush_wait_for_updates():
    """One stage after the other; they hold two more versions."""
    keep = {"pipe": 4, "recompute": "full", "schedule": "2bw"}
    best = search(SMALL, TX, "h100x4", sequences=16, keep=keep, asynchronous=True).best
    machine, memory = machine_of("h100x4"), memory_of(target="h100x4")
    aligned = dataclasses.replace(best.plan, schedule="aligned", even=True)  # the same layers
    each = memory.each(best.plan)
    mine, other = (step_seconds(SMALL, p, machine, each=each) for p in (best.plan, aligned))
    # Stages but the last are idle in all of its forward ticks, as they are to fill and to drain.
    layer = layer_costs(SMALL, kind_of("h100"), batch=best.plan.microbatch)[1]
    forward, backward = (2 * seconds for seconds in (layer.forward, layer.backward))
    saved = 2 * forward + 3 * backward - 3 * mine.update
    assert mine.bubble == pytest.approx(other.bubble - saved, rel=1e-6)
    assert memory.fullest(best.plan) > memory.fullest(aligned)
    with pytest.raises(ValueError, match="needs asynchronous=True"):
        search(SMALL, TX, "h100x4", sequences=16, keep={"schedule": "2bw"})


def test_plans_without_a_flush_have_as_many_layers_on_each_stage():
    """As ``AsyncPipeline`` needs; the head makes the last stage of other plans smaller."""
    model, keep = dataclasses.replace(MODELS["llama2-7b"], layers=12), {"recompute": "full"}
    space = PlanSpace(model, 8, 32, asynchronous=True)
    assert not [plan for plan in space.plans(keep) if plan.asynchronous]
    options = {"sequences": 32, "keep": {"pipe": 4, "schedule": "2bw"}, "asynchronous": True}
    assert search(model, optax.adam(1e-3), "h100x4", **options).best.layers == (3,) * 4


def test_equal_chunks_where_the_fastest_do_not_fit():
    """The last chunk is smaller where a step is fastest, and all devices hold the largest one."""
    model, options = MODELS["llama2-7b"], {"sequences": 16, "length": 2048, "offload": False}
    keep = {"pipe": 8, "schedule": "aligned", "recompute": "full", "microbatch": 1}
    fastest = search(model, TX, "h100x8", keep=keep, **options)
    assert [(it.plan.even, max(it.layers)) for it in fastest.plans] == [(False, 5), (True, 4)]
    assert fastest.best.memory > 1.1 * fastest.plans[1].memory
    assert fastest.best.layers[-1] < fastest.best.layers[0]
    tight = dataclasses.replace(H100, memory=fastest.best.memory / 0.92 - 1)
    found = search(model, TX, "h100x8", device=tight, keep=keep, **options)
    assert [it.plan for it in found.plans] == [fastest.plans[1].plan]
    assert "aligned, equal" in found.best.summary
    assert found.best.layers == (4,) * 8
    assert found.rejected[0].plan == fastest.best.plan


@pytest.mark.parametrize(
    ("target", "layers", "vocabulary"), [("h100x8", 11, 256000), ("v5e:2x4", 8, 32000)]
)
def test_no_plan_goes_below_its_bound(target, layers, vocabulary):
    """Whatever is reached, whatever is hidden, and however stages share the layers."""
    machine = machine_of(target)
    model = dataclasses.replace(SMALL, layers=layers, vocabulary=vocabulary)
    for plan in itertools.islice(PlanSpace(model, 8, 16).plans(), 0, None, 13):
        bound = step_seconds(model, plan, machine, ideal=True).full_overlap
        found = step_seconds(model, plan, machine)
        assert bound < found.full_overlap <= found.seconds * (1 + 1e-12)
        assert found.seconds <= found.no_overlap * (1 + 1e-12)


def test_a_plan_fits_to_the_byte():
    """And the search is deterministic."""
    device = dataclasses.replace(H100, memory=2e9)
    options = {"sequences": 16, "headroom": 0.0, "keep": {"tensor": 1, "recompute": "full"}}
    first, second = (search(SMALL, TX, "h100x8", device=device, **options) for _ in range(2))
    assert first == second
    best = first.best
    exact = dataclasses.replace(device, memory=best.memory)
    assert search(SMALL, TX, "h100x8", device=exact, **options).best == best
    less = dataclasses.replace(device, memory=best.memory - 1)
    found = search(SMALL, TX, "h100x8", device=less, **options)
    assert best not in found.plans
    # Rejected plans are faster, say by how much they fail, and fit with what is named beside them.
    for plan in found.rejected:
        assert plan.seconds.seconds <= found.plans[-1].seconds.seconds
        assert plan.memory > found.memory
        assert plan.change == "state in 8bit"
        kept = {name: getattr(plan.plan, name) for name in KEPT} | {"state_format": "8bit"}
        changed = {"keep": kept, "state_formats": ("8bit",)}
        assert search(SMALL, TX, "h100x8", device=less, **options | changed).best.plan.lossy


def test_what_no_change_makes_fit_is_not_listed():
    """Plans that store 345 GiB beside the state are faster, and help nobody with 80 GB."""
    found = search(MODELS["llama2-7b"], TX, "h100x8", sequences=64, keep={"pipe": 1, "tensor": 1})
    for plan in found.rejected:
        assert plan.memory - plan.held["state"] <= found.memory
        assert plan.plan.recompute != "none"
    assert len(found.rejected) == 2
    assert "fits with" in str(found)


def test_of_equal_plans_the_simpler_one_is_first():
    """All exact ones come before those whose state, weights or gradients are lossy."""
    plans = [
        ParallelPlan(data=8, stage=3),
        ParallelPlan(data=8, stage=3, replicas=2),
        ParallelPlan(data=4, tensor=2, stage=3),
        ParallelPlan(data=2, tensor=4, stage=3),
        ParallelPlan(data=4, pipe=2, microbatches=2),
        ParallelPlan(data=8, stage=3, offload=True),
        ParallelPlan(data=8, stage=3, state_format="8bit"),
        ParallelPlan(data=8, stage=3, replicas=2, sync="qsgd(8)"),
    ]
    assert sorted([*plans[5:], *plans[2:5], *plans[:2]], key=_simpler_first) == plans


def test_updates_on_the_host_where_they_are_asked_for():
    """The fastest offload over a slow link; beside TPUs not of state in 8 bits."""
    keep = {"pipe": 1, "tensor": 1, "offload": (True, "update"), "recompute": "full"}
    best = {}
    for asked, link in ((True, 5e9), ("update", 5e9), ("update", H100.host_link)):
        options = {"device": dataclasses.replace(H100, host_link=link), "keep": keep}
        found = search(
            SMALL, TX, "h100x8", sequences=16, offload=asked, weights=("master",), **options
        )
        best[asked, link] = found.best.plan.offload
    assert list(best.values()) == [True, "update", True]
    options = {"optimizer": "adamw", "target": "h100x8", "length": 512, "dtype": "bfloat16"}
    plan = ParallelPlan(data=8, stage=2, offload="update")
    file = PlanFile(model="llama2-7b", layers=(8,), plan=plan, promised={}, **options)
    assert "offload='optimizer', update_on='host'" in "".join(file.code())
    assert short(plan).endswith("update on the host")
    for target, narrow in (("h100x8", True), ("v5e:2x4", False)):
        costs = memory_of(target=target)
        formats = ({"state_format": x} for x in (None, "bfloat16", "8bit"))
        places = [costs.updates_on_host(**x) for x in formats]
        assert places == [True, True, narrow]


def test_lossy_plans_only_where_they_are_asked_for():
    """On a slow network compressed gradients are faster, and named."""
    slow = dataclasses.replace(H100, network=1e8)
    keep = {"pipe": 1, "tensor": 1, "offload": False, "recompute": "full", "microbatches": 1}
    options = {"sequences": 16, "device": slow, "keep": keep}
    plain = search(SMALL, TX, "h100x16", **options)
    assert not any(plan.lossy for plan in plain.plans)
    syncs = (None, "powersgd(4)", "qsgd(8)")
    every = search(SMALL, TX, "h100x16", syncs=syncs, weights=("master", "stochastic"), **options)
    assert every.best.lossy
    assert every.best.plan.sync == "powersgd(4)"
    assert every.best.seconds.data < plain.best.seconds.data / 10
    assert "gradients by powersgd(4)" in every.best.summary
    assert {plan.plan.weights for plan in every.plans} <= {"master", "stochastic"}
    compressed = [plan for plan in PlanSpace(SMALL, 16, 16, syncs=syncs).plans() if plan.sync]
    assert {(plan.pipe, plan.tensor, plan.spread) for plan in compressed} == {(1, 1, False)}
    assert all(plan.replicas > 1 for plan in compressed if plan.stage == 3)
    both = search(SMALL, TX, "h100x16", state_formats=(None, "bfloat16"), top=50, **options)
    assert both.compared == 2 * plain.compared
    assert any(plan.lossy for plan in both.plans)


def test_nothing_hides_a_compressed_sync():
    """Of replicas, too: it comes after all passes."""
    slow = dataclasses.replace(H100, network=1e8)
    costs = memory_of(target="h100x16", device=slow)
    for plan in (
        ParallelPlan(data=16, stage=1, sync="qsgd(8)"),
        ParallelPlan(data=16, stage=2, replicas=2, sync="qsgd(8)"),
    ):
        found = costs.seconds(plan, costs.passes(plan))
        assert found.data > found.exposed > 0.1
        rest = dataclasses.replace(found, data=found.data - found.exposed, exposed=0.0)
        assert found.seconds == pytest.approx(rest.seconds + found.exposed)


def test_weights_hold_what_their_transformations_hold():
    """Of AdamW, for one parameter: moments of 2 bytes; of 4, and 4 of the master."""
    found = [memory_of().state_bytes_in(None, name) for name in ("plain", "master", "stochastic")]
    assert found == pytest.approx([4, 12, 8], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"keep": {"stages": 3}},
            r"is kept must be one of 'data', .*, got 'stages'; nearest is 'stage'",
        ),
        (
            {"keep": {"pipe": 1, "schedule": "1f1b"}},
            "16 sequences among 32 devices with pipe=1, schedule='1f1b': each of these",
        ),
        (
            {"device": dataclasses.replace(H100, memory=2e7), "keep": {"pipe": 1, "tensor": 2}},
            r"no plan fits h100x32: its devices have 17\.5 MiB, 8% of their memory left free, and "
            r"the smallest of [\d,]+ plans needs .* MiB, .* MiB too much: ",
        ),
        ({"recompute": ("selective",)}, "recompute must be of 'none', .*, got 'selective'"),
        ({"syncs": ("qsgd(2)",)}, r"by 'powersgd\(RANK\)', .* got 'qsgd\(2\)'"),
    ],
)
def test_impossible_requests(options, message):
    with pytest.raises(ValueError, match=message):
        search(**({"model": SMALL, "tx": TX, "target": "h100x32", "sequences": 16} | options))


@pytest.mark.parametrize(("target", "chosen"), [("a100-40x1", True), ("h100x1", False)])
def test_updates_in_the_backward_pass_where_others_do_not_fit(target, chosen):
    """Without loss; of equal times the plain step."""
    tx = optax_ext.adafactor(1e-3, factoring=optax_ext.flax_transformer())
    options = {"offload": False, "update_in_backward": True, "recompute": ("full",), "top": 1}
    found = search(MODELS["llama2-7b"], tx, target, sequences=16, length=1024, **options)
    assert found.best.plan.update_in_backward == chosen
    assert not found.best.lossy
