"""What a layer costs by its saved names: operations, bytes, every choice that none beats."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from sharding.plan.machine._devices import KINDS
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_work import Work
from sharding.remat._choose_saved_names import HostCopies, TracedBlock, host_copies

WIDTH, HIDDEN, ROWS = 16, 64, 32


def mlp(p, x):
    x = checkpoint_name(x * 1.5, "scaled")
    up = checkpoint_name(x @ p["up"], "up")
    gate = checkpoint_name(jax.nn.silu(x @ p["gate"]), "gate")
    return x + checkpoint_name(up * gate, "product") @ p["down"]


def twice(p, x):
    for _ in range(2):  # one name for two values
        x = x + jnp.tanh(checkpoint_name(x @ p["up"], "pre")) @ p["down"]
    return jnp.sin(checkpoint_name(x, "sum"))


def traced_block(block, x=None):
    x = jnp.ones((ROWS, WIDTH)) if x is None else x
    shapes = {"up": (WIDTH, HIDDEN), "gate": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return TracedBlock.of(block, params, x, None)


def seconds_again(found, saved):
    """Of what runs again if these names are saved, by walking the graph from what is read."""
    graph, have = found.graph, {value for name in saved for value in found.values[name]}
    equations, seen, pending = set(), set(), list(graph.outputs)
    while pending:
        value = pending.pop()
        if value not in seen | have and value in graph.producer:
            seen.add(value)
            equations.add(graph.producer[value])
            pending += graph.equations[graph.producer[value]].operands
    return sum(found.seconds[i] for i in equations)


def test_flash_attention_is_an_operation_with_its_products():
    """A Pallas kernel with its own derivative, whose products are in branches: all are counted."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    batch, heads, length, head = 2, 2, 256, 128
    width = heads * head

    def attention(p, x):
        q, k, v = (checkpoint_name(x @ p[name], name) for name in "qkv")
        q, k, v = (w.reshape(batch, length, heads, head).swapaxes(1, 2) for w in (q, k, v))
        context = flash_attention(q, k, v, causal=True).swapaxes(1, 2).reshape(batch, length, width)
        return x + context @ p["out"]

    weights = {name: jnp.ones((width, width)) for name in (*"qkv", "out")}
    x = jnp.ones((batch, length, width))
    traced = TracedBlock.of(attention, weights, x, KINDS["v5e"])
    product, kernel = 2 * x.size * width, 2 * 2 * x.size * length
    assert traced.forward.flops == 4 * product + kernel
    # What its forward rule keeps has no name: the kernel runs again, whatever is saved. Its scores
    # stay on the chip: the time is that of its products, and of what it returns.
    saved, none = (traced.again(names)[0] * KINDS["v5e"].flops for names in ("qkv", ""))
    assert kernel < saved < 4 * kernel
    assert none - saved == pytest.approx(3 * product, rel=0.01)


def test_names_within_loops_and_branches_are_not_found():
    """Those of an inner jit are."""

    def loop(p, x):
        return jax.lax.fori_loop(0, 2, lambda i, x: mlp(p, x), x)

    def branch(p, x):
        return jax.lax.cond(jnp.sum(x) > 0, mlp, lambda p, x: x, p, x)

    for block in (loop, branch):
        assert not traced_block(block).values
    traced = traced_block(jax.jit(mlp))
    assert set(traced.values) == {"scaled", "up", "gate", "product"}
    assert set(traced.only(["up"]).values) == {"up"}


def test_copies_to_host_memory_wait_for_their_link():
    copies = HostCopies(("a",), bandwidth=10.0, forward=2.0, backward=3.0, input_bytes=10)
    assert copies.wait(0, 0.0) == 0.0  # 1 second each way
    assert copies.wait(20, 0.0) == pytest.approx(1.0)  # 3 seconds: beyond the forward pass
    assert copies.wait(50, 1.0) == pytest.approx(4.0 + 2.0)


@pytest.mark.parametrize(
    ("block", "speed", "hidden", "input_bytes"),
    [
        (twice, 0, False, 0),
        (mlp, 2e10, False, 4 * ROWS * WIDTH),
        (mlp, 2e11, True, 0),
        (twice, 1e9, True, 4 * ROWS * WIDTH),
    ],
)
def test_frontiers_equal_enumeration(block, speed, hidden, input_bytes):
    """Every name is saved, copied to host memory or computed again: all choices, all budgets."""
    found = traced_block(block)
    allowed = list(found.values)[1:] if speed else []
    forward = found.forward.seconds
    passes = [forward, found.step.seconds - forward]
    if hidden:  # what runs again alone hides copies
        passes = [1.0, 0.0]
    host = HostCopies(allowed, speed, *passes, input_bytes) if speed else None

    def nbytes(name):
        return num_bytes([found.graph.types[value] for value in found.values[name]])

    choices = []
    for places in itertools.product(("device", "host", "again"), repeat=len(found.values)):
        by_place = {place: [] for place in ("device", "host", "again")}
        for name, place in zip(found.values, places, strict=True):
            by_place[place].append(name)
        saved, offloaded = by_place["device"], by_place["host"]
        if set(offloaded) <= set(allowed):
            again = seconds_again(found, [*saved, *offloaded])
            held, moved = (sum(map(nbytes, names)) for names in (saved, offloaded))
            wait = host.wait(moved, again) if host else 0.0
            choices.append((held, again + wait))
    best = []  # of fewer bytes than the one before, and more time
    for nbytes in sorted({nbytes for nbytes, _ in choices}):
        least = min(seconds for other, seconds in choices if other <= nbytes)
        if not best or least < best[-1][1] * (1 - 1e-9):
            best.append((nbytes, least))
    frontier = [(each.nbytes, each.seconds) for each in reversed(found.frontier(host))]
    assert [nbytes for nbytes, _ in frontier] == [nbytes for nbytes, _ in best]
    np.testing.assert_allclose([s for _, s in frontier], [s for _, s in best], rtol=1e-12)


@pytest.mark.parametrize(("kind", "seconds"), [("v5e", 0.0), ("h100", 2.0)])
def test_a_gpu_waits_for_its_copies(kind, seconds):
    """As an H200 was seen to, by XLA's default; a TPU copies beside its products."""
    link = KINDS[kind].host_link
    host = host_copies(KINDS[kind], ["a"], Work(0.0, 5.0), Work(0.0, 15.0), 0)
    assert host.wait(link, 0.0) == seconds
