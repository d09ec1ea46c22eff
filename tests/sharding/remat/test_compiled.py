"""Plans against programs for H100s and TPUs: bytes, operations, and the traps of both.

What XLA does with ``jax.checkpoint`` on an accelerator cannot be seen in programs for CPUs.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding as shd
from sharding.plan import targets
from sharding.plan.audit._liveness import temporaries_of

from ...compilers import need


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(target, fn, params, x):
    """Of a step that returns gradients of parameters."""
    placed = jax.sharding.SingleDeviceSharding(targets.topology(target)[0])

    def loss(params, x):
        return jnp.sum(fn(params, x).astype(jnp.float32) ** 2)

    args = jax.tree.map(lambda t: t.update(sharding=placed), (params, x))
    return jax.jit(jax.grad(loss), out_shardings=placed).lower(*args).compile()


WIDTH, HIDDEN, ROWS, LENGTH = 1024, 4096, 163840, 12


def block(p, x):
    """An activation is 320 MiB: more than the on-chip memory of a TPU, which would hide it."""
    rms = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
    h = x * rms.astype(x.dtype) * p["scale"][None]
    return x + jax.nn.gelu(checkpoint_name(h @ p["up"], "pre")) @ p["down"]


@pytest.mark.parametrize("target", ["h100x1", "v5e:1x1"])
def test_programs_of_stacks_hold_what_is_planned(target):
    """Bytes of the device and of its host, and every operation; never more than the budget."""
    need(target)
    params = {
        "scale": array(LENGTH, WIDTH),
        "up": array(LENGTH, WIDTH, HIDDEN),
        "down": array(LENGTH, HIDDEN, WIDTH),
    }
    x = array(ROWS, WIDTH)
    found = shd.remat.frontier(block, params, x, device=target, length=LENGTH)
    assert [each.lengths for each in found] == [(4, 3), (12,), (12,)]
    moved = shd.remat.plan(block, params, x, "4.5GiB", device=target, length=LENGTH, offload=True)
    assert [each.host > 0 for each in (moved, *found)] == [True, False, False, False]
    fitting = found[:-1] if target.startswith("v5e") else found  # all names are beyond its memory
    for each in (moved, *fitting):
        program = compiled(target, each.apply(), params, x)
        assert each.peak * 0.97 < each.check(program) <= each.budget
        assert shd.audit(program).matmul_flops == each.work.flops
        host = program.memory_analysis().host_temp_size_in_bytes
        assert host == pytest.approx(each.host, rel=1e-3)
    assert found[0].extra_flops > found[1].extra_flops > found[2].extra_flops == 0


def layer(p, x):
    if "merge" in p:  # four rows
        x = x.reshape(x.shape[0] // 4, -1) @ p["merge"]
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + jax.nn.gelu(hidden) @ p["down"]


def four_stages(rows=131072, width=1024):
    """As a vision model: a quarter of the rows and twice the width in each stage.

    The gradients of late parameters are larger than their activations: XLA would put them off.
    """
    params, x = [], array(rows, width)
    for stage in range(4):
        for i in range(3):
            own = {"up": array(width, 4 * width), "down": array(4 * width, width)}
            params.append(own | ({"merge": array(2 * width, width)} if stage and not i else {}))
        width *= 2
    return [layer] * len(params), params, x


def test_programs_of_chains_hold_what_is_planned():
    """Never more bytes than planned; the last block's backward pass may do with fewer."""
    need("h100x1")
    fns, params, x = four_stages()
    plans = shd.remat.frontier(fns, params, x, device="h100x1")
    first = 2.0 * x.shape[0] * x.shape[1] * 4 * x.shape[1]  # its input has no cotangent here
    assert len(plans) >= 8
    for found in plans[:: max(1, len(plans) // 5)]:
        program = compiled("h100x1", found.apply(), params, x)
        assert found.peak * 0.95 <= temporaries_of(program) <= found.peak * 1.0001
        assert shd.audit(program).matmul_flops == found.work.flops - first
