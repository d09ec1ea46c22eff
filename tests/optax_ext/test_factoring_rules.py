"""Which dims of a parameter are factored: ``Factoring``, the rules, Flax's attention."""

import copy
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, by_path, flax_attention, last_two_dims, two_largest_dims

from ..flax_nnx import needs_nnx, nnx

RULES = {
    "Factoring": Factoring((0,), (1,)),
    "last_two_dims": last_two_dims(),
    "two_largest_dims": two_largest_dims(2, batch=(-1,)),
    "by_path": by_path({"a": None, "b": last_two_dims()}),
    "flax_attention": flax_attention(batch=(0,)),
    "flax_transformer": optax_ext.flax_transformer(),
    "flax_transformer, stacked": optax_ext.flax_transformer(stack_dim=1),
}


def state_shapes(params, factoring):
    """{path: (nu, nu_row, nu_col) shapes} that an optimizer keeps, None for a slot not used."""
    state = jax.eval_shape(optax_ext.scale_by_adafactor(factoring=factoring).init, params)
    treedef = jax.tree.structure(params)
    slots = [treedef.flatten_up_to(getattr(state, f)) for f in ("nu", "nu_row", "nu_col")]
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(params)
    ]
    shapes = [
        tuple(None if x is None else x.shape for x in leaf) for leaf in zip(*slots, strict=True)
    ]
    return dict(zip(paths, shapes, strict=True))


# --- Factoring ------------------------------------------------------------------------------------


def test_dims_are_sorted_count_from_the_end_and_may_be_lists_of_numpy_integers():
    found = Factoring((-1, 1), (0,), (-3,)).resolve("w", (2, 3, 4, 5, 6))
    assert found == Factoring((1, 4), (0,), (2,))
    assert Factoring().resolve("b", ()) == Factoring()
    assert Factoring([0], np.array([1, 2])) == Factoring((0,), (1, 2))
    assert all(type(d) is int for d in Factoring([0], np.array([1, 2])).cols)


def test_dims_that_do_not_fit():
    for dims in (((0, 0), (1,)), ((0,), (0,)), ((0,), (1,), (1,)), ((), (), (2, 2))):
        with pytest.raises(ValueError, match="names a dim twice") as error:
            Factoring(*dims)
        assert repr(tuple(dims[0])) in str(error.value)
    # Once from the end, which the shape alone can tell.
    for dims in (((-1,), (1,)), ((0,), (1,), (-2,)), ((), (), (0, -2))):
        with pytest.raises(ValueError, match=r"'w' of shape \(3, 4\).*names a dim twice"):
            optax_ext.scale_by_came(factoring=Factoring(*dims)).init({"w": jnp.ones((3, 4))})
    for dims in (((0,), ()), ((), (1,)), ((), (1,), (0,))):
        with pytest.raises(ValueError, match="must name both rows and cols, or neither"):
            Factoring(*dims)


