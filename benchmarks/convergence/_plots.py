"""Pictures of the report; colours of Okabe and Ito, which most colour-blind people tell apart."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import _search
import _studies
import _summary
import matplotlib
import numpy as np
from _summary import Final, Rows

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLE = {
    "adamw": ("#000000", "o"),
    "adafactor": ("#E69F00", "s"),
    "came": ("#D55E00", "^"),
    "came_debiased": ("#0072B2", "v"),
    "lamb": ("#009E73", "D"),
    "muon": ("#CC79A7", "P"),
    "lion": ("#56B4E9", "X"),
    "adamw_8bit": ("#777777", "o"),
    "came_8bit": ("#F0B090", "^"),
}


def _axes(number: int, **kwargs: Any) -> tuple[Any, np.ndarray]:
    figure, axes = plt.subplots(
        1, number, figsize=(4.2 * number + 1.5, 4), layout="constrained", squeeze=False, **kwargs
    )
    for ax in axes[0]:
        ax.grid(alpha=0.3)
    return figure, axes[0]


def _save(figure: Any, axes: np.ndarray, path: pathlib.Path) -> None:
    handles = {}
    for ax in axes.flat:
        handles |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def curves(found: Mapping[str, Mapping[str, Final]], path: pathlib.Path) -> None:
    """Validation loss against step: mean over the seeds, and how far they are apart."""
    figure, axes = _axes(len(found))
    for ax, (task, contenders) in zip(axes, found.items(), strict=True):
        ends = []
        for name, one in contenders.items():
            runs = [_summary.curve(row) for row in one.rows.values()]
            length = min(len(steps) for steps, _ in runs)
            steps, losses = runs[0][0][:length], np.array([y[:length] for _, y in runs])
            ax.plot(steps, losses.mean(0), color=STYLE[name][0], label=name)
            ax.fill_between(
                steps, losses.min(0), losses.max(0), color=STYLE[name][0], alpha=0.2, linewidth=0
            )
            ends += [losses[:, length // 5], losses[:, -1]]
        ax.set(title=task, xlabel="step", ylabel="validation loss, nats")
        ax.set_ylim(np.nanmin(ends) - 0.05, np.nanmax(ends) + 0.05)
    _save(figure, axes, path)


def sensitivity(rows: Rows, size: str, tasks: Sequence[str], path: pathlib.Path) -> None:
    """Loss against learning rate with the other hyperparameters as at the start of the search."""
    figure, axes = _axes(len(tasks))
    for ax, task in zip(axes, tasks, strict=True):
        lowest = []
        for name, (colour, marker) in STYLE.items():
            found, _ = _studies.tuned(rows, size, task, name)
            if not found:
                continue
            first = next(iter(found))
            line = sorted(
                (trial.exponent, loss)
                for trial, loss in found.items()
                if (trial.weight_decay, trial.betas) == (first.weight_decay, first.betas)
            )
            x, y = zip(*line, strict=True)
            ax.plot(10.0 ** np.array(x), y, color=colour, marker=marker, markersize=5, label=name)
            best = _search.best(found)
            ax.plot(10**best.exponent, found[best], "*", color=colour, markersize=12)
            lowest.append(found[best])
        ax.set(title=task, xscale="log", xlabel="learning rate", ylabel="validation loss, nats")
        if lowest:
            ax.set_ylim(min(lowest) - 0.05, min(lowest) + 1.0)
    _save(figure, axes, path)


def batches(rows: Rows, size: str, path: pathlib.Path) -> None:
    """Loss against batch at equal tokens, by each rule of the learning rate."""
    rules = {"linear": "linear rule", "square_root": "square-root rule", "searched": "searched"}
    figure, axes = _axes(len(rules), sharey=True)
    for ax, (field, title) in zip(axes, rules.items(), strict=True):
        for name in _studies.MAIN:
            found = _summary.batches(rows, size, name)
            losses = [getattr(at, field) for at in found]
            y = [np.nan if x is None or not np.isfinite(x) else x for x in losses]
            colour, marker = STYLE[name]
            ax.plot([at.batch for at in found], y, color=colour, marker=marker, label=name)
        ax.set(title=title, xlabel="batch, windows", xscale="log")
    axes[0].set_ylabel("validation loss at equal tokens, nats")
    _save(figure, axes, path)


def spike(rows: Rows, size: str, task: str, path: pathlib.Path) -> None:
    """Early loss, and RMS of the updates of matrices, with warm-up (solid) and without."""
    figure, axes = _axes(2)
    for name in _studies.SPIKE:
        for config in _studies.spike_configs(rows, size, task, name):
            row = rows.get(_studies.key_of(config))
            if row is None:
                continue
            colour, warm = STYLE[name][0], config["warmup"] > 0
            label = f"{name}, {'warm-up' if warm else 'none'}"
            style = {"color": colour, "linestyle": "-" if warm else "--", "label": label}
            for ax, field in zip(axes, ("early_loss", "early_update_rms"), strict=True):
                values = np.array([np.nan if x is None else x for x in row[field]])
                if field == "early_update_rms":
                    values = values / config["hyper"]["learning_rate"]
                ax.plot(np.arange(1, len(values) + 1), values, alpha=0.7, linewidth=1, **style)
    axes[0].set(title="training loss", xlabel="step", ylabel="nats")
    axes[1].set(
        title="update of matrices", xlabel="step", yscale="log", ylabel="RMS / peak learning rate"
    )
    _save(figure, axes, path)
