"""Plans for scanned stacks: the same gradients, exact operations, copies to host memory."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan import estimate
from sharding.plan._devices import KINDS
from sharding.plan._models import MODELS
from sharding.plan._tiles import num_bytes
from sharding.plan.timing._traced_work import Work, work_of
from sharding.remat._modes import TracedBlock, one_of
from sharding.remat._names import HostCopies
from sharding.remat._presets import MAXTEXT_NAMES, NameRequest
from sharding.remat._stack import Stack
from sharding.remat._stack_plan import StackPlan

LENGTH, WIDTH, ROWS = 12, 16, 1024


def block(p, x):
    h = checkpoint_name(x @ p["up"], "hidden")
    gate = checkpoint_name(x @ p["gate"], "gate")
    if "key" in p:
        h = h * jax.random.bernoulli(p["key"], 0.8, h.shape)
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


def plain(params, x):
    for i in range(LENGTH):
        x = block(jax.tree.map(lambda w, i=i: w[i], params), x)
    return x


def gradients(fn, params, x):
    own = {name: w for name, w in params.items() if name != "key"}

    def loss(own, x):
        return jnp.sum(jnp.sin(fn(params | own, x)) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(own, x)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_are_those_of_the_plain_stack(dropout):
    params, x = stack(dropout)
    want = gradients(plain, params, x)
    plans = [*shd.remat.frontier(block, params, x, length=LENGTH)]
    plans += [
        dataclasses.replace(plans[0], lengths=lengths, names=names, offloaded=offloaded)
        for lengths in ((12,), (3, 4), (6, 2))
        for names, offloaded in ((("gate",), ()), ((), ("hidden",)), ((), ("block_input",)))
    ]
    for found in plans:
        got = gradients(found.apply(), params, x)
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
    plans = shd.remat.frontier(block, *stack(), length=LENGTH)
    assert len(plans) > 2
    for less, more in itertools.pairwise(plans):
        assert less.peak < more.peak
        assert less.extra_time > more.extra_time
    assert {len(each.lengths) for each in plans} == {1, 2}
    assert "12 hidden gate" in str(plans)


def test_what_is_saved():
    params, x = stack()
    every = next(p for p in shd.remat.frontier(block, params, x, length=12) if len(p.names) == 2)
    assert every.lengths == (12,)
    assert every.saved == 12 * (num_bytes(x) + 2 * ROWS * 4 * WIDTH * x.dtype.itemsize)
    assert every.extra_flops == 0


def test_the_plan_is_the_fastest_that_fits():
    params, x = stack()
    plans = shd.remat.frontier(block, params, x, length=LENGTH)
    for each in plans:
        for budget in (each.peak, each.peak * 1.001):
            found = shd.remat.plan(block, params, x, budget, length=LENGTH)
            assert found.peak <= budget
            assert found.extra_time == pytest.approx(each.extra_time)
    with pytest.raises(ValueError, match=r"this stack needs .* at least"):
        shd.remat.plan(block, params, x, 1000, length=LENGTH)


@pytest.mark.parametrize("seed", [3, 13])
def test_more_bytes_are_never_slower_whatever_programs_take(monkeypatch, seed):
    """Temporaries beside what is stored vary threefold: none of them is foreseen by another."""
    rng, rest = np.random.default_rng(seed), {}

    def temporaries(self, each):
        key = self._key(each)
        return each.saved + rest.setdefault(key, rng.uniform(1, 3) * ROWS * 4 * WIDTH * 4)

    monkeypatch.setattr(Stack, "temporaries", temporaries)
    params, x = stack()
    made = Stack(block, params, x, LENGTH, jax.devices()[0], None)
    candidates = made.candidates(NameRequest(), False)
    peaks = {each.work.seconds: made.peak(each) for each in candidates}
    for budget in np.linspace(min(peaks.values()), max(peaks.values()), 30):
        made._peaks.clear()  # what earlier budgets have compiled does not matter
        found = made.fastest(candidates, budget)
        assert found.work.seconds == min(t for t, peak in peaks.items() if peak <= budget)


def test_a_prime_number_of_blocks_is_one_scan():
    params, x = stack()
    params = jax.tree.map(lambda w: w[:7], params)
    found = shd.remat.frontier(block, params, x, length=7)
    assert {each.lengths for each in found} == {(7,)}


@pytest.mark.filterwarnings("ignore:the blocks have no named values")
def test_blocks_without_parameters():
    x = jnp.ones((ROWS, WIDTH))
    for found in shd.remat.frontier(lambda p, x: jnp.sin(x), None, x, length=4):
        np.testing.assert_array_equal(found.apply()(None, x), plain_sines(x))


def plain_sines(x):
    for _ in range(4):
        x = jnp.sin(x)
    return x


def test_a_stack_takes_parameters_of_its_length():
    """Those of more blocks would need more than was planned."""
    params, x = stack()
    run = shd.remat.plan(block, params, x, "1GiB", length=LENGTH).apply()
    with pytest.raises(ValueError, match="length"):
        run(jax.tree.map(lambda w: jnp.concatenate([w, w]), params), x)


# --- Names ----------------------------------------------------------------------------------------


def decoder(p, x):
    """With MaxText's names."""
    x = checkpoint_name(x, "decoder_layer_input")
    q = checkpoint_name(x @ p["up"], "query_proj")
    k = checkpoint_name(x @ p["gate"], "key_proj")
    context = checkpoint_name(jnp.tanh(q) * jnp.sin(k), "context")
    return x + checkpoint_name(context @ p["down"], "out_proj")


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


