"""Plans for chains: the same gradients, less memory, and programs that are compared with them."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan.timing._traced_work import Work, work_of
from sharding.remat._chain import Block, ChainTable, Kept, Mode, Rerun, numbers_in_tree
from sharding.remat._modes import MeasuredBlock, TracedBlock
from sharding.remat._remat_plan import _Chain, in_bytes

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
    return (
        [block] * (len(WIDTHS) - 1) + [head],
        params,
        jnp.asarray(rng.normal(size=(64, WIDTHS[0]))),
    )


def plain(blocks, params, x):
    for fn, p in zip(blocks, params, strict=True):
        x = fn(p, x)
    return x


def trained(params):
    """Without keys, which have no gradients."""
    return [{k: v for k, v in p.items() if k != "key"} for p in params]


TREES = (
    (Rerun((Kept(0, 0), Rerun((Kept(1, -1),)), Kept(2, -1))), Kept(3, 0), Kept(4, 0)),
    (Rerun((Rerun((Kept(0, 0), Kept(1, 0))), Kept(2, 0))), Kept(3, -1), Kept(4, 0)),
    (Kept(0, 0), Rerun((Kept(1, 0), Rerun((Kept(2, 0), Kept(3, 0))), Kept(4, 0)))),
)


@functools.cache
def plans():
    """Of all budgets."""
    return shd.remat.frontier(*chain())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dropout", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_plain_chain(dropout):
    blocks, params, x = chain(dropout)

    def loss(fn):
        def of(own, x):
            full = [p | o for p, o in zip(params, own, strict=True)]
            return fn(full, x)

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1)))

    want = loss(lambda p, x: plain(blocks, p, x))(trained(params), x)
    found = shd.remat.frontier(blocks, params, x)
    found = [found[0]] + [
        dataclasses.replace(found[0], tree=(*tree, Kept(5, 0))) for tree in (TREES[0], TREES[2])
    ]
    for each in found:
        got = loss(each.apply())(trained(params), x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


def test_the_frontier_trades_bytes_for_time():
    for less, more in itertools.pairwise(plans()):
        assert less.peak <= more.peak
        assert less.extra_time > more.extra_time
    assert plans()[0].saved < plans()[-1].saved
    assert all(numbers_in_tree(each.tree) == list(range(len(WIDTHS))) for each in plans())
    assert "hidden" in str(plans()[-1])
    assert "extra time" in str(plans())


def test_a_budget_is_kept():
    """The least bytes of the error are one; sizes are rounded up to slots, which may be more."""
    middle = plans()[len(plans()) // 2]
    found = shd.remat.plan(*chain(), 1.01 * middle.peak)
    assert found.peak <= 1.01 * middle.peak
    assert found.extra_time <= middle.extra_time + 1e-9
    with pytest.raises(ValueError, match=r"these blocks need .* at least, [\d,]+ bytes") as error:
        shd.remat.plan(*chain(), plans()[0].peak / 2)
    least = re.search(r"([\d,]+) bytes", str(error.value))[1].replace(",", "")
    assert shd.remat.plan(*chain(), least).peak <= int(least)


def test_the_cotangent_that_a_block_is_given_is_counted_once():
    """Its temporaries are those of its own backward pass, in which that of the input is written."""
    traced = TracedBlock.of(
        lambda p, x: jnp.tanh(x) * p, jnp.ones(()), jnp.ones((64, 256)), jax.devices()[0]
    )
    assert traced.temporaries(()) <= 64 * 256 * 4


def measured_chain(count, saved, temporaries, size):
    """Equal blocks, which save all or nothing."""
    modes = (Mode(("all",), saved, temporaries, 0.0), Mode((), 0.0, temporaries, 1.0))
    measured = MeasuredBlock(Block(1.0, 2.0, modes), WORK, WORK, (WORK, WORK))
    return _Chain((None,) * count, (measured,) * count, (size,) * (count + 1))


def test_long_chains_have_plans_that_run_nothing_again():
    """Blocks whose bytes are just above a number of slots: rounding takes as much as it can."""
    blocks = measured_chain(40, 4e6, 9e6, 1e6)
    everything = tuple(Kept(i, 0) for i in range(40))
    assert blocks.trees(400)[-1][1] == everything
    assert blocks.fastest(1e15, 50) == everything
    with pytest.raises(ValueError, match="above the number of blocks, 40, got 40"):
        blocks.fastest(1e15, 40)


def test_the_least_bytes_are_a_budget():
    """Also where sizes, rounded up to slots, do not fit them."""
    blocks, slots = measured_chain(6, 3.7e6, 9.1e6, 1.3e6), 25
    least, tree = blocks.trees(slots)[0]
    assert np.isinf(ChainTable(blocks.blocks, blocks.sizes, least, slots).times[-1])
    assert blocks.fastest(least, slots) == tree
    with pytest.raises(ValueError, match=f"these blocks need .* at least, {least:,.0f} bytes"):
        blocks.fastest(least - 1, slots)


def test_products_run_again_as_often_as_planned():
    _, params, x = chain()
    for found in plans():
        step = jax.grad(found.apply(), argnums=(0, 1))
        # XLA on CPUs merges what runs again with its first run.
        assert work_of(jax.jit(step), params, x, kind=None).flops == found.work.flops


def test_a_chain_takes_parameters_of_as_many_blocks():
    _, params, x = chain()
    run = plans()[0].apply()
    for wrong in (params[:-1], [*params, params[-1]]):
        with pytest.raises(ValueError, match=f"each of 6 blocks, got {len(wrong)}"):
            run(wrong, x)


class Program:
    """What a compiler says of one."""

    def __init__(self, temporaries, tiled=False):
        self.temp_size_in_bytes, self.tiled = 2 * temporaries if tiled else temporaries, tiled
        self.host_argument_size_in_bytes = self.host_temp_size_in_bytes = 0
        self.argument_size_in_bytes, self.output_size_in_bytes = 500, 300
        self.alias_size_in_bytes = 100
        self.peak_memory_in_bytes = temporaries + 500 + 300 - 100

    def memory_analysis(self):
        return self

    def as_text(self):
        return "f32[8,128]{1,0:T(8,128)}" if self.tiled else "HloModule of a CPU"


@pytest.mark.parametrize("tiled", [False, True])
def test_check_compares_a_program(tiled):
    """Of TPUs what is live at once, not the sum of what is allocated."""
    found = dataclasses.replace(plans()[0], budget=2**30, peak=1000)
    assert found.check(Program(1000, tiled)) == 1000
    with pytest.raises(shd.remat.OverBudgetError, match="above its plan of"):
        found.check(Program(1100, tiled))
    with pytest.raises(shd.remat.OverBudgetError, match="above its budget of"):
        found.check(Program(2**31, tiled), tolerance=1e9)


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


@pytest.mark.filterwarnings("ignore:the blocks have no named values")
def test_blocks_without_products_have_tables():
    """Of operations, of which there are none, nothing is a fraction."""
    params = [jnp.ones(())] * 2
    sines = shd.remat.frontier(lambda p, x: jnp.sin(jnp.sin(x)) * p, params, jnp.ones((64, 8)))
    assert "0.0%" in str(sines)
    same = shd.remat.plan(lambda p, x: x, [None] * 2, jnp.ones((64, 8)), "1MiB")
    assert same.extra_time == 0.0
    assert "0.0 %" in str(same)


def test_bad_input():
    blocks, params, x = chain()
    for pattern, args in (
        ("parameters for each of 6 blocks, got 5", (blocks, params[:-1], x, 1e9)),
        ("for stacked ones give length=", (block, params[0], x, 1e9)),
        ("a text such as '8GiB', got '8 apples'", (blocks, params, x, "8 apples")),
        (r"got '1[.]2[.]3GB'", (blocks, params, x, "1.2.3GB")),
        ("must be above 0", (blocks, params, x, 0)),
        (r"estimate\(params, tx, zero, device=[.]{3}\); got None", (blocks, params, x, None)),
        (r"a number of bytes, a text .* got \[1\]", (blocks, params, x, [1])),
    ):
        with pytest.raises(ValueError, match=pattern):
            shd.remat.plan(*args)
    texts = {"2KB": 2000, "3 MiB": 3 * 2**20, "1.5GiB": 1.5 * 2**30, "7": 7}
    assert {text: in_bytes(text) for text in texts} == texts
