"""``state_specs``: the right spec for every leaf of any transformation's state."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

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
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-3),
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
        (TRANSFORMATIONS["came"], "0/instability_row", "0/instability_col"),
        (TRANSFORMATIONS["our_adafactor"], "0/nu_row", "0/nu_col"),
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


def test_several_dims_a_side():
    shape = jax.ShapeDtypeStruct((64, 4, 16), jnp.float32)
    tx = optax_ext.scale_by_came(factoring=optax_ext.Factoring((0,), (1, 2)))
    specs = shd.state_specs(tx, {"q": shape}, {"q": P("data", "model")}, MESH)
    assert specs.nu_row["q"] == P("data")
    assert specs.nu_col["q"] == P("model")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_good_as_out_shardings(kind):
    """On a real mesh of either kind, init puts every leaf where its spec says."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    tx = TRANSFORMATIONS["came"]
    specs = shd.state_specs(tx, ABSTRACT, SPECS, mesh)
    out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), ABSTRACT)
    state = jax.jit(tx.init, out_shardings=out)(zeros)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(out), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


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


def test_a_broken_init_raises_its_own_error():
    def init(params):
        raise KeyError("no such thing")

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    with pytest.raises(KeyError, match="no such thing"):
        shd.state_specs(tx, ABSTRACT, SPECS, MESH)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({**SPECS, "wide": P("dp")}, r"'wide': axis 'dp' is not in the mesh \('data', 'model'\)"),
        (
            {**SPECS, "unsharded": P("data")},
            r"'unsharded': dim 0 of shape \(7, 13\) does not divide by 4",
        ),
        ({**SPECS, "bias": P("data", "model")}, r"'bias' has more entries than its shape \(512,\)"),
        ({"wide": P()}, "param_specs does not match the parameters"),
    ],
)
def test_bad_specs(specs, message):
    with pytest.raises(ValueError, match=message):
        shd.state_specs(TRANSFORMATIONS["adamw"], ABSTRACT, specs, MESH)


def test_a_prefix_and_none_mean_replicated():
    for specs in (None, P()):
        found = shd.state_specs(TRANSFORMATIONS["adamw"], ABSTRACT, specs, MESH)
        assert all(not any(spec) for spec in jax.tree.leaves(found))


def test_flax_metadata_is_taken():
    nn = pytest.importorskip("flax.linen")
    box = nn.Partitioned(jax.ShapeDtypeStruct((64, 32), jnp.float32), names=("data", "model"))
    specs = shd.state_specs(optax.adafactor(1e-3, min_dim_size_to_factor=8), {"w": box}, None, MESH)
    # Optax's rows are the smaller dim: 32, which is sharded over "model".
    assert specs[0].v_row["w"].value == P("model")
    assert specs[0].v_col["w"].value == P("data")
