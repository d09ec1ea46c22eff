"""Plans of loops: products exact, programs that fit, layers that ZeRO gathers one by one."""

import dataclasses
import functools
import itertools
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding

import sharding as shd
from optax_ext.equations import inner_jaxprs
from sharding.plan import estimate
from sharding.plan.machine._devices import KINDS, num_bytes
from sharding.plan.model._models import MODELS
from sharding.plan.model._traced_work import work_of, work_of_equation
from sharding.remat import _loss_search, _plan_activations
from sharding.remat._loss_search import LossSearch, PlannableLoss
from sharding.remat._plan_activations import loss_search

from .. import model

LENGTH, WIDTH, ROWS, STEPS = 6, 16, 1024, 3


def block(p, x):
    hidden = checkpoint_name(x @ p["up"], "hidden")
    gate = checkpoint_name(x @ p["gate"], "gate")
    return x + (jnp.tanh(hidden) * jax.nn.silu(gate)) @ p["down"]


def init():
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 4 * WIDTH), "gate": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {k: jnp.asarray(rng.normal(size=(LENGTH, *s)) / s[0] ** 0.5) for k, s in shapes.items()}


def data(step, rows=ROWS):
    scale = np.linspace(0.2, 3.0, rows)[:, None]  # shards of different scale
    return jnp.asarray(np.random.default_rng(step).normal(size=(rows, WIDTH)) * scale)


def loss(params, x, fn=block):
    x = jax.lax.scan(lambda x, p: (fn(p, x), None), x, params)[0]
    return jnp.mean(jnp.sum(jnp.sin(x) ** 2, axis=-1))


def planned_loss(x, fn=loss, params=None):
    return PlannableLoss(fn, init() if params is None else params, x, jax.devices()[0])


def search_of(x, fn=loss, params=None, kind=None):
    return LossSearch(planned_loss(x, fn, params), kind, in_loops=True)


def loop_of(layer, kind=None, offload=False, x=None, params=None):
    x, fn = data(0, 32) if x is None else x, functools.partial(loss, fn=layer)
    return planned_loss(x, fn, params).loops_of(kind, offload)[0]


def mlp(p, x):
    x = checkpoint_name(x * 1.5, "scaled")
    up = checkpoint_name(x @ p["up"], "up")
    gate = checkpoint_name(jax.nn.silu(x @ p["gate"]), "gate")
    return x + checkpoint_name(up * gate, "product") @ p["down"]


def twice(p, x):
    for _ in range(2):  # one name for two values
        x = x + jnp.tanh(checkpoint_name(x @ p["up"], "pre")) @ p["down"]
    return jnp.sin(checkpoint_name(x, "sum"))


@pytest.mark.parametrize(("layer", "some"), [(block, "hidden, gate"), (twice, "pre, dot_general")])
def test_products_run_again_as_often_as_planned(layer, some):
    """Of every form: with and without names, in one and in two levels; time op by op."""
    plans = search_of(data(0), functools.partial(loss, fn=layer))._forms()
    forms = {str(each.loops): each for each in plans}
    assert {"nothing", "each layer, and segments of layers"} <= {*forms}
    assert f"all but {some}" in "; ".join(forms)
    for each in plans:
        grad = jax.grad(each, argnums=(0,))
        work = work_of(grad, init(), data(0), kind=None)
        assert work.flops == each.work.flops
        if layer is block:  # the other has few products
            assert work.seconds == pytest.approx(each.work.seconds, rel=0.1)
    assert layer is twice or forms["all but hidden, gate"].extra_flops == 0


