"""Plans for scanned stacks: the same gradients, exact operations, copies to host memory."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan import estimate
from sharding.plan.machine._devices import KINDS
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._models import MODELS
from sharding.plan.model._traced_model import work_of
from sharding.remat._choose_saved_names import MAXTEXT_NAMES, NameRequest, TracedBlock
from sharding.remat._stack_plan import Stack, one_of

LENGTH, WIDTH, ROWS = 12, 16, 1024


def block(p, x):
    h = checkpoint_name(x @ p["up"], "hidden")
    gate = checkpoint_name(x @ p["gate"], "gate")
    if "key" in p:
        h = h * (1 + jax.random.key_data(p["key"])[-1] % 3)
    return x + (jnp.tanh(h) * jax.nn.silu(gate)) @ p["down"]


def stack(dropout=False):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5)

    params = {
        "up": draw(LENGTH, WIDTH, 4 * WIDTH),
        "gate": draw(LENGTH, WIDTH, 4 * WIDTH),
        "down": draw(LENGTH, 4 * WIDTH, WIDTH),
    }
    if dropout:
        params["key"] = jax.random.split(jax.random.key(0), LENGTH)
    return params, draw(ROWS, WIDTH)


def gradients(fn, params, x):
    own = {name: w for name, w in params.items() if name != "key"}

    def loss(own, x):
        return jnp.sum(jnp.sin(fn(params | own, x)) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(own, x)


@functools.cache
def plans():
    return shd.remat.frontier(block, *stack(), length=LENGTH)


@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_plain_stack():
    """With random masks, which must be the same when a block runs again."""
    params, x = stack(dropout=True)
    want = gradients(
        lambda p, x: jax.lax.scan(lambda x, w: (block(w, x), None), x, p)[0], params, x
    )
    found = shd.remat.plan(block, params, x, "1GiB", length=LENGTH)
    for changes in (
        {},
        {"names": ("gate",), "offloaded": ("hidden", "block_input")},
        {"names": (), "lengths": (3, 4)},
    ):
        got = gradients(dataclasses.replace(found, **changes).apply(), params, x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13), got, want
        )


def test_products_run_again_as_often_as_planned():
    """Of every candidate: with and without names, in one and in two levels."""
    params, x = stack()
    found = Stack(block, params, x, LENGTH, jax.devices()[0], None)
    plans = [found.plan(each, 0.0, 0.0) for each in found.candidates(NameRequest(), False)]
    assert {each.lengths for each in plans} == {(12,), (4, 3), (6, 2)}
    for each in plans:
        step = jax.grad(lambda p, x, each=each: jnp.sum(each.apply()(p, x)), argnums=(0, 1))
        assert work_of(step, params, x, kind=None).flops == each.work.flops


def test_the_frontier_trades_bytes_for_time():
    assert len(plans()) > 2
    for less, more in itertools.pairwise(plans()):
        assert less.peak < more.peak
        assert less.extra_time > more.extra_time
    assert {len(each.lengths) for each in plans()} == {1, 2}
    assert "12 hidden gate" in str(plans())
    every = next(each for each in plans() if len(each.names) == 2)
    _, x = stack()
    assert every.lengths == (12,)
    assert every.saved == 12 * (num_bytes(x) + 2 * ROWS * 4 * WIDTH * x.dtype.itemsize)
    assert every.extra_flops == 0


def with_temporaries(monkeypatch, rest_of):
    """A stack whose programs take what they store and ``rest_of(key)``; and its candidates."""
    monkeypatch.setattr(Stack, "temporaries", lambda self, each: each.saved + rest_of(each.key))
    made = Stack(block, *stack(), LENGTH, jax.devices()[0], None)
    return made, made.candidates(NameRequest(), False)


@pytest.mark.parametrize("seed", [3, 13])
def test_more_bytes_are_never_slower_whatever_programs_take(monkeypatch, seed):
    """Temporaries beside what is stored vary threefold: none of them is foreseen by another."""
    rng, rest = np.random.default_rng(seed), {}
    made, candidates = with_temporaries(
        monkeypatch, lambda key: rest.setdefault(key, rng.uniform(1, 3) * ROWS * 4 * WIDTH * 4)
    )
    peaks = {each.work.seconds: made.peak(each) for each in candidates}
    for budget in np.linspace(min(peaks.values()), max(peaks.values()), 30):
        made._peaks.clear()  # what earlier budgets have compiled does not matter
        found = made.fastest(candidates, budget)
        assert found.work.seconds == min(t for t, peak in peaks.items() if peak <= budget)
    made._peaks.clear()
    with pytest.raises(ValueError, match=r"this stack needs .* at least") as error:
        made.fastest(candidates, 1000)  # less than any stores: none was compiled
    assert f"{math.ceil(min(peaks.values())):,} bytes" in str(error.value)


def test_a_frontier_has_no_slower_plan_of_equal_bytes(monkeypatch):
    """Nor one that the compiler gives up."""
    made, candidates = with_temporaries(monkeypatch, lambda key: 0.0)
    slowest = candidates[-1]
    peaks = {id(each): 1e6 for each in candidates} | {id(slowest): math.inf}
    monkeypatch.setattr(made, "peak", lambda each: peaks[id(each)])
    (only,) = made.frontier(candidates)
    assert only.work == candidates[0].work
    peaks.update(dict.fromkeys(peaks, math.inf))
    assert made.frontier(candidates) == []


def test_a_stack_takes_parameters_of_its_length():
    """Those of more blocks would need more than was planned."""
    params, x = stack()
    with pytest.raises(ValueError, match="length"):
        plans()[-1].apply()(jax.tree.map(lambda w: jnp.concatenate([w, w]), params), x)


def decoder(p, x):
    """With MaxText's names."""
    x = checkpoint_name(x, "decoder_layer_input")
    q = checkpoint_name(x @ p["up"], "query_proj")
    k = checkpoint_name(x @ p["gate"], "key_proj")
    context = checkpoint_name(jnp.tanh(q) * jnp.sin(k), "context")
    return x + checkpoint_name(context @ p["down"], "out_proj")


