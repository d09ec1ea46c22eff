"""Training with each gradient sync: loss against steps and against bytes sent.

Runs examples/train_lm.py --config ngrams-small, of whose parameters nine tenths are a table with
sparse gradients, as plain data parallelism over 8 virtual CPU devices, which sends nothing but
gradients: every sync with SGD, AdamW and CAME, on the same batches. A finished run in runs/sync/ is
read, not repeated, so that the command can be stopped and started again. All runs take an hour on
two cores.

  python benchmarks/sync_training.py            # writes benchmarks/results/
  python benchmarks/sync_training.py --smoke    # a tiny model, two runs, prints only
"""

import argparse
import pathlib
from collections.abc import Iterator, Mapping

import _local_training
import _results
import _training
import matplotlib
import numpy as np

OPTIMIZERS = ("sgd", "adamw", "came")
SYNCS = ("dense", "zen", "topk", "ef21", "dgc", "qsgd4", "powersgd", "gradzip", "qsgd8")
STEPS = 300
SEEDS = (0, 1)  # of dense; the others have the first
Summaries = Mapping[tuple[str, str, int], dict]
HEADER = """\
| optimizer | sync | validation loss | against dense | KiB sent per device and step | times less |
|---|---|---|---|---|---|"""
ZEN_HEADER = """\
| optimizer | zen against dense: first 20 steps | all steps |
|---|---|---|"""


# Replicas that take local steps: the outer transformation, and steps between synchronizations.
LOCAL = {
    "ordinary steps": ("none", 1),
    "local SGD, every step": ("mean", 1),
    "local SGD, every 8": ("mean", 8),
    "local SGD, every 64": ("mean", 64),
    "DiLoCo, every 8": ("nesterov", 8),
    "DiLoCo, every 64": ("nesterov", 64),
}
LOCAL_STEPS = 320  # after which all replicas have just met
LOCAL_HEADER = """\
| adamw, 8 replicas | validation loss | against ordinary | KiB sent per device, step | times less |
|---|---|---|---|---|"""


def name_of(optimizer: str, method: str, seed: int) -> str:
    """The folder of a run."""
    return f"{optimizer}-{method}-{seed}"


def rows(summaries: Summaries) -> Iterator[str]:
    """Lines of the table; of dense the spread of seeds in place of a change."""
    for optimizer, method, seed in summaries:
        if seed:
            continue
        dense = summaries[optimizer, "dense", 0]
        found = summaries[optimizer, method, seed]
        change = f"{100 * (found['val_loss'] / dense['val_loss'] - 1):+.2f} %"
        if method == "dense" and (optimizer, "dense", 1) in summaries:
            again = summaries[optimizer, "dense", 1]["val_loss"] / dense["val_loss"]
            change = f"another seed: {100 * (again - 1):+.2f} %"
        yield (
            f"| {optimizer} | {method} | {found['val_loss']:.4f} | {change} "
            f"| {found['wire_bytes'] / 2**10:,.0f} "
            f"| {dense['wire_bytes'] / found['wire_bytes']:.1f} |"
        )


def local_rows(runs: pathlib.Path, smoke: bool = False) -> Iterator[str]:
    """Lines of the table of local steps."""
    cases = list(LOCAL.items())[:: 3 if smoke else 1]
    config, steps = ("smoke", 8) if smoke else ("ngrams-small", LOCAL_STEPS)
    ordinary: dict = {}
    for name, (outer, every) in cases[:2] if smoke else cases:
        every = min(every, steps)
        options = (config, "adamw", outer, every, steps)
        found = _local_training.summary_of(runs, f"adamw-{outer}-{every}", *options)
        ordinary = ordinary or found
        more = 100 * (found["val_loss"] / ordinary["val_loss"] - 1)
        yield (
            f"| {name} | {found['val_loss']:.4f} | {more:+.2f} % "
            f"| {found['wire_bytes'] / 2**10:,.0f} "
            f"| {ordinary['wire_bytes'] / found['wire_bytes']:.1f} |"
        )


def apart(runs: pathlib.Path, one: tuple, other: tuple, steps: int) -> float:
    """The largest relative difference of the training losses of two runs in the first steps."""
    a, b = (
        np.array([loss for step, loss in _training.losses_of(runs, name_of(*key), "loss")][:steps])
        for key in (one, other)
    )
    return float(np.max(np.abs(a / b - 1)))