@pytest.mark.parametrize(
    ("layer", "name", "link", "offload", "passes"),
    [
        (twice, "h100", 1.0, [], None),
        (mlp, "h100", 2e12, True, None),
        (mlp, "v5e", 1e12, True, None),
        (mlp, "v5e", 1e12, ["gate", "product"], None),
        (twice, "v5e", 1e12, ["pre", "block_input"], None),
        (mlp, "v5e", 1e12, True, (1.0, 1e-12)),  # what runs again alone hides copies
    ],
)
def test_forms_equal_enumeration(layer, name, link, offload, passes, monkeypatch):
    """Every value is stored, copied to host memory or computed again: all choices, all budgets.

    A TPU copies beside its passes, a GPU waits for its copies, as an H200 was seen to.
    """
    kind = dataclasses.replace(KINDS[name], host_link=link)
    loop, spent = loop_of(layer, kind, offload), {}
    graph, (forward, backward) = loop._graph, passes or loop._passes()
    monkeypatch.setattr(loop, "_passes", lambda: (forward, backward))
    for eqn in graph.equations:
        types = ([graph.types[v] for v in vs] for vs in (eqn.operands, eqn.results))
        spent[eqn.results] = LENGTH * work_of_equation(eqn, *types, kind).seconds
    names = {e.results[0]: e.params["name"] for e in graph.equations if e.primitive.name == "name"}
    assert [*names.values()] == loop.names
    may = {v for v, n in names.items() if offload is True or n.split(" #")[0] in offload}
    choices = []
    for places in itertools.product(("stored", "moved", "again"), repeat=len(names)):
        place = dict(zip(names, places, strict=True))
        of = [[v for v in names if place[v] == at] for at in ("stored", "moved")]
        if places[0] != "again" and may.issuperset(of[1]):
            run, _ = graph.needed(graph.outputs, {*of[0], *of[1]})
            again = sum(spent[eqn.results] for eqn in run)
            held, host = (LENGTH * num_bytes([graph.types[v] for v in vs]) for vs in of)
            wait = max(0, host / link - forward) + max(0, host / link - backward - again)
            choices.append((held, again + (wait if kind.tile else 2 * host / link)))
    best = []  # of more bytes than the one before, and less time
    for held, seconds in sorted(choices):
        if not best or seconds < best[-1][1] * (1 - 1e-9):
            best.append((held, seconds))
    have = [(form.nbytes, form.seconds) for form in loop.forms]
    assert len(have) == len(best)
    np.testing.assert_allclose(have, best, rtol=1e-12)


def test_names_within_loops_and_branches_are_not_found():
    """Those of an inner jit are."""

    def in_loop(p, x):
        return jax.lax.fori_loop(0, 2, lambda i, x: mlp(p, x), x)

    def in_branch(p, x):
        return jax.lax.cond(jnp.sum(x) > 0, mlp, lambda p, x: x, p, x)

    names = {"scaled", "up", "gate", "product"}
    assert names <= {*loop_of(jax.jit(mlp)).names}
    assert names.isdisjoint(loop_of(in_loop).names + loop_of(in_branch).names)


