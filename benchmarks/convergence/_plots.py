"""Pictures of the report; colours of Okabe and Ito, which most colour-blind people tell apart."""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _search
import _studies
import _summary
import matplotlib
import numpy as np
from _contenders import CONTENDERS
from _studies import Rows
from _summary import BASELINE, Finals

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Colour, marker, line: 8-bit state is its parent's, hollow and dotted.
STYLE = {
    "adamw": ("#000000", "o", "-"),
    "adafactor": ("#E69F00", "s", "-"),
    "came": ("#D55E00", "^", "-"),
    "came_debiased": ("#0072B2", "v", "-"),
    "lamb": ("#009E73", "D", "-"),
    "muon": ("#CC79A7", "P", "-"),
    "lion": ("#56B4E9", "X", "-"),
    "adamw_8bit": ("#000000", "o", ":"),
    "came_8bit": ("#D55E00", "^", ":"),
    "adafactor_momentum": ("#8C6D31", "s", "--"),
    "adafactor_plain": ("#E69F00", "s", ":"),
}
TOP = 0.5  # nats above the worst of the contenders' best runs that a picture shows
ABOVE = 0.02  # between the triangles of contenders that are above it


def look(name: str) -> dict[str, Any]:
    """Of a contender's lines and markers."""
    colour, marker, line = STYLE[name]
    style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5}
    return {**style, "markerfacecolor": "none" if name.endswith("8bit") else colour}


def _top(losses: Iterable[float], room: float = TOP) -> float:
    """Of a picture of which these must be seen."""
    return max(filter(math.isfinite, losses), default=10.0) + room


def _above(ax: Any, x: np.ndarray, top: float, place: int, colour: str) -> None:
    """Triangles for what is above the picture or diverged, a line for each contender."""
    ax.plot(x, np.full(len(x), top + ABOVE * place), color=colour, marker=6, linestyle="none")


