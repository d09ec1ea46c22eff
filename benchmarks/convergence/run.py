"""Trains what the comparison of optimizers needs and what is not there yet.

Each finished run is a line of benchmarks/results/convergence/runs_cpu.jsonl. The command can be
stopped at any moment and given again, and several may run at once: none repeats a run, and one that
was under way goes on from its last minute.

  python benchmarks/convergence/run.py --study tuning final --tasks next_token
  python benchmarks/convergence/run.py --study tuning --minutes 8
  python benchmarks/convergence/run.py --smoke    # a tiny model, seconds, prints only
"""

import argparse
import contextlib
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _results
import _rows
import _studies
from _contenders import CONTENDERS
from _tasks import TASKS

CLAIMS = _results.ROOT / "runs" / "convergence"


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", nargs="+", default=["tuning"], choices=_studies.STUDIES)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--minutes", type=float, help="stop, and save, after these")
    parser.add_argument("--workers", type=int, default=1, help="processes, one core each")
    parser.add_argument("--corpus", type=pathlib.Path, help="text; the standard library's source")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps no rows")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # this is a worker
    chosen = parser.parse_args()
    chosen.size = "smoke" if chosen.smoke else "cpu"
    if chosen.smoke:
        chosen.study, chosen.contenders = ["tuning", "final"], ["lion"]
    chosen.rows = chosen.rows or _rows.path(chosen.size)
    return chosen


def start_workers(number: int) -> int:
    """Runs this command in processes of one core each, which share nothing but the rows."""
    cores = sorted(os.sched_getaffinity(0))
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--core", str(cores[i % len(cores)])],
            env={**os.environ, "XLA_FLAGS": flags.strip()},
        )
        for i in range(number)
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return max(worker.wait() for worker in workers)
    finally:
        for worker in workers:
            worker.terminate()


@contextlib.contextmanager
def claimed(name: str) -> Iterator[bool]:
    """Whether this process is the one that runs ``name``; a dead process holds no claim."""
    CLAIMS.mkdir(parents=True, exist_ok=True)
    with (CLAIMS / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


Plans = Callable[[dict[str, _rows.Row]], Iterable[_studies.Plan]]


def work(
    chosen: argparse.Namespace,
    plans: Plans,
    with_parent: bool = True,
    runs: float = float("inf"),
    trainer: Any = None,
) -> None:
    """Runs what is ready and not claimed, until nothing is or the time is over.

    Args:
      chosen: of the command line: size, corpus, rows, minutes.
      plans: what is to be run, by the rows that are there.
      with_parent: whether it ends with the process that started it.
      runs: how many to finish at most.
      trainer: if not that of the tasks.
    """
    import _runs  # after the process has its core
    import _sizes

    trainer = trainer or _runs.Trainer(chosen.corpus)
    checksum = trainer.corpus(_sizes.SIZES[chosen.size].context).checksum
    end = time.monotonic() + 60 * (chosen.minutes or float("inf"))
    last, parent = "", os.getppid()
    while runs > 0 and not (with_parent and os.getppid() != parent):
        asked = list(plans(_rows.finished(chosen.rows, checksum)))
        ready = [(plan, config) for plan in asked for config in plan.ready]
        if not ready or time.monotonic() > end:
            for plan in asked:
                if plan.waits:
                    print(f"{plan.name} waits for {plan.waits}.", flush=True)
            return
        # What is compiled already goes first.
        ready.sort(key=lambda pair: _runs.signature(pair[1]) != last)
        for plan, config in ready:
            with claimed(_rows.key_of(config)) as mine:
                if not mine or _rows.key_of(config) in _rows.finished(chosen.rows, checksum):
                    continue
                row = trainer.run(config, CLAIMS / "saved", end)
                if row is None:
                    print(f"{plan.name}, seed {config['seed']}: saved, goes on later.", flush=True)
                    return
                _rows.append(chosen.rows, row)
            last, runs = _runs.signature(config), runs - 1
            values = ", ".join(f"{name} {value:g}" for name, value in config["hyper"].items())
            print(
                f"{time.strftime('%H:%M:%S')} {plan.name}, seed {config['seed']}, {values}: "
                f"{'diverged' if row['diverged'] else row['loss']}, {row['seconds']:.0f} s "
                f"({plan.done + 1} of {plan.total})",
                flush=True,
            )
            break
        else:
            time.sleep(2)  # what is left is being run by others


def main() -> int:
    """Starts the workers, or is one."""
    chosen = options()
    if chosen.core is None and chosen.smoke:
        with tempfile.TemporaryDirectory() as folder:
            sys.argv += ["--rows", f"{folder}/rows.jsonl"]
            return start_workers(chosen.workers)
    if chosen.core is None:
        return start_workers(chosen.workers)
    if not chosen.smoke:
        os.sched_setaffinity(0, {chosen.core})
    asked = chosen.size, chosen.study, chosen.tasks, chosen.contenders
    work(chosen, lambda rows: _studies.plans(rows, *asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