def test_flash_attention_is_an_operation_with_its_products():
    """A Pallas kernel with its own derivative, whose products are in branches: all are counted."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    batch, heads, length, head = 2, 2, 256, 128
    width, kind = heads * head, KINDS["v5e"]

    def attention(p, x):
        q, k, v = (checkpoint_name(x @ p[name], name) for name in "qkv")
        q, k, v = (w.reshape(batch, length, heads, head).swapaxes(1, 2) for w in (q, k, v))
        context = flash_attention(q, k, v, causal=True).swapaxes(1, 2).reshape(batch, length, width)
        return x + context @ p["out"]

    params = {name: jnp.ones((LENGTH, width, width), jnp.float32) for name in (*"qkv", "out")}
    x = jnp.ones((batch, length, width), jnp.float32)
    product, kernel = 2 * x.size * width, 2 * 2 * x.size * length
    layer = jax.tree.map(lambda w: w[0], params)
    assert work_of(attention, layer, x, kind=kind).flops == 4 * product + kernel
    # What its forward rule keeps has no name: the kernel runs again, whatever is saved. Its scores
    # stay on the chip: the time is that of its products, and of what it returns.
    forms = loop_of(attention, kind, x=x, params=params).forms
    none, *_, saved = (each.seconds * kind.flops / LENGTH for each in forms)
    assert kernel < saved < 4 * kernel
    assert none - saved == pytest.approx(3 * product, rel=0.01)


def test_many_values_at_once():
    """None is read where it is computed: not all sets of these are compared."""

    def wide(p, x):
        hidden = [x @ p["up"] for _ in range(17)]
        hidden = [h.astype(jnp.bfloat16) for h in hidden]
        hidden = [checkpoint_name(h, f"name {i}") for i, h in enumerate(hidden)]
        return x + sum(jnp.sin(h) for h in hidden).astype(x.dtype) @ p["down"]

    start = time.process_time()
    first, *_, last = loop_of(wide).forms
    assert str(first) == "each layer"
    assert str(last).count("name") == 17
    assert time.process_time() - start < 5


@pytest.mark.parametrize("seed", [3, 13])
def test_more_bytes_are_never_slower_whatever_programs_take(monkeypatch, seed):
    """None of them is foreseen by another. An error has the least bytes of any."""
    search, rng = search_of(data(0)), np.random.default_rng(seed)
    peaks = {plan.loops: plan.saved * rng.uniform(1, 3) for plan in search._forms()}
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda fn, *_, **__: peaks[fn.loops])
    seconds = {plan.loops: plan.work.seconds for plan in search._forms()}
    for budget in np.linspace(min(peaks.values()), max(peaks.values()), 30):
        search._known.clear()  # what earlier budgets have compiled does not matter
        found = search.fastest(budget)
        assert found.work.seconds == min(seconds[form] for form in peaks if peaks[form] <= budget)
    for less, more in itertools.pairwise(search.frontier()):
        assert less.peak < more.peak
        assert less.work.seconds > more.work.seconds
    search._known.clear()
    with pytest.raises(ValueError, match="programs that were tried the smallest takes"):
        search.fastest(1000)  # less than any stores


def test_a_frontier_has_no_slower_plan_of_equal_bytes(monkeypatch):
    """Nor one that the compiler gives up."""
    search = search_of(data(0))
    peaks = {plan.loops: 1e6 for plan in search._forms()}
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda fn, *_, **__: peaks[fn.loops])
    (only,) = search.frontier()
    assert only.extra_time == 0
    search._known.clear()
    peaks.update(dict.fromkeys(peaks, float("inf")))
    monkeypatch.setattr(search, "_by_few_layers", lambda form: float("inf"))
    assert search.frontier() == []


def test_the_bytes_of_a_plan_are_a_budget_that_it_meets(monkeypatch):
    """Graphs count more of what a loop stores than some programs do."""
    search = search_of(data(0))
    peaks = {plan.loops: 0.7 * plan.saved for plan in search._forms()}
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda fn, *_, **__: peaks[fn.loops])
    plans = search.frontier()
    assert len(plans) > 2
    for plan in plans:
        assert search.fastest(plan.peak).extra_time == plan.extra_time


def test_a_loop_whose_parameters_no_compiler_takes(monkeypatch):
    """As that of TPUs beyond their memory: bytes are those of fewer layers, and linear."""
    layer = sum(x.nbytes for x in jax.tree.leaves(init())) / LENGTH
    kind = dataclasses.replace(KINDS["v5e"], memory=4.1 * 2 * layer / 0.6)  # of four layers
    search, compiled = search_of(data(0), kind=kind), _loss_search.step_temporaries

    def refuses(fn, params, batch, device, **options):
        if params["up"].shape[0] == LENGTH:
            return float("inf")
        return compiled(fn, params, batch, device, **options)

    want = [search._measured(plan).peak for plan in search._forms()]
    search._known.clear()
    monkeypatch.setattr(_loss_search, "step_temporaries", refuses)
    for plan, peak in zip(search._forms(), want, strict=True):
        near = float("inf") if plan.loops.segments else pytest.approx(peak, rel=0.02)
        assert search._measured(plan).peak == near
    search._known.clear()
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda *_, **__: float("inf"))
    with pytest.raises(ValueError, match="nor the memory of the device"):
        search.fastest(2**40)


def test_layers_of_large_models_are_planned_at_their_size():
    """Only traced: 405B parameters, activations beyond 2^31 bytes."""
    decoder = MODELS["llama3-405b"]

    def loss(params, x):
        x = jax.lax.scan(lambda x, p: (decoder.apply_layer(p, x), None), x, params)[0]
        return jnp.sum(x.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((8, 8192, decoder.width), jnp.bfloat16)
    plans = search_of(x, loss, decoder.abstract(jnp.bfloat16)["layers"])._forms()
    assert len(plans) > 5
    least, most = min(plans, key=lambda p: p.saved), max(plans[1:], key=lambda p: p.saved)
    assert most.saved - least.saved > decoder.layers * 2**31
    assert least.work.flops > 1.2 * most.work.flops


def test_what_a_plan_leaves_is_a_budget(monkeypatch):
    """Of the stage that is asked for, beside its state; stage 3 leaves loops as they are."""
    params, tx, in_loops = init(), optax.adam(1e-3), []

    def recorded(*args, **options):
        in_loops.append(options["in_loops"])
        return loss_search(*args, **options)

    monkeypatch.setattr(_plan_activations, "loss_search", recorded)
    device = shd.DeviceKind("small", 10 * 2**20, 1e12, 1e14, 1e11, None, "made up")
    for stage in (2, 3):
        zero = shd.Zero(jax.sharding.AbstractMesh((8,), ("data",)), stage=stage)
        planned = estimate(params, tx, zero, device=device)
        left = device.memory - planned.stage(f"stage {stage}").peak
        found = shd.remat.plan(loss, params, data(0), planned)
        assert found.budget == left
        assert in_loops.pop() == (stage == 3)
        counted = estimate(params, tx, zero, device=device, activations=found.peak)
        assert counted.stage(f"stage {stage}").peak <= device.memory
    tiny = dataclasses.replace(device, memory=1e4)
    with pytest.raises(ValueError, match="nothing is left for activations"):
        shd.remat.plan(loss, params, data(0), estimate(params, tx, zero, device=tiny))


# --- Within sharded steps -------------------------------------------------------------------------

TX = optax.adam(1e-2)


@functools.cache
def plans(devices=4, loss_fn=loss):
    """For the rows of one of so many devices: one computes layers again, one stores what it can."""
    search = search_of(data(0, ROWS // devices), loss_fn)
    found = {str(plan.loops): plan for plan in search._forms()}
    return found["each layer"], found["all but hidden, gate"]


@functools.cache
def trained_alone():
    return model.alone(model.make_of(init, TX), TX, loss, data, STEPS)[0][0]


def assert_trained_as_alone(zero, fn, form=lambda params: params, param_specs=None):
    make = model.make_of(lambda: form(init()), TX)
    state = model.run(zero, make, TX, fn, data, STEPS, param_specs)
    have, want = zero.full_params(state), form(trained_alone())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), have, want)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("devices", [4, 1])
def test_training_is_that_of_one_device(devices):
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=3)
    assert_trained_as_alone(zero, plans(devices)[0])


def equations(jaxpr, name, in_loop=False):
    """The equations of a kind, and whether each is in a loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield in_loop
        for inner in inner_jaxprs(eqn):
            yield from equations(inner, name, in_loop or eqn.primitive.name == "scan")