def zen_rows(runs: pathlib.Path) -> Iterator[str]:
    """How far zen, which loses nothing, is from dense by rounding alone."""
    for optimizer in OPTIMIZERS:
        dense, zen = (optimizer, "dense", 0), (optimizer, "zen", 0)
        first, all_steps = (apart(runs, zen, dense, steps) for steps in (20, STEPS))
        yield f"| {optimizer} | {first:.1e} | {all_steps:.1e} |"


def plot(path: pathlib.Path, runs: pathlib.Path, summaries: Summaries) -> None:
    """Draws losses on held-out text against steps, and against the bytes that a device sent."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(OPTIMIZERS), figsize=(12, 7.5), sharey=True, layout="constrained"
    )
    for (optimizer, method, seed), summary in summaries.items():
        if seed:
            continue
        steps, losses = zip(
            *_training.losses_of(runs, name_of(optimizer, method, seed), "val_loss"), strict=True
        )
        sent = np.array(steps) * summary["wire_bytes"] / 2**20
        column, color = OPTIMIZERS.index(optimizer), f"C{SYNCS.index(method)}"
        style = {"color": color, "label": method, "linewidth": 1.2, "markersize": 3}
        style["linestyle"] = "--" if method == "zen" else "-"  # it covers dense
        axes[0, column].plot(steps[1:], losses[1:], marker="o", **style)
        axes[1, column].plot(sent[1:], losses[1:], marker="o", **style)
    for column, optimizer in enumerate(OPTIMIZERS):
        axes[0, column].set(title=optimizer, xlabel="step")
        axes[1, column].set(xscale="log", xlabel="MiB sent by a device")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("validation loss, nats per byte")
    axes[0, 0].legend()
    figure.savefig(path, dpi=130)


def cases(smoke: bool) -> list[tuple[str, str, int]]:
    """Optimizer, sync and seed of each run; all optimizers of one sync before the next."""
    if smoke:
        return [("sgd", "dense", 0), ("sgd", "topk", 0)]
    found = [
        (optimizer, method, 0)
        for method in SYNCS
        for optimizer in (OPTIMIZERS if method != "dgc" else ("sgd",))
    ]
    return found + [(optimizer, "dense", seed) for seed in SEEDS[1:] for optimizer in OPTIMIZERS]


def main() -> None:
    """Trains the runs that are not finished; prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes no results")
    parser.add_argument(
        "--local", action="store_true", help="local steps alone; prints their table"
    )
    options = parser.parse_args()
    smoke = options.smoke
    runs = _results.ROOT / "runs" / ("sync_smoke" if smoke else "sync")
    if options.local:
        _results.table(LOCAL_HEADER, local_rows(runs, smoke))
        return
    of_run = ["--devices", "8", "--stage", "0", "--audit"]
    of_run += ["--smoke"] if smoke else ["--config", "ngrams-small", "--steps", str(STEPS)]
    summaries = {}
    for case in cases(smoke):
        optimizer, method, seed = case
        own = ["--optimizer", optimizer, "--sync", method, "--seed", str(seed)]
        summaries[case] = _training.summary_of(runs, name_of(*case), of_run + own)
        print(f"{' '.join(map(str, case))}: {summaries[case]['val_loss']:.4f}", flush=True)
    of_all = _results.table(HEADER, rows(summaries))
    if not smoke:
        of_zen = _results.table(ZEN_HEADER, zen_rows(runs))
        about = (
            f"{STEPS} steps of `train_lm.py --config ngrams-small` at stage 0, data parallel over "
            "8 virtual CPU devices; one run each, on the same batches. All syncs of an "
            "optimizer have its learning rate of train_lm.py: adamw's and came's were tuned for "
            "`--config small` and plain sums, sgd's was not. Loss in nats per byte on 16 batches "
            "of held-out text. Bytes are read from the compiled step, for zen from the branch "
            "that gradients as sparse as these take, for gradzip as a mean of its two steps. The "
            "last table but one has relative differences of training losses, the largest of all "
            f"steps. The last one is of {LOCAL_STEPS} steps, in which replicas of one device share "
            "the batch: two windows of 64 bytes each; local SGD averages parameters, DiLoCo has "
            "Nesterov momentum 0.9 and rate 0.7 between replicas."
        )
        picture = "![loss against steps and bytes](sync_training.png)"
        title = "Gradient syncs: training"
        of_local = _results.table(LOCAL_HEADER, local_rows(runs))
        _results.write("sync_training", title, about, picture, of_all, of_zen, of_local)
        plot(_results.RESULTS / "sync_training.png", runs, summaries)


if __name__ == "__main__":
    main()