@pytest.fixture
def uncompiled(monkeypatch):
    """Every program takes what it stores; none is compiled."""
    monkeypatch.setattr(Stack, "temporaries", lambda self, each: each.saved)


@pytest.mark.usefixtures("uncompiled")
def test_presets_and_places_fix_the_names():
    params, x = stack()
    for names, saved in (
        ("full", ()),
        ("save_qkv_proj", ("query_proj", "key_proj")),
        ("minimal_with_context", ("query_proj", "key_proj", "context", "out_proj")),
        ({"query_proj": "device", "context": "remat"}, ("query_proj",)),
    ):
        found = shd.remat.plan(decoder, params, x, "1GiB", length=LENGTH, names=names)
        assert found.names == saved
    only = shd.remat.frontier(decoder, params, x, length=LENGTH, names=["context"])
    assert {each.names for each in only} <= {(), ("context",)}


@pytest.mark.usefixtures("uncompiled")
def test_names_that_spare_nothing_are_named():
    params, x = stack()

    def after(p, x):
        return x + checkpoint_name(jnp.tanh(checkpoint_name(x @ p["up"], "pre")), "act") @ p["down"]

    def side(p, x):
        y = x @ p["up"]
        return x + (jnp.tanh(y) + checkpoint_name(y, "mid")) @ p["down"]  # tanh reads y itself

    for pattern, fn, options in (
        ("act: saving this spares no operation", after, {}),
        ("mid: saving this spares no operation", side, {}),
        ("no named values", lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"], {}),
        ("no name that may be saved", block, {"names": ["other"]}),
    ):
        with pytest.warns(UserWarning, match=pattern):
            shd.remat.plan(fn, params, x, "1GiB", length=LENGTH, **options)


def test_a_carry_is_offloaded_by_a_name_within_the_loop():
    """A name outside has no effect: the traced scan would keep all inputs on the device."""
    params, x = stack()

    def text(found):
        return str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(found.apply()(p, x))))(params))

    one_scan = dataclasses.replace(plans()[0], lengths=(LENGTH,), names=())
    assert "<host>" in text(dataclasses.replace(one_scan, offloaded=("block_input",)))
    assert "<host>" not in text(one_scan)


def test_bad_input():
    params, x = stack()

    for pattern, changes in (
        (r"must be stacked, 11 layers in the first dim, but down has the shape", {"length": 11}),
        ("give one function, not several", {"length": 12, "block": [block] * 12}),
        ("return what they get", {"length": 12, "block": lambda p, x: x @ p["up"]}),
        ("is no preset; known are 'full'", {"length": 12, "names": "everything"}),
        ("'hidden' must be in one of 'device'", {"length": 12, "names": {"hidden": "disk"}}),
        ("ignored by XLA on CPUs", {"length": 12, "offload": True}),
        ("what names= has decided", {"length": 12, "offload": True, "names": "full"}),
    ):
        fn, own = changes.pop("block", block), changes.pop("params", params)
        with pytest.raises(ValueError, match=pattern):
            shd.remat.plan(fn, own, x, "1GiB", **changes)
    with pytest.raises(ValueError, match="modes must be at least 2"):
        shd.remat.frontier(block, params, x, length=12, modes=1)


def test_names_of_large_layers_are_chosen_at_their_size():
    """Only traced: 405B parameters, activations beyond 2^31 bytes, in a second or two."""
    model = MODELS["llama3-405b"]
    params = one_of(model.abstract(jnp.bfloat16)["layers"])
    x = jax.ShapeDtypeStruct((8, 8192, model.width), jnp.bfloat16)
    traced = TracedBlock.of(model.apply_layer, params, x, KINDS["h100"])
    found = traced.frontier()
    assert len(found) > 5
    assert found[-1].nbytes == 0
    assert found[0].nbytes > 2**31
    most, least = (traced.step + traced.recompute(found[i].names) for i in (-1, 0))
    assert most.flops > 1.2 * least.flops
    assert not set(traced.useless()) - MAXTEXT_NAMES


def test_what_a_plan_leaves_is_a_budget():
    """Of the stage that is asked for, beside its state."""
    params, x = stack()
    tx = optax.adam(1e-3)
    zero = shd.Zero(jax.sharding.AbstractMesh((8,), ("data",)), stage=2)
    device = shd.DeviceKind("small", 10 * 2**20, 1e12, 1e14, 1e11, None, "made up")
    planned = estimate(params, tx, zero, device=device)
    left = device.memory - planned.stage("stage 2").peak
    found = shd.remat.plan(block, params, x, planned, length=LENGTH)
    assert found.budget == left
    counted = estimate(params, tx, zero, device=device, activations=found.peak)
    assert counted.stage("stage 2").peak <= device.memory
    tiny = dataclasses.replace(device, memory=1e5)
    with pytest.raises(ValueError, match="nothing is left for activations"):
        shd.remat.plan(block, params, x, estimate(params, tx, zero, device=tiny), length=LENGTH)
