"""Draws the pictures of README.md and docs/ from recorded tables: ``make pictures``.

Each is read from a file of benchmarks/results/ and fits a screen of 390 pixels:
docs/pictures/NAME.png on light pages, NAME_dark.png on dark ones.
"""

import pathlib
import re
import sys

import matplotlib.pyplot as plt
from cycler import cycler

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
from sharding import pipeline  # noqa: E402

RESULTS = DOCS.parent / "benchmarks" / "results"
BLUE, LIGHT, GREY, RED = "C0", "C1", "C2", "C3"
STYLES = {
    "": [
        "default",
        {"axes.prop_cycle": cycler(color=["#2b6cb0", "#90bde8", "#8a8a8a", "#c53030"])},
    ],
    "_dark": [
        "dark_background",
        {"axes.prop_cycle": cycler(color=["#4f9ae3", "#24507c", "#7d7d7d", "#ff8080"])},
        dict.fromkeys(["figure.facecolor", "axes.facecolor"], "#121212"),
    ],
}
ALL = {"font.size": 11, "savefig.dpi": 150, "axes.spines.top": False, "axes.spines.right": False}
H100 = 79.1  # GiB: 84.9 GB


def rows(name, *starts):
    """The cells of those rows of a result's tables that start with ``starts``."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines if line.startswith("|")]
    return [row for row in cells if tuple(row[: len(starts)]) == starts]


def memory():
    """GiB of one device for 7B and 70B: labels and numbers, of three tables."""
    totals = {row[2]: float(row[8]) for row in rows("zero_memory", "7B", "h100x8")}
    (measured,) = rows("one_gpu", "llama2-7b", "Adafactor", "1 x 1 x 1024", "backward")[:1]
    (tuned,) = rows("fine_tuning_memory", "llama2-70b", "1,024", "1", "h100x1", "0", "-")
    return {
        "7B, AdamW, plain step": totals["0"],
        "7B, ZeRO 3 on 8 GPUs": totals["3"],
        "7B, Adafactor, 1 GPU": float(measured[7]),
        "70B, QLoRA, 1 GPU": float(tuned[9]),
    }


def bars(values, unit, colors, limit=None):
    """One labelled horizontal bar for each number."""
    figure, ax = plt.subplots(figsize=(5.2, 0.55 + 0.5 * len(values)), layout="constrained")
    found = ax.barh(list(values), list(values.values()), color=colors, height=0.62)
    ax.bar_label(found, [f"{x + 1e-9:.3g}" for x in values.values()], padding=3)  # 39.15: 39.2
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.set_xlim(0, 1.14 * max(values.values()))
    if limit:
        ax.axvline(limit, color=RED, linestyle="--")
        ax.text(limit, -0.55, "one H100", color=RED, ha="center", va="bottom")
    return figure


def stages():
    """What a device holds of 7B at each stage: the step's arguments, and its temporaries."""
    figure, ax = plt.subplots(figsize=(5.2, 2.6), layout="constrained")
    found = rows("zero_memory", "7B", "h100x8")
    names = [f"stage {row[2]}" for row in found]
    held, temporary = ([float(row[i]) for row in found] for i in (4, 5))
    ax.bar(names, held, color=BLUE, label="parameters, state, batch")
    top = ax.bar(names, temporary, bottom=held, color=LIGHT, label="gradients, activations")
    ax.bar_label(top, [f"{float(row[8]):.3g}" for row in found], padding=2)
    ax.axhline(H100, color=RED, linestyle="--")
    ax.text(3.4, H100 + 1, "one H100", color=RED, ha="right", va="bottom")
    ax.set_ylabel("GiB")
    ax.set_ylim(0, 118)
    ax.legend(frameon=False)
    return figure


def state():
    """Bytes of optimizer state for each float32 parameter of 7B, in float32 and in 8 bits."""
    names = {"AdamW": "`optax.adamw`", "CAME": "`optax_ext.came, flax_transformer()`"}
    found = {name: rows("state_bytes", row)[-1] for name, row in names.items()}
    values = {}
    for name, row in found.items():
        values |= {name: float(row[1]), f"{name}, 8 bits": float(row[3])}
    return bars(values, "bytes of state per parameter", [GREY, GREY, BLUE, BLUE])


def wire():
    """Bytes that each gradient sync sends with AdamW, and what it costs in loss."""
    found = [row for row in rows("sync_training", "adamw") if len(row) == 6]
    found.sort(key=lambda row: float(row[5]))
    loss = {row[1]: row[3] if "seed" not in row[3] else "exact" for row in found}
    values = {f"{row[1]}  ({loss[row[1]]})": float(row[4].replace(",", "")) / 1024 for row in found}
    return bars(values, "MiB sent in a step (change of loss)", BLUE)


def drawn(schedule):
    """What its ``draw`` shows, with idle ticks in a grey of the style."""
    figure, ax = plt.subplots(figsize=(5.2, 1.9), layout="constrained")
    schedule.draw(ax).patch.set(facecolor=GREY, alpha=0.3)
    return figure


def predicted():
    """Predicted beside published seconds of training steps that nothing was fitted to."""
    figure, ax = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    found = [row for row in rows("step_time_model", "held out") if len(row) == 10]
    for kind, color in (("GPU", BLUE), ("TPU", RED)):
        points = [
            (float(row[4].replace(",", "")), float(row[5].replace(",", "")))
            for row in found
            if (kind == "TPU") == (" v" in row[2] or "tpu" in row[2])
        ]
        ax.scatter(*zip(*points, strict=True), s=9, color=color, alpha=0.6, label=f"{kind}s")
    ends = (0.2, 200)
    ax.plot(ends, ends, color=GREY, linewidth=1)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set(xlabel="published seconds of a step", ylabel="predicted")
    ax.legend(frameon=False)
    return figure


def main():
    """Draws all of them, in both styles."""
    pictures = {
        "memory": lambda: bars(memory(), "GiB of one device", [GREY, BLUE, BLUE, BLUE], H100),
        "stages": stages,
        "state": state,
        "wire": wire,
        # 1F1B in four stages, and PipeDream-2BW, which does not flush.
        "schedule": lambda: drawn(pipeline.one_f_one_b(4, 6, aligned=False)),
        "asynchronous": lambda: drawn(pipeline.pipedream_2bw(4, 4, 3, aligned=False)),
        "predicted": predicted,
    }
    for suffix, style in STYLES.items():
        with plt.style.context([*style, ALL]):
            for name, draw in pictures.items():
                draw().savefig(DOCS / "pictures" / f"{name}{suffix}.png")


if __name__ == "__main__":
    main()
