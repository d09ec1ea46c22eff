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
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import flax.linen as nn
import jax

import sharding as shd
from sharding.plan.cost._parallel_plan import short

sys.path.insert(0, str(_results.ROOT))
RESULT = _results.RESULTS / "fitted_steps.md"
STEPS = 4  # of a setting in a round
HEADER = """\
| loss | chosen | memory, KiB | of KiB | by hand, fit | chosen, ms | fastest by hand, ms | ratio |
|---|---|---|---|---|---|---|---|"""


def steps_by_hand(
    loss_fn: Callable[..., Any], make_state: Any, args: Any, batch: Any, memory: float, options: Any
) -> dict[str, Callable[[], Any]]:
    """Of stages, micro-batches and recomputation those that fit: each runs a step."""
    found = {}
    ways = (("1 micro-batch", 1, loss_fn), ("2", 2, loss_fn), ("all again", 1, None))
    for stage, (name, count, loss) in itertools.product(range(4), ways):
        zero = shd.Zero(jax.make_mesh((8,), ("data",)), stage=stage, view="global")
        step = zero.train_step(loss or jax.checkpoint(loss_fn), microbatches=count, **options)
        state, given = zero.init(make_state, *args, tx=options.get("tx")), zero.put(batch)
        if shd.audit(step.lower(state, given).compile(), mesh=zero.mesh).memory <= memory:
            found[f"stage {stage}, {name}"] = repeated(step, state, given)
    return found


def repeated(step: Any, state: Any, batch: Any) -> Callable[[], Any]:
    """A function that runs the next step."""
    held = [state]

    def run() -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics

    return run


def seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median time of a step of each, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                jax.block_until_ready(run())
            times[name].append((time.perf_counter() - start) / STEPS)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # one warms up


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
        chosen = repeated(plan.train_step(), plan.init(*args), plan.put(batch))
        took = seconds({"": chosen} | by_hand, rounds)
        ours, beside = took.pop(""), "- | -"
        if took:
            best = min(took, key=took.__getitem__)
            beside = f"{1e3 * took[best]:.2f} ({best}) | {ours / took[best]:.2f}"
        yield (
            f"| {name} | {short(plan.plan)} | {plan.memory / 1024:.0f} | {memory / 1024:.0f} "
            f"| {len(by_hand)} of 12 | {1e3 * ours:.2f} | {beside} |"
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
        table = _results.table(HEADER, rows(names, 1 if smoke else 25))
    if not smoke:
        known = re.findall(r"^\| \w+ \| stage .*$", RESULT.read_text(), re.M) if names else []
        kept = [row for row in known if row.split()[1] not in names]
        _results.write(
            "fitted_steps",
            "Steps that fit chose, beside settings written by hand",
            f"Adam, 8 virtual devices of {_results.machine('cpu')}. By hand: stages 0 to 3 with 1 "
            "and 2 micro-batches, and with all computed again; those count that fit. Settings take "
            "turns, 4 steps each; medians of 25 rounds; each loss in a process of its own.",
            "\n".join([table, *kept]),
        )


if __name__ == "__main__":
    main()
