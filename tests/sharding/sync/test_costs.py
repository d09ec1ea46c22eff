"""Measured sparsity, and the closed forms of wire bytes against counts by hand."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from sharding.sync import Sparsity

from .harness import SyncRunner

ROWS, WIDTH = 1024, 64


def spread(num, count, same=0, seed=0):
    """Rows of devices: some shared by all, and others of their own."""
    order = np.random.default_rng(seed).permutation(ROWS)
    rest = order[same:]
    return [np.concatenate([order[:same], rest[i * count : (i + 1) * count]]) for i in range(num)]


def test_measured_densities():
    found = Sparsity.measure(spread(4, 10, same=6), ROWS, WIDTH)
    assert found.num_devices == 4
    assert found.densities == {1: 16 / ROWS, 2: 26 / ROWS, 4: 46 / ROWS}
    assert found.overlap == 6 / 16
    often = [np.repeat(x, 3) for x in spread(4, 10, same=6)]
    assert Sparsity.measure(often, ROWS, WIDTH) == found


def test_skewness_and_blocks():
    """All rows in the first quarter, four to a block of 256 elements."""
    ids = [np.arange(32), np.arange(32), np.arange(64), np.arange(64)]
    found = Sparsity.measure(ids, ROWS, WIDTH)
    assert found.skewness == (4.0, 4.0)
    assert found.block_densities == (48 / ROWS, 64 / ROWS)
    apart = Sparsity.measure([np.arange(0, ROWS, 16)] * 4, ROWS, WIDTH)
    assert apart.skewness == (1.0, 1.0)
    assert apart.block_densities == (0.25, 0.25)
    assert Sparsity.measure([np.array([], int)] * 2, ROWS, WIDTH).densities == {1: 0.0, 2: 0.0}


def test_bytes_by_hand():
    found = Sparsity.measure(spread(8, 16), ROWS, WIDTH)
    row, indexed = 4 * WIDTH, 4 * WIDTH + 4
    have = found.bytes_sent()
    assert have["dense"] == 2 * 7 / 8 * ROWS * row
    assert have["agsparse"] == pytest.approx(7 * 16 * indexed)
    assert have["sparcml"] == pytest.approx((16 + 32 + 64) * indexed)
    assert have["zen"] == pytest.approx(7 / 8 * (16 * indexed + 128 * row + ROWS / 8))
    # 256 blocks of four rows, 32 per owner: the share of the fullest, of one device and of all.
    one = [np.unique(x // 4) for x in spread(8, 16)]
    fullest = np.mean([np.bincount(x // 128, minlength=8).max() / x.size for x in spread(8, 16)])
    rows = np.concatenate(spread(8, 16))
    every = np.unique(rows // 4).size * np.bincount(rows // 128, minlength=8).max() / rows.size
    mean = np.mean([x.size for x in one])
    want = 7 / 8 * 8 * (fullest * mean + every) * 4 * row
    assert have["omnireduce"] == pytest.approx(want)
    assert found.bytes_sent(2)["dense"] == have["dense"] / 2


@pytest.mark.parametrize(
    ("ids", "name", "ties"),
    [
        (spread(2, 8), "agsparse", []),
        (spread(16, 2), "agsparse", ["zen"]),  # sent once or sent back, the bytes are the same
        (spread(16, 2, same=30), "zen", []),  # shared rows are sent back once
        ([np.arange(ROWS)] * 2, "dense", ["agsparse", "zen"]),
    ],
    ids=["few devices", "no overlap", "overlap", "not sparse"],
)
def test_the_method_that_sends_least(ids, name, ties):
    found = Sparsity.measure(ids, ROWS, WIDTH)
    choice, costs = found.choose(), found.bytes_sent()
    assert choice.name == name == min(("dense", "agsparse", "zen"), key=costs.get)
    assert choice.note.partition("bytes. ")[2].partition(" would")[0] == " and ".join(ties)


def test_the_chosen_method_has_the_measured_densities():
    """Few rows of the sum are shared by all devices: an owner sends few of its slots."""
    found = Sparsity.measure(spread(8, 2, same=60), ROWS, WIDTH)
    runner = SyncRunner(found.choose().sync, {"w": (ROWS, WIDTH)}, 8, dtype=jnp.float32)
    text, union = runner.jaxpr(), 76 / ROWS
    assert found.choose().name == "zen"
    assert found.densities[8] == union
    expected = union * ROWS / 8
    room = int(np.ceil(expected + np.sqrt(2 * np.log(100 * 8) * expected * (1 - union))))
    sent = {int(n) // 8 for n in re.findall(rf"f32\[(\d+),{WIDTH}\] = all_gather", text)}
    assert room in sent


def test_bad_input():
    with pytest.raises(ValueError, match="at least one device"):
        Sparsity.measure([], ROWS, WIDTH)
    for row in (-1, ROWS):
        with pytest.raises(ValueError, match=f"ids must be from 0 to 1023, got {row} to {row}"):
            Sparsity.measure([np.array([row])], ROWS, WIDTH)
