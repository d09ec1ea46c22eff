"""Parameters in files, which are encoded as they are read: one array is in memory at a time."""

import re
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from sharding import stored

LAYERS, ROWS, COLUMNS = 3, 64, 128
KEY = jax.random.key(0)
FORMS = {"layers": (stored.frozen(4), stored.lora(2)), "head": stored.frozen(8)}


def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(ml_dtypes.bfloat16)  # noqa: E731
    layers = {"up": draw(LAYERS, ROWS, COLUMNS), "down": draw(LAYERS, COLUMNS, ROWS)}
    return {"layers": layers, "norm": draw(LAYERS, ROWS), "head": draw(ROWS, COLUMNS)}


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


class Reads:
    """Lazy arrays that count what is read, and what of it is alive when more is read."""

    def __init__(self):
        self.alive, self.number, self.most = weakref.WeakSet(), 0, 0

    def of(self, x):
        def read(index):
            found = Counted.of(x[index])
            self.alive.add(found)
            self.number, self.most = self.number + 1, max(self.most, len(self.alive))
            return found

        return stored.Lazy(x.shape, x.dtype, read)


class Counted(np.ndarray):
    """Hashed by identity, and so counted."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    @classmethod
    def of(cls, x):
        return np.array(x).view(cls)


def test_one_array_of_a_stack_is_in_memory_at_a_time():
    reads = Reads()
    stacks = {"layers": {k: reads.of(x) for k, x in arrays()["layers"].items()}}
    found = stored.store(stacks, {"layers": FORMS["layers"]}, KEY)
    assert (reads.number, reads.most) == (2 * LAYERS, 1)
    given = {"layers": arrays()["layers"]}
    assert_equal(found, stored.store(given, {"layers": FORMS["layers"]}, KEY))


@pytest.mark.parametrize("kind", ["memmap", "safetensors", "orbax"])
def test_files_give_what_arrays_give(kind, tmp_path):
    """Matrices of PyTorch are transposed, and there is one for each layer."""
    expected = arrays()
    if kind == "memmap":

        def mapped(path, x):
            name = tmp_path / jax.tree_util.keystr(path, simple=True, separator=".")
            np.memmap(name, x.dtype, "w+", shape=x.shape)[...] = x
            return np.memmap(name, x.dtype, "r", shape=x.shape)

        given = jax.tree_util.tree_map_with_path(mapped, expected)
    elif kind == "safetensors":
        up, down = ([x.T.copy() for x in expected["layers"][k]] for k in ("up", "down"))
        first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
        named = {
            f"{i}.{name}": x for name, of in (("up", up), ("down", down)) for i, x in enumerate(of)
        }
        safetensors.numpy.save_file(named, first)
        others = {"norm": expected["norm"], "head": expected["head"]}
        safetensors.numpy.save_file(others, second)
        files = stored.safetensors(first, second)
        stack = lambda name: stored.stack([files[f"{i}.{name}"].T for i in range(LAYERS)])  # noqa: E731
        layers = {name: stack(name) for name in ("up", "down")}
        given = {"layers": layers, "norm": stored.stack([files["norm"][i] for i in range(LAYERS)])}
        given["head"] = files["head"]
        with pytest.raises(ValueError, match="is in several files"):
            stored.safetensors(first, first)
    else:
        ocp.PyTreeCheckpointer().save(tmp_path / "saved", expected)
        given = stored.orbax(tmp_path / "saved")
    found = stored.store(given, FORMS, KEY, like=jax.eval_shape(arrays_on_device))
    assert_equal(found, stored.store(expected, FORMS, KEY))


def arrays_on_device():
    return jax.tree.map(jnp.asarray, arrays())


@pytest.mark.parametrize(
    ("forms", "change", "message"),
    [
        ({"norm": stored.lora(4)}, {}, "rank 4 is above a dim of norm, of shape (3, 64)"),
        ({"head": stored.frozen(4), "layrs": stored.frozen(4)}, {}, "'layrs' matches no parameter"),
        ({"head": stored.frozen(4), "ids": stored.frozen(4)}, {}, "ids is an array of int"),
        (
            {"head": stored.frozen(4)},
            {"head": (COLUMNS, ROWS)},
            "of head there is one of shape (64, 128), and the loss takes one of shape (128, 64)",
        ),
        ({"head": stored.frozen(4)}, {"more": (2,)}, "of more there is none, and the loss takes"),
        ({"head": stored.frozen(4)}, {"ids": None}, "of ids there is one of shape (8,), and the"),
    ],
)
def test_what_does_not_fit_raises_before_anything_is_read(forms, change, message):
    reads = Reads()
    given = arrays() | {"ids": np.arange(8)}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    like |= {k: shape and jax.ShapeDtypeStruct(shape, float) for k, shape in change.items()}
    like = {k: x for k, x in like.items() if x is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        stored.store(jax.tree.map(reads.of, given), forms, KEY, like=like)
    assert reads.number == 0


def test_what_is_read_has_the_shape_it_should():
    wrong = stored.Lazy((2, 3), float, lambda index: np.zeros((3, 2))[index])
    with pytest.raises(
        ValueError, match=re.escape("of shape (2, 3) was read at (), and gave (3, 2)")
    ):
        np.asarray(wrong)
    with pytest.raises(ValueError, match=re.escape("float64[2], float64[3]")):
        stored.stack([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match="got none"):
        stored.stack([])


@pytest.mark.parametrize("to", [stored.frozen(4), stored.frozen(8)])
def test_merging_to_codes_says_its_error(to):
    params = stored.store(arrays_on_device(), FORMS | {"norm": stored.masked(0.5)}, KEY)
    up = params["layers"]["up"]
    noise = np.random.default_rng(1).normal(size=up.b.shape)
    params["layers"]["up"] = up.__class__(up.base, up.a, jnp.asarray(noise, up.b.dtype), up.scale)
    found, errors = stored.merge(params, to)
    assert errors.keys() == {"layers/up", "layers/down"}
    for name in ("up", "down"):
        w, coded = (np.asarray(p["layers"][name].decode(), float) for p in (params, found))
        error = np.linalg.norm(coded - w) / np.linalg.norm(w)
        np.testing.assert_allclose(errors[f"layers/{name}"], error, rtol=1e-6)
        assert isinstance(found["layers"][name], stored.NormalFloat4 | stored.Coded)
    # What was in these codes, and has no adapter added yet, stays: B of the second is zero.
    assert errors["layers/up"] > 0.005
    assert found["norm"] is params["norm"]


def test_ranks_and_alphas_have_the_names_of_peft():
    forms = {"up": stored.lora(4, alpha=8), "down": stored.lora(4, alpha=2), "head": stored.lora(2)}
    params = stored.store(arrays_on_device(), forms, KEY)
    _, config = stored.peft(params, lambda path, index: ".".join([*map(str, index), path]))
    assert (config["r"], config["lora_alpha"]) == (4, 2)
    assert config["rank_pattern"] == {"head": 2}
    assert config["alpha_pattern"] == {f"{i}.layers/up": 8 for i in range(LAYERS)}
    assert len(config["target_modules"]) == 2 * LAYERS + 1
    with pytest.raises(ValueError, match="no parameter is adapted"):
        stored.peft(arrays())
