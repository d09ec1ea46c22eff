"""The matrix form of a parameter, and the way back."""

import jax
import numpy as np
import optax

import optax_ext
import sharding as shd
from sharding.step.owners._matrix_form import MatrixForm


def test_any_order_of_dims_there_and_back():
    form = MatrixForm.of(optax_ext.Factoring((3,), (0, 2)), "w", (3, 4, 5, 6))
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    y = jax.jit(form.to_matrices)(x)
    np.testing.assert_array_equal(y, np.einsum("abcd->bdac", x).reshape(4, 6, 15))
    np.testing.assert_array_equal(jax.jit(form.from_matrices)(y, y), x)


def test_layers_in_a_module_called_blocks_are_no_stack():
    """Each has its own matrices, as under another name: query is (embed, heads * head_dim)."""
    tx = shd.by_owner(optax.trace(0.9), factoring=optax_ext.flax_transformer())
    layer = {"query": {"kernel": np.ones((8, 2, 3))}, "out": {"kernel": np.ones((2, 3, 8))}}
    layer["up"] = {"kernel": np.ones((8, 8))}
    for name in ("blocks", "trunk"):
        params = {name: {"block_0": layer, "block_1": layer}}
        state = tx.init(params)
        _, state = tx.update(params, state)
        shapes = {x.shape for x in jax.tree.leaves(state)}
        assert shapes == {(8, 6), (6, 8), (8, 8)}
