"""Measured sparsity, and the closed forms of wire bytes against counts by hand."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from sharding.sync import Sparsity

from .harness import SyncRunner, room

ROWS, WIDTH = 1024, 64


def spread(num, count, same=0, seed=0):
    """Rows of devices: some shared by all, and others of their own."""
    order = np.random.default_rng(seed).permutation(ROWS)
    rest = order[same:]
    return [np.concatenate([order[:same], rest[i * count : (i + 1) * count]]) for i in range(num)]


def test_measured_densities():
    with pytest.raises(ValueError, match="ids must be from 0 to 1023, got 1024 to 1024"):
        Sparsity.measure([np.array([ROWS])], ROWS, WIDTH)
    found = Sparsity.measure(spread(4, 10, same=6), ROWS, WIDTH)
    assert (found.num_devices, found.density, found.union_density) == (4, 16 / ROWS, 46 / ROWS)
    often = [np.repeat(x, 3) for x in spread(4, 10, same=6)]
    assert Sparsity.measure(often, ROWS, WIDTH) == found


def test_bytes_by_hand():
    found = Sparsity.measure(spread(8, 16), ROWS, WIDTH)
    row, indexed = 4 * WIDTH, 4 * WIDTH + 4
    have = found.bytes_sent()
    assert have["dense"] == 2 * 7 / 8 * ROWS * row
    assert have["agsparse"] == pytest.approx(7 * 16 * indexed)
    assert have["zen"] == pytest.approx(7 / 8 * (16 * indexed + 128 * row + ROWS / 8))
    assert found.bytes_sent(2)["dense"] == have["dense"] / 2


@pytest.mark.parametrize(
    ("ids", "name", "ties"),
    [
        (spread(16, 2), "agsparse", "zen"),  # sent once or sent back, the bytes are the same
        (spread(16, 2, same=30), "zen", ""),  # shared rows are sent back once
        ([np.arange(ROWS)] * 2, "dense", "agsparse and zen"),
    ],
    ids=["no overlap", "overlap", "not sparse"],
)
def test_the_method_that_sends_least(ids, name, ties):
    found = Sparsity.measure(ids, ROWS, WIDTH)
    choice = found.choose()
    assert choice.name == name
    assert f"dense {found.bytes_sent(2)['dense']:,.0f} bytes" in found.choose(itemsize=2).note
    assert choice.note.partition("bytes. ")[2].partition(" would")[0] == ties


def test_the_chosen_method_has_the_measured_densities():
    """Few rows of the sum are shared by all devices: an owner sends few of its slots."""
    found = Sparsity.measure(spread(8, 2, same=60), ROWS, WIDTH)
    runner = SyncRunner(found.choose().sync, {"w": (ROWS, WIDTH)}, 8, dtype=jnp.float32)
    assert found.choose().name == "zen"
    assert found.union_density == 76 / ROWS
    sent = re.findall(rf"f32\[(\d+),{WIDTH}\] = all_gather", runner.jaxpr())
    assert room(76 / ROWS, ROWS / 8, 8) in {int(n) // 8 for n in sent}
