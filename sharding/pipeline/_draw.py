"""Pictures of schedules: with matplotlib, and as text for a terminal."""

from typing import TYPE_CHECKING, Any

import numpy as np

from sharding.pipeline._ops import LETTERS, Costs, Op

if TYPE_CHECKING:
    from sharding.pipeline._schedule import Schedule

# The colours of the papers: forward blue, backward green, weights orange; chunks get lighter.
_COLORS = {
    Op.FORWARD: "#4c78c8",
    Op.BACKWARD: "#59a868",
    Op.WEIGHT: "#e0913a",
    Op.UPDATE: "#c0504d",
}


def as_text(schedule: "Schedule") -> str:
    """A line of figures, and a row per stage: operation and micro-batch; letters name chunks."""
    figures = schedule.check()
    live = " ".join(map(str, figures.live))
    head = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches,"
        f" {figures.ticks} ticks, bubble {100 * figures.bubble:.1f} %"
    )
    head += "" if schedule.forward_only else f", live activations {live}"
    cells = [["."] * schedule.num_ticks for _ in range(schedule.num_stages)]
    for tick, stage, (op, microbatch, _) in schedule.tasks():
        chunk = chr(ord("a") + schedule.chunk[tick, stage]) if schedule.num_chunks > 1 else ""
        cells[stage][tick] = f"{LETTERS[op]}{microbatch}{chunk}"
    width = max(len(cell) for row in cells for cell in row)
    digits = len(str(schedule.num_stages - 1))
    rows = [
        f"{stage:{digits}}  " + " ".join(f"{cell:{width}}" for cell in row)
        for stage, row in enumerate(cells)
    ]
    return "\n".join([head, *(row.rstrip() for row in rows)])


def draw(schedule: "Schedule", ax: Any, costs: Costs | None) -> Any:
    """See ``Schedule.draw``."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb

    if costs is None:
        lengths = np.ones(schedule.num_ticks)
    else:
        of = np.array([costs.of(op) for op in Op])
        lengths = of[schedule.op].max(axis=1)
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    if ax is None:
        width = max(4.0, min(18.0, 0.28 * schedule.num_ticks))
        _, ax = plt.subplots(figsize=(width, 0.6 + 0.35 * schedule.num_stages))
    for tick, stage, (op, microbatch, _) in schedule.tasks():
        chunk = int(schedule.chunk[tick, stage])
        lighter = 0.55 * chunk / max(1, schedule.num_chunks - 1)
        color = tuple(c + (1 - c) * lighter for c in to_rgb(_COLORS[op]))
        length = lengths[tick] if costs is None else costs.of(op)
        ax.broken_barh(
            [(starts[tick], length)], (stage - 0.45, 0.9), facecolors=[color], edgecolor="white"
        )
        ax.text(
            starts[tick] + length / 2,
            stage,
            str(microbatch),
            ha="center",
            va="center",
            color="white" if lighter < 0.4 else "black",
            fontsize=7,
        )
    ax.set(
        xlim=(0, starts[-1]),
        ylim=(schedule.num_stages - 0.5, -0.5),
        yticks=range(schedule.num_stages),
        xlabel="ticks" if costs is None else "time",
        ylabel="stage",
        title=schedule.name,
    )
    ax.set_facecolor("#ececec")  # the bubble
    return ax
