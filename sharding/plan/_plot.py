"""Pictures of the memory of one device, and of its price in time."""

from collections.abc import Mapping, Sequence
from typing import Any

from sharding.plan._format import NEED
from sharding.plan.audit._audit import Audit
from sharding.plan.cost._estimate import Plan
from sharding.plan.search._search import SearchResult
from sharding.remat._planned_loss import LossPlan

# Parts of memory from the lowest, as ``by_part`` has them: their labels and colors.
_PARTS = {
    "params": ("parameters", "#4477aa"),
    "grads": ("gradients", "#66ccee"),
    "state": ("state", "#ccbb44"),
    "activations": ("activations", "#aa3377"),
    "batch": ("batch", "#bbbbbb"),
}
_TALLEST = 2.5  # higher bars, in units of the device's memory, are clipped


def plot_plans(plans: Mapping[str, Plan]) -> Any:
    """A panel for each plan with a stacked bar for each stage, as a ``matplotlib.figure.Figure``.

    ``plans`` are by name. A line shows the memory of the device; much higher bars are clipped and
    labelled.

    Raises:
      ValueError: matplotlib is not installed.

    >>> import jax, optax, sharding as shd
    >>> zero = shd.Zero(jax.sharding.AbstractMesh((8,), ("data",)))
    >>> params = {"w": jax.ShapeDtypeStruct((2**15, 2**15), "bfloat16")}
    >>> plot_plans({"adam": shd.plan.estimate(params, optax.adam(1e-3), zero)}).axes[0].get_title()
    'adam: 1.07B parameters'
    """
    figure, panels = _figure([len(plan.stages) for plan in plans.values()])
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        bars = {stage.name: stage.by_part() for stage in plan.stages}
        title = f"{name or 'planned'}: {plan.num_params / 1e9:.3g}B parameters"
        _bars(axes, bars, plan.device.memory if plan.device else None, title)
    _legend(figure)
    return figure


def plot_audits(audits: Mapping[str, Audit]) -> Any:
    """A stacked bar for each of the ``audits``, by name, as a ``matplotlib.figure.Figure``.

    >>> import jax, sharding as shd
    >>> found = shd.audit(jax.jit(lambda x: 2 * x).lower(jax.numpy.ones(1024)))
    >>> plot_audits({"doubled": found}).axes[0].get_title()
    'compiled'
    """
    figure, (axes,) = _figure([len(audits)])
    bars = {name: audited.by_part for name, audited in audits.items()}
    kinds = {audited.kind.memory for audited in audits.values() if audited.kind}
    _bars(axes, bars, min(kinds, default=None), "compiled")
    _legend(figure)
    return figure


def plot_search(found: SearchResult) -> Any:
    """Memory and time of the plans ``found``, and their frontier: a ``matplotlib.figure.Figure``.

    >>> import optax
    >>> from sharding.plan import MODELS, search
    >>> found = search(MODELS["gpt2-small"], optax.adam(1e-3), "h100x1", sequences=8)
    >>> plot_search(found).axes[0].get_title()
    'h100x1'
    """
    figure, (axes,) = _figure([4])
    gib = 2**30
    if found.frontier:
        line = [(plan.seconds.seconds, plan.memory / gib) for plan in found.frontier]
        axes.plot(*zip(*line, strict=True), color="gray", drawstyle="steps-post", label="frontier")
    plans = [(plan.seconds.seconds, plan.memory / gib) for plan in found.plans]
    rejected = [(plan.seconds.seconds, plan.memory / gib) for plan in found.rejected]
    axes.scatter(*zip(*plans, strict=True), color=_PARTS["params"][1], label="fits")
    if rejected:
        style = {"color": _PARTS["activations"][1], "marker": "x", "label": "does not"}
        axes.scatter(*zip(*rejected, strict=True), **style)
    axes.axhline(found.memory / gib, color="black", linestyle="--", label="memory of a device")
    axes.axvline(found.bound, color="gray", linestyle=":", label="bound")
    axes.set(xlabel="predicted seconds a step", ylabel="GiB on the fullest device")
    axes.set(yscale="log", title=found.target)
    axes.legend()
    return figure


def plot_frontiers(
    frontiers: Mapping[str, Sequence[LossPlan]], others: Mapping[str, LossPlan] | None = None
) -> Any:
    """Bytes against time of activations, as a ``matplotlib.figure.Figure``.

    ``frontiers`` are those of ``remat.frontier`` by name, each a line; ``others`` are points.

    >>> import jax, jax.numpy as jnp, sharding as shd
    >>> loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> plans = shd.remat.frontier(loss, jnp.ones((64, 64)), jnp.ones((512, 64)))
    >>> plot_frontiers({"loss": plans}).axes[0].get_xlabel()
    'peak of activations and temporaries, GiB'
    """
    figure, (axes,) = _figure([6])
    for name, plans in frontiers.items():
        line = {"drawstyle": "steps-post", "marker": "o", "markersize": 4, "label": name}
        axes.plot(*zip(*map(_point, plans), strict=True), **line)
    for name, plan in (others or {}).items():
        axes.plot(*_point(plan), "x", color="black", markersize=5)
        axes.annotate(name, _point(plan), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="peak of activations and temporaries, GiB", ylabel="extra time, % of a step")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _point(plan: LossPlan) -> tuple[float, float]:
    """GiB and percent of a step."""
    return plan.peak / 2**30, 100 * plan.extra_time


def _figure(bars: list[int]) -> tuple[Any, Any]:
    """A figure without a window, and its panels, by the number of bars of each."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"a picture needs matplotlib: {NEED}.") from None
    widths = [1.0 + 0.6 * number for number in bars]
    figure = Figure(figsize=(1.5 + sum(widths), 3.6), layout="constrained")
    (panels,) = figure.subplots(1, len(bars), squeeze=False, width_ratios=widths)
    return figure, panels


def _legend(figure: Any) -> None:
    """One legend for all panels, beside them."""
    shown = {bars.get_label(): bars for axes in figure.axes for bars in axes.containers}
    labels = [label for label, _ in reversed(_PARTS.values()) if label in shown]
    handles = [shown[part] for part in labels]
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)


def _bars(
    axes: Any, bars: Mapping[str, Mapping[str, float]], limit: float | None, title: str
) -> None:
    bottom = [0.0] * len(bars)
    for part, (label, color) in _PARTS.items():
        heights = [values[part] / 2**30 for values in bars.values()]
        if any(heights):
            axes.bar(list(bars), heights, bottom=bottom, label=label, color=color)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if limit is not None:
        line, top = limit / 2**30, _TALLEST * limit / 2**30
        axes.axhline(line, color="black", linestyle="--", linewidth=1)
        right = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.text(1, line, f"a device's {line:.0f} GiB", fontsize=8, **right)
        above = {"ha": "center", "va": "top", "bbox": {"facecolor": "white", "edgecolor": "none"}}
        for i, height in enumerate(bottom):
            if height > top:
                axes.set_ylim(0, top)
                axes.text(i, 0.96 * top, f"{height:,.0f}", fontsize=8, **above)
    axes.set_ylabel("GiB on one device")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
