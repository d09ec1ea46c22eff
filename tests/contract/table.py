"""The transformations that keep the contract. A new one joins with one row."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, by_path, last_two_dims, two_largest_dims


@dataclasses.dataclass(frozen=True)
class Row:
    """One transformation, and which statements of the contract apply to it."""

    make: Callable[..., optax.GradientTransformation]
    # Its arguments; under inject_hyperparams all of them are injected.
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Gradients times a constant give the same updates.
    scale_invariant: bool = True
    # Updates of 16-bit parameters are float32, and hold the rounding of the parameters.
    rounds_parameters: bool = False
    # Keeps codes and scales of blocks, which have no parameter's shape or dtype.
    blocks: bool = False

    def __call__(self, **overrides):
        return self.make(**(self.arguments | overrides))


def around_came(wrap):
    """Makes CAME within another transformation."""

    def make(learning_rate, weight_decay, factoring):
        return wrap(optax_ext.came(learning_rate, weight_decay=weight_decay, factoring=factoring))

    return make


CAME = {"learning_rate": 0.1, "weight_decay": 0.01, "factoring": last_two_dims()}


def low_precision(inner):
    """Every array in 8 bits; of the formats the one that is compiled soonest."""
    bits = optax_ext.Linear(8)
    return optax_ext.low_precision_state(inner, bits, rounding="compensated", min_size=0)


def lazy_rows(inner):
    """Every array a table whose rows all have a gradient."""
    return optax_ext.lazy_rows(inner, lambda params: jax.tree.map(is_table, params))


def unfactored(rate):
    """What is cheap to compile, for transformations of updates."""
    return optax_ext.adafactor(rate, multiply_by_parameter_scale=False, factoring=None)


def scale_by_delay(learning_rate, delays, anneal_steps):
    """After Adafactor: divided updates."""
    return optax.chain(unfactored(learning_rate), optax_ext.scale_by_delay(delays, anneal_steps))


def discrepancy_correction(learning_rate, delays, decay):
    """After Adafactor: its updates, and their average."""
    last = optax_ext.discrepancy_correction(delays, decay)
    return optax.chain(unfactored(learning_rate), last)


def is_table(x):
    """Whether the first dim is unlike all others."""
    return x.ndim > 0 and x.shape[0] not in x.shape[1:]


TRANSFORMATIONS = {
    "came, every option": Row(
        optax_ext.came,
        {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "b1": 0.8,
            "b2": 0.95,
            "b3": 0.99,
            "eps": 1e-28,
            "eps_instability": 1e-15,
            "clipping_threshold": 0.7,
            "factoring": by_path({"b": None}, default=two_largest_dims(2)),
            "mu_dtype": jnp.bfloat16,
            "debias_instability": True,
            "weight_decay": lambda count: 0.1 / (1 + count),
            "weight_decay_mask": {"w": True, "b": False},
        },
    ),
    "adafactor, every option": Row(
        optax_ext.adafactor,
        {
            "learning_rate": 0.5,
            "decay_rate": 0.7,
            "decay_offset": 2,
            "beta2_cap": 0.9,
            "min_parameter_scale": 1e-2,
            "relative_step": True,
            "clipping_threshold": 0.7,
            "momentum": 0.9,
            "dtype_momentum": "bfloat16",
            "weight_decay_rate": 0.01,
            "weight_decay_times_lr": True,
            "weight_decay_mask": {"w": True, "b": False},
            "eps": 1e-28,
            "factoring": by_path({"none": None}, default=two_largest_dims(2)),
        },
    ),
    "lars, every option": Row(
        optax_ext.lars,
        {
            # Where the gradient is zero, weight decay alone is the direction of a step.
            "learning_rate": lambda count: 0.007 / (1 + 0.01 * count),
            "momentum": 0.8,
            "weight_decay": lambda count: 0.1 / (1 + count),
            "trust_coefficient": 0.5,
            "nesterov": True,
            "weight_decay_mask": {"w": True, "b": False},
            "trust_ratio_mask": None,
            "stacked": Factoring(),
        },
        scale_invariant=False,
    ),
    "lamb, every option": Row(
        optax_ext.lamb,
        {
            "learning_rate": lambda count: 0.01 / (1 + 0.01 * count),
            "b1": 0.8,
            "b2": 0.95,
            "eps": 1e-8,
            "weight_decay": lambda count: 0.1 / (1 + count),
            "weight_decay_mask": {"w": True, "b": False},
            "trust_ratio_mask": None,
            "stacked": Factoring(),
        },
        scale_invariant=False,
    ),
    # The same promises, and what it does to 16-bit parameters.
    "master_weights": Row(around_came(optax_ext.master_weights), CAME, rounds_parameters=True),
    "low_precision_state": Row(around_came(low_precision), CAME, blocks=True),
    "lazy_rows": Row(around_came(lazy_rows), CAME),
    "scale_by_delay": Row(
        scale_by_delay,
        {"learning_rate": 0.1, "anneal_steps": 9, "delays": 3.0},
    ),
    "discrepancy_correction": Row(
        discrepancy_correction,
        {"learning_rate": 0.1, "delays": 3.0, "decay": 0.2},
    ),
}

# Options under which nothing is stored in 16 bits, for comparisons in float64.
WIDE = {
    optax_ext.came: {"mu_dtype": np.dtype("float64")},
    optax_ext.adafactor: {"dtype_momentum": np.dtype("float64")},
}


every = pytest.mark.parametrize("name", TRANSFORMATIONS)


def make(name, *, wide=False, masks=True, **overrides):
    """The transformation of a row.

    Args:
      name: the row.
      wide: everything in float64.
      masks: without them for trees that have not all of the masks' leaves.
      **overrides: other arguments.
    """
    row = TRANSFORMATIONS[name]
    changed = {} if masks else {k: None for k in row.arguments if k == "weight_decay_mask"}
    return row(**changed | (WIDE.get(row.make, {}) if wide else {}) | overrides)


SHAPES = {"w": (6, 4), "b": (4,)}


def tree(seed, dtype="float32", shapes=SHAPES):
    """Full-rank values near 1."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def types(tree):
    """Shapes and dtypes; a weak type would become a strong one, and compile again."""
    return jax.tree.map(jax.typeof, tree)


def assert_close(have, want, rtol=1e-12):
    """By the norm of each leaf."""
    chex.assert_trees_all_equal_structs(have, want)

    def check(path, x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(np.ravel(x - y))
        assert error <= rtol * np.linalg.norm(np.ravel(y)), (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, have, want)
