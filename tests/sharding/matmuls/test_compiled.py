"""Programs for H100s and TPUs: the types that products run in, and what they hold."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import sharding as shd
from sharding.plan import targets

from ...compilers import need

LAYERS, WIDTH, HIDDEN, ROWS = 8, 512, 2048, 512


def loss(params, x):
    def layer(x, p):
        return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def compiled(target, fn):
    of = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    params = {"up": of(LAYERS, WIDTH, HIDDEN), "down": of(LAYERS, HIDDEN, WIDTH)}
    place = jax.sharding.SingleDeviceSharding(targets.topology(target)[0])
    args = jax.tree.map(lambda t: t.update(sharding=place), (params, of(ROWS, WIDTH)))
    return jax.jit(jax.value_and_grad(fn), out_shardings=place).lower(*args).compile()


def products(program):
    """How many there are, by the types of their operands."""
    text = program.as_text()
    types = dict(re.findall(r"%?([\w.\-]+) = (\w+)\[", text))
    pairs = re.findall(r" (?:dot|convolution)\(%?([\w.\-]+), %?([\w.\-]+)\)", text)
    return Counter(tuple(sorted((types[a], types[b]))) for a, b in pairs)


@pytest.mark.parametrize(
    ("target", "recipe", "types"),
    [
        ("h100x1", "fp8", {("f8e4m3fn", "f8e4m3fn"): 3, ("f8e4m3fn", "f8e5m2"): 4}),
        ("v5e:1x1", "int8", {("s8", "s8"): 7}),
    ],
)
def test_every_product_of_layers_is_of_few_bits(target, recipe, types):
    """Forward two, backward four, and one that the checkpoint computes again."""
    need(target)
    plain, low = compiled(target, loss), compiled(target, shd.quantized_matmuls(loss, recipe))
    assert products(low) == types
    assert sum(products(plain).values()) == sum(types.values())
    # Codes of one layer at a time: no stack is transposed or quantized before its loop.
    stack = LAYERS * WIDTH * HIDDEN * 2
    temporaries = [x.memory_analysis().temp_size_in_bytes for x in (plain, low)]
    assert temporaries[1] < temporaries[0] + stack