@pytest.mark.parametrize(("dim", "shape"), [(2, (3, 4)), (-3, (3, 4)), (0, ())])
def test_a_dim_that_does_not_exist(dim, shape):
    for factoring in (Factoring(batch=(dim,)), last_two_dims(batch=(dim,))):
        for make in (optax_ext.scale_by_came, optax_ext.scale_by_adafactor):
            with pytest.raises(ValueError, match=rf"names dim {dim}, but 'w' has shape") as error:
                make(factoring=factoring).init({"w": jnp.ones(shape)})
            assert str(shape) in str(error.value)


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "shape", "want"),
    [
        (last_two_dims(), (), Factoring()),
        (last_two_dims(), (7,), Factoring()),
        (last_two_dims(), (1, 1), Factoring((0,), (1,))),
        (last_two_dims(), (3, 3, 16, 32), Factoring((2,), (3,))),
        (last_two_dims(8), (8, 8), Factoring((0,), (1,))),
        (last_two_dims(8), (8, 7), Factoring()),
        (last_two_dims(8), (7, 8), Factoring()),
        (last_two_dims(batch=(0,)), (3, 4), Factoring(batch=(0,))),
        (last_two_dims(batch=(0,)), (3, 4, 5), Factoring((1,), (2,), (0,))),
        (last_two_dims(batch=(1,)), (3, 4, 5), Factoring((0,), (2,), (1,))),
        (last_two_dims(batch=(-1,)), (3, 4, 5), Factoring((0,), (1,), (2,))),
        (last_two_dims(5, batch=(0,)), (3, 4, 5), Factoring(batch=(0,))),
        (two_largest_dims(1), (), Factoring()),
        (two_largest_dims(1), (7,), Factoring()),
        (two_largest_dims(), (127, 4096), Factoring()),
        (two_largest_dims(), (128, 4096), Factoring((0,), (1,))),
        (two_largest_dims(), (4096, 128), Factoring((1,), (0,))),
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

    params = {
        "a": [jnp.ones(1), {"b/c": jnp.ones((2, 3))}],
        "value": optax.EmaState(1.0, jnp.ones(4)),
    }
    params["value"] = params["value"]._replace(count=jnp.ones(()))
    optax_ext.scale_by_came(factoring=Spy()).init(params)
    assert asked == [
        ("a/0", (1,)),
        ("a/1/b/c", (2, 3)),
        ("value/count", ()),
        ("value/ema", (4,)),
    ]


# --- Rules are values -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_rules_are_hashable_equal_values_and_not_callable(name):
    rule = RULES[name]
    same = copy.deepcopy(rule)
    assert same == rule
    assert hash(same) == hash(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert not callable(rule)
    assert isinstance(rule, optax_ext.FactoringRule)
    assert len({*RULES.values(), same}) == len(RULES)


@pytest.mark.parametrize("bad", ["last_two_dims", last_two_dims, Factoring, (0, 1), len, True, 3])
def test_what_is_not_a_rule(bad):
    for make in (
        lambda: optax_ext.came(1e-3, factoring=bad),
        lambda: optax_ext.scale_by_came(factoring=bad),
        lambda: optax_ext.adafactor(factoring=bad),
        lambda: optax_ext.scale_by_adafactor(factoring=bad),
    ):
        with pytest.raises(ValueError, match="factoring must be a Factoring, a rule") as error:
            make()
        assert repr(bad) in str(error.value)
    with pytest.raises(ValueError, match="the rule of pattern 'kernel' must be"):
        by_path({"kernel": bad})
    with pytest.raises(ValueError, match="default must be"):
        by_path({}, default=bad)


def test_a_pattern_that_is_not_a_regular_expression():
    for pattern in ("(kernel", 3):
        with pytest.raises(ValueError, match=re.escape(f"pattern {pattern!r} is not a regular")):
            by_path({pattern: None})


# --- Flax's attention -----------------------------------------------------------------------------

EMBED, HEADS, HEAD_DIM, LAYERS = 24, 4, 6, 3


def expected_attention(prefix="", suffix="", stack=()):
    """The shapes of (nu, nu_row, nu_col) for one attention layer."""
    projection = (None, (*stack, EMBED), (*stack, HEADS, HEAD_DIM))
    want = {"out/kernel": (None, (*stack, HEADS, HEAD_DIM), (*stack, EMBED))}
    want |= {"out/bias": ((*stack, EMBED), None, None)}
    for name in ("query", "key", "value"):
        want |= {f"{name}/kernel": projection}
        want |= {f"{name}/bias": ((*stack, HEADS, HEAD_DIM), None, None)}
    return {f"{prefix}{k}{suffix}": v for k, v in want.items()}


def linen_attention(**kwargs):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, **kwargs)
    x = jnp.ones((2, 5, EMBED))
    return jax.eval_shape(module.init, jax.random.key(0), x)


def test_linen_attention_in_boxes():
    """``nn.Partitioned`` and its like put the array in an attribute; the path is the same."""
    for box in (nn.with_partitioning, nn.with_logical_partitioning):
        params = linen_attention(
            kernel_init=box(nn.initializers.lecun_normal(), ("embed", "heads", None)),
            bias_init=box(nn.initializers.zeros_init(), ("heads", None)),
        )
        shapes = state_shapes(params, flax_attention())
        assert shapes == expected_attention("params/", "/value")


@needs_nnx
def test_nnx_attention():
    module = nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=EMBED, decode=False, rngs=nnx.Rngs(0)
    )
    params = nnx.state(module, nnx.Param)
    assert state_shapes(params, flax_attention()) == expected_attention(suffix="/value")
    assert state_shapes(nnx.to_pure_dict(params), flax_attention()) == expected_attention()


def test_other_parameters_follow_the_default():
    rule = flax_attention()
    assert rule.resolve("mlp/kernel", (8, 4)) == Factoring((0,), (1,))
    assert rule.resolve("monkey/kernel", (2, 8, 4)) == Factoring((1,), (2,))  # ends in key
    assert rule.resolve("layout/kernel", (2, 8, 4)) == Factoring((1,), (2,))  # ends in out
    assert flax_attention(default=two_largest_dims(1)).resolve("mlp", (8, 4)) == Factoring(
        (1,), (0,)
    )
    assert flax_attention(batch=(0,)).resolve("mlp/bias", (3, 4)) == Factoring(batch=(0,))
