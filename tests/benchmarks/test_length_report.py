"""The report of the study of lengths: right numbers, and something to say whatever is missing."""

import _length_plots
import _length_report
import _length_summary
import _length_tables
import _lengths
import _made_up
import numpy as np
import pytest

SIZE, TASK = "smoke", "masked"


@pytest.fixture(scope="module")
def rows():
    return _made_up.length_rows(SIZE)


def changed(rows, contender, steps, **fields):
    """The rows with other fields in the final runs of a contender."""
    keys = {row["key"] for row in final(rows, contender, steps).rows.values()}
    return {key: {**row, **fields} if key in keys else row for key, row in rows.items()}


def final(rows, contender, steps):
    return _length_summary.final(rows, SIZE, TASK, contender, steps)


def points(rows, contender, other="adamw"):
    return _length_summary.points(_length_summary.every(rows, SIZE, TASK), contender, other)


def test_differences_are_taken_seed_by_seed(rows):
    point = points(rows, "came")[1]
    one, base = (final(rows, name, 80).rows for name in ("came", "adamw"))
    want = [one[seed]["loss"] - base[seed]["loss"] for seed in (1, 2, 3)]
    assert (point.steps, point.seeds) == (80, 3)
    assert point.mean == pytest.approx(np.mean(want))


def test_intervals_come_from_contenders_with_all_seeds(rows):
    """One that lacks a seed has an interval, wider, but does not make it."""
    less = dict(rows)
    del less[final(rows, "came", 80).rows[2]["key"]]
    full, part = points(rows, "muon")[1], points(less, "came")[1]
    assert part.seeds == 2
    assert part.half_width > full.half_width
    only = {
        key: row
        for key, row in rows.items()
        if row["config"]["contender"] == "adamw" or row["config"]["seed"] < 2
    }
    assert points(only, "came")[0].half_width is None
    assert "no interval yet" in _length_tables.differences(
        _length_summary.every(only, SIZE, TASK), SIZE
    )


def test_level_names_lengths_whose_intervals_hold_zero():
    at = [
        _length_summary.Point(300, 0.1, 0.02, 3),
        _length_summary.Point(1000, -0.01, 0.02, 3),
        _length_summary.Point(3000, 0.0, None, 1),
    ]
    assert _length_summary.level_at(at) == "1,000"
    assert _length_summary.level_at(at[:1]) == "none of 1"
    assert _length_summary.level_at(at[2:]) == "-"


def test_a_contrast_is_one_minus_the_other(rows):
    text = _length_tables.contrasts(_length_summary.every(rows, SIZE, TASK), SIZE)
    line = next(line for line in text.splitlines() if line.startswith("| debiasing |"))
    want = points(rows, "came_debiased", "came")[0].mean
    assert "`came_debiased` minus `came`" in line
    assert f"{want:+.3f} (" in line


def test_what_diverged_is_named(rows):
    broken = changed(rows, "came", 80, loss=None, diverged=True)
    found = _length_summary.every(broken, SIZE, TASK)
    line = next(x for x in _length_tables.differences(found, SIZE).splitlines() if "`came`" in x)
    assert "| diverged |" in line
    assert [point.steps for point in points(broken, "came")] == [40]


@pytest.mark.parametrize("there", [0, 10, 60, 150])
def test_a_report_of_part_of_the_rows_says_what_is_missing(rows, there, tmp_path):
    part = dict(list(rows.items())[:there])
    found = _length_report.parts(part, SIZE, tmp_path)
    if not any(_length_summary.every(part, SIZE, task) for task in _lengths.TASKS):
        assert found == []
        return
    assert found[0].startswith("**Not finished**")
    assert found[-2] == "## Not there yet"
    assert "| 80 |" in found[-1]


def test_a_whole_report_names_its_picture_and_misses_nothing(rows, tmp_path):
    text = "\n\n".join(_length_report.parts(rows, SIZE, tmp_path))
    assert "Not there yet" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["lengths_smoke.png"]
    assert "](lengths_smoke.png)" in text
    assert all(f"`{name}`" in text for name in _lengths.CONTESTED)


def test_the_picture_names_lengths_that_are_not_there(rows):
    every = _length_summary.every(rows, SIZE, TASK)
    assert _length_plots._absent(every, SIZE) == ""
    assert _length_plots._absent({40: every[40]}, SIZE) == "\n(80 not run yet)"
    some = {**every, 80: {"adamw": every[80]["adamw"]}}
    assert _length_plots._absent(some, SIZE) == "\n(80 in part)"
