"""Markdown tables of the reports, and what is around them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _results
import _sizes
import _studies
import _summary
import numpy as np
from _contenders import CONTENDERS, growth
from _studies import Rows
from _summary import BASELINE, Difference, Final, Finals

METHOD = "Method: [benchmarks/convergence](../../convergence/README.md)."


def write(name: str, title: str, rows: Rows, about: str, *parts: str, script: str) -> None:
    """Writes a report, which says what machines, commits and text its rows come from."""

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows.values() if name in row}))

    hours = sum(row["cpu_seconds"] for row in rows.values()) / 3600
    commits = Counter(row["commit"] for row in rows.values()).most_common()
    of_commits = ", ".join(f"{name} ({number} runs)" for name, number in commits)
    where = (
        f"{len(rows)} runs, {hours:.1f} hours of CPU time, on {all_of('machine')}; commits "
        f"{of_commits}, jax {all_of('jax')}, optax {all_of('optax')}, Python {all_of('python')}, "
        f"checksum of the text {all_of('corpus')}. {about}"
    )
    _results.write(f"convergence/{name}", title, where, *parts, script=f"convergence/{script}")


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Empty without lines."""
    cells = [f"| {' | '.join(line)} |" for line in lines]
    head = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*head, *cells]) if cells else ""


def losses(found: Finals, ratios: Mapping[str, Sequence[float]]) -> str:
    """Final losses, what they took, and what the optimizer keeps; best first."""
    lines = []
    for name, one in sorted(found.items(), key=lambda item: float(np.mean(item[1].losses))):
        other = name != BASELINE and BASELINE in found
        against = difference_cell(_summary.difference(found, name)) if other else "-"
        steps = _steps(one, found[BASELINE]) if other else "-"
        state = one.first["state_bytes"] / one.first["num_params"]
        cells = [f"`{name}`", spread_cell(one.losses), str(len(one.rows)), against, steps]
        lines.append([*cells, f"{state:.2f}", _ratio(ratios.get(name))])
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


def difference_cell(of: Difference | None, digits: int = 3) -> str:
    """A difference, and the interval around it if there is one."""
    if of is None:
        return "-"
    mean, half = of
    interval = f" ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})" if half else ""
    return f"{mean:+.{digits}f}{interval}"


def _ratio(quartiles: Sequence[float] | None) -> str:
    return "{1:.2f} ({0:.2f}-{2:.2f})".format(*quartiles) if quartiles else "-"


def _steps(one: Final, baseline: Final) -> str:
    """To the baseline's loss: the median of the seeds, and which part of them got there."""
    counts = _summary.steps_to_baseline(one, baseline)
    if not counts.size:
        return "-"
    steps, missed = one.first["config"]["steps"], int(np.isinf(counts).sum())
    if missed == len(counts):
        return f"> {steps}"
    middle = float(np.median(counts))
    tokens = middle / steps * one.first["tokens"]
    text = f"> {steps}" if np.isinf(middle) else f"{middle:.0f} ({tokens / 1e3:.0f}k)"
    return text + (f"; {missed} of {len(counts)} not" if missed else "")


def chosen(found: Finals) -> str:
    """What the search chose, after how many runs, and which of it lies on an edge."""
    lines = [
        [f"`{name}`", *hyper_cells(one.hyper), str(one.searched), ", ".join(one.edges) or "-"]
        for name, one in found.items()
    ]
    header = ["contender", "learning rate", "weight decay", "others", "runs", "on an edge"]
    return table(header, lines)


def hyper_cells(hyper: Mapping[str, float]) -> list[str]:
    """Learning rate, weight decay, and the others."""
    others = {k: v for k, v in hyper.items() if k not in ("learning_rate", "weight_decay")}
    return [
        f"{hyper['learning_rate']:g}",
        f"{hyper['weight_decay']:g}",
        ", ".join(f"{key} {value:g}" for key, value in others.items()),
    ]


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
    return table(["contender", "parent", "minus the parent's loss, mean", "by seed"], lines)


def batches(found: Mapping[str, Sequence[_summary.AtBatch]]) -> str:
    """Losses by batch with each rule; empty where nothing is known."""
    lines = []
    for name, points in found.items():
        for at in points:
            rate = "-" if at.learning_rate is None else f"{at.learning_rate:g}"
            values = [loss_cell(x) for x in (at.linear, at.square_root, at.best)]
            edge = "learning rate" if at.on_edge else "-"
            less = "-" if at.lead is None else f"{at.lead:+.3f}"
            lines.append([f"`{name}`", str(at.batch), str(at.steps), *values, less, rate, edge])
    header = ["contender", "batch", "steps", "linear rule", "square-root rule", "best"]
    return table([*header, "best, minus AdamW's", "its learning rate", "on an edge"], lines)


