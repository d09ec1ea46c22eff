"""A search for a model of one's own: traced figures beside closed forms and compiled programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharding import stored
from sharding.plan import (
    PlanFile,
    TracedModel,
    estimate,
    kind_of,
    layer_costs,
    search,
    verify,
)
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._plan_costs import PlanCosts, TracedCosts, zero_of
from sharding.plan.cost._step_time import step_seconds
from sharding.plan.machine._devices import achieved
from sharding.plan.model._models import Decoder
from sharding.plan.model._traced_work import UNIT, work_of
from sharding.plan.search import _traced_model
from sharding.plan.search._search import machine_of

TX = optax.adamw(1e-3)
DECODER = Decoder(4, 256, 4, 4, 1024, 512, 128)


@functools.cache
def traced_decoder(model=DECODER):
    """A decoder as if it were somebody's own model."""
    return TracedModel(model.make_loss(), model.init, model.batch(8), model.length)


def loss_fn(params, batch):
    """Neither transformer, nor names; the layers are a loop."""
    x = batch["x"] @ params["embed"]
    scale = batch["scale"][:, None]
    layer = lambda x, w: (x + scale * jnp.tanh(x @ w["in"]) @ w["out"], None)  # noqa: E731
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((jnp.mean(x, axis=-1) - batch["y"]) ** 2)


def init(dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.1 * rng.normal(size=shape), dtype)  # noqa: E731
    layers = {"in": draw(4, 64, 256), "out": draw(4, 256, 64)}
    return {"embed": draw(32, 64), "layers": layers}


EXAMPLE = {
    "x": jax.ShapeDtypeStruct((8, 32), jnp.float32),
    "y": jax.ShapeDtypeStruct((8,), jnp.float32),
    "scale": jax.ShapeDtypeStruct((8,), jnp.float32),
}
OWN = TracedModel(loss_fn, init, EXAMPLE)


@functools.cache
def memory_of(model, target="h100x8", dtype=jnp.bfloat16):
    kind = TracedCosts if isinstance(model, TracedModel) else PlanCosts
    return kind(model, TX, machine_of(target), dtype=dtype)


@pytest.mark.parametrize(
    "recompute", ["save_qkv_proj", "full", pytest.param("none", marks=pytest.mark.slow)]
)
def test_figures_are_those_of_the_closed_form(recompute):
    """Operations; what four more layers store; temporaries of a layer that is computed again."""
    own, plan = memory_of(traced_decoder()), ParallelPlan(microbatch=5, recompute=recompute)
    seconds = step_seconds(DECODER, plan, machine_of("h100x1"), ideal=True).matmul
    found = own.traced(5, recompute)
    assert found.flops / kind_of("h100").flops == pytest.approx(seconds, rel=1e-3)
    deep = dataclasses.replace(DECODER, layers=8)
    stored, closed = (
        memory_of(more).activations(plan).stored - memory_of(less).activations(plan).stored
        for more, less in ((traced_decoder(deep), traced_decoder()), (deep, DECODER))
    )
    assert stored == pytest.approx(closed, rel=0.01)
    if recompute != "none":
        costs = layer_costs(DECODER, kind_of("h100"), batch=5, recompute=recompute)
        assert found.working == pytest.approx(costs[1].working_bytes, rel=0.01)


def test_layers_of_equal_types_that_compute_otherwise_are_apart():
    def loss(params, x):
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w) if i % 2 else x @ w @ w @ w
        return jnp.mean(x)

    init = lambda dtype: [jnp.zeros((64, 64), dtype)] * 4  # noqa: E731
    model = TracedModel(loss, init, jax.ShapeDtypeStruct((8, 64), jnp.float32))
    # Of 8 products forward one has no gradient of its input; "full" computes all again.
    assert model.traced(8, jnp.float32, "none").products == 3 * 8 - 1
    assert model.traced(8, jnp.float32, "full").products >= 4 * 8 - 1 - 4


def test_products_in_any_branch_are_work():
    def one_branch(x, other):
        branches = (lambda x: x @ x, lambda x: x)
        return jax.lax.cond(x[0, 0] > 0, *(branches if other else branches[::-1]), x)

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    for other in (False, True):
        found = work_of(functools.partial(one_branch, other=other), x, kind=kind_of("h100"))
        assert found.flops == 2 * 16**3


def test_parameters_and_state_are_those_of_the_planner():
    own = memory_of(OWN, dtype=jnp.float32)
    plan = ParallelPlan(data=8, stage=2, microbatch=2048, recompute="none")
    planned = estimate(
        *(OWN.abstract(), TX, zero_of(ParallelPlan(data=8, stage=2))),
        device=kind_of("h100"),
        gathered_once=OWN.gathered_once,
        activations=own.activations(plan),
        batch=own.batch(plan),
    )
    assert own.fullest(plan) == pytest.approx(planned.stage("stage 2").peak)
    assert own.batch(plan) == 2048 * 4 * 34


