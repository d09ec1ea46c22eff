"""The report of the study of fine-tuning."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import _fine_study
import _plots
import _rows
import _search
import _summary
import numpy as np
from _fine_study import CELLS, CONTENDERS, Scale
from _studies import Cell, Rows, there
from _summary import BASELINE, Difference, half_width
from _tables import METHOD, difference_cell, table, write

NEAR = 0.02  # of the best accuracy: a learning rate that is as good
ABOUT = f"""Held-out accuracy in points and loss in nats, minus AdamW's on the same seeds; AdamW's
row has its own. Means over three tasks and two models to start from; the width of the 95 %
intervals comes from all optimizers of a table. Good rates: the decades of learning rate in which
accuracy on validation files is within {100 * NEAR:.0f} points of the best. Early excess: the most
by which training loss exceeds AdamW's in one of the first 50 steps, a mean of all final runs."""
Found = Mapping[str, "Final"]


class Final(NamedTuple):
    """The final runs of an optimizer at one length, and its searches; all by cell."""

    losses: np.ndarray  # (cells, seeds), held-out
    accuracies: np.ndarray  # (cells, seeds), in points
    early: np.ndarray  # (steps,), mean of all
    rates: list[str]  # what the searches chose, with a star on an edge
    width: float  # decades of learning rates as good as the best, a mean


def final(rows: Rows, every: list[Cell]) -> Final | None:
    """None unless all runs are there."""
    runs = [list(there(rows, cell.finals).values()) for cell in every]
    if not all(of and len(of) == len(cell.finals) for of, cell in zip(runs, every, strict=True)):
        return None
    rates, widths = [], []
    for cell in every:
        exponents, best = [trial.exponent for trial in cell.found], _search.best(cell.found)
        rates.append(f"{10**best.exponent:.3g}")
        rates[-1] += "*" * (best.exponent in (min(exponents), max(exponents)))
        accuracies = [row["accuracy"] for row in there(rows, cell.tried).values()]
        tried = zip(exponents, accuracies, strict=True)
        good = [exponent for exponent, x in tried if x >= max(accuracies) - NEAR]
        widths.append(max(good) - min(good))

    def numbers(name: str) -> np.ndarray:
        return np.array([_summary.numbers([row[name] for row in of]) for of in runs])

    early = np.mean([_summary.numbers(row["early_loss"]) for of in runs for row in of], axis=0)
    return Final(numbers("loss"), 100 * numbers("accuracy"), early, rates, float(np.mean(widths)))


def parts(rows: Rows, scale: Scale, dtype: str, picture: pathlib.Path) -> list[str]:
    """The report's parts in order, none without AdamW; draws its picture."""
    every: dict[str, Found] = {}
    for mode, steps in [(mode, steps) for mode, of in scale.steps.items() for steps in of]:
        cells = {n: _fine_study.cells(rows, scale, dtype, n, mode, steps) for n in CONTENDERS}
        found = {name: one for name, of in cells.items() if (one := final(rows, of))}
        every |= {f"{mode}, {steps:,} steps": found} if BASELINE in found else {}
    if not every:
        return []
    _draw(every, picture)
    out = [ABOUT, f"![Accuracy minus AdamW's, and the loss of the first steps]({picture.name})"]
    for title, found in every.items():
        out += [f"## {title.capitalize()}", _differences(found)]
        out += ["Accuracy, and learning rates chosen (*: on an edge of the search):"]
        out += [_by_cell(found)]
        programs = _fine_study.programs(scale, CONTENDERS)
        missing = [f"`{name}`" for name, of in programs if of in title and name not in found]
        out += [f"Not there yet: {', '.join(missing)}."] if missing else []
    return out


def write_of(platform: str, path: pathlib.Path) -> None:
    """Writes the report of a platform's record and its picture."""
    rows, scale = _rows.finished(path), _fine_study.SCALES["cpu"]
    text = parts(rows, scale, _fine_study.DTYPES[platform], path.with_suffix(".png"))
    if not text:
        raise SystemExit(f"{path.name}: at no length are all runs of {BASELINE} there yet.")
    title = "Fine-tuning: which optimizer ends best?"
    write(path.stem, title, rows, METHOD, *text, script="fine_tuning")


def _differences(found: Found) -> str:
    base, lines = found[BASELINE], []
    halves = [half_width([one[i].mean(0) for one in found.values()]) for i in (0, 1)]
    for name, one in found.items():
        cells = [f"`{name}`"]
        for i, digits in ((1, 2), (0, 3)):
            less = Difference((one[i] - base[i]).mean(), halves[i])
            own = f"{one[i].mean():.{digits}f}"
            cells += [own if one is base else difference_cell(less, digits)]
        lines.append([*cells, f"{one.width:.2f}", f"{(one.early - base.early).max():.2f}"])
    return table(["optimizer", "accuracy", "loss", "good rates", "early excess"], lines)


def _by_cell(found: Found) -> str:
    base, lines = found[BASELINE], []
    for name, one in found.items():
        less = (one.accuracies - (one is not base) * base.accuracies).mean(1)
        sign = "" if one is base else "+"
        cells = [f"{x:{sign}.1f}, {rate}" for x, rate in zip(less, one.rates, strict=True)]
        lines.append([f"`{name}`", *cells])
    header = ["optimizer"]
    for i, (task, start) in enumerate(CELLS):
        half = half_width([one.accuracies[i] for one in found.values()])
        header.append(f"{task} from {start}" + (f", ± {half:.1f}" if half else ""))
    return table(header, lines)


def _draw(every: Mapping[str, Found], path: pathlib.Path) -> None:
    """Accuracy minus AdamW's with intervals, and the first steps of the shortest length."""
    figure, (axes,) = _plots.new_axes(2)
    there = {name for found in every.values() for name in found} - {BASELINE}
    names = [name for name in CONTENDERS if name in there][::-1]
    for place, (title, found) in enumerate(every.items()):
        half = half_width([one.accuracies.mean(0) for one in found.values()])
        marker, up = "osD"[place], 0.22 * ((len(every) - 1) / 2 - place)
        for name, one in found.items():
            if name != BASELINE:
                less = (one.accuracies - found[BASELINE].accuracies).mean()
                style = {"color": _plots.STYLE[name][0], "marker": marker, "capsize": 2}
                axes[0].errorbar(less, names.index(name) + up, xerr=half, **style)
        axes[0].plot([], [], marker, color="grey", label=title)
    axes[0].axvline(0, color="black", linewidth=1)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(xlabel="held-out accuracy minus AdamW's, points")
    axes[0].legend(fontsize=7, frameon=False)
    title, found = next(iter(every.items()))
    ends = {}
    for name, one in found.items():
        y, style = one.early - found[BASELINE].early, {**_plots.look(name), "marker": ""}
        axes[1].plot(np.arange(len(y)) + 1, y, **style)
        ends[name] = (len(y), y[-1])
    axes[1].set(title=title, xlabel="step", ylabel="training loss minus AdamW's, nats")
    _plots.label_ends(axes[1], ends)
    _plots.save(figure, path)