def batch_finals(found: Mapping[str, Sequence[_summary.AtBatch]]) -> str:
    """The best of the smallest and of the largest batch on other seeds; empty without runs."""
    by_batch: dict[int, dict[str, np.ndarray]] = {}
    for name, points in found.items():
        for at in points:
            if len(at.others) == len(_studies.BATCH_SEEDS) and np.isfinite(at.others).all():
                by_batch.setdefault(at.batch, {})[name] = at.others
    lines = []
    for batch, of in by_batch.items():
        half = _summary.half_width(list(of.values()))
        for name, losses in sorted(of.items(), key=lambda item: float(item[1].mean())):
            less = None
            if name != BASELINE and BASELINE in of:
                less = Difference(float((losses - of[BASELINE]).mean()), half)
            cells = [str(batch), f"`{name}`", str(len(losses)), spread_cell(losses)]
            lines.append([*cells, difference_cell(less)])
    header = ["batch", "contender", "seeds", "validation loss, mean ± sd"]
    return table([*header, "minus AdamW's (95 % interval)"], lines)


def growths(size: str) -> str:
    """How much larger CAME's updates are as published, by the steps of a run."""
    out = []
    for times in _studies.BATCHES:
        hyper = {"b3": CONTENDERS["came"].betas[0]["b3"]}
        config = _sizes.config(f"{size}_batch", "next_token", "came", 0, hyper, times)
        out.append(f"{growth(config):.1f} in {config['steps']} steps")
    return ", ".join(out)


def loss_cell(loss: float | None) -> str:
    """Of one run."""
    if loss is None:
        return "-"
    return f"{loss:.3f}" if np.isfinite(loss) else "diverged"


def spike(rows: Rows, size: str, task: str) -> str:
    """Final losses and the largest early update with warm-up and without; empty without runs."""
    lines = []
    for name in _studies.SPIKE:
        for configs in _studies.spike(rows, size, task, name):
            found = list(_studies.there(rows, configs).values())
            if not found:
                continue
            hyper, values = configs[0]["hyper"], np.array([_studies.loss(row) for row in found])
            updates = [_summary.numbers(row["early_update_rms"]) for row in found]
            largest = max(float(np.nanmax(run)) for run in updates)
            rate, _, others = hyper_cells(hyper)
            kind = "10 % of the steps" if configs[0]["warmup"] else "none"
            cells = [f"`{name}`", others, rate, kind, str(len(found)), spread_cell(values)]
            relative = largest / hyper["learning_rate"]
            lines.append([*cells, f"{largest:.2g}", f"{relative:.2g}"])
    header = ["contender", "betas", "peak learning rate", "warm-up", "seeds"]
    header += ["validation loss, mean ± sd", "largest early update, RMS", "/ peak learning rate"]
    return table(header, lines)


def rerun(known: Rows, fresh: Rows, size: str) -> str:
    """The reruns beside the committed rows, and whether they agree."""
    lines, every = [], _summary.finals(known, size, "next_token")
    ends = {n: _studies.loss_of(fresh, _studies.rerun(known, size, n)) for n in _studies.RERUN}
    for name, end in ends.items():
        runs = f"{every[name].searched} of {CONTENDERS[name].budget}"
        less, of, agrees = None, None, "-"
        if name != BASELINE:
            of = _summary.difference(every, name, further=True)
            if None not in (of, end, ends[BASELINE]):
                less = end - ends[BASELINE]
                agrees = "yes" if abs(less - of.mean) <= of.half_width else "no"
        cells = [f"`{name}`", runs, spread_cell(every[name].losses), loss_cell(end)]
        rerun_less = "-" if less is None else f"{less:+.3f}"
        lines.append([*cells, difference_cell(of), rerun_less, agrees])
    header = ["contender", "runs of the search", "committed loss", "loss of the rerun"]
    header += ["committed, minus AdamW's (interval)", "rerun, minus AdamW's", "agrees"]
    notes = [
        f"One run each on seed {_studies.RERUN_SEED}, which none of the committed runs has. It "
        "agrees where its difference to AdamW lies in the interval that holds 19 of 20 further "
        "seeds if the committed ones are typical."
    ]
    if {row["corpus"] for row in known.values()} != {row["corpus"] for row in fresh.values()}:
        notes += [
            "This Python's library is another text than that of the committed rows: compare "
            "differences, not losses."
        ]
    return "\n\n".join([*notes, table(header, lines)])


def missing(plans: Iterable[_studies.Plan]) -> str:
    """What is not there yet, a line for each kind of run; empty if nothing is missing."""
    kinds: dict[str, dict[str, Any]] = {}
    for plan in plans:
        kind, _, contender = plan.name.rpartition(" ")
        if plan.total:
            kinds.setdefault(kind, {})[contender] = plan
    lines = []
    for kind, of in kinds.items():
        begun = [f"{n} {p.done} of {p.total}" for n, p in of.items() if 0 < p.done < p.total]
        none = [name for name, plan in of.items() if not plan.done]
        if begun or none:
            done = f"{len(of) - len(begun) - len(none)} of {len(of)}"
            lines.append([kind, done, ", ".join(begun) or "-", ", ".join(none) or "-"])
    return table(["runs", "contenders done", "begun, runs", "not begun"], lines)
