"""Output of train_lm.py: tables, a progress bar, the metrics file and plots."""

import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.panel
import rich.progress
import rich.text

from optax_ext import BatchSchedule, batch_advice
from sharding import Audit
from sharding.plan._format import show

# A log file gets plain lines of a fixed width, a terminal gets colors and a moving bar.
console = rich.console.Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def bits(loss: float) -> float:
    """A loss in nats as bits per byte."""
    return loss / math.log(2)


def human_bytes(size: float) -> str:
    """A number of bytes, such as ``3.2 MiB``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


class Metrics:
    """A file with one JSON object per step, which survives a process killed while it writes.

    Attributes:
      rows: the contents of the file.
    """

    def __init__(self, path: pathlib.Path, num_rows: int, write: bool = True):
        """Opens the file, and drops all but the first ``num_rows`` rows of an earlier process.

        Without ``write`` the file is only read, because another process writes it.
        """
        self.rows = read_metrics(path)[:num_rows]
        if write:
            _write_atomically(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = path.open("a") if write else None

    def write(self, row: dict[str, float]) -> None:
        """Adds a row; it is in the file when this returns."""
        self.rows.append(row)
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def read_metrics(path: pathlib.Path) -> list[dict[str, float]]:
    """The rows of a metrics file, up to the first incomplete one; [] if there is no file."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_json(path: pathlib.Path, content: dict) -> None:
    """Writes a file atomically: a process killed meanwhile leaves the old content."""
    _write_atomically(path, json.dumps(content, indent=2) + "\n")


def _write_atomically(path: pathlib.Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


class Progress:
    """A bar on a terminal; in a log, a line every twentieth of the run or every 30 seconds."""

    def __init__(
        self,
        title: str,
        rows: list[dict[str, float]],
        steps: int,
        context: int,
        batches: BatchSchedule,
    ):
        """``rows``: metrics of the steps done so far; ``context``: tokens of a window."""
        self._steps, self._context, self._batches = steps, context, batches
        self._first: tuple[int, float] | None = None  # the step that compiled, and when it ended
        self._printed = time.monotonic()
        self._val_loss = next((r["val_loss"] for r in reversed(rows) if "val_loss" in r), None)
        done = rows[-1]["step"]
        text = "" if done == steps else "compiling the training step"
        self._bar = rich.progress.Progress(
            "[bold]{task.description}",
            rich.progress.BarColumn(bar_width=None),
            "{task.completed}/{task.total}  {task.fields[text]}",
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, text=text)
        if text and not console.is_terminal:
            console.print(text)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, row: dict[str, float]) -> None:
        """Shows a row of metrics."""
        step, now = row["step"], time.monotonic()
        self._val_loss = row.get("val_loss", self._val_loss)
        text = f"loss {row['loss']:.3f}  {bits(row['loss']):.3f} bits/byte"
        if self._val_loss is not None:
            text += f" (held out {bits(self._val_loss):.3f})"
        if self._first is None:
            self._first = step, now
        else:
            pace = (now - self._first[1]) / (step - self._first[0])
            minutes, seconds = divmod(round(pace * (self._steps - step)), 60)
            windows = self._batches.examples(step) - self._batches.examples(self._first[0])
            rate = self._context * windows / (now - self._first[1])
            text += f"  {rate:,.0f} tokens/s  {minutes}:{seconds:02d} left"
        if "noise_scale" in row:
            text += f"  {batch_note(row['noise_scale'], self._batches.size(step - 1))}"
        self._bar.update(self._task, completed=step, text=text)
        due = step % -(-self._steps // 20) == 0 or now - self._printed > 30
        if due and not console.is_terminal:
            line = f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}"
            console.print(line, soft_wrap=True)
            self._printed = now


def batch_note(noise_scale: float, windows: int) -> str:
    """How the batch compares with the critical batch size."""
    advice = batch_advice(noise_scale, windows)
    if advice == "unknown":
        return "critical batch size not known yet"
    return f"batch {advice} the critical size, ~{noise_scale:,.1f} windows"


def print_plan(plan: Any, adamw: Any, more: Sequence[str] = ()) -> None:
    """Prints the cost of each stage, with this run's stage marked, and of AdamW without ZeRO."""
    stages = (*plan.stages, dataclasses.replace(adamw.stages[0], name="adamw, no ZeRO"))
    marked = dataclasses.replace(plan, stages=stages, recommended=plan.requested)
    notes = ["* this run", *more]
    notes += plan.notes if plan.device else plan.notes[1:]  # the first is about its memory
    show(marked.tables(), notes, console=console)


def print_audit(found: Audit, notes: Sequence[str] = ()) -> None:
    """Prints the memory, traffic and work of a compiled step."""
    show(found.tables(), [*notes, *found.sentences], console=console)


def print_summary(summary: dict, directory: pathlib.Path) -> None:
    """Prints the result of a finished run, and where its files are."""
    text = rich.text.Text(summary["prompt"][-200:], style="dim")
    text.append(summary["sample"], style="not dim bold")
    title = "excerpt of a held-out file (dim), and the model's continuation"
    console.print(rich.panel.Panel(text, title=title))
    console.print(
        f"{summary['optimizer']}: {summary['bits_per_byte']:.3f} bits per byte on held-out text "
        f"after {summary['steps']} steps."
    )
    console.print(f"In {directory}: metrics.jsonl, loss.png, layout.txt, summary.json, checkpoints")


def _axes(width: float, columns: int = 1, **options: object):
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, 4), layout="constrained", **options)
    return figure, axes


def _draw_losses(axes, rows: list[dict[str, float]], color: str, label: str = "") -> None:
    train = [(row["step"], bits(row["loss"])) for row in rows if "loss" in row]
    val = [(row["step"], bits(row["val_loss"])) for row in rows if "val_loss" in row]
    axes.plot(*zip(*train, strict=True), color=color, alpha=0.3, linewidth=0.8)
    axes.plot(*zip(*val, strict=True), color=color, marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)


def plot_loss(path: pathlib.Path, title: str, rows: list[dict[str, float]]) -> None:
    """Draws the losses of one run."""
    figure, axes = _axes(7)
    _draw_losses(axes, rows, "C0", "held out (thin: training)")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_compare(path: pathlib.Path, rows: dict[str, list], summaries: dict[str, dict]) -> None:
    """Draws the losses of several runs by name, and the bytes of their optimizer states."""
    figure, (left, right) = _axes(11, 2, width_ratios=(5, 4))
    for i, (name, summary) in enumerate(summaries.items()):
        _draw_losses(left, rows[name], f"C{i}", f"{name}: {summary['bits_per_byte']:.3f}")
        for j, key in enumerate(("bytes_without_zero", "bytes_per_device")):
            size = summary[key]["opt_state"]
            bar = right.barh(i + 0.4 * j, size, 0.38, color=f"C{i}", alpha=(0.4, 1.0)[j])
            right.bar_label(bar, [human_bytes(size)], padding=3)
    left.set_title("Loss (points: held-out text)")
    left.legend(title="bits per byte at the end")
    right.set_title("Optimizer state per device (pale: no ZeRO)")
    right.set_yticks([i + 0.2 for i in range(len(summaries))], list(summaries))
    right.set_xticks([])
    right.invert_yaxis()
    right.margins(x=0.25)
    right.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=150)
