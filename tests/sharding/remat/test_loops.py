"""Plans of loops: products exact, programs that fit, layers that ZeRO gathers one by one."""

import dataclasses
import functools
import itertools

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
from sharding._jaxprs import inner_jaxprs
from sharding.plan import estimate
from sharding.plan.machine._devices import KINDS
from sharding.plan.model._models import MODELS
from sharding.plan.model._traced_work import work_of
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


def search_of(x, fn=loss, params=None, kind=None):
    planned = PlannableLoss(fn, init() if params is None else params, x, jax.devices()[0])
    return LossSearch(planned, kind, in_loops=True)


def test_products_run_again_as_often_as_planned():
    """Of every form: with and without names, in one and in two levels; time op by op."""
    plans = search_of(data(0))._forms()
    forms = {str(each.loops): each for each in plans}
    assert {"nothing", "all but hidden, gate", "each layer, and segments of layers"} <= {*forms}
    for each in plans:
        grad = jax.grad(each, argnums=(0,))
        work = work_of(grad, init(), data(0), kind=None)
        assert work.flops == each.work.flops
        assert work.seconds == pytest.approx(each.work.seconds, rel=0.1)
    assert forms["all but hidden, gate"].extra_flops == 0


@pytest.mark.parametrize("seed", [3, 13])
def test_more_bytes_are_never_slower_whatever_programs_take(monkeypatch, seed):
    """None of them is foreseen by another. An error has the least bytes of any."""
    search, rng = search_of(data(0)), np.random.default_rng(seed)
    peaks = {plan.loops: plan.saved * rng.uniform(1, 3) for plan in search._forms()}
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda fn, *_: peaks[fn.loops])
    seconds = {plan.loops: plan.work.seconds for plan in search._forms()}
    for budget in np.linspace(min(peaks.values()), max(peaks.values()), 30):
        search._known.clear()  # what earlier budgets have compiled does not matter
        found = search.fastest(budget)
        assert found.work.seconds == min(seconds[form] for form in peaks if peaks[form] <= budget)
    for less, more in itertools.pairwise(search.frontier()):
        assert less.peak < more.peak
        assert less.work.seconds > more.work.seconds
    search._known.clear()
    with pytest.raises(ValueError, match=r"this loss needs .* at least"):
        search.fastest(1000)  # less than any stores


def test_a_frontier_has_no_slower_plan_of_equal_bytes(monkeypatch):
    """Nor one that the compiler gives up."""
    search = search_of(data(0))
    peaks = {plan.loops: 1e6 for plan in search._forms()}
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda fn, *_: peaks[fn.loops])
    (only,) = search.frontier()
    assert only.extra_time == 0
    search._known.clear()
    peaks.update(dict.fromkeys(peaks, float("inf")))
    monkeypatch.setattr(search, "_by_few_layers", lambda form: float("inf"))
    assert search.frontier() == []


def test_a_loop_whose_parameters_no_compiler_takes(monkeypatch):
    """As that of TPUs beyond their memory: bytes are those of fewer layers, and linear."""
    layer = sum(x.nbytes for x in jax.tree.leaves(init())) / LENGTH
    kind = dataclasses.replace(KINDS["v5e"], memory=4.1 * 2 * layer / 0.6)  # of four layers
    search, compiled = search_of(data(0), kind=kind), _loss_search.step_temporaries

    def refuses(fn, params, batch, device):
        if params["up"].shape[0] == LENGTH:
            return float("inf")
        return compiled(fn, params, batch, device)

    want = [search._measured(plan).peak for plan in search._forms()]
    search._known.clear()
    monkeypatch.setattr(_loss_search, "step_temporaries", refuses)
    for plan, peak in zip(search._forms(), want, strict=True):
        near = float("inf") if plan.loops.segments else pytest.approx(peak, rel=0.02)
        assert search._measured(plan).peak == near
    search._known.clear()
    monkeypatch.setattr(_loss_search, "step_temporaries", lambda *_: float("inf"))
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

    def recorded(*args):
        in_loops.append(args[-1])
        return loss_search(*args)

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
def plans(view="device", loss_fn=loss):
    """For the rows of one device of four: one computes layers again, one stores what it can."""
    rows = ROWS // 4 if view == "device" else ROWS
    search = search_of(data(0, rows), loss_fn)
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
@pytest.mark.parametrize("view", ["device", "global"])
def test_training_is_that_of_one_device(view):
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=3, view=view)
    assert_trained_as_alone(zero, plans(view)[0])


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
    whole, found = (
        shd.remat.frontier(loss, *args, stage=3) for args in ((alone, x), (params, sharded))
    )
    # Hidden values are shards, inputs are not.
    assert found[-1].peak < 0.7 * whole[-1].peak
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
