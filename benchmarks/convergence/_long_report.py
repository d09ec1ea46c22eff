"""The reports of the studies of long runs: lengths and formats."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import _long
import _plots
import _rows
import _search
import _sizes
import _studies
import _summary
import numpy as np
from _contenders import FORMATS
from _studies import Rows
from _summary import BASELINE, Difference, Final, Finals
from _tables import METHOD, difference_cell, hyper_cells, missing, spread_cell, table, write

# What is asked beside the difference to the baseline: a name, and which minus which.
CONTRASTS = {
    "confidence, debiased": ("came_debiased", "adafactor"),
    "confidence, as published": ("came", "adafactor"),
    "debiasing": ("came_debiased", "came"),
}
NUDGE = 1.03  # between the marks of contenders at one length
EARLY = 0.15  # of a run: the nearest point of a curve is what short runs would have seen
LINES = {"nearest": ":", "stochastic": "-", "compensated": "--", "master": "--"}
COLOURS = {"8bit": "#0072B2", "4bit": "#D55E00", "bf16": "#009E73"}

ByLength = Mapping[int, Finals]


def write_both(rows: Rows, size: str) -> None:
    """Writes the reports of a size and their pictures, where there are any runs."""
    plans = _long.length_plans(rows, size, _long.LENGTHS[size])
    of_lengths = _studies.there(rows, [config for plan in plans for config in plan.configs])
    both = (_long.formats, _long.in_float32)
    of_formats = [config for name in FORMATS for of in both for config in of(rows, size, name)]
    for name, title, parts, used in (
        ("lengths", "How long until CAME has Adam's quality?", lengths, of_lengths),
        (
            "formats",
            "State and parameters in few bits, in long runs",
            formats,
            _studies.there(rows, of_formats),
        ),
    ):
        if text := parts(rows, size, _rows.FOLDER):
            write(f"{name}_{size}", title, used, METHOD, *text, script="report")


def lengths(rows: Rows, size: str, folder: pathlib.Path) -> list[str]:
    """The report's parts in order, none without final runs; draws its picture into ``folder``."""
    every = {task: finals(rows, size, task) for task in _long.TASKS}
    if not any(any(found.values()) for found in every.values()):
        return []
    _draw_lengths(every, folder / f"lengths_{size}.png")
    windows = _sizes.SIZES[_long.size_of(size)].final_windows
    todo = missing(_long.length_plans(rows, size, _long.LENGTHS[size]))
    out = ["**Not finished**: what is missing is listed at the end."] if todo else []
    out += [
        f"Cross entropy in nats on {windows:,} held-out windows, minus AdamW's on the same seeds; "
        "below 0 is better than AdamW. In brackets 95 % intervals; their width comes from all "
        "contenders of a length together. One that has 0 in it shows no difference: it is called "
        "level. Intervals leave out that hyperparameters were chosen on one other seed.",
        f"![Loss minus AdamW's against the steps of a run](lengths_{size}.png)",
    ]
    for task, found in every.items():
        if not any(found.values()):
            continue
        contrasts = _contrasts(found)
        out += [f"## {task}", _differences(found)]
        out += ["What confidence and debiasing change:", contrasts] if contrasts else []
        out += ["What the searches chose:", _chosen(found)]
    return out + (["## Not there yet", todo] if todo else [])


def finals(rows: Rows, size: str, task: str) -> dict[int, dict[str, Final]]:
    """By length, of the contenders that have any."""
    out: dict[int, dict[str, Final]] = {steps: {} for steps in _long.LENGTHS[size]}
    for steps, found in out.items():
        for name in _long.CONTESTED:
            cell = _long.cell(rows, size, task, name, steps)
            one = _summary.final(rows, cell, _edges)
            found |= {name: one} if one else {}
    return out


def _edges(found: _search.Found) -> list[str]:
    rate = [] if _search.bracketed(found, _long.STRIDE) else ["learning_rate"]
    return rate + _search.edges_of_betas(found)


