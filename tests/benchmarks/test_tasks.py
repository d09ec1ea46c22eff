"""The tasks of the comparison of optimizers: what is hidden, and the order of the data."""

import types

import _fine_data
import _tasks
import numpy as np
import pytest
from _corpus import Corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(np.random.default_rng(0).integers(256, size=100_000, dtype=np.uint8).tobytes())
    return Corpus(path, context=128)


def test_masks(corpus):
    batch = _tasks.TASKS["masked"].batch(corpus, 0, 0, 512)
    chosen = batch["weights"] == 1
    np.testing.assert_array_equal(chosen.sum(axis=1), round(0.15 * 128))
    same = batch["inputs"] == batch["targets"]
    assert same[~chosen].all()
    hidden = batch["inputs"] == _tasks.MASK
    # Three standard deviations of 9728 draws.
    assert abs(hidden[chosen].mean() - 0.8) < 0.012
    assert abs(same[chosen].mean() - 0.1 - 0.1 / 256) < 0.01
    assert batch["inputs"][~hidden].max() < 256
    # No position is preferred.
    assert np.ptp(chosen.mean(axis=0)) < 0.11


@pytest.mark.parametrize("name", _tasks.TASKS)
def test_data_are_a_function_of_seed_and_step(corpus, name):
    task = _tasks.TASKS[name]
    first = task.batch(corpus, 1, 7, 8)
    task.batch(corpus, 1, 8, 8)
    again, held_out = task.batch(corpus, 1, 7, 8), [task.validation(corpus, 8) for _ in range(2)]
    assert all((first[key] == again[key]).all() for key in first)
    assert all((held_out[0][key] == held_out[1][key]).all() for key in held_out[0])
    for seed, step in ((1, 8), (2, 7)):
        assert (task.batch(corpus, seed, step, 8)["targets"] != first["targets"]).any()
    if name == "next_token":
        np.testing.assert_array_equal(first["inputs"][:, 1:], first["targets"][:, :-1])
        return
    # Masks differ between steps on the same windows.
    windows = np.arange(129, dtype=np.int32)[None] * np.ones((4, 1), np.int32)
    same = types.SimpleNamespace(batch=lambda seed, step, size: windows[:size])
    one, two = (task.batch(same, 0, step, 4) for step in (0, 1))
    assert any((one[key] != two[key]).any() for key in one)


def test_windows_to_fine_tune_on_have_their_labels():
    text = b'"""What it does."""\nx = "# no"\n# A comment.\ndef f():\n    raise KeyError\n'
    lines = [(text[first:last], label) for label, _, _, first, last in _fine_data._lines(text)]
    assert [label for _, label in lines] == [2, 0, 1, 0, 0]
    assert lines[2][0] == b"# A comment."
    [(label, blank, first, _, last)] = _fine_data._functions(text)
    assert (label, blank[first:last]) == (1, b"def f():\n          KeyError\n")
