"""Which dims of a parameter are factored: ``Factoring``, the rules, Flax's attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, by_path, flax_transformer, last_two_dims, two_largest_dims

# --- Factoring ------------------------------------------------------------------------------------


def test_dims_are_sorted_count_from_the_end_and_may_be_lists_of_numpy_integers():
    found = Factoring((-1, 1), (0,), (-3,)).resolve("w", (2, 3, 4, 5, 6))
    assert found == Factoring((1, 4), (0,), (2,))
    assert Factoring().resolve("b", ()) == Factoring()
    assert Factoring([0], np.array([1, 2])) == Factoring((0,), (1, 2))
    assert all(type(d) is int for d in Factoring([0], np.array([1, 2])).cols)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Factoring((0,), (0,)), "names a dim twice"),
        # Once from the end, which the shape alone can tell.
        (lambda: Factoring((-1,), (1,)).resolve("w", (3, 4)), r"\(3, 4\).*names a dim twice"),
        (lambda: Factoring((0,), ()), "must name both rows and cols, or neither"),
        (lambda: Factoring(batch=(2,)).resolve("w", (3, 4)), "names dim 2, but 'w' has shape"),
        (lambda: last_two_dims(batch=(-3,)).resolve("w", (3, 4)), "names dim -3, but 'w' has"),
        (lambda: optax_ext.came(1e-3, factoring=len), "factoring must be a Factoring, a rule"),
        (lambda: optax_ext.adafactor(factoring=(0, 1)), "factoring must be a Factoring, a rule"),
        (lambda: by_path({"kernel": len}), "the rule of pattern 'kernel' must be"),
        (lambda: by_path({}, default=3), "default must be"),
        (lambda: by_path({"(": None}), r"pattern '\(' is not a regular expression"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "shape", "want"),
    [
        (last_two_dims(), (7,), Factoring()),
        (last_two_dims(), (3, 3, 16, 32), Factoring((2,), (3,))),
        (last_two_dims(8), (8, 8), Factoring((0,), (1,))),
        (last_two_dims(8), (8, 7), Factoring()),
        (last_two_dims(batch=(0,)), (3, 4), Factoring(batch=(0,))),
        (last_two_dims(batch=(0,)), (3, 4, 5), Factoring((1,), (2,), (0,))),
        (last_two_dims(batch=(1,)), (3, 4, 5), Factoring((0,), (2,), (1,))),
        (last_two_dims(batch=(-1,)), (3, 4, 5), Factoring((0,), (1,), (2,))),
        (two_largest_dims(1), (7,), Factoring()),
        (two_largest_dims(), (127, 4096), Factoring()),
        (two_largest_dims(), (128, 4096), Factoring((0,), (1,))),
        (two_largest_dims(1), (4, 16, 12), Factoring((2,), (1,))),
        (two_largest_dims(1), (5, 5, 5), Factoring((1,), (2,))),  # equal sizes as numpy.argsort
        (two_largest_dims(1, batch=(1,)), (4, 16, 12), Factoring((0,), (2,), (1,))),
        (two_largest_dims(8, batch=(1,)), (4, 16, 12), Factoring(batch=(1,))),
        (Factoring((-1,), (0,)), (3, 4), Factoring((1,), (0,))),
    ],
    ids=repr,
)
def test_rules(rule, shape, want):
    assert rule.resolve("path", shape) == want


def test_by_path_takes_the_first_pattern_found_anywhere_in_the_path():
    rule = by_path(
        {
            r"emb": None,
            r"^head/": Factoring((1,), (0,)),
            r"kernel$": two_largest_dims(1),
            r"head": Factoring((0,), (1,), (2,)),
        },
        default=last_two_dims(3),
    )
    assert rule.resolve("head/emb/kernel", (2, 3)) is None
    assert rule.resolve("head/kernel", (2, 3)) == Factoring((1,), (0,))
    assert rule.resolve("x/head/kernel", (5, 3)) == Factoring((1,), (0,))
    assert rule.resolve("x/head/kernel_2", (5, 3, 4)) == Factoring((0,), (1,), (2,))
    assert rule.resolve("x/other", (2, 3)) == Factoring()
    assert rule.resolve("x/other", (3, 3)) == Factoring((0,), (1,))
    assert by_path({"a": last_two_dims()}, default=None).resolve("b", (3, 3)) is None
    assert by_path({}).resolve("b", (3, 3)) == Factoring((0,), (1,))


def test_paths_are_the_keys_joined_by_slashes():
    """Of dicts, lists, named tuples; the optimizer asks with just these."""
    asked = []

    class Spy:
        def resolve(self, path, shape):
            asked.append((path, shape))

    value = optax.EmaState(jnp.ones(()), jnp.ones(4))
    params = {"a": [jnp.ones(1), {"b/c": jnp.ones((2, 3))}], "value": value}
    optax_ext.scale_by_came(factoring=Spy()).init(params)
    assert asked == [("a/0", (1,)), ("a/1/b/c", (2, 3)), ("value/count", ()), ("value/ema", (4,))]


# --- Flax's attention -----------------------------------------------------------------------------


def test_linen_attention_in_boxes():
    """``nn.Partitioned`` and its like put the array in an attribute; the path is the same."""
    embed, heads, head_dim = 24, 4, 6
    for box in (nn.with_partitioning, nn.with_logical_partitioning):
        module = nn.MultiHeadDotProductAttention(
            num_heads=heads,
            kernel_init=box(nn.initializers.lecun_normal(), ("embed", "heads", None)),
            bias_init=box(nn.initializers.zeros_init(), ("heads", None)),
        )
        params = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 5, embed)))
        tx = optax_ext.scale_by_adafactor(factoring=flax_transformer())
        state = jax.eval_shape(tx.init, params)
        have = [nn.unbox(x)["params"] for x in (state.nu, state.nu_row, state.nu_col)]
        for name in ("query", "key", "value", "out"):
            nu, row, col = (x[name] for x in have)
            sides = [(embed,), (heads, head_dim)]
            want_row, want_col = sides[::-1] if name == "out" else sides
            assert nu["kernel"] is None
            assert (row["kernel"].shape, col["kernel"].shape) == (want_row, want_col)
            assert nu["bias"].shape == want_col
            assert row["bias"] is None
