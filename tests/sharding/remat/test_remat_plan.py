"""Plans for chains: the same gradients, less memory, and programs that are compared with them."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan import targets
from sharding.plan.timing._traced_work import Work, work_of
from sharding.remat._chain import Block, Kept, Mode, Rerun, numbers_in_tree
from sharding.remat._modes import MeasuredBlock
from sharding.remat._remat_plan import _Chain, in_bytes

from ...compilers import need

WIDTHS = (8, 16, 64, 16, 32, 8, 24)
WORK = Work(0.0, 0.0)


def block(p, x):
    h = checkpoint_name(x @ p["up"], "hidden")
    if "key" in p:
        h = h * jax.random.bernoulli(p["key"], 0.8, h.shape)
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
        | ({"key": jax.random.key(i)} if dropout else {})
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


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_are_those_of_the_plain_chain(dropout):
    blocks, params, x = chain(dropout)

    def loss(fn):
        def of(own, x):
            full = [p | o for p, o in zip(params, own, strict=True)]
            return fn(full, x)

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1)))

    want = loss(lambda p, x: plain(blocks, p, x))(trained(params), x)
    plans = shd.remat.frontier(blocks, params, x)
    last = tuple(Kept(i, 0) for i in range(5, len(blocks)))
    plans += [dataclasses.replace(plans[0], tree=(*tree, *last)) for tree in TREES]
    for found in plans:
        got = loss(found.apply())(trained(params), x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


def test_the_frontier_trades_bytes_for_time():
    plans = shd.remat.frontier(*chain())
    for less, more in itertools.pairwise(plans):
        assert less.peak <= more.peak
        assert less.extra_time > more.extra_time
    assert plans[0].saved < plans[-1].saved
    assert all(numbers_in_tree(each.tree) == list(range(len(WIDTHS))) for each in plans)
    assert "hidden" in str(plans[-1])
    assert "extra time" in str(plans)


def test_a_budget_is_kept():
    plans = shd.remat.frontier(*chain())
    budget = plans[len(plans) // 2].peak
    found = shd.remat.plan(*chain(), 1.01 * budget)
    assert found.peak <= 1.01 * budget
    assert found.extra_time <= plans[len(plans) // 2].extra_time + 1e-9
    with pytest.raises(ValueError, match=r"these blocks need .* at least"):
        shd.remat.plan(*chain(), plans[0].peak / 2)


def test_the_least_bytes_of_the_error_are_a_budget():
    """Sizes are rounded up to slots, which must not refuse the least plan in just its bytes."""
    with pytest.raises(ValueError, match=r"at least, [\d,]+ bytes") as error:
        shd.remat.plan(*chain(), 1)
    least = re.search(r"([\d,]+) bytes", str(error.value))[1].replace(",", "")
    assert shd.remat.plan(*chain(), least).peak <= int(least)


def test_long_chains_have_plans_that_run_nothing_again():
    """Blocks whose bytes are just above a number of slots: rounding takes as much as it can."""
    count = 90
    modes = (Mode(("all",), 4e6, 9e6, 0.0), Mode((), 0.0, 9e6, 1.0))
    measured = MeasuredBlock(Block(1.0, 2.0, modes), WORK, WORK, (WORK, WORK))
    blocks = _Chain((None,) * count, (measured,) * count, (1e6,) * (count + 1))
    everything = tuple(Kept(i, 0) for i in range(count))
    assert blocks.trees(1000)[-1][1] == everything
    assert blocks.fastest(1e15, 100) == everything
    with pytest.raises(ValueError, match="above the number of blocks, 90, got 90"):
        blocks.fastest(1e15, 90)


def test_products_run_again_as_often_as_planned():
    blocks, params, x = chain()
    for found in shd.remat.frontier(blocks, params, x):
        step = jax.grad(found.apply(), argnums=(0, 1))
        # XLA on CPUs merges what runs again with its first run.
        assert work_of(jax.jit(step), params, x, kind=None).flops == found.work.flops


def test_a_chain_takes_parameters_of_as_many_blocks():
    blocks, params, x = chain()
    run = shd.remat.plan(blocks, params, x, "1GiB").apply()
    for wrong in (params[:-1], [*params, params[-1]]):
        with pytest.raises(ValueError, match=f"each of 7 blocks, got {len(wrong)}"):
            run(wrong, x)


def test_check_compares_a_program():
    blocks, params, x = chain()
    found = shd.remat.plan(blocks, params, x, "1GiB")

    class Program:
        def __init__(self, temporaries):
            self.temp_size_in_bytes = temporaries

        def memory_analysis(self):
            return self

        def as_text(self):
            return "HloModule of a CPU"

    assert found.check(Program(found.peak)) == found.peak
    with pytest.raises(shd.remat.OverBudgetError, match="above its plan of"):
        found.check(Program(1.1 * found.peak))
    with pytest.raises(shd.remat.OverBudgetError, match="above its budget of"):
        found.check(Program(2**31), tolerance=1e9)


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
    grads = jax.grad(found.apply())(params, tokens)
    want = jax.grad(lambda p: plain(blocks, p, tokens))(params)
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
    with pytest.raises(ValueError, match="parameters for each of 7 blocks, got 6"):
        shd.remat.plan(blocks, params[:-1], x, 1e9)
    with pytest.raises(ValueError, match="for stacked ones give length="):
        shd.remat.plan(block, params[0], x, 1e9)
    with pytest.raises(ValueError, match="a text such as '8GiB', got '8 apples'"):
        shd.remat.plan(blocks, params, x, "8 apples")
    with pytest.raises(ValueError, match=r"got '1[.]2[.]3GB'"):
        shd.remat.plan(blocks, params, x, "1.2.3GB")
    with pytest.raises(ValueError, match="must be above 0"):
        shd.remat.plan(blocks, params, x, 0)
    with pytest.raises(ValueError, match=r"estimate\(params, tx, zero, device=[.]{3}\); got None"):
        shd.remat.plan(blocks, params, x, None)
    with pytest.raises(ValueError, match=r"a number of bytes, a text .* got \[1\]"):
        shd.remat.plan(blocks, params, x, [1])
    assert [in_bytes(text) for text in ("2KB", "3 MiB", "1.5GiB", "7")] == [
        2000,
        3 * 2**20,
        1.5 * 2**30,
        7,
    ]


# --- Programs for an accelerator ------------------------------------------------------------------


def test_programs_for_a_gpu_hold_what_is_planned():
    """Twelve blocks of large matrices: exactly the operations, and at most the bytes.

    XLA writes the cotangent of a residual block's input in place of that of its output, and the
    first one into the result: up to two activations less than planned.
    """
    need("h100x1")
    (device, *_) = targets.topology("h100x1")
    rows, width = 65536, 1024
    placed = jax.sharding.SingleDeviceSharding(device)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed)

    def layer(p, x):
        hidden = checkpoint_name(x @ p["up"], "hidden")
        return x + jax.nn.gelu(hidden) @ p["down"]

    params = [{"up": array(width, 4 * width), "down": array(4 * width, width)}] * 12
    x = array(rows, width)
    plans = shd.remat.frontier(layer, params, x, device="h100x1")
    assert len(plans) > 10
    for found in (plans[0], plans[len(plans) // 2], plans[-1]):

        def loss(params, x, found=found):
            return jnp.sum(found.apply()(params, x).astype(jnp.float32) ** 2)

        step = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=placed).lower(params, x)
        compiled = step.compile()
        assert found.peak - 2.01 * 2 * rows * width < found.check(compiled, 0.0) <= found.peak
        assert shd.audit(compiled).matmul_flops == found.work.flops
