"""Steps that are predicted by a measured machine, beside those that a data sheet predicts.

The machine is measured as ``optax-ext check --measure`` does it, before and after the steps of each
model: AdamW in float32, whose time is predicted by the mean of both. One device of one core: its
CPU seconds are what a step takes there, whatever else runs on the cores.

  python benchmarks/measured_machine.py           # writes benchmarks/results/measured_machine.md
  python benchmarks/measured_machine.py --smoke   # one tiny model, prints only
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _networks import MONET, NETWORKS
from _transformer import Config, init, make_loss
from loss_programs import MODELS as LOSSES

import sharding as shd
from sharding.check import _measure_machine
from sharding.check._measure_machine import measure_machine
from sharding.plan import ParallelPlan, TracedModel
from sharding.plan.search._search import costs_of, machine_of

TX = optax.adamw(1e-3)
DEVICES, STAGE, STEPS = 1, 0, 3
# A core of an EPYC 7763 of AMD by its data sheet: two products and sums of 8 float32 values a cycle
# at 2.45 GHz; its share of 8 channels of DDR4-3200 for 64 cores. Links are copies in that memory.
SHEET = shd.DeviceKind("cpu", 8e9, 204.8e9 / 64, 2.45e9 * 32, 204.8e9 / 64, None, "AMD")
HEADER = """\
| model | measured, ms (least to most of the tries) | by the measured machine, ms | ratio \
| by the data sheet, ms | ratio |
|---|---|---|---|---|---|"""
Model = tuple[Callable[..., Any], Any, Any]  # a loss, its parameters and a batch


def models(smoke: bool) -> dict[str, Model]:
    """Losses with their parameters and batches."""

    def network(name: str, scale: int) -> Model:
        make = NETWORKS[name] if name in NETWORKS else MONET[name][0]
        loss, types, batch = make(8 * scale if smoke else scale)
        rng = np.random.default_rng(0)
        params = [np.asarray(rng.normal(0, 0.05, x.shape), np.float32) for x in types]
        shape = (4, *batch.shape[1:])
        if batch.dtype == jnp.int32:
            return loss, params, rng.integers(0, 100, shape)
        return loss, params, rng.normal(size=shape).astype(np.float32)

    config = Config(layers=2, width=64) if smoke else Config(layers=4)
    tokens = np.random.default_rng(0).integers(0, 512, (4, 33 if smoke else 257))
    make, towers, batch = LOSSES["masked mean"](smoke)
    found: dict[str, Callable[[], Model]] = {
        "decoder, scanned": lambda: (make_loss(), init(config), tokens),
        "residual MLP": lambda: (towers, make(), batch),
        "GPT-2, an eighth as wide": lambda: network("GPT-2, unrolled", 8),
        "T5, an eighth as wide": lambda: network("T5-like", 8),
        "ResNet-50, an eighth as wide": lambda: network("ResNet-50", 8),
        "VGG-16, an eighth as wide": lambda: network("VGG-16", 8),
        "LSTM, an eighth as wide": lambda: network("LSTM", 8),
    }
    return {name: made() for name, made in [*found.items()][: 1 if smoke else None]}


def step_of(model: Model) -> Callable[[], None]:
    """A call that takes a step, compiled and run once."""
    loss, params, batch = model
    zero = shd.Zero(jax.make_mesh((DEVICES,), ("data",)), stage=STAGE)
    step = zero.train_step(loss, tx=TX)
    held = [zero.init(lambda: (params, TX.init(params)), tx=TX)]
    placed = zero.put(batch)

    def call() -> None:
        held[0], _ = jax.block_until_ready(step(held[0], placed))

    call()
    return call


def predicted(model: Model, kind: shd.DeviceKind) -> float:
    """Seconds of a step by the figures of a kind."""
    loss, params, batch = model
    traced = TracedModel(loss, lambda dtype: jax.tree.map(jnp.asarray, params), batch)
    costs = costs_of(traced, TX, machine_of(f"cpu:{DEVICES}", kind), 1, jnp.dtype(jnp.float32))
    rows = len(jax.tree.leaves(batch)[0]) // DEVICES
    plan = ParallelPlan(data=DEVICES, stage=STAGE, microbatch=rows, recompute="none")
    return costs.seconds(plan, costs.passes(plan)).seconds


def rows(smoke: bool, tries: int) -> Iterator[str]:
    """A line for each model; the machine is measured before and after its steps."""
    clock = time.process_time
    _measure_machine._DTYPES = ("float32",)  # the dtype of all models
    if smoke:
        _measure_machine._LEAST, _measure_machine._LONG = 0.0, 1e-4
    before = measure_machine(clock=clock).device()
    for name, model in models(smoke).items():
        step = step_of(model)
        found = []
        for _ in range(tries):
            start = clock()
            for _ in range(STEPS):
                step()
            found.append((clock() - start) / STEPS)
        took = statistics.median(found)
        after = before if smoke else measure_machine(clock=clock).device()
        mine = statistics.mean(predicted(model, kind) for kind in (before, after))
        sheet, before = predicted(model, SHEET), after
        print(os.getloadavg(), flush=True)
        yield (
            f"| {name} | {1e3 * took:.1f} ({1e3 * min(found):.1f} to {1e3 * max(found):.1f}) "
            f"| {1e3 * mine:.1f} | {mine / took:.2f} | {1e3 * sheet:.1f} | {sheet / took:.2f} |"
        )


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--tries", type=int, default=5)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    tries = 1 if options.smoke else options.tries
    load = os.getloadavg()[0]
    table = _results.table(HEADER, rows(options.smoke, tries))
    if not options.smoke:
        sheet = {k: v for k, v in dataclasses.asdict(SHEET).items() if k in ("flops", "bandwidth")}
        about = (
            f"{_results.machine('cpu')}, of which one device uses one; AdamW, float32. Medians of "
            f"{tries} times {STEPS} steps, in CPU seconds; the machine was measured before and "
            "after those of each model. The load of the machine, of which this is one: "
            f"{load:.1f} before, {os.getloadavg()[0]:.1f} after. The data sheet of a core: {sheet}."
        )
        _results.write("measured_machine", "Steps predicted by a measured machine", about, table)


if __name__ == "__main__":
    main()
