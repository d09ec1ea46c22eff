"""Plans against programs for H100s and TPUs: bytes, operations, and the traps of both.

What XLA does with ``jax.checkpoint`` on an accelerator cannot be seen in programs for CPUs.
"""

import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan import targets
from sharding.plan.program._temporaries import temporaries_of
from sharding.remat._checkpoint import policy_of

from ...compilers import need

MIB = 2**20


@pytest.fixture(params=["h100x1", "v5e:1x1"])
def target(request):
    return compiler_of(request.param)


@pytest.fixture
def gpu():
    return compiler_of("h100x1")


def compiler_of(target):
    need(target)
    return target


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(target, fn, params, x):
    """Of a step that returns gradients of parameters."""
    placed = jax.sharding.SingleDeviceSharding(targets.topology(target)[0])

    def loss(params, x):
        return jnp.sum(fn(params, x).astype(jnp.float32) ** 2)

    args = jax.tree.map(lambda t: t.update(sharding=placed), (params, x))
    return jax.jit(jax.grad(loss), out_shardings=placed).lower(*args).compile()


def temporaries(program):
    return temporaries_of(program)


# --- Stacks ---------------------------------------------------------------------------------------

WIDTH, HIDDEN, ROWS, LENGTH = 1024, 4096, 163840, 12


def block(p, x):
    """An activation is 320 MiB: more than the on-chip memory of a TPU, which would hide it."""
    rms = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
    h = x * rms.astype(x.dtype) * p["scale"][None]
    return x + jax.nn.gelu(checkpoint_name(h @ p["up"], "pre")) @ p["down"]


def stacked(length=LENGTH):
    params = {
        "scale": array(length, WIDTH),
        "up": array(length, WIDTH, HIDDEN),
        "down": array(length, HIDDEN, WIDTH),
    }
    return params, array(ROWS, WIDTH)


def test_programs_of_stacks_hold_what_is_planned(target):
    """Bytes of the device and of its host, and every operation; never more than the budget."""
    params, x = stacked()
    found = shd.remat.frontier(block, params, x, device=target, length=LENGTH)
    assert [each.lengths for each in found] == [(4, 3), (12,), (12,)]
    offloading = shd.remat.plan(
        block, params, x, "4.5GiB", device=target, length=LENGTH, offload=True
    )
    assert [each.host > 0 for each in (offloading, *found)] == [True, False, False, False]
    fitting = found[:-1] if target.startswith("v5e") else found  # all names are beyond its memory
    for each in (offloading, *fitting):
        program = compiled(target, each.apply(), params, x)
        assert each.peak * 0.97 < each.check(program) <= each.budget
        assert shd.audit(program).matmul_flops == each.work.flops
        host = program.memory_analysis().host_temp_size_in_bytes
        assert host == pytest.approx(each.host, rel=1e-3)
    assert found[0].extra_flops > found[1].extra_flops > found[2].extra_flops == 0


def test_names_to_offload_are_those_of_the_blocks_or_their_input(gpu):
    params, x = stacked()

    def plan(**changes):
        return shd.remat.plan(block, params, x, "30GiB", device=gpu, length=LENGTH, **changes)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="none of the requested")
        assert plan(names={"block_input": "offload"}).offloaded == ("block_input",)
    with pytest.warns(UserWarning, match="none of the requested names"):
        plan(offload=["other"])


def test_more_bytes_never_take_more_time(gpu):
    params, x = stacked()
    budgets = [5.6, 7.0, 9.0, 25.0]
    found = [shd.remat.plan(block, params, x, b * 2**30, device=gpu, length=12) for b in budgets]
    for less, more in itertools.pairwise(found):
        assert less.peak <= more.peak
        assert less.extra_time >= more.extra_time
    assert found[0].extra_flops > 0 == found[-1].extra_flops


# --- Chains ---------------------------------------------------------------------------------------


def layer(p, x):
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + jax.nn.gelu(hidden) @ p["down"]


def narrower(p, x):
    """Merges four rows."""
    return layer(p, x.reshape(x.shape[0] // 4, -1) @ p["merge"])


def equal_blocks(rows=65536, width=1024, count=12):
    params = {"up": array(width, 4 * width), "down": array(4 * width, width)}
    return [layer] * count, [params] * count, array(rows, width)


def four_stages(rows=131072, width=1024):
    """As a vision model: a quarter of the rows and twice the width in each stage.

    The gradients of late parameters are larger than their activations: XLA would put them off.
    """
    fns, params, x = [], [], array(rows, width)
    for stage in range(4):
        for i in range(3):
            merges = bool(stage and not i)
            own = {"up": array(width, 4 * width), "down": array(4 * width, width)}
            fns.append(narrower if merges else layer)
            params.append(own | ({"merge": array(2 * width, width)} if merges else {}))
        width *= 2
    return fns, params, x


@pytest.mark.parametrize(("chain", "above"), [(equal_blocks, 0.001), (four_stages, 0.05)])
def test_programs_of_chains_hold_what_is_planned(gpu, chain, above):
    """Never more bytes than planned; the last block's backward pass may do with fewer."""
    fns, params, x = chain()
    plans = shd.remat.frontier(fns, params, x, device=gpu)
    first = 2.0 * x.shape[0] * x.shape[1] * 4 * x.shape[1]  # its input has no cotangent here
    assert len(plans) >= 8
    for found in plans[:: max(1, len(plans) // 5)]:
        program = compiled(gpu, found.apply(), params, x)
        assert found.peak * (1 - above) <= temporaries(program) <= found.peak * 1.0001
        assert shd.audit(program).matmul_flops == found.work.flops - first


# --- Traps ----------------------------------------------------------------------------------------


def chain_of(block):
    def run(params, x):
        for p in params:
            x = block(p, x)
        return x

    return run


def test_gradients_are_not_put_off(gpu):
    """What the barriers of a chain are for."""
    fns, params, x = four_stages()

    def bare(params, x):
        for i, (fn, p) in enumerate(zip(fns, params, strict=True)):
            names = ("hidden",) if i > 2 else ()
            x = jax.checkpoint(fn, policy=policy_of(names))(p, x)
        return x

    planned = next(
        each
        for each in shd.remat.frontier(fns, params, x, device=gpu)
        if each.summary.startswith("(0/1) (1/1) (2/1) 3/0 4/0 5/0")
    )
    assert planned.check(compiled(gpu, planned.apply(), params, x)) < 1.03 * planned.peak
    assert temporaries(compiled(gpu, bare, params, x)) > 1.3 * planned.peak


def test_checkpoints_without_barriers_do_nothing_in_a_chain(gpu):
    """``prevent_cse=False`` is for loops: here XLA merges what should run again."""
    fns, params, x = equal_blocks(count=6)
    loose = jax.checkpoint(layer, prevent_cse=False)
    found = shd.remat.frontier(fns, params, x, device=gpu)[0]
    merged = compiled(gpu, chain_of(loose), params, x)
    assert temporaries(merged) > 2 * found.peak
    with pytest.raises(shd.remat.OverBudgetError):
        found.check(merged)


def test_offload_in_an_unrolled_chain_takes_more_memory(target):
    """Why it is refused there."""
    _, params, x = equal_blocks(rows=ROWS, count=4)
    nothing, offload = (
        compiled(target, chain_of(jax.checkpoint(layer, policy=policy)), params, x)
        for policy in (policy_of(()), policy_of((), ("hidden",)))
    )
    assert offload.memory_analysis().host_temp_size_in_bytes > 0
    assert temporaries(offload) > 1.3 * temporaries(nothing)
