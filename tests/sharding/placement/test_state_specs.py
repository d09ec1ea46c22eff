"""``state_specs``: the right spec for every leaf of any transformation's state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

from .. import model

MESH = AbstractMesh((4, 2), ("data", "model"))

# shape, spec of the parameter
PARAMS = {
    "wide": ((256, 512), P("data", "model")),
    "square": ((256, 256), P("model", "data")),  # shapes alone do not distinguish rows from columns
    "stacked": ((3, 256, 512), P(None, "data", "model")),
    "both": ((512, 128), P(("data", "model"))),
    "bias": ((512,), P("data")),
    "unsharded": ((7, 13), P()),
    "scalar": ((), P()),
}
ABSTRACT = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, (shape, _) in PARAMS.items()}
SPECS = {k: spec for k, (_, spec) in PARAMS.items()}
HALF = {k: k in ("wide", "bias") for k in PARAMS}

TRANSFORMATIONS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, momentum=0.9),
    "sm3": optax.sm3(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "galore": optax.contrib.galore(1e-3, rank=16),  # its projected moments are replicated
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "multi_steps": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3)), 4
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax_ext.came)(1e-3),
    "masked": optax.masked(optax.adamw(1e-3), HALF),
    "partition": optax.partition({True: optax.adamw(1e-3), False: optax_ext.adafactor(1e-3)}, HALF),
    "apply_if_finite": optax.apply_if_finite(optax_ext.came(1e-3), 3),
    "came": optax_ext.came(1e-3),
    "low_precision_state": optax_ext.low_precision_state(
        optax.adamw(1e-3), rounding="compensated", block_size=64
    ),
    "our_adafactor": optax_ext.adafactor(1e-3, momentum=0.9, factoring=optax_ext.last_two_dims()),
}


def leaves(specs):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs)
    }


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_leaf_can_lie_as_its_spec_says(name):
    """Structure as the state's; ranks fit; sizes divide; full moments are sharded as parameters."""
    tx = TRANSFORMATIONS[name]
    specs = shd.state_specs(tx, ABSTRACT, SPECS, MESH)
    state = jax.eval_shape(tx.init, ABSTRACT)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    moments = 0
    for (path, spec), leaf in zip(leaves(specs).items(), jax.tree.leaves(state), strict=True):
        assert len(spec) <= len(leaf.shape)
        NamedSharding(MESH, spec).shard_shape(leaf.shape)  # raises where a size does not divide
        key = path.rsplit("/")[-1]
        if key in PARAMS and leaf.shape == PARAMS[key][0]:
            moments += 1
            assert spec == SPECS[key]
    assert moments, "no leaf has its parameter's shape: the check saw nothing"


@pytest.mark.parametrize(
    ("tx", "row", "col"),
    [
        (TRANSFORMATIONS["adafactor"], "0/v_row", "0/v_col"),
        (TRANSFORMATIONS["came"], "0/nu_row", "0/nu_col"),
        (TRANSFORMATIONS["inject_hyperparams"], "inner_state/0/nu_row", "inner_state/0/nu_col"),
    ],
)
def test_factored_statistics_lie_as_the_dims_they_keep(tx, row, col):
    found = leaves(shd.state_specs(tx, ABSTRACT, SPECS, MESH))
    assert found[f"{row}/wide"] == P("data")
    assert found[f"{col}/wide"] == P("model")
    assert found[f"{row}/square"] == P("model")
    assert found[f"{col}/square"] == P("data")
    assert found[f"{row}/stacked"] == P(None, "data")
    assert found[f"{col}/stacked"] == P(None, "model")


def fails_to_be_typed(init, message):
    """The specs, with a warning."""
    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    with pytest.warns(UserWarning, match=message):
        return shd.state_specs(tx, ABSTRACT, SPECS, MESH)


def test_an_init_that_cannot_be_typed_falls_back_and_says_so():
    def init(params):
        flat = jax.tree.map(lambda p: jnp.zeros_like(p).reshape(-1), params)
        return {"flat": flat, "mu": jax.tree.map(jnp.zeros_like, params)}

    specs = fails_to_be_typed(init, "'stacked' is matched to parameters by path and shape")
    assert specs["mu"] == SPECS
    assert specs["flat"]["stacked"] == P()
    assert specs["flat"]["wide"] == P(("data", "model"))  # the others keep their types

    def init(params):
        if any(jax.typeof(p).sharding.mesh.axis_names for p in jax.tree.leaves(params)):
            raise TypeError("no meshes here")
        return {"mu": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros([])}

    assert fails_to_be_typed(init, "no meshes here") == {"mu": SPECS, "count": P()}


class State(NamedTuple):
    step: jax.Array
    average: dict
    opt: tuple
    params: dict
    key: jax.Array


def test_a_state_of_any_form_under_a_jit_of_ones_own(x64):
    """Sharded as the parameters by every step; the numbers are those of one device."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax_ext.came(1e-2, weight_decay=0.1))
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 24)), "b": rng.normal(size=24)}
    rows = rng.normal(size=(3, 32, 16)) * 10.0 ** rng.uniform(-2, 1, (3, 32, 1))

    def make_state(params):
        return State(jnp.zeros((), int), params, tx.init(params), params, jax.random.key(0))

    def step(state, x):
        loss = lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)  # noqa: E731
        updates, opt = tx.update(jax.grad(loss)(state.params), state.opt, state.params)
        new = optax.apply_updates(state.params, updates)
        average = optax.incremental_update(new, state.average, 0.1)
        return State(state.step + 1, average, opt, new, state.key)

    zero = model.zero_on(4, 2, names=("data", "model"), stage=3)
    specs = {"w": P(None, "model"), "b": P()}
    types = zero.place(jax.eval_shape(lambda: params), param_specs=specs)
    shardings = shd.state_shardings(make_state, types)
    assert shardings.params["w"] == NamedSharding(zero.mesh, P("data", "model"))
    assert shardings.average == shardings.opt[1][0].mu == shardings.params
    assert shardings.opt[1][0].nu_row["w"].spec == P("data")
    assert shardings.opt[1][0].nu_col["w"].spec == P("model")
    assert shardings.step.spec == shardings.key.spec == P()
    assert shd.state_shardings(tx, params, specs, zero.mesh)[1][0].nu_col["w"].spec == P("model")

    state = jax.jit(make_state, out_shardings=shardings)(zero.place(params, param_specs=specs))
    batch = NamedSharding(zero.mesh, P("data"))
    options = {"in_shardings": (shardings, batch), "out_shardings": shardings, "donate_argnums": 0}
    run, alone, expected = jax.jit(step, **options), jax.jit(step), make_state(params)
    for x in rows:
        state, expected = run(state, jax.device_put(x, batch)), alone(expected, x)
    model.assert_close(state[:-1], expected[:-1], 1e-12)
    with pytest.raises(ValueError, match="got no mesh, and parameters that are on none"):
        shd.state_shardings(make_state, params)
