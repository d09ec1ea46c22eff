"""Cycles of a schedule: loops in loops, and the mean trips of tiles that end beyond an array."""

import pytest
from kernel_cycles import EXAMPLE, SHAPES, cycles, kernel_of, trips_of_slices


def test_loops_count_by_their_trips():
    # One bundle before, 3 of a loop of 10 trips, 3 of one in it of 32; one of these says that it is
    # of the outer loop, as bundles with instructions of both do.
    assert cycles(EXAMPLE) == 1 + 10 * (3 + 32 * 3)
    assert cycles(EXAMPLE.replace("32 /*", "%s8 /*"), unknown=2.5) == 1 + 10 * (3 + 2.5 * 3)


def test_slices_of_the_last_tile():
    columns, rows = (trips_of_slices(kernel_of("lion, nearest", shape)) for shape in SHAPES)
    assert columns == pytest.approx(86 / 3)  # slices of 128 columns, tiles of 4,096
    assert rows == pytest.approx(786 / 158)  # slices of 64 rows, tiles of 320; 6 of columns in each