def test_a_chain_takes_presets():
    params, x = stack()
    layers = [jax.tree.map(lambda w, i=i: w[i], params) for i in range(4)]
    found = shd.remat.plan(decoder, layers, x, "1GiB", names="save_qkv_proj")
    assert {found.names[each.block][each.mode] for each in found.tree} == {
        ("query_proj", "key_proj")
    }


def test_names_that_spare_nothing_are_named():
    params, x = stack()

    def after(p, x):
        return x + checkpoint_name(jnp.tanh(checkpoint_name(x @ p["up"], "pre")), "act") @ p["down"]

    def side(p, x):
        y = x @ p["up"]
        return x + (jnp.tanh(y) + checkpoint_name(y, "mid")) @ p["down"]  # tanh reads y itself

    def unnamed(p, x):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    with pytest.warns(UserWarning, match=r"act: saving this spares no operation"):
        shd.remat.plan(after, params, x, "1GiB", length=LENGTH)
    with pytest.warns(UserWarning, match=r"mid: saving this spares no operation"):
        shd.remat.plan(side, params, x, "1GiB", length=LENGTH)
    with pytest.warns(UserWarning, match="no named values"):
        shd.remat.plan(unnamed, params, x, "1GiB", length=LENGTH)
    with pytest.warns(UserWarning, match="no name that may be saved"):
        shd.remat.plan(block, params, x, "1GiB", length=LENGTH, names=["other"])
    with pytest.warns(UserWarning, match="none of the requested names"):
        shd.remat.plan(block, params, x, "1GiB", length=LENGTH, names="save_qkv_proj")


def test_a_kernel_with_its_own_derivative_is_one_operation():
    """As flash attention: what its forward rule keeps is saved or computed again as a whole."""
    params, x = stack()

    @jax.custom_vjp
    def kernel(x):
        return jnp.tanh(x)

    def forward(x):
        y = jnp.tanh(x)
        return checkpoint_name(y, "kept"), checkpoint_name(y, "kept")

    kernel.defvjp(forward, lambda y, g: (g * (1 - y**2),))

    def layer(p, x):
        return x + kernel(x @ p["up"]) @ p["down"]

    plans = shd.remat.frontier(layer, params, x, length=LENGTH)
    assert plans[-1].names == ("kept",)
    assert plans[-1].extra_flops == 0

    def plain(params, x):
        for i in range(LENGTH):
            x = layer(jax.tree.map(lambda w, i=i: w[i], params), x)
        return x

    want = gradients(plain, params, x)
    for found in plans:
        got = gradients(found.apply(), params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, want)


# --- Host memory ----------------------------------------------------------------------------------


def test_copies_to_host_memory_wait_for_their_link():
    copies = HostCopies(("a",), bandwidth=10.0, forward=2.0, backward=3.0, input_bytes=10)
    assert copies.wait(0, 0.0) == 0.0  # 1 second each way
    assert copies.wait(20, 0.0) == pytest.approx(1.0)  # 3 seconds: beyond the forward pass
    assert copies.wait(50, 1.0) == pytest.approx(4.0 + 2.0)


def offloading(**changes):
    """Figures that make copies cheap or dear beside the toy's operations."""
    return StackPlan(
        **(
            {
                "peak": 0.0,
                "saved": 0.0,
                "budget": 0.0,
                "work": Work(0.0, 1.0),
                "plain": Work(0.0, 1.0),
                "block": block,
                "lengths": (LENGTH,),
                "names": (),
            }
            | changes
        )
    )


