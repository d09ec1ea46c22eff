"""The report of the study of formats."""

import pathlib

import _format_study
import _lengths
import _plots
import numpy as np
from _format_study import Drift
from _formats import FORMATS, PARENTS
from _summary import Rows
from _tables import table

LINES = {"nearest": ":", "stochastic": "-", "compensated": "--", "master": "--"}
COLOURS = {"8bit": "#0072B2", "4bit": "#D55E00", "bf16": "#009E73"}


def parts(rows: Rows, size: str, folder: pathlib.Path) -> list[str]:
    """The report's parts in order, none without runs; draws its picture into ``folder``."""
    found = {name: _format_study.drift(rows, size, name) for name in FORMATS}
    there = {name: one for name, one in found.items() if one is not None}
    broken = _format_study.diverged(rows, size)
    if not there and not broken:
        return []
    out = [
        f"Next byte, {_format_study.STEPS[size]:,} steps; each format has the hyperparameters and "
        "the seeds of its optimizer in float32, so that runs differ in rounding alone. Losses "
        "minus float32's in nats, by seed. `nearest`, `stochastic` and `compensated` are roundings "
        "of the state, or of bfloat16 parameters; `master`: float32 master weights. The early "
        "point is where a short run would end, read from curves on fewer windows.",
    ]
    if there:
        _draw(there, folder / f"formats_{size}.png")
        out += [f"![Loss minus float32's along the run](formats_{size}.png)", _table(there)]
    if broken:
        out += [f"Diverged: {', '.join(f'`{name}`' for name in broken)}."]
    todo = missing(rows, size)
    return out + ([f"**Not there yet**: {todo}."] if todo else [])


def missing(rows: Rows, size: str) -> str:
    """Formats and seeds that have no run, in words; empty if nothing is missing."""
    lines = []
    for seed in _lengths.seeds_of(_format_study.STEPS[size]):
        plans = [p for p in _format_study.plans(rows, size) if f"seed {seed}," in p.name]
        names = [plan.name.split()[-1] for plan in plans if plan.done < plan.total]
        if names:
            which = "all" if len(names) == len(plans) else ", ".join(names)
            lines.append(f"seed {seed}: {which}")
    return "; ".join(lines)


def _table(there: dict[str, Drift]) -> str:
    lines = []
    for name, one in there.items():
        at, early = one.early
        cells = [f"`{name}`", f"{one.state_bytes:.2f}", _values(early), _values(one.end)]
        lines.append([*cells, f"{one.end.mean():+.4f}"])
    header = ["format", "state, bytes per parameter", f"after {at:,} steps", "at the end", "mean"]
    return table(header, lines)


def _values(values: np.ndarray) -> str:
    return ", ".join(f"{x:+.4f}" for x in values)


def _draw(there: dict[str, Drift], path: pathlib.Path) -> None:
    """Loss minus float32's along the run, mean over the seeds, a panel for each optimizer."""
    parents = [parent for parent in PARENTS if any(FORMATS[n].parent == parent for n in there)]
    figure, axes = _plots.new_axes(len(parents), sharey=True)
    for ax, parent in zip(axes.flat, parents, strict=True):
        ax.axhline(0, color="black", linewidth=1)
        for name, one in there.items():
            if FORMATS[name].parent != parent:
                continue
            kind, rounding = name.removeprefix(f"{parent}_").split("_")
            style = {"color": COLOURS[kind], "linestyle": LINES[rounding]}
            ax.plot(one.steps, one.curve.mean(0), label=f"{kind} {rounding}", **style)
        ax.set(title=parent, xlabel="step", ylabel="validation loss minus float32's, nats")
        ax.legend(fontsize=7, frameon=False)
    _plots.save(figure, path)
