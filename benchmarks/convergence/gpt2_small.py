"""Trains GPT-2 small with AdamW, CAME, Adafactor and 8-bit CAME on one GPU.

It reports loss, tokens per second, and the peak of memory that the device reports; each run has a
process of its own, so that the peak is its own. The text is that of the other studies, 16 million
bytes a run. The command can be stopped at any moment and given again: it goes on from the last
minute, as long as runs/ is there.

  python benchmarks/convergence/gpt2_small.py --minutes 8   # starts nothing that it cannot save
  python benchmarks/convergence/gpt2_small.py --report      # writes results/ from what is there
  python benchmarks/convergence/gpt2_small.py --smoke       # tiny, on any device; keeps nothing
"""

import argparse
import dataclasses
import functools
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _results
import _rows
import _runs
import _search
import _sizes
import _studies
import _tables
import run
from _contenders import EVERY
from _studies import Rows

CONTENDERS = ("adamw", "came_debiased", "adafactor_momentum", "came_debiased_8bit")
EXPONENTS = (-3.0, -3.25, -2.75)  # of the learning rate; all contenders at one before the next
SEED = 1
LEAST = 1.0  # minutes that are worth a start
ABOUT = """One seed. Loss in nats on 512 held-out windows, at the best of the learning rates that
were run; speed and memory are of that run. Tokens per second are of training alone, the median
twentieth of the run. Peak memory is that which the device reports for the process of the run,
activations included."""


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="stop, and save, after these")
    parser.add_argument("--corpus", type=pathlib.Path, help="text; the standard library's source")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--report", action="store_true", help="write the table, and end")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a run's process
    chosen = parser.parse_args()
    chosen.size = "smoke_gpt2" if chosen.smoke else "gpt2_small"
    chosen.rows = chosen.rows or _rows.path(chosen.size)
    return chosen


def config(size: str, contender: str, exponent: float) -> _studies.Config:
    """A run, with weight decay and betas from which the searches of the small model start."""
    trial = dataclasses.replace(_search.start(EVERY[contender]), exponent=exponent)
    return _sizes.config(size, "next_token", contender, SEED, trial.hyper)


def plans(rows: Rows, size: str) -> list[_studies.Plan]:
    """In the order of work: every contender has a run before any has a second one."""
    every = [(exponent, contender) for exponent in EXPONENTS for contender in CONTENDERS]
    return [
        _studies.plan(f"at 1e{e:g} {contender}", rows, [config(size, contender, e)], 1)
        for e, contender in (every[:2] if size.startswith("smoke") else every)
    ]


def one_run(chosen: argparse.Namespace) -> None:
    """Trains one run in this process, as far as the time goes."""
    import jax

    programs = _results.ROOT / "runs" / "convergence" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(programs))
    trainer = _runs.Trainer(chosen.corpus, speed=True)
    asked = functools.partial(plans, size=chosen.size)
    run.work(chosen, asked, with_parent=False, runs=1, trainer=trainer)


def all_runs(chosen: argparse.Namespace) -> int:
    """A process for each run, until all are there, the time is over or one fails."""
    end = time.monotonic() + 60 * chosen.minutes
    while any(plan.ready for plan in plans(_rows.finished(chosen.rows), chosen.size)):
        left = (end - time.monotonic()) / 60
        if left < LEAST:
            break
        command = [sys.executable, __file__, "--one", "--minutes", f"{left:.3f}"]
        command += ["--rows", str(chosen.rows), *(["--smoke"] if chosen.smoke else [])]
        command += ["--corpus", str(chosen.corpus)] if chosen.corpus else []
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
    return 0


def lines(rows: Rows, size: str) -> Iterator[list[str]]:
    """One for each contender with a run, at its best learning rate."""
    for contender in CONTENDERS:
        configs = [config(size, contender, exponent) for exponent in EXPONENTS]
        there = list(_studies.there(rows, configs).values())
        if not there:
            continue
        best = min(there, key=_studies.loss)
        rates = [f"{row['config']['hyper']['learning_rate']:g}" for row in there]
        losses = [_tables.loss_cell(_studies.loss(row)) for row in there]
        speed, peak = best["tokens_per_second"], best["peak_bytes"]
        yield [
            f"`{contender}`",
            losses[there.index(best)],
            rates[there.index(best)],
            ", ".join(f"{rate}: {loss}" for rate, loss in zip(rates, losses, strict=True)),
            f"{len(there)} of {len(EXPONENTS)}",
            "-" if speed is None else f"{speed:,.0f}",
            "-" if peak is None else f"{peak / 2**30:.2f}",
            f"{best['state_bytes'] / 2**30:.2f}",
        ]


def write(chosen: argparse.Namespace) -> None:
    """Prints the table and what is missing, and keeps it at whole size."""
    rows = _rows.finished(chosen.rows)
    header = ["contender", "validation loss", "at learning rate", "all learning rates", "runs"]
    header += ["tokens/s", "peak memory, GiB", "optimizer state, GiB"]
    text = _tables.table(header, lines(rows, chosen.size))
    if todo := _tables.missing(plans(rows, chosen.size)):
        text += f"\n\n## Not there yet\n\n{todo}"
    print(text)
    if rows and not chosen.smoke:
        title = "GPT-2 small: loss, speed and memory"
        _tables.write("gpt2_small", title, rows, ABOUT, text, script="gpt2_small")


def main() -> int:
    """Runs what is missing, or is the process of a run."""
    chosen = options()
    if chosen.one:
        one_run(chosen)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if chosen.smoke:
            chosen.rows = pathlib.Path(folder) / "rows.jsonl"
        code = 0 if chosen.report else all_runs(chosen)
        write(chosen)
    return code


if __name__ == "__main__":
    sys.exit(main())