def test_the_plans_of_any_loss():
    found = search(OWN, TX, "h100x8", sequences=64, keep={"replicas": 1}, top=50)
    plans = [each.plan for each in found.plans]
    assert {plan.pipe for plan in plans} == {plan.tensor for plan in plans} == {1}
    assert {plan.stage for plan in plans} == {0, 1, 2, 3}
    # The loss has none of MaxText's names; without these, "minimal" stores results of products.
    assert {plan.recompute for plan in plans} <= {"none", "minimal", "full"}
    assert found.bound <= found.best.seconds.seconds
    with pytest.raises(ValueError, match="length is that of the example, 1, got 5"):
        search(OWN, TX, "h100x8", sequences=8, length=5)
    with pytest.raises(ValueError, match=r"recompute must be one of .* got 'minimal_offloaded'"):
        OWN.loss("minimal_offloaded")  # whose values no step copies


def test_graphs_of_few_operations_are_planned(monkeypatch):
    """Of a loss with layers; one without has no other plan."""
    every, costs = ("full", "planned_half"), memory_of(traced_decoder())
    assert costs.forms(every) == every
    monkeypatch.setattr(_traced_model, "_MOST_OPERATIONS", 1)
    assert costs.forms(every) == ("full",)


def skips(params, x):
    """No layers are found in it."""
    kept = []
    for name in "abcdefgh":
        x = x + kept.pop() if name > "d" else x
        x = jnp.tanh(jnp.tanh(x @ params[name]) @ params[name].T)
        kept.append(x)
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss", [skips, loss_fn])
def test_plans_of_a_graph_are_those_of_its_program(loss):
    """Each has fewer bytes, as planned, for more products: exactly those that the program has."""
    init_skips = lambda dtype: {name: jnp.ones((64, 256), dtype) for name in "abcdefgh"}  # noqa: E731
    x = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    model = TracedModel(skips, init_skips, x) if loss is skips else OWN
    memory, device = [], kind_of("h100")
    for form in ("none", "planned_half", "planned_third"):
        plan = ParallelPlan(microbatch=2048, recompute=form)
        costs = TracedCosts(model, TX, machine_of("cpu:1", device), dtype=jnp.float32)
        file = PlanFile("", "", "cpu:1", 1, "float32", (), plan, {"memory": costs.fullest(plan)})
        found = verify(file, model, TX, memory=2.0**40, device=device)
        assert found.flops == found.planned_flops
        assert found.memory <= 1.15 * found.planned_memory
        memory.append(found.memory)
    assert memory[2] < memory[1] < 0.8 * memory[0]


def test_a_loop_reads_and_writes_what_it_adds_up():
    """As the gradients of parameters that tiles share."""
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)

    def loop(step):
        run = lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, length=10)[0]  # noqa: E731
        return work_of(run, x, x, kind=UNIT).seconds

    assert loop(jnp.add) - loop(jnp.multiply) == 10 * 2 * 4000


def test_convolutions_have_measured_rates_of_their_own():
    def loss(params, x):
        dims = ("NHWC", "HWIO", "NHWC")
        for w in params:
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.mean(x.mean((1, 2)) @ jnp.ones((8, 8)))

    x = jax.ShapeDtypeStruct((8, 16, 16, 8), jnp.float32)
    model = TracedModel(loss, lambda dtype: [jnp.ones((3, 3, 8, 8))] * 2, x)
    kind = dataclasses.replace(kind_of("h100"), reached=achieved(kind_of("h100")))
    slow = dataclasses.replace(kind.reached, convolutions=(0.25, 0.5))
    seconds = []
    for device in (kind, dataclasses.replace(kind, reached=slow)):
        costs = TracedCosts(model, TX, machine_of("h100x8", device), dtype=jnp.float32)
        passes = costs.passes(ParallelPlan(data=8, microbatch=8))
        seconds.append(passes.work.matmul)
    image, filters = 8 * 16 * 16 * 8, 9 * 8 * 8
    flops, touched = 5 * 2 * image * filters / 8, 5 * 4 * (2 * image + filters)
    rate, bandwidth = kind.flops * slow.matmul, kind.bandwidth * slow.passes
    more = 3 * flops / rate + touched / bandwidth
    assert seconds[1] - seconds[0] == pytest.approx(more)


@pytest.mark.parametrize("rows", [2**10, 2**17])
def test_large_temporaries_are_new_memory(rows):
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w))  # noqa: E731
    model = TracedModel(loss, lambda dtype: jnp.ones((64, 64)), x)
    kind, seconds = kind_of("h100"), []
    for new_memory in (0.0, 1e-9):
        reached = dataclasses.replace(achieved(kind), new_memory=new_memory)
        device = dataclasses.replace(kind, reached=reached)
        costs = TracedCosts(model, TX, machine_of("h100x1", device), dtype=jnp.float32)
        plan = ParallelPlan(data=1, microbatch=rows, recompute="none")
        seconds.append(costs.passes(plan).work.elementwise)
        held = costs.activations(plan)
    more = 1e-9 * (held.stored + held.working) * (rows == 2**17)
    assert seconds[1] - seconds[0] == pytest.approx(more)


