"""Plans of all budgets: bytes of peak against time."""

from collections.abc import Mapping, Sequence
from typing import Any

from sharding.plan._format import NEED, Table, size, text_of
from sharding.remat._planned import RematPlan

GIB = 2**30


class Frontier(list[Any]):
    """Plans that no other one beats in bytes and time, from the fewest bytes to the most."""

    def tables(self) -> list[Table]:
        """The table to print."""
        columns = ("stores", "peak", "in host memory", "products again", "extra time")
        return [Table("Activations of one device", columns, [_row(each) for each in self])]

    def __str__(self) -> str:
        return text_of(self.tables())


def _row(each: RematPlan) -> tuple[str, ...]:
    return (
        each.summary,
        size(each.peak),
        size(each.host) if each.host else "",
        f"{each.products_again:.1%}",
        f"{each.extra_time:.1%}",
    )


def plot(frontiers: Mapping[str, Sequence[RematPlan]], others: Any = None) -> Any:
    """Bytes of peak against time, a line for each frontier under its name.

    Args:
      frontiers: as ``frontier`` returns them.
      others: by name, plans to be shown as points beside the lines, such as those of presets.

    Returns:
      A ``matplotlib.figure.Figure``.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"a picture needs matplotlib: {NEED}.") from None
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, plans in frontiers.items():
        bytes_, times = ([f(each) for each in plans] for f in (_gib, _percent))
        axes.plot(bytes_, times, drawstyle="steps-post", marker="o", markersize=4, label=name)
    for name, each in (others or {}).items():
        axes.plot([_gib(each)], [_percent(each)], "x", color="black", markersize=5)
        axes.annotate(
            name,
            (_gib(each), _percent(each)),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_xlabel("peak of activations and temporaries, GiB")
    axes.set_ylabel("extra time, % of a step")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if any(frontiers):
        axes.legend(fontsize=8, frameon=False)
    return figure


def _gib(each: RematPlan) -> float:
    return each.peak / GIB


def _percent(each: RematPlan) -> float:
    return 100 * each.extra_time
