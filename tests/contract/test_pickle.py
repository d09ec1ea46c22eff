"""What can be sent to another process: rules, formats, transformations; states in test_contract.

No transformation of optax goes through ``pickle``, for its functions are closures; all of them go
through ``cloudpickle``, and so do ours.
"""

import pickle

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
import sharding as shd

from .table import TRANSFORMATIONS

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 24).reshape(6, 4), "b": jnp.linspace(0.5, 1.0, 4)}
VALUES = {
    "Factoring": optax_ext.Factoring((0,), (1, 2)),
    "last_two_dims": optax_ext.last_two_dims(2, batch=(0,)),
    "two_largest_dims": optax_ext.two_largest_dims(),
    "by_path": optax_ext.by_path({"a": None, "b": optax_ext.last_two_dims()}),
    "flax_transformer": optax_ext.flax_transformer(stack_dim=1),
    "describe_factoring": optax_ext.describe_factoring(optax_ext.flax_transformer(), PARAMS),
    "Precision": shd.Precision(),
    **optax_ext.STATE_FORMATS,
}


def test_values():
    for name, value in VALUES.items():
        assert pickle.loads(pickle.dumps(value)) == value, name


@pytest.mark.parametrize("name", ["adamw", *TRANSFORMATIONS])
def test_transformations(name):
    """With cloudpickle where it is installed; pickle refuses them, as it does those of optax."""
    tx = optax.adamw(1e-3) if name == "adamw" else TRANSFORMATIONS[name]()
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        pickle.dumps(tx)
    cloudpickle = pytest.importorskip("cloudpickle")
    pair, grads = (tx, pickle.loads(cloudpickle.dumps(tx))), jax.tree.map(jnp.cos, PARAMS)
    chex.assert_trees_all_equal(*(of.update(grads, of.init(PARAMS), PARAMS) for of in pair))
