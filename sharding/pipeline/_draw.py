"""Pictures of schedules, with matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sharding.pipeline._operations import Op

# The colours of the papers: forward blue, backward green, weights orange.
_COLORS = {
    Op.FORWARD: "#4c78c8",
    Op.BACKWARD: "#59a868",
    Op.WEIGHT: "#e0913a",
    Op.UPDATE: "#c0504d",
}


class Box(NamedTuple):
    """An operation in a picture."""

    stage: int
    start: float
    length: float
    op: Op
    microbatch: int
    lighter: float  # from 0, the full colour, to 1, white: tells chunks apart


def draw_boxes(
    ax: Any, boxes: Sequence[Box], size: tuple[int, int], end: float, unit: str, title: str
) -> Any:
    """Draws a row per stage; ``size`` is that of the table: ticks and stages."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb

    num_ticks, num_stages = size
    if ax is None:
        width = max(4.0, min(18.0, 0.28 * num_ticks))
        _, ax = plt.subplots(figsize=(width, 0.6 + 0.35 * num_stages))
    for box in boxes:
        color = tuple(c + (1 - c) * box.lighter for c in to_rgb(_COLORS[box.op]))
        span = [(box.start, box.length)]
        ax.broken_barh(span, (box.stage - 0.45, 0.9), facecolors=[color], edgecolor="white")
        ax.text(
            box.start + box.length / 2,
            box.stage,
            str(box.microbatch),
            ha="center",
            va="center",
            color="white" if box.lighter < 0.4 else "black",
            fontsize=7,
        )
    ax.set(
        xlim=(0, end),
        ylim=(num_stages - 0.5, -0.5),
        yticks=range(num_stages),
        xlabel=unit,
        ylabel="stage",
        title=title,
    )
    ax.set_facecolor("#ececec")  # the bubble
    return ax
