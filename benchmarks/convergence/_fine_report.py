"""The report of the study of fine-tuning."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import _fine_study
import _plots
import _rows
import _search
import numpy as np
from _fine_study import CELLS, CONTENDERS, SEEDS
from _studies import Cell, Rows, there
from _summary import BASELINE, Difference, half_width
from _tables import METHOD, difference_cell, missing, table, write
from scipy import stats

EARLY = 50  # steps
NEAR = 0.02  # of the best accuracy: a learning rate that is as good
ABOUT = f"""Held-out accuracy in points and loss in nats, minus AdamW's on the same seeds; AdamW's
row has its own. Means over three tasks and two models to start from; the width of the 95 %
intervals comes from all optimizers of a table. Good rates: the decades of learning rate in which
accuracy on validation files is within {100 * NEAR:.0f} points of the best. Early excess: the most
by which training loss exceeds AdamW's in one of the first {EARLY} steps, a mean of all runs. Then
accuracy by task and model, and the learning rates chosen (*: on an edge of the search)."""

ABOUT_STORED = """LoRA of rank 8 by `sharding.stored`, 200 steps of AdamW from the model that AdamW
trained, at one learning rate, 0.00316: that from which searches for `lora` start. Matrices are
bfloat16, NF4 with scales in 8 bits (QLoRA), or `Linear(4)`. Their rows of 96 numbers are no
multiple of 64, so that blocks of codes run on from row to row, as in bitsandbytes. Held-out
accuracy in points, and loss in nats, means over tasks; then minus the first row's, with the
95 % interval of Student's t over runs. The model was trained anew for this: other pages do not
compare."""


class Final(NamedTuple):
    """The final runs of an optimizer at one length, and its searches."""

    ends: np.ndarray  # (cells, seeds, 2), accuracy in points and loss
    early: np.ndarray  # (steps,), mean losses
    rates: list[str]  # by cell, with a star on an edge
    width: float  # decades of learning rates as good as the best, a mean


Found = Mapping[str, Final]


def final(rows: Rows, cells: list[Cell]) -> Final | None:
    """None unless all runs are there."""
    runs = there(rows, [config for cell in cells for config in cell.finals]).values()
    if len(runs) < len(CELLS) * len(SEEDS):
        return None
    ends = np.array([(100 * row["accuracy"], row["loss"]) for row in runs], float)
    early = np.array([row["early_loss"][:EARLY] for row in runs], float).mean(0)
    rates, widths = [], []
    for cell in cells:
        exponents, best = [trial.exponent for trial in cell.found], _search.best(cell.found)
        on_edge = best.exponent in (min(exponents), max(exponents))
        rates.append(f"{10**best.exponent:.3g}" + "*" * on_edge)
        tried = np.array([row["accuracy"] for row in there(rows, cell.tried).values()])
        widths.append(np.ptp(np.array(exponents)[tried >= tried.max() - NEAR]))
    return Final(ends.reshape(len(CELLS), -1, 2), early, rates, float(np.mean(widths)))


def write_to(folder: pathlib.Path, backend: str) -> None:
    """Draws a platform's record; writes its report if ``folder`` has the record, else prints it."""
    record, every = _fine_study.record(backend), {}
    rows, picture = _rows.finished(record), folder / f"{record.stem}.png"
    for mode, steps in _fine_study.RUNS["cpu"]:
        of = {n: _fine_study.cells(rows, "cpu", backend, mode, steps, n) for n in CONTENDERS}
        found = {name: one for name, cells in of.items() if (one := final(rows, cells))}
        if BASELINE in found and len(found) > 1:
            every[f"{mode}, {steps:,} steps"] = found
    _draw(every, picture)
    out = [ABOUT, f"![Accuracy minus AdamW's, and the loss of the first steps]({picture.name})"]
    for title, found in every.items():
        out += [f"## {title.capitalize()}", _table(found)]
    todo = missing(_fine_study.plans(rows, "cpu", backend))
    out += ["## Not there yet", todo] if todo else []
    if folder == record.parent:
        title = "Fine-tuning: which optimizer ends best?"
        about = f"{METHOD} Rows: `{record.name}`; seed 0 has the searches."
        write(record.stem, title, rows, about, *out, script="fine_tuning")
    else:
        print("\n\n".join(out))


def write_stored(backend: str) -> None:
    """Writes the report of adapters on stored parameters."""
    record = _fine_study.record(backend, stored=True)
    rows = _rows.finished(record)
    title = "Fine-tuning: what do frozen parameters in 4 bits cost?"
    about = f"{METHOD} Rows: `{record.name}`."
    parts = ABOUT_STORED, _stored_table(rows, backend)
    write(record.stem, title, rows, about, *parts, script="fine_tuning")


