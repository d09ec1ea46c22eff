"""The same training by whole systems: ZeRO, few bits, PowerSGD, a pipeline, a remat plan.

Runs examples/train_lm.py with each, on 8 virtual CPU devices, on the same batches as a reference on
one device with the same optimizer. What is lossless must have the losses of its reference to
rounding, or the command fails. A finished run in runs/systems/ is read, not repeated, and one that
was stopped goes on, so that the command can be stopped and given again.

  python benchmarks/whole_systems.py            # writes benchmarks/results/
  python benchmarks/whole_systems.py --report   # from the runs that are finished, trains nothing
  python benchmarks/whole_systems.py --smoke    # a tiny model, prints only
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import _results
import _training
import numpy as np

STEPS = 200
FIRST = 20  # steps in which rounding has not grown yet
# Relative, of a training loss in the first steps. Float32 has 6e-8; a loss is a mean over a few
# thousand logits of a model that has taken up to 20 steps with gradients summed in another order.
TOLERANCE = 1e-4
HEADER = """\
| system | reference | lossless | validation loss | minus the reference's \
| first steps, largest | all steps, largest | state, KiB per device \
| sent, KiB per device and step | activations, KiB per device |
|---|---|---|---|---|---|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class System:
    """One way to run the training.

    Attributes:
      options: of train_lm.py.
      reference: the system whose losses it should have; itself if None.
      lossless: whether they should be the same to rounding.
    """

    options: tuple[str, ...]
    reference: str | None = None
    lossless: bool = True


ONE = ("--devices", "1", "--stage", "0")
MANY = ("--devices", "8", "--stage")
ADAMW, CAME = ("--optimizer", "adamw"), ("--optimizer", "came")
PIPELINE = ("--pipeline", "4", "--schedule", "1f1b", "--microbatches", "8")
ROOMY, TIGHT = "1GiB", "18MiB"  # of a device; the first stores everything
# By name; a reference comes before those that need it.
SYSTEMS = {
    "AdamW, one device": System((*ADAMW, *ONE)),
    "ZeRO 3 + AdamW": System((*ADAMW, *MANY, "3"), "AdamW, one device"),
    "1F1B, 4 stages x 2 replicas, ZeRO 1 + AdamW": System(
        (*ADAMW, *MANY, "1", *PIPELINE), "AdamW, one device"
    ),
    "AdamW, 8 devices, everything stored": System(
        (*ADAMW, *MANY, "0", "--memory", ROOMY), "AdamW, one device"
    ),
    "AdamW, 8 devices, remat plan": System(
        (*ADAMW, *MANY, "0", "--memory", TIGHT), "AdamW, one device"
    ),
    "ZeRO 2 + AdamW, PowerSGD of rank 4": System(
        (*ADAMW, *MANY, "2", "--sync", "powersgd"), "AdamW, one device", lossless=False
    ),
    "CAME, one device": System((*CAME, *ONE), "AdamW, one device", lossless=False),
    "CAME 8-bit, one device": System(
        (*CAME, *ONE, "--state", "8bit"), "CAME, one device", lossless=False
    ),
    "ZeRO 2 + CAME 8-bit": System((*CAME, *MANY, "2", "--state", "8bit"), "CAME 8-bit, one device"),
}
# Of --smoke.
FEW = ("AdamW, one device", "ZeRO 3 + AdamW")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left: its summary and its training losses, in order."""

    summary: Mapping[str, Any]
    losses: np.ndarray


def apart(one: Outcome, other: Outcome, steps: int | None = None) -> float:
    """The largest relative difference of the training losses, of the first steps or of all."""
    a, b = one.losses[:steps], other.losses[:steps]
    return float(np.max(np.abs(a / b - 1)))


def rows(of: Mapping[str, System], found: Mapping[str, Outcome]) -> Iterator[str]:
    """Lines of the table, as far as there are runs."""
    for name, one in found.items():
        system = of[name]
        cells = [name, system.reference or "-", "-", f"{one.summary['val_loss']:.4f}"]
        other = found.get(system.reference or "")
        if other is None:
            cells += ["-"] * 3
        else:
            cells[2] = "yes" if system.lossless else "no"
            cells += [
                f"{one.summary['val_loss'] - other.summary['val_loss']:+.4f}",
                f"{apart(one, other, FIRST):.1e}",
                f"{apart(one, other):.1e}",
            ]
        state = sum(one.summary["bytes_per_device"].values())
        sizes = state, one.summary["wire_bytes"], one.summary.get("activation_bytes")
        cells += ["-" if size is None else f"{size / 2**10:,.0f}" for size in sizes]
        yield f"| {' | '.join(cells)} |"


def failures(of: Mapping[str, System], found: Mapping[str, Outcome]) -> list[str]:
    """Lossless systems whose first losses are not those of their reference, in sentences."""
    out = []
    for name, one in found.items():
        reference = of[name].reference
        if reference in found and of[name].lossless:
            most = apart(one, found[reference], FIRST)
            if not most <= TOLERANCE:
                out.append(
                    f"{name} is lossless, but its losses differ from those of {reference} by "
                    f"{most:.1e} in the first {FIRST} steps; at most {TOLERANCE:.0e} is rounding."
                )
    return out


def folder_of(name: str) -> str:
    """Of a run."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def outcome(runs: pathlib.Path, name: str, options: tuple[str, ...]) -> Outcome:
    """Of a run, which is trained unless it is finished."""
    folder = folder_of(name)
    summary = _training.summary_of(runs, folder, options)
    return Outcome(
        summary, np.array([loss for _, loss in _training.losses_of(runs, folder, "loss")])
    )


def main() -> int:
    """Trains the runs that are not finished; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes no results")
    parser.add_argument("--report", action="store_true", help="of finished runs; trains nothing")
    chosen = parser.parse_args()
    smoke = chosen.smoke
    runs = _results.ROOT / "runs" / ("systems_smoke" if smoke else "systems")
    common = (
        "--audit",
        *(("--config", "smoke-deep", "--steps", "20") if smoke else ("--steps", str(STEPS))),
    )
    of = {name: SYSTEMS[name] for name in FEW} if smoke else SYSTEMS
    found: dict[str, Outcome] = {}
    for name, system in of.items():
        if chosen.report and not (runs / folder_of(name) / "summary.json").exists():
            continue
        found[name] = outcome(runs, name, (*common, *system.options))
        print(f"{name}: {found[name].summary['val_loss']:.4f}", flush=True)
    table = _results.table(HEADER, rows(of, found))
    wrong = failures(of, found)
    print("\n".join(wrong))
    if not smoke:
        about = (
            f"{STEPS} steps of `train_lm.py --config small` on virtual CPU devices, one run each, "
            "on the same batches. Learning rates are those of train_lm.py for each optimizer. Loss "
            f"in nats per byte on 16 batches of held-out text. The largest relative difference to "
            f"the reference's training losses, of the first {FIRST} steps and of all: what is "
            "lossless differs by rounding, which grows with the steps. State: parameters, "
            "gradients and optimizer. Bytes sent are read from the compiled step. Activations are "
            "those of the plan, where there is one: CPU programs merge what the plan runs again, "
            "accelerators do not. One device sends nothing; the pipeline also divides the "
            "activations, which is not counted here."
        )
        title = "Whole systems: the same training"
        missing = ", ".join(name for name in of if name not in found)
        todo = [f"**Not there yet**: {missing}."] if missing else []
        _results.write("whole_systems", title, about, table, *wrong, *todo)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
