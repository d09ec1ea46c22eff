"""Parameters in Flax's boxes: specs of the state that Flax makes, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import optax_ext

from ..flax_nnx import needs_nnx, nnx
from .test_frameworks import TXS, WIDTH, dtype_of

# Sides of one length: shapes do not distinguish the dims.
DIMS = {"kernel": ((WIDTH, WIDTH), ("embed", "mlp")), "bias": ((WIDTH,), ("mlp",))}
RULES = (("embed", "data"), ("mlp", "model"))
BOXES = {
    "nn.Partitioned": nn.Partitioned,
    "nn.LogicallyPartitioned": nn.LogicallyPartitioned,
    "nnx.Param": lambda x, names: nnx.Param(x, out_sharding=names, eager_sharding=False),
}


def boxed(name, box=lambda x, names: x, seed=None):
    def draw(shape):
        rng = np.random.default_rng(seed)
        return jnp.asarray(rng.normal(size=shape), dtype_of(name))

    return {k: box(draw(shape), names) for k, (shape, names) in DIMS.items()}


@pytest.mark.parametrize(
    "box", [pytest.param(box, marks=needs_nnx) if box == "nnx.Param" else box for box in BOXES]
)
@pytest.mark.parametrize("name", TXS)
def test_specs_of_boxes(name, box):
    """Every spec has the rank of its array, and that of a statistic is of the dim that it keeps."""
    tx = TXS[name]()
    state = jax.eval_shape(tx.init, boxed(name, BOXES[box]))
    specs = (nnx if box == "nnx.Param" else nn).get_partition_spec(state)
    logical = nn.logical_to_mesh(specs, RULES) if "Log" in box else specs
    is_spec = {"is_leaf": lambda x: isinstance(x, P)}
    seen = set()
    for (path, array), spec, on_mesh in zip(
        jax.tree_util.tree_leaves_with_path(state),
        jax.tree.leaves(specs, **is_spec),
        jax.tree.leaves(logical, **is_spec),
        strict=True,
    ):
        key = jax.tree_util.keystr(path)
        field = "row" if "row" in key or "scale[0]" in key else "col"
        vector = ("embed",) if field == "row" and "kernel" in key else ("mlp",)
        want = {0: (), 1: vector, 2: ("embed", "mlp")}[array.ndim if "key" not in key[:4] else 0]
        assert spec == P(*want), key
        assert on_mesh == (P(*map(dict(RULES).get, want)) if "Log" in box else spec), key
        seen.add((field, array.ndim))
    assert name not in ("came", "4 bits") or {("row", 1), ("col", 1)} <= seen
    if box == "nn.Partitioned":
        found = optax.tree_map_params(
            tx,
            lambda x: x.get_partition_spec(),
            state,
            transform_non_params=lambda x: P(),
            is_leaf=lambda x: isinstance(x, nn.Partitioned),
        )
        assert jax.tree.leaves(found, **is_spec) == jax.tree.leaves(specs, **is_spec)


@pytest.mark.parametrize("name", ["came", "4 bits", "master"])
def test_boxes_do_not_change_numbers(name):
    tx, ends = TXS[name](), []
    if name == "4 bits":  # stochastic rounding depends on paths
        tx = optax_ext.low_precision_state(optax_ext.came(1e-3), 4, rounding="nearest")
    update = jax.jit(tx.update)
    for box in ({}, {"box": nn.Partitioned}):
        params = boxed(name, seed=0, **box)
        state = start = tx.init(params)
        for seed in (1, 2, 3):
            updates, state = update(boxed(name, seed=seed, **box), state, params)
            params = optax.apply_updates(params, updates)
        assert jax.tree.structure(state) == jax.tree.structure(start)
        ends.append(jax.tree.leaves((params, state)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
