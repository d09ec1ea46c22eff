"""Pictures of the study of lengths."""

import pathlib
from collections.abc import Mapping

import _length_summary
import _lengths
import _plots
from _summary import BASELINE, Final

STYLE = {**_plots.STYLE, "adafactor_momentum": ("#8C6D31", "s", "--")}
NUDGE = 1.03  # between the marks of contenders at one length


def differences(
    every: Mapping[str, Mapping[int, Mapping[str, Final]]], size: str, path: pathlib.Path
) -> None:
    """Loss minus AdamW's against the steps of a run, with 95 % intervals.

    It draws the lengths that are there and names those that are not.
    """
    figure, axes = _plots.new_axes(len(every))
    for ax, (task, found) in zip(axes.flat, every.items(), strict=True):
        ax.axhline(0, color=STYLE[BASELINE][0], linewidth=1)
        ends = {}
        names = [name for name in _lengths.CONTESTED if name != BASELINE]
        for place, name in enumerate(names):
            points = _length_summary.points(found, name)
            if not points:
                continue
            x = [point.steps * NUDGE ** (place - len(names) / 2) for point in points]
            y = [point.mean for point in points]
            bars = [point.half_width or 0.0 for point in points]
            ax.errorbar(x, y, bars, **_plots.look(name, STYLE), capsize=2, elinewidth=1)
            ends[name] = (x[-1], y[-1])
        lengths = _lengths.LENGTHS[size]
        ax.set(xscale="log", xlabel="steps of a run", ylabel="loss minus AdamW's, nats")
        ax.set_xticks(lengths, [f"{steps:,}" for steps in lengths])
        ax.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        ax.minorticks_off()
        ax.set_title(task + _absent(found, size), fontsize=9)
        if not ends:
            ax.text(0.5, 0.5, "no runs yet", transform=ax.transAxes, ha="center")
        _plots.label_ends(ax, ends, STYLE)
    _plots.save(figure, path)


def _absent(found: Mapping[int, Mapping[str, Final]], size: str) -> str:
    """What the picture of a task lacks, in words."""
    lengths = _lengths.LENGTHS[size]
    part = [f"{n:,}" for n in lengths if 0 < len(found.get(n, {})) < len(_lengths.CONTESTED)]
    none = [f"{n:,}" for n in lengths if not found.get(n)]
    words = [f"{', '.join(part)} in part"] if part else []
    words += [f"{', '.join(none)} not run yet"] if none else []
    return f"\n({'; '.join(words)})" if words else ""