def _stored_table(rows: Rows, backend: str) -> str:
    """Empty where no seed of any task has all rows."""
    ends: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for mode in _fine_study.STORED:
        found = there(rows, _fine_study.stored_configs("cpu", backend, mode)).values()
        ends[mode] = {
            (row["config"]["task"], row["config"]["seed"]): (100 * row["accuracy"], row["loss"])
            for row in found
        }
    shared = [run for run in ends["lora_16"] if all(run in of for of in ends.values())]
    if not shared:
        return ""
    base, lines = np.array([ends["lora_16"][run] for run in shared]), []
    tasks = list(dict.fromkeys(task for task, _ in shared))
    for mode, of in ends.items():
        values = np.array([of[run] for run in shared])
        cells = [f"`{mode}`", f"{values[:, 0].mean():.2f}", f"{values[:, 1].mean():.3f}"]
        for less, n in zip((values - base).T, (2, 3), strict=True):
            half = np.nan if len(less) < 2 else stats.sem(less) * stats.t.ppf(0.975, len(less) - 1)
            cells.append("-" if mode == "lora_16" else f"{less.mean():+.{n}f} ± {half:.{n}f}")
        by_task = [[of[run][0] for run in shared if run[0] == task] for task in tasks]
        lines.append([*cells, *(f"{np.mean(accuracies):.1f}" for accuracies in by_task)])
    header = ["mode", "accuracy", "loss", "accuracy, minus 16 bits'", "loss, minus 16 bits'"]
    seeds = ", ".join(str(seed) for seed in sorted({seed for _, seed in shared}))
    return f"{table([*header, *tasks], lines)}\n\nRuns a row: {len(shared)}, of seed {seeds}."


def _halves(found: Found) -> list[float | None]:
    return [half_width([one.ends[..., i].mean(0) for one in found.values()]) for i in (0, 1)]


def _table(found: Found) -> str:
    base, lines = found[BASELINE], []
    for name, one in found.items():
        less, cells = one.ends - (one is not base) * base.ends, [f"`{name}`"]
        for x, half, n in zip(less.mean((0, 1)), _halves(found), (2, 3), strict=True):
            cells.append(f"{x:.{n}f}" if one is base else difference_cell(Difference(x, half), n))
        cells += [f"{one.width:.2f}", f"{(one.early - base.early).max():.2f}"]
        by_cell, sign = zip(less[..., 0].mean(1), one.rates, strict=True), "+" * (one is not base)
        lines.append([*cells, *(f"{x:{sign}.1f}, {rate}" for x, rate in by_cell)])
    header = ["optimizer", "accuracy", "loss", "good rates", "early excess"]
    for i, cell in enumerate(CELLS):
        half = half_width([one.ends[i, :, 0] for one in found.values()])
        header.append(f"{' from '.join(cell)}, ± {half:.1f}")
    return table(header, lines)


def _draw(every: Mapping[str, Found], path: pathlib.Path) -> None:
    """Accuracy minus AdamW's with intervals, and the first steps of the shortest length."""
    figure, (axes,) = _plots.new_axes(2)
    names = [name for name in CONTENDERS[:0:-1] if any(name in found for found in every.values())]
    for place, (title, found) in enumerate(every.items()):
        marker, up = "osD"[place], 0.22 * ((len(every) - 1) / 2 - place)
        for name in found.keys() - {BASELINE}:
            less = (found[name].ends - found[BASELINE].ends)[..., 0].mean()
            style = {"color": _plots.STYLE[name][0], "marker": marker, "capsize": 2}
            axes[0].errorbar(less, names.index(name) + up, xerr=_halves(found)[0], **style)
        axes[0].plot([], [], marker, color="grey", label=title)
    axes[0].axvline(0, color="black", linewidth=1)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(xlabel="held-out accuracy minus AdamW's, points")
    axes[0].legend(fontsize=7, frameon=False)
    (title, found), ends = next(iter(every.items())), {}
    for name, one in found.items():
        y = one.early - found[BASELINE].early
        axes[1].plot(np.arange(len(y)) + 1, y, **{**_plots.look(name), "marker": ""})
        ends[name] = (len(y), y[-1])
    axes[1].set(title=title, xlabel="step", ylabel="training loss minus AdamW's, nats")
    _plots.label_ends(axes[1], ends)
    _plots.save(figure, path)
