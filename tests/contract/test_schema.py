"""The checkpoint contract: a state's fields, their order, shapes and dtypes.

Checkpoints written by one release are read by the next. A test that fails here says that they would
not be: then say so in the changelog, offer a way to convert, and write the new schema down.
"""

import jax
import jax.numpy as jnp
import optax

import optax_ext

SCHEMA = {
    "ScaleByCameState": "count mu nu nu_row nu_col instability_row instability_col",
    "ScaleByAdafactorState": "count nu nu_row nu_col",
    "MomentumState": "mu",
    "MasterWeightsState": "master inner_state",
    "ScaleByLarsState": "count",
    "LarsMomentumState": "trace",
    "ScaleByLambState": "count mu nu",
    "GradientNoiseScaleState": "count squared_norm variance",
    "LowPrecisionState": "key inner_state",
    "StochasticRoundingState": "key inner_state",
    "ScaleByDelayState": "count",
    "DiscrepancyCorrectionState": "correction",
}

PARAMS = {"w": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16), "b": jax.ShapeDtypeStruct((4,), "f2")}

# Path, dtype and shape of each leaf, in order.
LEAVES = {
    "came": """
        [0].count int32[]  [0].mu[b] float32[4]  [0].mu[w] float32[6,4]  [0].nu[b] float32[4]
        [0].nu_row[w] float32[6]  [0].nu_col[w] float32[4]  [0].instability_row[w] float32[6]
        [0].instability_col[w] float32[4]
    """,
    "adafactor": """
        [0].count int32[]  [0].nu[b] float32[4]  [0].nu_row[w] float32[6]
        [0].nu_col[w] float32[4]  [1].count int32[]  [3].mu[b] float32[4]  [3].mu[w] float32[6,4]
    """,
    "lars": "[0].count int32[]  [2].trace[b] float32[4]  [2].trace[w] float32[6,4]",
    "lamb": """
        [0].count int32[]  [0].mu[b] float32[4]  [0].mu[w] float32[6,4]  [0].nu[b] float32[4]
        [0].nu[w] float32[6,4]
    """,
    "master_weights": """
        .master[b] float32[4]  .master[w] float32[6,4]  .inner_state[0].trace[b] float32[4]
        .inner_state[0].trace[w] float32[6,4]
    """,
    "low_precision_state": """
        .key uint32[2]  .inner_state[0].trace[b].codes uint8[2]
        .inner_state[0].trace[b].scale[0] float32[1]  .inner_state[0].trace[w].codes uint8[3,4]
        .inner_state[0].trace[w].scale[0] float32[6]  .inner_state[0].trace[w].scale[1] float32[4]
    """,
    "scale_by_delay": ".count int32[]",
    "discrepancy_correction": ".correction[b] float32[4]  .correction[w] float32[6,4]",
}

MAKE = {
    "came": lambda: optax_ext.came(1e-3),
    "adafactor": lambda: optax_ext.adafactor(
        lambda count: 1e-3, momentum=0.9, factoring=optax_ext.last_two_dims()
    ),
    "lars": lambda: optax_ext.lars(1e-3, weight_decay=lambda count: 1e-4),
    "lamb": lambda: optax_ext.lamb(1e-3),
    "master_weights": lambda: optax_ext.master_weights(optax.sgd(1e-3, momentum=0.9)),
    "low_precision_state": lambda: optax_ext.low_precision_state(
        optax.sgd(1e-3, momentum=0.9), bits=4, min_size=0
    ),
    "scale_by_delay": lambda: optax_ext.scale_by_delay(3.0, 10),
    "discrepancy_correction": lambda: optax_ext.discrepancy_correction(3.0),
}


def test_every_state_is_in_the_schema():
    """With its fields in this order."""
    states = {k: v for k, v in vars(optax_ext).items() if hasattr(v, "_fields")}
    assert {k: " ".join(v._fields) for k, v in states.items()} == SCHEMA
    assert all(v.__doc__ for v in states.values())


def test_leaves():
    """No placeholders among them."""
    for name, want in LEAVES.items():
        state = jax.eval_shape(MAKE[name]().init, PARAMS)
        have = [
            f"{jax.tree_util.keystr(path)} {leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            for path, leaf in jax.tree.leaves_with_path(state)
        ]
        assert " ".join(have).replace("'", "").split() == want.split(), name