def difference(found: ByLength, steps: int, name: str, other: str = BASELINE) -> Difference | None:
    """Loss minus the other's at a length."""
    return _summary.difference(found[steps], name, other, seeds=len(_long.seeds_of(steps)))


def _differences(found: ByLength) -> str:
    """Loss minus AdamW's by length, and at which lengths it is level; AdamW's row has its loss."""
    lines = []
    for name in _long.CONTESTED:
        of = {steps: finals[name] for steps, finals in found.items() if name in finals}
        if name == BASELINE and of:
            cells = [spread_cell(of[steps].losses) if steps in of else "-" for steps in found]
            lines.append([f"`{name}`", *cells, "-"])
        elif of:
            points = {steps: difference(found, steps, name) for steps in found}
            known = {n: of for n, of in points.items() if of and of.half_width is not None}
            level = [f"{n:,}" for n, of in known.items() if abs(of.mean) <= of.half_width]
            none = f"none of {len(known)}" if known else "-"
            lost = {n for n, one in of.items() if not np.isfinite(one.losses).all()}
            cells = {n: difference_cell(point) for n, point in points.items()}
            cells |= {n: "diverged" for n in lost if not points[n]}
            lines.append([f"`{name}`", *cells.values(), ", ".join(level) or none])
    header = [f"{steps:,} steps" for steps in found]
    return table(["contender", *header, "level with AdamW at"], lines)


def _contrasts(found: ByLength) -> str:
    """What confidence and debiasing change by length; empty without runs."""
    lines = []
    for name, (one, other) in CONTRASTS.items():
        points = [difference(found, steps, one, other) for steps in found]
        if any(points):
            which = f"`{one}` minus `{other}`"
            lines.append([name, which, *(difference_cell(point) for point in points)])
    return table(["what", "difference", *(f"{steps:,} steps" for steps in found)], lines)


def _chosen(found: ByLength) -> str:
    """What each search chose, after how many runs, and what of it lies on an edge."""
    lines = []
    for steps, contenders in found.items():
        for name, one in contenders.items():
            rate, _, others = hyper_cells(one.hyper)
            edges = ", ".join(one.edges) or "-"
            cells = [f"{steps:,}", f"`{name}`", rate, others or "-", str(one.searched), edges]
            lines.append([*cells, f"{spread_cell(one.losses)} ({len(one.rows)})"])
    header = ["steps", "contender", "learning rate", "others", "runs of the search", "on an edge"]
    return table([*header, "validation loss, mean ± sd (seeds)"], lines)


def _draw_lengths(every: Mapping[str, ByLength], path: pathlib.Path) -> None:
    """Loss minus AdamW's against the steps of a run, with 95 % intervals."""
    figure, axes = _plots.new_axes(len(every))
    for ax, (task, found) in zip(axes.flat, every.items(), strict=True):
        ax.axhline(0, color=_plots.STYLE[BASELINE][0], linewidth=1)
        ends, lengths = {}, list(found)
        names = [name for name in _long.CONTESTED if name != BASELINE]
        for place, name in enumerate(names):
            points = {n: of for n in lengths if (of := difference(found, n, name))}
            if not points:
                continue
            x = [steps * NUDGE ** (place - len(names) / 2) for steps in points]
            y = [of.mean for of in points.values()]
            bars = [of.half_width or 0.0 for of in points.values()]
            ax.errorbar(x, y, bars, **_plots.look(name), capsize=2, elinewidth=1)
            ends[name] = (x[-1], y[-1])
        ax.set(xscale="log", xlabel="steps of a run", ylabel="loss minus AdamW's, nats")
        ax.set_xticks(lengths, [f"{steps:,}" for steps in lengths])
        ax.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        ax.minorticks_off()
        ax.set_title(task, fontsize=9)
        _plots.label_ends(ax, ends)
    _plots.save(figure, path)


