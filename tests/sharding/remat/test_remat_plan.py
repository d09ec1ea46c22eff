"""Plans for chains: the same gradients, less memory, and programs that are compared with them."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan.model._traced_model import Work, work_of
from sharding.remat import _chain_plan
from sharding.remat._block_costs import MeasuredBlock, TracedBlock
from sharding.remat._chain_plan import MeasuredChain
from sharding.remat._chain_search import Block, Kept, Mode, Rerun
from sharding.remat._plan_activations import in_bytes

WIDTHS = (8, 16, 64, 16, 32, 24)
WORK = Work(0.0, 0.0)


def block(p, x):
    h = checkpoint_name(x @ p["up"], "hidden")
    if "key" in p:
        h = h * (1 + jax.random.key_data(p["key"])[-1] % 3)
    return jnp.tanh(h) @ p["down"]


def head(p, x):
    return jnp.sum(jnp.sin(x * p["scale"][None]) ** 2)


def chain(dropout=False):
    rng = np.random.default_rng(0)
    params = [
        {
            "up": jnp.asarray(rng.normal(size=(m, 4 * m)) / m**0.5),
            "down": jnp.asarray(rng.normal(size=(4 * m, n)) / (4 * m) ** 0.5),
        }
        | ({"key": jax.random.key(7)} if dropout and i == 1 else {})
        for i, (m, n) in enumerate(itertools.pairwise(WIDTHS))
    ]
    params.append({"scale": jnp.asarray(rng.normal(size=WIDTHS[-1]))})
    x = jnp.asarray(rng.normal(size=(64, WIDTHS[0])))
    return [block] * (len(WIDTHS) - 1) + [head], params, x


def plain(blocks, params, x):
    for fn, p in zip(blocks, params, strict=True):
        x = fn(p, x)
    return x


TREES = (
    (Rerun((Kept(0, 0), Rerun((Kept(1, -1),)), Kept(2, -1))), Kept(3, 0), Kept(4, 0)),
    (Kept(0, 0), Rerun((Kept(1, 0), Rerun((Kept(2, 0), Kept(3, 0))), Kept(4, 0)))),
)


@functools.cache
def plans():
    return shd.remat.frontier(*chain())


@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_plain_chain():
    blocks, params, x = chain(dropout=True)

    def gradients(fn):
        def loss(own, x):
            return fn([p | o for p, o in zip(params, own, strict=True)], x)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(trained, x)

    trained = [{k: v for k, v in p.items() if k != "key"} for p in params]
    want = gradients(functools.partial(plain, blocks))
    found = shd.remat.frontier(blocks, params, x)
    found = [found[0]] + [dataclasses.replace(found[0], tree=(*tree, Kept(5, 0))) for tree in TREES]
    for each in found:
        got = gradients(each.apply())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


def test_a_budget_is_kept():
    middle = plans()[len(plans()) // 2]
    assert shd.remat.plan(*chain(), middle.peak).tree == middle.tree
    with pytest.raises(ValueError, match=r"these blocks need .* at least, [\d,]+ bytes"):
        shd.remat.plan(*chain(), plans()[0].peak / 2)


def test_the_cotangent_that_a_block_is_given_is_counted_once():
    """Its temporaries are those of its own backward pass, in which that of the input is written."""
    traced = TracedBlock.of(
        lambda p, x: jnp.tanh(x) * p, jnp.ones(()), jnp.ones((64, 256)), jax.devices()[0]
    )
    assert traced.temporaries(()) <= 64 * 256 * 4


def measured_chain(count, saved, temporaries, size, platform="cpu"):
    """Equal blocks, which save all or nothing."""
    modes = (Mode(("all",), saved, temporaries, 0.0), Mode((), 0.0, temporaries, 1.0))
    measured = MeasuredBlock(Block(1.0, 2.0, modes), WORK, WORK, (WORK, WORK))
    device = types.SimpleNamespace(platform=platform)
    sizes = (size,) * (count + 1)
    return MeasuredChain((None,) * count, [None] * count, None, device, (measured,) * count, sizes)


def test_every_number_of_bytes_is_a_budget():
    """Of sizes that are no multiples of each other; the least bytes, and all that a chain takes."""
    chain = measured_chain(40, 4e6 + 1, 9.1e6, 1.3e6)
    peaks = chain.search.peaks.tolist()
    assert len(peaks) > 50
    for peak, time in zip(peaks, chain.search.times, strict=True):
        assert chain.fastest(peak).work.seconds == time
    everything = tuple(Kept(i, 0) for i in range(40))
    assert chain.fastest(peaks[-1]).tree == chain.fastest(1e15).tree == everything
    with pytest.raises(ValueError, match=f"these blocks need .* at least, {peaks[0]:,.0f} bytes"):
        chain.fastest(peaks[0] - 1)


def test_a_plan_is_never_slower_than_one_of_the_frontier(monkeypatch):
    """Whatever programs take, beside what their blocks take alone; none is above its budget."""
    rng, factors = np.random.default_rng(0), {}

    def temporaries(plan, *_):
        return plan.peak * factors.setdefault(plan.tree, rng.uniform(0.9, 1.3))

    monkeypatch.setattr(shd.remat.ChainPlan, "apply", lambda plan: plan)
    monkeypatch.setattr(_chain_plan, "step_temporaries", temporaries)
    chain = measured_chain(40, 4e6 + 1, 9.1e6, 1.3e6, "cuda")
    frontier = chain.frontier()
    assert 3 < len(frontier) <= 16
    for each in frontier:
        found = chain.fastest(each.peak)
        assert found.peak <= found.budget == each.peak
        assert found.work.seconds <= each.work.seconds
    least = math.ceil(frontier[0].peak)
    with pytest.raises(ValueError, match=f"these blocks need .* at least, {least:,} bytes"):
        chain.fastest(chain.search.peaks[0] - 1)
    monkeypatch.setattr(_chain_plan, "step_temporaries", lambda *_: math.inf)
    assert chain.frontier() == []
    with pytest.raises(ValueError, match="nor the memory of the device"):
        chain.fastest(1e15)


def test_products_run_again_as_often_as_planned():
    _, params, x = chain()
    for found in plans():
        step = jax.grad(found.apply(), argnums=(0, 1))
        # XLA on CPUs merges what runs again with its first run.
        assert work_of(jax.jit(step), params, x, kind=None).flops == found.work.flops


def program(temporaries, tiled):
    allocated = 2 * temporaries if tiled else temporaries
    sizes = {"argument": 500, "output": 300, "alias": 100, "temp": allocated}
    sizes |= {"host_argument": 0, "host_temp": 0}
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})
    memory.peak_memory_in_bytes = temporaries + 500 + 300 - 100
    text = "f32[8,128]{1,0:T(8,128)}" if tiled else "HloModule of a CPU"
    return types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: text)


@pytest.mark.parametrize("tiled", [False, True])
def test_check_compares_a_program(tiled):
    """Of TPUs what is live at once, not the sum of what is allocated."""
    found = dataclasses.replace(plans()[0], budget=2**30, peak=1000)
    assert found.check(program(1000, tiled)) == 1000
    with pytest.raises(shd.remat.OverBudgetError, match="above its plan of"):
        found.check(program(1100, tiled))
    with pytest.raises(shd.remat.OverBudgetError, match="above its budget of"):
        found.check(program(2**31, tiled), tolerance=1e9)


def test_integers_enter_a_chain():
    """Tokens have no gradients; an embedding is the first block."""
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(10, 8))), jnp.asarray(rng.normal(size=(8, 8)))]
    blocks = [
        lambda table, tokens: table[tokens],
        lambda w, x: jnp.sum(jnp.tanh(checkpoint_name(x @ w, "pre"))),
    ]
    tokens = jnp.asarray(rng.integers(0, 10, 64))
    found = shd.remat.plan(blocks, params, tokens, "1MiB")
    grads = jax.jit(jax.grad(found.apply()))(params, tokens)
    want = jax.jit(jax.grad(lambda p: plain(blocks, p, tokens)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, want)


def test_bad_input():
    blocks, params, x = chain()
    for pattern, args in (
        ("parameters for each of 6 blocks, got 5", (blocks, params[:-1], x, 1e9)),
        ("for stacked ones give length=", (block, params[0], x, 1e9)),
        ("a text such as '8GiB', got '8 apples'", (blocks, params, x, "8 apples")),
        ("must be above 0", (blocks, params, x, 0)),
        (r"a number of bytes, a text .* got \[1\]", (blocks, params, x, [1])),
    ):
        with pytest.raises(ValueError, match=pattern):
            shd.remat.plan(*args)
    with pytest.raises(ValueError, match="each of 6 blocks, got 7"):
        plans()[0].apply()([*params, params[-1]], x)
    texts = {"2KB": 2000, "3 MiB": 3 * 2**20, "1.5GiB": 1.5 * 2**30, "7": 7}
    assert {text: in_bytes(text) for text in texts} == texts