def traced(zero, fn):
    step = zero.train_step(fn, tx=TX)
    state = zero.abstract_state(model.make_of(init, TX), tx=TX)
    return jax.make_jaxpr(step)(state, data(0)).jaxpr


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_gathers_and_reduces_as_by_hand(stage):
    """One ``jax.checkpoint``, and the collectives of ``zero.gathered`` within the loop."""
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    policy = jax.checkpoint_policies.save_only_these_names("hidden", "gate")
    layer = zero.gathered(block, policy=policy)
    if stage == 2:
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    planned, same = traced(zero, plans()[1]), traced(zero, functools.partial(loss, fn=layer))
    for name in ("reduce_scatter", "all_gather", "checkpoint", "remat2"):
        assert list(equations(planned, name)) == list(equations(same, name))
    assert True in equations(planned, "reduce_scatter")


@pytest.mark.usefixtures("x64")
def test_beside_tensor_parallelism():
    """Planned with the shards of a model axis, and trained on a mesh that has one."""
    specs = {"up": P(None, None, "model"), "gate": P(None, None, "model")}
    specs |= {"down": P(None, "model", None)}
    shared = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    params = {
        name: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(shared, specs[name]))
        for name, w in init().items()
    }
    x = jax.ShapeDtypeStruct((ROWS // 2, WIDTH), params["up"].dtype)
    alone = jax.tree.map(lambda t: t.update(sharding=None), params)
    sharded = x.update(sharding=NamedSharding(shared, P()))
    whole = shd.remat.plan(loss, alone, x, "1TiB", stage=3)
    found = shd.remat.frontier(loss, params, sharded, stage=3)
    # Hidden values are shards, inputs are not.
    assert found[-1].peak < 0.7 * whole.peak
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, axis="data", stage=3)
    assert_trained_as_alone(zero, found[0], param_specs=specs)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        hidden = checkpoint_name(dense(4 * WIDTH, name="up")(x), "hidden")
        gate = checkpoint_name(dense(4 * WIDTH, name="gate")(x), "gate")
        return x + dense(WIDTH, name="down")(jnp.tanh(hidden) * jax.nn.silu(gate))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LENGTH,
        )
        return scan(Block(name="block"), x, None)[0]


@pytest.mark.usefixtures("x64")
def test_a_linen_model():
    """``nn.scan`` over blocks, whose layers stage 3 gathers one by one."""

    def form(params):
        return {"block": jax.tree.map(lambda w: {"kernel": w}, params)}

    def of_model(params, x):
        return jnp.mean(jnp.sum(jnp.sin(Stack().apply({"params": params}, x)) ** 2, axis=-1))

    search = search_of(data(0, ROWS // 4), of_model, form(init()))
    (found,) = (plan for plan in search._forms() if str(plan.loops) == "each layer")
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=3)
    assert_trained_as_alone(zero, found, form)