class Drift(NamedTuple):
    """A format beside float32, by seed: loss minus float32's in nats."""

    end: np.ndarray  # (seeds,), on the large set of windows
    steps: np.ndarray  # (points,)
    curve: np.ndarray  # (seeds, points), on fewer windows
    state_bytes: float  # of the optimizer, for each parameter


def drift(rows: Rows, size: str, name: str) -> Drift | None:
    """Of the seeds on which both are there; None without any, or where one diverged."""
    both = zip(_long.formats(rows, size, name), _long.in_float32(rows, size, name), strict=True)
    pairs = [list(of.values()) for pair in both if len(of := _studies.there(rows, pair)) == 2]
    if not pairs or any(row["diverged"] for pair in pairs for row in pair):
        return None
    curves = [[_summary.curve(row)[1] for row in pair] for pair in pairs]
    return Drift(
        end=np.array([one["loss"] - other["loss"] for one, other in pairs]),
        steps=_summary.curve(pairs[0][0])[0],
        curve=np.array([one - other for one, other in curves]),
        state_bytes=pairs[0][0]["state_bytes"] / pairs[0][0]["num_params"],
    )


def formats(rows: Rows, size: str, folder: pathlib.Path) -> list[str]:
    """The report's parts in order, none without runs; draws its picture into ``folder``."""
    runs = {name: _studies.there(rows, _long.formats(rows, size, name)) for name in FORMATS}
    found = {name: of for name in FORMATS if (of := drift(rows, size, name))}
    broken = [n for n, of in runs.items() if any(row["diverged"] for row in of.values())]
    if not found and not broken:
        return []
    out = [
        f"Next byte, {_long.FORMAT_STEPS[size]:,} steps; each format has the hyperparameters and "
        "the seeds of its optimizer in float32, so that runs differ in rounding alone. Losses "
        "minus float32's in nats, by seed. `nearest`, `stochastic` and `compensated` are roundings "
        "of the state, or of bfloat16 parameters; `master`: float32 master weights. The early "
        "point is where a short run would end, read from curves on fewer windows.",
    ]
    if found:
        _draw_formats(found, folder / f"formats_{size}.png")
        out += [f"![Loss minus float32's along the run](formats_{size}.png)", _drifts(found)]
    if broken:
        out += [f"Diverged: {', '.join(f'`{name}`' for name in broken)}."]
    todo = missing(_long.format_plans(rows, size))
    return out + (["## Not there yet", todo] if todo else [])


def _drifts(found: Mapping[str, Drift]) -> str:
    def by_seed(values: np.ndarray) -> str:
        return ", ".join(f"{x:+.4f}" for x in values)

    steps = next(iter(found.values())).steps
    early = int(np.abs(steps - EARLY * steps[-1]).argmin())  # where a short run would end
    lines = []
    for name, of in found.items():
        cells = [f"`{name}`", f"{of.state_bytes:.2f}", by_seed(of.curve[:, early])]
        lines.append([*cells, by_seed(of.end), f"{of.end.mean():+.4f}"])
    header = ["format", "state, bytes per parameter", f"after {steps[early]:,} steps", "at the end"]
    return table([*header, "mean"], lines)


def _draw_formats(found: Mapping[str, Drift], path: pathlib.Path) -> None:
    """Loss minus float32's along the run, mean over the seeds, a panel for each optimizer."""
    parents = list(dict.fromkeys(FORMATS[name].parent for name in found))
    figure, axes = _plots.new_axes(len(parents), sharey=True)
    for ax, parent in zip(axes.flat, parents, strict=True):
        ax.axhline(0, color="black", linewidth=1)
        for name, of in found.items():
            if FORMATS[name].parent == parent:
                kind, rounding = name.removeprefix(f"{parent}_").split("_")
                style = {"color": COLOURS[kind], "linestyle": LINES[rounding]}
                ax.plot(of.steps, of.curve.mean(0), label=f"{kind} {rounding}", **style)
        ax.set(title=parent, xlabel="step", ylabel="validation loss minus float32's, nats")
        ax.legend(fontsize=7, frameon=False)
    _plots.save(figure, path)
