"""Plans against programs for H100s and TPUs: bytes, operations, and the traps of both.

What XLA does with ``jax.checkpoint`` on an accelerator cannot be seen in programs for CPUs.
"""

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
        assert found.peak * (1 - above) <= temporaries_of(program) <= found.peak * 1.0001
        assert shd.audit(program).matmul_flops == found.work.flops - first


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
    assert temporaries_of(compiled(gpu, bare, params, x)) > 1.3 * planned.peak
