"""Steps that ``fit`` chose by running them, beside twelve settings written by hand.

The losses are those of tests/sharding/plan/test_fit.py, of eight kinds, on 8 virtual CPU devices.

  python benchmarks/fitted_steps.py            # prints the table, writes benchmarks/results/
  python benchmarks/fitted_steps.py GPT nnx    # measures these losses again, and keeps other rows
  python benchmarks/fitted_steps.py --smoke    # one loss, a few steps, prints only
"""

import argparse
import inspect
import itertools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import flax.linen as nn
import jax
import numpy as np

import sharding as shd
from sharding.plan.cost._parallel_plan import short

sys.path.insert(0, str(_results.ROOT))
RESULT = _results.RESULTS / "fitted_steps.md"
STEPS, CHUNKS = 4, 4  # steps of a program in a round; ratios of the second half of the rounds
HEADER = """\
| loss | chosen | memory, KiB | of KiB | by hand, fit | chosen, ms | fastest by hand, ms \
| ratio | of CPU time | chosen to itself | of CPU time |
|---|---|---|---|---|---|---|---|---|---|---|"""


def steps_by_hand(
    loss_fn: Callable[..., Any], make_state: Any, args: Any, batch: Any, memory: float, options: Any
) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Of stages, micro-batches and recomputation those that fit: each its program, and a step."""
    found = {}
    ways = (("1 micro-batch", 1, loss_fn), ("2", 2, loss_fn), ("all again", 1, None))
    for stage, (name, count, loss) in itertools.product(range(4), ways):
        zero = shd.Zero(jax.make_mesh((8,), ("data",)), stage=stage)
        step = zero.train_step(loss or jax.checkpoint(loss_fn), microbatches=count, **options)
        state, given = zero.init(make_state, *args, tx=options.get("tx")), zero.put(batch)
        lowered = step.lower(state, given)
        if shd.audit(lowered.compile(), mesh=zero.mesh).memory <= memory:
            found[f"stage {stage}, {name}"] = lowered.as_text(), repeated(step, state, given)
    return found


def repeated(step: Any, state: Any, batch: Any) -> Callable[[], Any]:
    """A function that runs the next step."""
    held = [state]

    def run() -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics

    return run


def seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """The times of a step of each by round, of the clock and of the CPU: [rounds, 2]."""
    times: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # one warms up
        for name in random.sample([*runs], len(runs)):
            start = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                jax.block_until_ready(runs[name]())
            times[name].append(np.subtract((time.perf_counter(), time.process_time()), start))
    return {name: np.array(values[1:]) / STEPS for name, values in times.items()}


def ratios(times: np.ndarray, others: np.ndarray) -> str:
    """Those of the medians of each chunk of the second half of the rounds."""
    middle = [np.median(np.split(x, 2)[1].reshape(CHUNKS, -1, 2), 1) for x in (times, others)]
    each = (middle[0] / middle[1]).T  # [2, chunks]
    return " | ".join(f"{np.median(x):.2f} ({x.min():.2f} to {x.max():.2f})" for x in each)


def rows(names: Any, rounds: int) -> Iterator[str]:
    """A line for each loss."""
    from tests.sharding.plan.test_fit import LOSSES, TX

    for name in names or LOSSES:
        make, _, memory = LOSSES[name]
        loss_fn, make_state, batch, options = make()
        args = [jax.random.key(0)] * len(inspect.signature(make_state).parameters)
        options |= {"tx": TX} if isinstance(make_state(*args), tuple) else {}
        limits = {"memory": memory, "headroom": 0.0, "measure": True}
        plan = shd.plan.fit(loss_fn, make_state, batch, **limits, **options)
        by_hand = steps_by_hand(loss_fn, make_state, args, batch, memory, options)
        chosen = {x: repeated(plan.train_step(), plan.init(*args), plan.put(batch)) for x in "ab"}
        programs = {text: name for name, (text, _) in reversed(by_hand.items())}
        took = seconds(chosen | {x: by_hand[x][1] for x in programs.values()}, rounds)
        ours, itself, beside = took.pop("a"), took.pop("b"), "- | - | -"
        if took:  # the fastest in the first half of the rounds, by the time of the CPU
            best = min(took, key=lambda name: np.median(took[name][: rounds // 2, 1]))
            beside = (
                f"{1e3 * np.median(took[best][:, 0]):.2f} ({best}) | {ratios(ours, took[best])}"
            )
        yield (
            f"| {name} | {short(plan.plan)} | {plan.memory / 1024:.0f} | {memory / 1024:.0f} "
            f"| {len(by_hand)} of 12, {len(programs)} programs | {1e3 * np.median(ours[:, 0]):.2f} "
            f"| {beside} | {ratios(ours, itself)} |"
        )


def main() -> None:
    """Runs the steps; writes the table of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("losses", nargs="*", help="whose rows are measured again; none: all")
    parser.add_argument("--smoke", action="store_true", help="one loss; no file")
    options = parser.parse_args()
    smoke, names = options.smoke, ["scale"] if options.smoke else options.losses
    jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
    with nn.logical_axis_rules([("embed", None), ("class", None)]):  # for those by hand
        table = _results.table(HEADER, rows(names, 8 if smoke else 80))
    if not smoke:
        known = re.findall(r"^\| \w+ \| stage .*$", RESULT.read_text(), re.M) if names else []
        kept = [row for row in known if row.split()[1] not in names]
        _results.write(
            "fitted_steps",
            "Steps that fit chose, beside settings written by hand",
            f"Adam, 8 virtual devices of {_results.machine('cpu')}. By hand: stages 0 to 3 with 1 "
            "and 2 micro-batches, and with all computed again; those count that fit, equal "
            "programs once. Programs take turns in a random order, 4 steps each, in 80 rounds, "
            "beside other work on the cores. The fastest by hand is that of the first 40 rounds. "
            "Of the others, in four chunks, ratios are the median, least and most of those of "
            "medians. Chosen to itself: the same step twice. Each loss in a process of its own.",
            "\n".join([table, *kept]),
        )


if __name__ == "__main__":
    main()