def test_a_carry_is_offloaded_by_a_name_within_the_loop():
    """A name outside has no effect: the traced scan would keep all inputs on the device."""
    params, x = stack()

    def kept(fn):
        """Memory kinds of what the forward pass keeps, beyond parameters."""
        _, vjp = jax.eval_shape(lambda p, x: jax.vjp(fn, p, x), params, x)
        shape = (LENGTH, *x.shape)
        return [t for t in jax.tree.leaves(vjp) if t.shape == shape]

    def text(found):
        return str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(found.apply()(p, x))))(params))

    inside = offloading(offloaded=("block_input",))
    assert kept(inside.apply())
    assert "<host>" in text(inside)
    assert "<host>" not in text(offloading())

    def outside(p, x):
        body = jax.checkpoint(block, policy=inside.policy, prevent_cse=False)
        return jax.lax.scan(lambda x, p: (checkpoint_name(body(p, x), "block_input"), None), x, p)[
            0
        ]

    assert "<host>" not in str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(outside(p, x))))(params))


def test_a_second_policy_around_the_scan_runs_all_again():
    """Why a plan's policy is applied once."""
    params, x = stack()
    found = shd.remat.frontier(block, params, x, length=LENGTH)[-1]
    assert found.names

    def products(fn):
        step = jax.grad(lambda p: jnp.sum(fn(p, x)))
        return work_of(step, params, kind=None).flops

    twice = jax.checkpoint(found.apply(), policy=found.policy)
    # The product that the next block's input needs.
    last = 2 * LENGTH * ROWS * (4 * WIDTH) * WIDTH
    assert products(twice) == products(found.apply()) + last


# --- Bad input ------------------------------------------------------------------------------------


def test_bad_input():
    params, x = stack()

    def call(**changes):
        return shd.remat.plan(
            changes.pop("block", block), changes.pop("params", params), x, "1GiB", **changes
        )

    for pattern, changes in (
        (r"must be stacked, 11 layers in the first dim, but down has the shape", {"length": 11}),
        ("down has the shape", {"length": 12, "params": params | {"down": 1.0}}),
        ("length must be at least 1, got 0", {"length": 0}),
        ("give one function, not several", {"length": 12, "block": [block] * 12}),
        ("return what they get", {"length": 12, "block": lambda p, x: x @ p["up"]}),
        ("is no preset; known are 'full'", {"length": 12, "names": "everything"}),
        ("'hidden' must be in one of 'device'", {"length": 12, "names": {"hidden": "disk"}}),
        ("ignored by XLA on CPUs", {"length": 12, "offload": True}),
        ("ignored by XLA on CPUs", {"length": 12, "names": {"hidden": "offload"}}),
        ("True, or a list of names, got 'hidden'", {"length": 12, "offload": "hidden"}),
        ("what names= has decided", {"length": 12, "offload": True, "names": "full"}),
        ("offload is for stacks", {"params": [params], "offload": True}),
        ("offload is for stacks", {"params": [params], "names": "minimal_offloaded"}),
        ("modes must be at least 2", {"params": [params], "modes": 1}),
    ):
        with pytest.raises(ValueError, match=pattern):
            call(**changes)


# --- Large models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b", "llama3-405b"])
def test_names_of_large_layers_are_chosen_at_their_size(name):
    """Only traced: 405B parameters, activations beyond 2^31 bytes, in a second or two."""
    model = MODELS[name]
    params = one_of(model.abstract(jnp.bfloat16)["layers"])
    x = jax.ShapeDtypeStruct((8, 8192, model.width), jnp.bfloat16)
    traced = TracedBlock.of(model.apply_layer, params, x, jax.devices()[0])
    values = traced.named_values(KINDS["h100"], None)
    found = values.frontier()
    assert len(found) > 5
    assert found[-1].nbytes == 0
    assert found[0].nbytes > 2**31
    again = traced.recompute(found[-1].names, Work(0.0, 0.0), KINDS["h100"])
    least = traced.recompute(found[0].names, Work(0.0, 0.0), KINDS["h100"])
    assert again.flops > 1.2 * least.flops
    assert not set(values.useless()) - MAXTEXT_NAMES


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
    with pytest.raises(ValueError, match="needs the memory of its device"):
        shd.remat.plan(block, params, x, estimate(params, tx, zero), length=LENGTH)
    tiny = dataclasses.replace(device, memory=1e5)
    with pytest.raises(ValueError, match="nothing is left for activations"):
        shd.remat.plan(block, params, x, estimate(params, tx, zero, device=tiny), length=LENGTH)
