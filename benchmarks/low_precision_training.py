"""Training with low-precision state: every format against float32, on the same batches.

Runs examples/train_lm.py for each optimizer, format and seed, on one device, and compares the loss
on held-out text at the end. A run that is finished in runs/low_precision/ is read, not repeated,
so that the command can be stopped and given again. All 30 runs take hours on two cores.

  python benchmarks/low_precision_training.py            # writes benchmarks/results/
  python benchmarks/low_precision_training.py --smoke    # a tiny model, two runs, prints only
"""

import argparse
import pathlib
from collections.abc import Mapping

import _results
import _training
import matplotlib
import numpy as np

OPTIMIZERS = ("adamw", "came")
STATES = ("float32", "8bit", "4bit", "fp8", "bfloat16")
SEEDS = (0, 1, 2)
Losses = Mapping[tuple[str, str, int], float]


def of(losses: Losses, optimizer: str, state: str) -> np.ndarray:
    """The losses of an optimizer and a format, by seed."""
    return np.array([losses[key] for key in sorted(losses) if key[:2] == (optimizer, state)])


def changes(losses: Losses, optimizer: str, state: str) -> np.ndarray:
    """By how much a format's loss is above float32's, for each seed, in percent."""
    return 100 * (of(losses, optimizer, state) / of(losses, optimizer, "float32") - 1)


def table(losses: Losses) -> str:
    """The losses as a Markdown table."""
    lines = [
        "| optimizer | state | validation loss, seeds 0, 1, 2 | mean | above float32, by seed |"
        " mean |",
        "|---|---|---|---|---|---|",
    ]
    for optimizer, state in dict.fromkeys(key[:2] for key in losses):
        found, above = of(losses, optimizer, state), changes(losses, optimizer, state)
        lines.append(
            f"| {optimizer} | {state} | {', '.join(f'{x:.4f}' for x in found)} "
            f"| {found.mean():.4f} | {', '.join(f'{x:+.2f} %' for x in above)} "
            f"| {above.mean():+.2f} % |"
        )
    return "\n".join(lines)


def plot(path: pathlib.Path, losses: Losses) -> None:
    """Draws the change of each run against float32, and the spread of seeds in float32."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for ax, optimizer in zip(axes, OPTIMIZERS, strict=True):
        exact = of(losses, optimizer, "float32")
        spread = 100 * (exact / exact.mean() - 1)
        ax.axhspan(spread.min(), spread.max(), color="0.9", label="float32, seed to seed")
        for i, state in enumerate(STATES[1:]):
            above = changes(losses, optimizer, state)
            ax.plot([i] * len(SEEDS), above, "o", color=f"C{i}", alpha=0.5)
            ax.plot([i - 0.25, i + 0.25], [above.mean()] * 2, color=f"C{i}")
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks(range(len(STATES) - 1), STATES[1:])
        ax.set_title(optimizer)
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("validation loss against float32, %")
    axes[0].legend(loc="upper left")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains the runs that are not finished; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes no results")
    smoke = parser.parse_args().smoke
    runs = _results.ROOT / "runs" / ("low_precision_smoke" if smoke else "low_precision")
    cases = [("came", "float32", 0), ("came", "4bit", 0)]
    if not smoke:
        # All optimizers and seeds of a format before the next: stopped early, formats are complete.
        cases = [(name, state, i) for state in STATES for i in SEEDS for name in OPTIMIZERS]
    losses = {}
    for optimizer, state, seed in cases:
        options = ["--devices", "1", "--optimizer", optimizer, "--state", state]
        options += ["--seed", str(seed), *(["--smoke"] if smoke else [])]
        summary = _training.summary_of(runs, f"{optimizer}-{state}-{seed}", options)
        losses[optimizer, state, seed] = summary["val_loss"]
        print(f"{optimizer} {state} seed {seed}: {summary['val_loss']:.4f}", flush=True)
    print(table(losses))
    if not smoke:
        about = (
            f"{summary['steps']} steps of `make train`'s model on one CPU "
            "device, the same batches and learning rate for all formats of an optimizer, "
            "stochastic rounding. Loss in nats per byte on 16 batches of held-out text."
        )
        picture = "![by format](low_precision_training.png)"
        title = "Training with low-precision state"
        _results.write("low_precision_training", title, about, picture, table(losses))
        plot(_results.RESULTS / "low_precision_training.png", losses)


if __name__ == "__main__":
    main()