def new_axes(
    columns: int, rows: int = 1, width: float = 4.6, **kwargs: Any
) -> tuple[Any, np.ndarray]:
    """A figure and its axes, (rows, columns)."""
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns + 0.4, 3.8 * rows),
        layout="constrained",
        squeeze=False,
        **kwargs,
    )
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: pathlib.Path) -> None:
    """Writes a picture and forgets it."""
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label_ends(ax: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """Names at the right of lines, each at its line's end unless another is there.

    Args:
      ax: whose limits are set.
      ends: x and y of the last point, by name.
    """
    if not ends:
        return
    low, high = ax.get_ylim()
    log = ax.get_yscale() == "log"
    to, back = (np.log10, lambda y: 10.0**y) if log else (np.asarray, float)
    bottom, top = float(to(low)), float(to(high))
    order = sorted(ends, key=lambda name: ends[name][1])
    places = to(np.clip([ends[name][1] for name in order], low, high))
    gap = 0.055 * (top - bottom)
    for _ in range(200):  # those that touch push each other apart
        short = np.maximum(gap - np.diff(places), 0) / 2
        places[:-1] -= short
        places[1:] += short
        places = np.clip(places, bottom, top)
    arrow = {"arrowstyle": "-", "alpha": 0.4, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 0}
    for name, place in zip(order, places, strict=True):
        colour, (x, y) = STYLE[name][0], ends[name]
        ax.annotate(
            name,
            xy=(x, min(max(y, low), high)),
            xytext=(1.03, back(place)),
            textcoords=ax.get_yaxis_transform(),
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={**arrow, "color": colour},
        )


def _band(ax: Any, name: str, x: np.ndarray, runs: np.ndarray) -> None:
    """The mean of runs, (runs, points), and between which values they lie."""
    colour, _, line = STYLE[name]
    ax.plot(x, runs.mean(0), color=colour, linestyle=line, linewidth=1.5)
    ax.fill_between(x, runs.min(0), runs.max(0), color=colour, alpha=0.2, linewidth=0)


def _stacked(runs: Sequence[np.ndarray]) -> np.ndarray:
    """(runs, points) of the shortest."""
    length = min(len(run) for run in runs)
    return np.array([run[:length] for run in runs])


def finals(found: Mapping[str, Finals], path: pathlib.Path) -> None:
    """Final losses of all seeds, best contender on top; a bar at their mean."""
    figure, axes = new_axes(len(found))
    for ax, (task, contenders) in zip(axes.flat, found.items(), strict=True):
        means = {name: float(one.losses.mean()) for name, one in contenders.items()}
        order = sorted(means, key=lambda name: -means[name])
        baseline = means.get(BASELINE, means[order[-1]])
        for place, name in enumerate(order):
            losses, colour = contenders[name].losses, STYLE[name][0]
            shown = losses[losses < baseline + TOP]
            ax.plot(shown, np.full(len(shown), place), **{**look(name), "linestyle": "none"})
            if len(shown) == len(losses):
                ax.plot([means[name]] * 2, [place - 0.3, place + 0.3], color=colour)
            else:
                text = f"{len(losses) - len(shown)} of {len(losses)} diverged or above"
                style = {"ha": "right", "fontsize": 7, "color": colour}
                ax.annotate(text, (0.98, place + 0.3), xycoords=("axes fraction", "data"), **style)
        if math.isfinite(baseline):
            ax.axvline(baseline, color="black", linewidth=0.8, alpha=0.5)
        ax.set_yticks(range(len(order)), order)
        ax.set(title=task, xlabel="validation loss at the end, nats")
    save(figure, path)


def curves(found: Mapping[str, Finals], path: pathlib.Path) -> None:
    """Validation loss against step: mean over the seeds, and between which values they lie."""
    figure, axes = new_axes(len(found))
    for ax, (task, contenders) in zip(axes.flat, found.items(), strict=True):
        ends, shown = {}, []
        for name, one in contenders.items():
            runs = [_summary.curve(row) for row in one.rows.values()]
            losses = _stacked([y for _, y in runs])
            steps = runs[0][0][: losses.shape[1]]
            _band(ax, name, steps, losses)
            if np.isfinite(losses[:, -1]).all():
                ends[name] = (float(steps[-1]), float(losses[:, -1].mean()))
            shown += [losses[:, len(steps) // 3 :].ravel()]
        values = np.concatenate(shown)
        values = values[np.isfinite(values)]
        if values.size:
            ax.set_ylim(values.min() - 0.03, np.percentile(values, 97) + 0.03)
        ax.set(title=task, xlabel="step", ylabel="validation loss, nats")
        label_ends(ax, ends)
    save(figure, path)


def sensitivity(rows: Rows, size: str, tasks: Sequence[str], path: pathlib.Path) -> None:
    """Loss against learning rate with the other hyperparameters as at the start of the search.

    A triangle at the top stands for a run that is above the picture or diverged, a star for the
    best of the whole search.
    """
    figure, axes = new_axes(len(tasks))
    for ax, task in zip(axes.flat, tasks, strict=True):
        searches = {n: _studies.cell(rows, size, task, n).found for n in CONTENDERS}
        searches = {name: found for name, found in searches.items() if found}
        top = _top(min(found.values()) for found in searches.values())
        for place, (name, found) in enumerate(searches.items()):
            first = next(iter(found))
            line = sorted(
                (trial.exponent, loss)
                for trial, loss in found.items()
                if (trial.weight_decay, trial.betas) == (first.weight_decay, first.betas)
            )
            x, y = (np.array(values) for values in zip(*line, strict=True))
            colour = STYLE[name][0]
            ax.plot(10.0**x, np.where(y < top, y, np.nan), label=name, **look(name))
            high = 10.0 ** x[~(y < top)]
            _above(ax, high, top, place, colour)
            best = _search.best(found)
            if found[best] < top:
                ax.plot(10**best.exponent, found[best], "*", color=colour, markersize=12)
        ax.set(title=task, xscale="log", xlabel="peak learning rate")
        ax.set_ylim(top=top + ABOVE * (len(searches) + 1))
        ax.set_ylabel("validation loss, nats")
        # Many lines cross here: names at their ends would be names of nothing.
        ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def batches(found: Mapping[str, Sequence[_summary.AtBatch]], path: pathlib.Path) -> None:
    """Loss against batch at equal tokens: the best, the lead over AdamW, and by two rules.

    A triangle at the top stands for a run that is above the picture or diverged.
    """
    figure, axes = new_axes(2, 2)
    sizes = sorted({at.batch for points in found.values() for at in points})
    known = [at.best for points in found.values() for at in points if at.best is not None]
    for ax, field, title in (
        (axes[0, 0], "best", "best learning rate"),
        (axes[0, 1], "lead", "best, minus AdamW's"),
        (axes[1, 0], "linear", "linear rule from the smallest batch"),
        (axes[1, 1], "square_root", "square-root rule from the smallest batch"),
    ):
        ends = {}
        if field == "lead":
            ax.axhline(0, color=STYLE[BASELINE][0], linewidth=1)
        top = math.inf if field == "lead" else _top(known, 0.05 if field == "best" else TOP)
        for place, (name, points) in enumerate(found.items()):
            there = [(at.batch, getattr(at, field)) for at in points]
            there = [(x, y) for x, y in there if y is not None]
            if not there:
                continue
            x, y = (np.array(values) for values in zip(*there, strict=True))
            inside = y < top
            ax.plot(x[inside], y[inside], **look(name))
            _above(ax, x[~inside], top, place, STYLE[name][0])
            if inside.any():
                ends[name] = (float(x[inside][-1]), float(y[inside][-1]))
        ax.set(title=title, ylabel="validation loss, nats")
        if field == "lead":
            ax.set_ylabel("nats; below 0 is better than AdamW")
        else:
            low = min(known) - 0.05 if math.isfinite(min(known)) else None
            ax.set_ylim(low, top + ABOVE * (len(found) + 1))
        ax.set(xscale="log", xlabel="batch, windows")
        ax.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
        ax.set_xticks(sizes, [str(x) for x in sizes])
        ax.minorticks_off()
        label_ends(ax, ends)
    save(figure, path)


def spike(rows: Rows, size: str, task: str, path: pathlib.Path) -> None:
    """Early loss, and RMS of the updates of matrices, with warm-up and without.

    Where betas change the spike, with those that the search started with.
    """
    figure, axes = new_axes(2, 2, sharex=True, sharey="row")
    ends: dict[Any, dict[str, tuple[float, float]]] = {ax: {} for ax in axes.flat}
    for name in _studies.SPIKE:
        for column, configs in enumerate([*_studies.spike(rows, size, task, name)][-2:]):
            found = _studies.there(rows, configs).values()
            for ax, field in zip(axes[:, column], ("early_loss", "early_update_rms"), strict=True):
                if not found:
                    continue
                values = _stacked([_summary.numbers(row[field]) for row in found])
                _band(ax, name, np.arange(1, values.shape[1] + 1), values)
                last = float(values[:, -1].mean())
                if np.isfinite(last):
                    ends[ax][name] = (float(values.shape[1]), last)
    for column, title in enumerate(("with warm-up", "without warm-up")):
        axes[0, column].set(title=title)
        axes[1, column].set(xlabel="step", yscale="log")
    axes[0, 0].set_ylabel("training loss, nats")
    axes[1, 0].set_ylabel("update of matrices, RMS")
    for ax, at in ends.items():
        label_ends(ax, at)
    save(figure, path)