def test_sums_of_loops_move_at_the_rate_of_what_products_read():
    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda c, _: (jnp.sin(c @ params), None), x, length=10)[0])

    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    model = TracedModel(loss, lambda dtype: jnp.ones((64, 64)), x)
    found = model.traced(8, jnp.dtype("float32"), "none")
    rows, matrix = 4 * 8 * 64, 4 * 64 * 64
    assert found.touched == 10 * (3 * (2 * rows + matrix) + 2 * matrix)
    assert found.moved < 10 * 2 * matrix


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_fine_tuning_is_planned_on_codes():
    """Adapters alone have gradients, state and a reduced wire; codes are gathered."""
    model, tx = TracedModel.fine_tuned(DECODER, TX, frozen=4, lora=4)
    costs = TracedCosts(model, tx, machine_of("h100x8"), dtype=jnp.bfloat16)
    params = model.abstract(jnp.bfloat16)
    adapters = bytes_of(model.trained(params))
    assert adapters == 2 * 4 * 4 * (4 * (256 + 256) + 3 * (256 + 1024))
    held = costs.by_part(ParallelPlan(data=8))
    assert held["params"] == bytes_of(params)
    assert held["grads"] == adapters
    assert held["state"] == pytest.approx(2 * adapters, rel=0.01)
    # No gradients of matrices and the head; of adapters three products each, and some run again.
    both = (m.traced(8, jnp.dtype("bfloat16"), "none") for m in (traced_decoder(), model))
    full, frozen = (x.flops for x in both)
    tokens = 8 * 128
    of_gradients = 2 * tokens * (DECODER.layers * DECODER.layer_elements + 256 * 512)
    of_adapters = 2 * tokens * adapters / 2
    assert full - frozen == pytest.approx(of_gradients - 3.5 * of_adapters, rel=0.01)
    # By which what is sent is timed: codes, and gradients of adapters.
    size = sum(x.size for x in jax.tree.leaves(params))
    assert costs.each(ParallelPlan())[:2] == pytest.approx(
        (bytes_of(params) / size, adapters / size)
    )


def test_search_of_fine_tuning_and_its_file():
    kept = {"stage": 3, "recompute": "full", "microbatches": 1, "offload": False}
    options = {"sequences": 8, "keep": kept, "recompute": ("none", "full"), "top": 1}
    found = search(DECODER, TX, "rtx4090x8", frozen=4, lora=4, **options).best
    model, tx = TracedModel.fine_tuned(DECODER, TX, frozen=4, lora=4)
    assert search(model, tx, "rtx4090x8", **options).best == found
    names = {"model": "llama2-7b", "optimizer": "adamw", "target": "rtx4090x8", "length": 128}
    file = PlanFile.of(found, dtype="bfloat16", frozen=4, lora=4, **names)
    assert "model, tx = shd.plan.TracedModel.fine_tuned(model, tx, frozen=4, lora=4)" in file.code()
    with pytest.raises(ValueError, match="give lora, their rank, too"):
        search(DECODER, TX, "rtx4090x8", frozen=4, **options)
    with pytest.raises(ValueError, match="TracedModel has forms of its own"):
        search(OWN, TX, "rtx4090x8", lora=4, **options)
    with pytest.raises(ValueError, match="rank 512 is above a dim"):
        TracedModel.fine_tuned(DECODER, TX, lora=512)


def test_decoding_is_one_pass_and_one_matrix_at_a_time():
    def loss(params, x):
        layer = lambda x, p: (jnp.tanh(x @ p["a"]) @ p["b"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params)[0])

    def init_of(*forms):
        def init(dtype):
            w = {"a": jnp.ones((2, 512, 512), dtype), "b": jnp.ones((2, 512, 512), dtype)}
            return stored.store(w, {"": forms}, jax.random.key(0)) if forms else w

        return init

    x = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16)
    forms = stored.frozen(4), stored.lora(4)
    coded = TracedModel(stored.loss_of(loss), init_of(*forms), x, trainable=stored.trained)
    plain = TracedModel(loss, init_of(), x)
    more = [m.traced(8, jnp.dtype("bfloat16"), "full") for m in (coded, plain)]
    matrix = 2 * 512**2  # bytes
    passes = (more[0].moved - more[1].moved) / (4 * matrix * (1 + 4.13 / 16))
    assert 1.5 < passes < 3.5  # of all four, in the forward and the backward pass
    # Where it is, and as the largest of what is there in 32 bits or as a gradient.
    assert more[0].working - more[1].working == pytest.approx(2 * matrix, rel=0.1)
