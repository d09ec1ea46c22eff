"""Markdown tables of the report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _growth
import _sizes
import _studies
import _summary
import numpy as np
from _contenders import CONTENDERS
from _summary import BASELINE, Final, Rows, Spread

Ratios = Mapping[str, Sequence[float]]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(header)
    cells = [" | ".join(line) for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {line} |" for line in cells)])


def losses(found: Mapping[str, Final], ratios: Ratios) -> str:
    """Final losses, what they took, and what the optimizer keeps; best first."""
    baseline, apart = found.get(BASELINE), _summary.spread_of(found)
    lines = []
    for name, one in sorted(found.items(), key=lambda item: float(np.mean(item[1].losses))):
        against = steps = "-"
        if baseline is not None and name != BASELINE:
            less = _summary.difference(one, baseline)
            against = _interval(less, _half_width(apart, less))
            steps = _steps(_summary.steps_to_baseline(one, baseline), one)
        cells = [f"`{name}`", spread_cell(one.losses), str(len(one.rows)), against, steps]
        lines.append([*cells, f"{one.state_bytes:.2f}", _ratio(ratios.get(name))])
    header = [
        "contender",
        "validation loss, mean ± sd",
        "seeds",
        "minus AdamW's (95 % interval)",
        "steps (tokens) to AdamW's loss",
        "state, bytes per parameter",
        "time of a training step / AdamW's (quartiles)",
    ]
    return table(header, lines)


def spread_cell(values: np.ndarray) -> str:
    """Mean and standard deviation of the seeds."""
    if not np.isfinite(values).all():
        return f"diverged ({int((~np.isfinite(values)).sum())} of {len(values)})"
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation}"


def _interval(values: np.ndarray, half_width: float | None) -> str:
    """Mean of differences, and the interval around it if there is one."""
    if not values.size or not np.isfinite(values).all():
        return "-"
    mean = float(np.mean(values))
    if half_width is None:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} ({mean - half_width:+.3f} to {mean + half_width:+.3f})"


def _half_width(apart: Spread | None, differences: np.ndarray) -> float | None:
    """Of the interval of their mean."""
    return apart.half_width(len(differences)) if apart and differences.size else None


def _ratio(quartiles: Sequence[float] | None) -> str:
    if quartiles is None:
        return "-"
    low, middle, high = quartiles
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _steps(counts: np.ndarray, one: Final) -> str:
    """Median of the seeds, and which part of them got there."""
    if not counts.size:
        return "-"
    row = next(iter(one.rows.values()))
    steps, missed = row["config"]["steps"], int(np.isinf(counts).sum())
    if missed == len(counts):
        return f"> {steps}"
    middle = float(np.median(counts))
    tokens = middle / steps * row["tokens"]
    text = f"> {steps}" if np.isinf(middle) else f"{middle:.0f} ({tokens / 1e3:.0f}k)"
    return text + (f"; {missed} of {len(counts)} not" if missed else "")


def chosen(found: Mapping[str, Final]) -> str:
    """What the search chose, after how many runs, and which of it lies on an edge."""
    lines = []
    for name, one in found.items():
        edges = ", ".join(one.edges) or "-"
        lines.append([f"`{name}`", *hyper_cells(one.hyper), str(one.searched), edges])
    header = ["contender", "learning rate", "weight decay", "others", "runs", "on an edge"]
    return table(header, lines)


def hyper_cells(hyper: Mapping[str, float]) -> list[str]:
    others = {k: v for k, v in hyper.items() if k not in ("learning_rate", "weight_decay")}
    return [
        f"{hyper['learning_rate']:g}",
        f"{hyper['weight_decay']:g}",
        ", ".join(f"{key} {value:g}" for key, value in others.items()),
    ]


def searching(rows: Rows, size: str, task: str) -> str:
    """The best so far of searches that no final run followed yet; empty if there are none."""
    lines = []
    for name, one in CONTENDERS.items():
        found, _ = _studies.tuned(rows, size, task, name)
        if found and _summary.final(rows, size, task, name) is None:
            hyper, runs = _studies.best_known(rows, size, task, name)
            loss = _cell(min(found.values()))
            lines.append([f"`{name}`", f"{runs} of {one.budget}", loss, *hyper_cells(hyper)])
    header = ["contender", "runs", "best so far", "learning rate", "weight decay", "others"]
    return table(header, lines) if lines else ""


def parents(rows: Rows, size: str, task: str) -> str:
    """What state in few bits changes at its parent's hyperparameters; empty without runs.

    Each seed is shown: such runs go the same way, so that the spread of contenders says nothing.
    """
    lines = []
    for name, one in CONTENDERS.items():
        less = _summary.at_parents(rows, size, task, name)
        if less.size:
            each = ", ".join(f"{x:+.4f}" for x in less)
            lines.append([f"`{name}`", f"`{one.parent}`", f"{less.mean():+.4f}", each])
    header = ["contender", "parent", "minus the parent's loss, mean", "by seed"]
    return table(header, lines) if lines else ""


def batches(rows: Rows, size: str) -> str:
    """Losses by batch with each rule; empty where nothing is known."""
    lines = []
    for name in _studies.MAIN:
        leads = _summary.lead(rows, size, name)
        for at in _summary.batches(rows, size, name):
            rate = "-" if at.learning_rate is None else f"{at.learning_rate:g}"
            values = [_cell(x) for x in (at.linear, at.square_root, at.best)]
            edge = "learning rate" if at.on_edge else "-"
            less = f"{leads[at.batch]:+.3f}" if at.batch in leads else "-"
            lines.append([f"`{name}`", str(at.batch), str(at.steps), *values, less, rate, edge])
    header = ["contender", "batch", "steps", "linear rule", "square-root rule", "best"]
    header += ["best, minus AdamW's", "its learning rate", "on an edge"]
    return table(header, lines) if lines else ""


def batch_finals(rows: Rows, size: str) -> str:
    """The best of the smallest and of the largest batch on other seeds; empty without runs."""
    lines = []
    for batch, found in _summary.batch_finals(rows, size).items():
        apart, base = _summary.spread(list(found.values())), found.get(BASELINE)
        for name, losses in sorted(found.items(), key=lambda item: float(item[1].mean())):
            other = name != BASELINE and base is not None
            less = _interval(losses - base, _half_width(apart, losses)) if other else "-"
            lines.append([str(batch), f"`{name}`", str(len(losses)), spread_cell(losses), less])
    header = ["batch", "contender", "seeds", "validation loss, mean ± sd"]
    return table([*header, "minus AdamW's (95 % interval)"], lines) if lines else ""


def growths(size: str) -> str:
    """How much larger CAME's updates are as published, by the steps of a run."""
    out = []
    for times in _studies.BATCH_BUDGETS:
        hyper = {"b3": CONTENDERS["came"].betas[0]["b3"]}
        config = _sizes.config(f"{size}_batch", "next_token", "came", 0, hyper, times)
        out.append(f"{_growth.growth(config):.1f} in {config['steps']} steps")
    return ", ".join(out)


