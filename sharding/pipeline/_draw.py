"""Pictures of schedules, with matplotlib."""

from typing import TYPE_CHECKING, Any

import numpy as np

from sharding.pipeline._operations import Costs, Op

if TYPE_CHECKING:
    from sharding.pipeline._schedule import Schedule

# The colours of the papers: forward blue, backward green, weights orange; updates red.
_COLORS = dict(zip(list(Op)[1:], ("#4c78c8", "#59a868", "#e0913a", "#c0504d"), strict=True))


def draw(schedule: "Schedule", ax: Any, costs: Costs | None) -> Any:
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb

    num_ticks, num_stages = schedule.op.shape
    if ax is None:
        width = max(4.0, min(18.0, 0.28 * num_ticks))
        _, ax = plt.subplots(figsize=(width, 0.6 + 0.35 * num_stages))
    lengths = np.ones(num_ticks) if costs is None else schedule._tick_times(costs)
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    for tick, stage, (op, microbatch, _) in schedule.tasks():
        length = lengths[tick] if costs is None else costs.of(op)
        # Chunks are told apart by their lightness.
        lighter = 0.55 * int(schedule.chunk[tick, stage]) / max(1, schedule.num_chunks - 1)
        color = tuple(c + (1 - c) * lighter for c in to_rgb(_COLORS[op]))
        span = [(starts[tick], length)]
        ax.broken_barh(span, (stage - 0.45, 0.9), facecolors=[color], edgecolor="white")
        style = {"color": "white" if lighter < 0.4 else "black", "fontsize": 7}
        at = starts[tick] + length / 2, stage
        ax.text(*at, str(microbatch), ha="center", va="center", **style)
    ax.set(
        xlim=(0, starts[-1]),
        ylim=(num_stages - 0.5, -0.5),
        yticks=range(num_stages),
        xlabel="ticks" if costs is None else "time",
        ylabel="stage",
        title=schedule.name,
    )
    ax.set_facecolor("#ececec")  # the bubble
    return ax
