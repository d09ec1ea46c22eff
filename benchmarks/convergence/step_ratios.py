"""Time of a training step of each contender, beside AdamW's, on this machine.

The model and the batch are those of the comparison, next token. All take steps in rounds, each in
an order of its own, on one core.

  python benchmarks/convergence/step_ratios.py           # results/convergence/time_cpu.json
  python benchmarks/convergence/step_ratios.py --smoke   # tiny, seconds; prints only
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _results
import _rows
import _search
import _sizes
import numpy as np
from _contenders import CONTENDERS
from _tasks import TASKS, Corpus


def one(size: str, contender: str, corpus: Corpus, steps: int) -> Callable[[], None]:
    """Takes some training steps and waits for them."""
    import _models
    import _runs
    import jax
    import jax.numpy as jnp

    hyper = _search.start(CONTENDERS[contender]).hyper
    config = _sizes.config(size, "next_token", contender, 0, hyper)
    program = _runs.Program(config, _runs.Trainer().judge(config))
    traced = {name: jnp.float32(hyper[name]) for name in _runs.TRACED}
    held = [program.init(_models.init(_sizes.model(config), 0), traced)]
    task, batch = TASKS["next_token"], config["batch"]
    batches = [task.batch(corpus, 0, i, batch) for i in range(steps)]
    stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *batches)

    def once() -> None:
        held[0], _ = program.train(held[0], traced, stacked)
        jax.block_until_ready(held[0])

    return once


def ratios(times: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Quartiles of the ratio to AdamW's, round by round."""
    base = times["adamw"]
    return {
        name: [round(float(x), 4) for x in np.percentile(seconds / base, (25, 50, 75))]
        for name, seconds in times.items()
    }


def measured(size: str, names: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """What the report reads."""
    import jax
    from _steps import time_alternately

    corpus = Corpus(None, _sizes.SIZES[size].context)
    steppers = {name: one(size, name, corpus, steps) for name in names}
    times = time_alternately(steppers, rounds, warm_up=1)
    about = (
        f"{rounds} rounds of {steps} steps on one core of "
        f"{_results.machine(jax.devices()[0].device_kind)}; commit {_results.commit()}, "
        f"{datetime.date.today()}, jax {importlib.metadata.version('jax')}."
    )
    milliseconds = {name: round(1e3 * float(np.median(x)) / steps, 3) for name, x in times.items()}
    return {"about": about, "milliseconds": milliseconds, "ratios": ratios(times)}


def main() -> None:
    """Measures, and keeps what was measured at whole size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    chosen = parser.parse_args()
    size, names = "cpu", list(CONTENDERS)
    if chosen.smoke:
        size, chosen.rounds, chosen.steps, names = "smoke", 2, 2, ["adamw", "came"]
    # Before jax starts its threads.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    text = json.dumps(measured(size, names, chosen.rounds, chosen.steps), indent=1)
    print(text)
    if not chosen.smoke:
        (_rows.FOLDER / f"time_{size}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
