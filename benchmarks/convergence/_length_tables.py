"""Markdown tables of the study of lengths."""

from collections.abc import Mapping, Sequence

import _length_summary
import _lengths
import _studies
import numpy as np
from _length_summary import Point
from _summary import BASELINE, Final, Rows
from _tables import hyper_cells, spread_cell, table

Found = Mapping[int, Mapping[str, Final]]


def differences(found: Found, size: str) -> str:
    """Loss minus AdamW's by length, and at which lengths it is level; AdamW's row has its loss."""
    lines = []
    for name in _lengths.CONTESTED:
        of = {steps: contenders.get(name) for steps, contenders in found.items()}
        if not any(of.values()):
            continue
        if name == BASELINE:
            cells = [_loss(of.get(steps)) for steps in _lengths.LENGTHS[size]]
            lines.append([f"`{name}`", *cells, "-"])
            continue
        points = _length_summary.points(found, name)
        cells = _by_length(points, size, of)
        lines.append([f"`{name}`", *cells, _length_summary.level_at(points)])
    header = [f"{steps:,} steps" for steps in _lengths.LENGTHS[size]]
    return table(["contender", *header, "level with AdamW at"], lines)


def contrasts(found: Found, size: str) -> str:
    """What confidence and debiasing change by length; empty without runs."""
    lines = []
    for name, (one, other) in _length_summary.CONTRASTS.items():
        points = _length_summary.points(found, one, other)
        if points:
            which = f"`{one}` minus `{other}`"
            lines.append([name, which, *_by_length(points, size, {})])
    header = [f"{steps:,} steps" for steps in _lengths.LENGTHS[size]]
    return table(["what", "difference", *header], lines) if lines else ""


def chosen(found: Found) -> str:
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


def missing(rows: Rows, size: str) -> str:
    """What is not there yet, a line for each length; empty if nothing is missing."""
    lines = []
    for steps in _lengths.LENGTHS[size]:
        plans = list(_lengths.plans(rows, size, (steps,)))
        todo = [plan for plan in plans if plan.done < plan.total or plan.waits]
        if not todo:
            continue
        begun = [f"{_short(plan)} {plan.done} of about {plan.total}" for plan in todo if plan.done]
        none = [_short(plan) for plan in todo if not plan.done]
        none = ["all"] if len(none) == len(plans) else none
        cells = [f"{steps:,}", f"{len(plans) - len(todo)} of {len(plans)}"]
        lines.append([*cells, ", ".join(begun) or "-", ", ".join(none) or "-"])
    header = ["steps", "searches with their finals", "begun, runs", "not begun"]
    return table(header, lines) if lines else ""


def _short(plan: _studies.Plan) -> str:
    return plan.name.split(", ")[1]


def _loss(one: Final | None) -> str:
    return "-" if one is None else spread_cell(one.losses)


def _by_length(points: Sequence[Point], size: str, of: Mapping[int, Final | None]) -> list[str]:
    at = {point.steps: point for point in points}
    return [_cell(at.get(steps), of.get(steps)) for steps in _lengths.LENGTHS[size]]


def _cell(point: Point | None, one: Final | None) -> str:
    if point is None:
        return "diverged" if one is not None and not np.isfinite(one.losses).all() else "-"
    if point.half_width is None:
        return f"{point.mean:+.3f} ({point.seeds} seeds, no interval yet)"
    low, high = point.mean - point.half_width, point.mean + point.half_width
    return f"{point.mean:+.3f} ({low:+.3f} to {high:+.3f})"