def _cell(loss: float | None) -> str:
    if loss is None:
        return "-"
    return f"{loss:.3f}" if np.isfinite(loss) else "diverged"


def spike(rows: Rows, size: str, task: str) -> str:
    """Final losses and the largest early update with warm-up and without; empty without runs."""
    lines = []
    for name in _studies.SPIKE:
        for hyper in _studies.spike_hypers(rows, size, task, name):
            for warm in (True, False):
                found = _summary.spike(rows, size, task, name, hyper, warm)
                if not found:
                    continue
                values = np.array([_summary.loss(row) for row in found])
                updates = [_summary.numbers(row["early_update_rms"]) for row in found]
                largest = max(float(np.nanmax(run)) for run in updates)
                rate, _, others = hyper_cells(hyper)
                kind = "10 % of the steps" if warm else "none"
                cells = [f"`{name}`", others, rate, kind, str(len(found)), spread_cell(values)]
                relative = largest / hyper["learning_rate"]
                lines.append([*cells, f"{largest:.2g}", f"{relative:.2g}"])
    header = ["contender", "betas", "peak learning rate", "warm-up", "seeds"]
    header += ["validation loss, mean ± sd", "largest early update, RMS", "/ peak learning rate"]
    return table(header, lines) if lines else ""


def rerun(known: Rows, fresh: Rows, size: str) -> str:
    """The reruns beside the committed rows, and whether they agree."""
    lines, same = [], _summary.corpus(known) == _summary.corpus(fresh)
    for one in _summary.reruns(known, fresh, size, _studies.RERUN):
        committed = "-" if one.committed is None else spread_cell(one.committed.losses)
        against = "-" if one.expected is None else _interval(one.expected, one.half_width)
        budget = CONTENDERS[one.name].budget
        cells = [f"`{one.name}`", f"{one.searched} of {budget}", committed, _cell(one.loss)]
        difference = "-" if one.difference is None else f"{one.difference:+.3f}"
        lines.append([*cells, against, difference, one.verdict])
    header = ["contender", "runs of the search", "committed loss", "loss of the rerun"]
    header += ["committed, minus AdamW's (interval)", "rerun, minus AdamW's", "agrees"]
    notes = [
        f"One run each on seed {_studies.RERUN_SEED}, which none of the committed runs has. It "
        "agrees where its difference to AdamW lies in the interval that holds 19 of 20 further "
        "seeds if the committed ones are typical."
    ]
    if not same and _summary.corpus(known) is not None:
        notes += [
            "This Python's library is another text than that of the committed rows: compare "
            "differences, not losses."
        ]
    return "\n\n".join([*notes, table(header, lines)])


def missing(rows: Rows, size: str, tasks: Sequence[str]) -> str:
    """What is not there yet, a line for each study and task; empty if nothing is missing."""
    lines = []
    for task in tasks:
        for study, plan in _studies.STUDIES.items():
            plans: dict[str, Any] = {name: plan(rows, size, task, name) for name in CONTENDERS}
            plans = {name: one for name, one in plans.items() if one.total}
            begun = [
                f"{name} {one.done} of {one.total}"
                for name, one in plans.items()
                if 0 < one.done < one.total
            ]
            none = [name for name, one in plans.items() if not one.done]
            if begun or none:
                done = sum(one.done == one.total for one in plans.values())
                cells = [study, task, f"{done} of {len(plans)}"]
                lines.append([*cells, ", ".join(begun) or "-", ", ".join(none) or "-"])
    header = ["study", "task", "contenders done", "begun, runs", "not begun"]
    return table(header, lines) if lines else ""
