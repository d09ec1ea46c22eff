"""The matrix form of a parameter, and the way back."""

import jax
import numpy as np

import optax_ext
from sharding.step._matrix_form import MatrixForm


def test_any_order_of_dims_there_and_back():
    form = MatrixForm.of(optax_ext.Factoring((3,), (0, 2)), "w", (3, 4, 5, 6))
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    y = jax.jit(form.to_matrices)(x)
    np.testing.assert_array_equal(y, np.einsum("abcd->bdac", x).reshape(4, 6, 15))
    np.testing.assert_array_equal(jax.jit(form.from_matrices)(y, y), x)
