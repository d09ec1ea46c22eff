"""Markdown tables of the report."""

from collections.abc import Mapping, Sequence

import _studies
import _summary
import numpy as np
from _contenders import CONTENDERS
from _summary import BASELINE, Final, Rows


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(header)
    return "\n".join(
        [
            "| " + " | ".join(header) + " |",
            rule,
            *("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


def _spread(values: np.ndarray, digits: int = 3, sign: str = "") -> str:
    """Mean and standard deviation of the seeds."""
    if not np.isfinite(values).all():
        return f"diverged ({int((~np.isfinite(values)).sum())} of {len(values)})"
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):{sign}.{digits}f}{deviation}"


def losses(found: Mapping[str, Final], ratios: Mapping[str, float]) -> str:
    """Final losses, what they took, and what the optimizer keeps; best first."""
    baseline = found.get(BASELINE)
    lines = []
    for name, one in sorted(found.items(), key=lambda item: float(np.mean(item[1].losses))):
        against = steps = "-"
        if baseline is not None and name != BASELINE:
            against = _spread(_summary.difference(one, baseline), sign="+")
        if baseline is not None:
            steps = _steps(one, _summary.target(baseline))
        ratio = f"{ratios[name]:.2f}" if name in ratios else "-"
        cells = [f"`{name}`", _spread(one.losses), str(len(one.rows)), against, steps]
        lines.append([*cells, f"{one.state_bytes:.2f}", ratio])
    header = [
        "contender",
        "validation loss, mean ± sd",
        "seeds",
        "minus AdamW's, by seed",
        "steps to AdamW's loss",
        "state, bytes a parameter",
        "time of a step / AdamW's",
    ]
    return _table(header, lines)


def _steps(one: Final, target: float) -> str:
    counts = np.array([_summary.steps_to(row, target) for row in one.rows.values()])
    reached = counts[np.isfinite(counts)]
    if not reached.size:
        return "not reached"
    tokens = next(iter(one.rows.values()))["config"]
    each = tokens["batch"] * tokens["context"]
    missed = (
        f", {len(counts) - reached.size} of {len(counts)} not" if reached.size < len(counts) else ""
    )
    return f"{reached.mean():.0f} ({reached.mean() * each / 1e3:.0f}k tokens){missed}"


def chosen(found: Mapping[str, Final]) -> str:
    """What the search chose, after how many runs, and which of it lies on an edge."""
    lines = []
    for name, one in found.items():
        hyper = dict(one.hyper)
        rate, decay = hyper.pop("learning_rate"), hyper.pop("weight_decay")
        betas = ", ".join(f"{key} {value:g}" for key, value in hyper.items())
        edges = ", ".join(one.edges) or "-"
        lines.append([f"`{name}`", f"{rate:g}", f"{decay:g}", betas, str(one.searched), edges])
    header = ["contender", "learning rate", "weight decay", "others", "runs", "on an edge"]
    return _table(header, lines)


def batches(rows: Rows, size: str) -> str:
    """Losses by batch with each rule; None where nothing is known."""
    lines = []
    for name in _studies.MAIN:
        for at in _summary.batches(rows, size, name):
            rate = "-" if at.learning_rate is None else f"{at.learning_rate:g}"
            values = [_cell(x) for x in (at.linear, at.square_root, at.searched)]
            edge = "learning rate" if at.on_edge else "-"
            lines.append([f"`{name}`", str(at.batch), str(at.steps), *values, rate, edge])
    header = [
        "contender",
        "batch",
        "steps",
        "linear rule",
        "square-root rule",
        "searched",
        "its learning rate",
        "on an edge",
    ]
    return _table(header, lines) if lines else ""


def _cell(loss: float | None) -> str:
    if loss is None:
        return "-"
    return f"{loss:.3f}" if np.isfinite(loss) else "diverged"


def missing(rows: Rows, size: str, tasks: Sequence[str]) -> str:
    """What is not there yet."""
    plans = _studies.plans(rows, size, list(_studies.STUDIES), tasks, list(CONTENDERS))
    lines = [
        [plan.name, f"{plan.done} of {plan.total}", plan.waits and f"waits for {plan.waits}"]
        for plan in plans
        if plan.done < plan.total
    ]
    return _table(["study", "runs", ""], lines) if lines else ""
