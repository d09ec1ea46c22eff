"""The matrix form of a parameter, its placement, and the way back."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
from sharding.step._matrix_form import MatrixForm

RULE = optax_ext.flax_transformer()
MESH = jax.sharding.AbstractMesh((8, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("name", "shape", "spec", "mergeable", "of_matrices"),
    [
        # As it is: the default rule's form.
        ("up/kernel", (5, 40, 48), P(None, "data"), None, P(None, "data")),
        ("query/kernel", (40, 8, 16), P(None, "data"), None, P(None, "data")),
        ("query/kernel", (40, 1, 16), P(None, None, "data"), None, P(None, "data")),
        ("out/kernel", (4, 64, 40), P(None, "data"), P(None, None, "data"), P(None, "data")),
        # Columns have an axis, heads do not divide by 8: nowhere.
        ("out/kernel", (4, 64, 40), P(None, "data", "model"), P(None, None, "model"),
         P(None, "model")),
        ("out/kernel", (4, 64, 40), P("model", "data"), P("model", None, "data"),
         P("model", "data")),
        ("qkv/kernel", (40, 3, 4, 16), P("data", None, "model"), None, P(None, "data", "model")),
        ("q_einsum/w", (4, 40, 16), P("model", "data"), None, P("data", "model")),
    ],
)  # fmt: skip
def test_specs_of_matrices(name, shape, spec, mergeable, of_matrices):
    form = MatrixForm.of(RULE, name, shape)
    assert form.mergeable(spec, MESH) == (spec if mergeable is None else mergeable)
    assert form.spec(spec, MESH) == of_matrices


def test_the_default_rule_is_the_identity():
    for shape in ((3, 4), (2, 3, 4), (2, 5, 3, 4)):
        assert MatrixForm.of(optax_ext.last_two_dims(), "w", shape).is_identity
    assert not MatrixForm.of(RULE, "out/kernel", (2, 3, 4)).is_identity


def test_any_order_of_dims_there_and_back():
    form = MatrixForm.of(optax_ext.Factoring((3,), (0, 2)), "w", (3, 4, 5, 6))
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    y = jax.jit(form.to_matrices)(x)
    np.testing.assert_array_equal(y, np.einsum("abcd->bdac", x).reshape(4, 6, 15))
    np.testing.assert_array_equal(jax.jit(form.from_matrices)(y, y), x)


@pytest.mark.usefixtures("x64")
def test_arrays_whose_types_hold_shardings():
    """On Explicit axes outside of a step, there and back, placed as before."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    form = MatrixForm.of(RULE, "layers/out/kernel", (5, 4, 64, 40))
    spec = P(None, "model", "data")
    with jax.set_mesh(mesh):
        x = jax.device_put(np.random.default_rng(0).normal(size=(5, 4, 64, 40)), spec)
        y = form.to_matrices(x)
        assert jax.typeof(y).sharding.spec == P(None, "model", "data")
        np.testing.assert_array_equal(y, np.reshape(x, (5, 256, 40)))
        back = form.from_matrices(y, x)
        assert jax.typeof(back).sharding.spec == jax.typeof(x).sharding.spec
        np.testing.assert_array_equal(back, x)
