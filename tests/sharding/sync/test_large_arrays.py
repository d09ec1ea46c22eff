"""Gradients of more than 2**31 elements: every method is lowered at the shapes of large models."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from sharding import sync

SHAPES = {
    "405B, stacked": (126, 16384, 53248),
    "405B, vocabulary": (128256, 16384),  # just below
    "405B, stacked attention": (126, 16384, 128, 128),
}
METHODS = {
    "dense": sync.dense("bfloat16"),
    "qsgd": sync.qsgd(4, rounding="nearest"),
    "powersgd": sync.powersgd(4),
    "gradzip": sync.gradzip(4),
    "top_k": sync.top_k(0.01),
    "top_k, by steps": sync.top_k({0: 0.25, 9: 0.01}, momentum=0.9, clip_norm=1.0),
    "top_k, EF21": sync.top_k(0.01, feedback="ef21"),
    "zen": sync.zen(),
    "agsparse": sync.agsparse(),
}


def lower(method, shapes, dims):
    """One step on 8 devices of a TPU, as text for its compiler."""
    grads = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}

    def step(grads, state):
        return method.reduce_scatter(grads, state, "data", dims)

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": P(), "out_specs": (P("data"), P()), "check_vma": False}
    traced = jax.jit(jax.shard_map(step, **specs)).trace(grads, jax.eval_shape(method.init, grads))
    return traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_large_models(name):
    """Of the largest as a mean, and as shards of columns and of rows."""
    shapes = SHAPES | {"columns": SHAPES["405B, stacked"], "rows": SHAPES["405B, stacked"]}
    dims = dict.fromkeys(SHAPES, 0) | {"columns": -1, "rows": -2}
    lower(METHODS[name], shapes, dims)
