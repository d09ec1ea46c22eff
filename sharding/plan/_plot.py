"""Pictures of the memory of one device."""

from collections.abc import Mapping
from typing import Any

from sharding.plan._audit import Audit
from sharding.plan._plan import Plan

_COLORS = {
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "optimizer state": "#ccbb44",
    "master weights": "#aa7733",
    "temporaries": "#ee6677",
    "batch and others": "#bbbbbb",
}


def plot_plan(plan: Plan, path: str) -> None:
    """A stacked bar for each stage."""
    bars = {
        stage.name: {
            "parameters": stage.params,
            "optimizer state": max(stage.opt_state + min(stage.master - stage.host, 0.0), 0.0),
            "master weights": max(stage.master - stage.host, 0.0),
            "gradients": stage.grads + stage.unreduced,
        }
        for stage in plan.stages
    }
    title = f"{plan.num_params / 1e9:.3g}B parameters, planned"
    _bars(bars, plan.device.memory if plan.device else None, title, path)


def plot_audits(audits: Mapping[str, Audit], path: str) -> None:
    """A stacked bar for each program."""
    bars = {
        name: each.arguments | {"temporaries": each.temporaries or sum(each.at_peak.values())}
        for name, each in audits.items()
    }
    kinds = {each.kind.memory for each in audits.values() if each.kind}
    _bars(bars, min(kinds, default=None), "Read from the compiled step", path)


def _bars(
    bars: Mapping[str, Mapping[str, float]], limit: float | None, title: str, path: str
) -> None:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'optax-ext[cli]'") from None
    figure, axes = plt.subplots(figsize=(1.6 + 1.2 * len(bars), 4), layout="constrained")
    bottom: dict[str, float] = dict.fromkeys(bars, 0.0)
    for part, color in _COLORS.items():
        heights = [values.get(part, 0.0) / 2**30 for values in bars.values()]
        if any(heights):
            shown: Any = list(bars)
            axes.bar(shown, heights, bottom=list(bottom.values()), label=part, color=color)
            bottom = {name: bottom[name] + h for name, h in zip(bars, heights, strict=True)}
    if limit is not None:
        axes.axhline(limit / 2**30, color="black", linestyle="--", linewidth=1)
        axes.annotate(" memory of a device", (0, limit / 2**30), va="bottom", fontsize=8)
    axes.set_ylabel("GiB on one device")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
