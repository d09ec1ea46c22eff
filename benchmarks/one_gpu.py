"""Training steps of large models on one GPU: memory and time beside what the planner says.

Each case has a process of its own, so that the peak which the device reports is its own. Four
programs at a time are compiled; then each runs alone. State is made on the host, array by array,
and its values are of no meaning.

  python benchmarks/one_gpu.py --minutes 5   # on a GPU; appends to results/one_gpu.jsonl
  python benchmarks/one_gpu.py --report      # writes results/one_gpu.md from these, anywhere
  python benchmarks/one_gpu.py --smoke       # tiny, on any device, prints only
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "")  # zero_memory.py would choose the CPU

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fine_tuning_memory import FORMS
from zero_memory import OPTIMIZERS, prepared

import sharding as shd
from sharding import stored
from sharding.plan import MODELS, Decoder, ParallelPlan, kind_of
from sharding.plan.cost._plan_costs import PlanCosts
from sharding.plan.search._search import machine_of

GIB = 2**30
AT_ONCE = 4  # processes that compile
TINY = Decoder(2, 64, 4, 4, 128, 96)
ROWS = _results.RESULTS / "one_gpu.jsonl"


QLORA = "AdamW of adapters, NF4"


@dataclasses.dataclass(frozen=True)
class Case:
    """A step in bfloat16 on one device; every layer is computed again."""

    model: str
    optimizer: str
    update: str = "after"  #: or "backward"
    sequences: int = 1  #: of a micro-batch
    microbatches: int = 1
    clip: bool = False  #: by the global norm
    host: str = ""  #: what host memory holds: "optimizer", "all"; "update": updated there
    length: int = 1024

    def zero(self) -> shd.Zero:
        """On the first device."""
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        options: dict[str, Any] = (
            {"offload": self.host} if self.host in ("optimizer", "all") else {}
        )
        if self.host == "update":
            options = {"offload": "optimizer", "update_on": "host"}
        return shd.Zero(mesh, **options)

    def tx(self) -> optax.GradientTransformation:
        """With the clip, if there is one."""
        if self.optimizer == QLORA:
            return optax.masked(optax.adamw(1e-4), stored.trained)
        tx = OPTIMIZERS[self.optimizer]
        return optax.chain(optax.clip_by_global_norm(1.0), tx) if self.clip else tx


CASES = [
    Case("llama2-7b", "Adafactor", "backward"),
    Case("llama2-7b", "Adafactor"),
    Case("llama2-7b", "CAME 8-bit", "backward"),
    Case("llama2-7b", "CAME 8-bit"),
    Case("llama2-7b", "AdamW 8-bit", "backward"),
    Case("llama2-13b", "CAME 8-bit", "backward"),
    Case("llama2-7b", "CAME 8-bit", "backward", microbatches=4, clip=True),
    Case("llama2-7b", "AdamW", "backward", host="all"),
    Case("1.3B", "AdamW", sequences=8),
    Case("1.3B", "AdamW", "backward", sequences=8),
    Case("1.3B", "AdamW", host="update", sequences=8),
    Case("1.3B", "AdamW", host="optimizer", sequences=8),
    Case("gpt2-small", "AdamW", sequences=16),
    Case("llama2-7b", "Adafactor", "backward", sequences=8),
    Case("llama2-7b", "AdamW", "backward", sequences=4, microbatches=4, host="all"),
    Case("llama3-8b", "CAME 8-bit", "backward", sequences=2, length=2048),
    Case("llama2-7b", QLORA),
]
OTHER_MODELS = {"1.3B": Decoder(24, 2048, 16, 16, 5504, 32000)}


def model_of(case: Case, smoke: bool) -> Decoder:
    """The model, or a tiny one."""
    model = TINY if smoke else (MODELS | OTHER_MODELS)[case.model]
    return dataclasses.replace(model, length=32 if smoke else case.length)


def filled(x: jax.ShapeDtypeStruct, rng: np.random.Generator, is_param: bool) -> jax.Array:
    """An array that is put where its type says: small random values, or zeros."""
    if is_param:
        block = rng.normal(0, 0.02, min(2**20, x.size)).astype(x.dtype)
        return jax.device_put(np.resize(block, x.shape), x.sharding)
    return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)


def fine_tuned(zero: shd.Zero, model: Decoder, tx: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """As ``prepared``, of frozen matrices in four bits and their adapters."""
    loss = stored.loss_of(model.make_loss(jax.checkpoint(model.apply_layer)))

    def make_state() -> tuple[Any, Any]:
        params = stored.store(model.init(dtype), FORMS, jax.random.key(0))
        return params, tx.init(params)

    step = zero.train_step(loss, tx=tx, trainable=stored.trained)
    return step, zero.abstract_state(make_state, tx=tx), model.batch(1)


def run_one(case: Case, smoke: bool, rounds: int) -> dict[str, Any]:
    """Figures of a case: compiles, waits for a line of input, then takes steps."""
    zero, tx, model = case.zero(), case.tx(), model_of(case, smoke)
    dtype, sequences = jnp.float32 if smoke else jnp.bfloat16, case.sequences * case.microbatches
    how = case.update, case.microbatches, dtype, sequences
    fine_tunes = case.optimizer == QLORA
    made = fine_tuned(zero, model, tx, dtype) if fine_tunes else prepared(zero, model, tx, *how)
    step, abstract, batch = made
    start = time.perf_counter()
    program = step.lower(abstract, batch).compile()
    seconds = time.perf_counter() - start
    found = shd.audit(program, mesh=zero.mesh)
    print(f"compiled in {seconds:.0f} s", flush=True)
    sys.stdin.readline()  # until others have compiled

    rng = np.random.default_rng(0)
    params, opt_state = abstract
    params = jax.tree.map(lambda x: filled(x, rng, True), params)
    state = params, jax.tree.map(lambda x: filled(x, rng, False), opt_state)
    jax.block_until_ready(state)
    tokens = rng.integers(model.vocabulary, size=batch.shape, dtype=np.int32)
    tokens = zero.put(tokens)
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        state, metrics = step(state, tokens)
        value = float(metrics["loss"])
        times.append(time.perf_counter() - start)
    stats = device.memory_stats() or {}
    return {
        **dataclasses.asdict(case),
        "device": device.device_kind,
        "jax": jax.__version__,
        "commit": _results.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "compile": seconds,
        "program": found.memory,
        "host_bytes": found.host,
        "before": before,
        "peak": stats.get("peak_bytes_in_use", 0),
        "seconds": times[2:],
        "loss": value,
    }


def waves(cases: Sequence[int], smoke: bool, minutes: float, rounds: int) -> Iterator[dict]:
    """Results, of some processes at a time; none is started after the time is over."""
    end = time.monotonic() + 60 * minutes
    for first in range(0, len(cases), AT_ONCE):
        if time.monotonic() > end:
            return
        started, numbers = [], cases[first : first + AT_ONCE]
        for number in numbers:
            command = [sys.executable, __file__, "--one", str(number), "--rounds", str(rounds)]
            started.append(
                subprocess.Popen(
                    command + ["--smoke"] * smoke,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                )
            )
        compiled = [process.stdout.readline() for process in started]  # all wait, or have failed
        for number, process, line in zip(numbers, started, compiled, strict=True):
            out, _ = process.communicate("go\n")
            if process.returncode or not out:
                print(f"{CASES[number]} failed: {line}", flush=True)
            else:
                yield json.loads(out.splitlines()[-1])


def predicted(row: dict[str, Any]) -> tuple[float, float] | None:
    """Bytes and seconds that the planner says; None for what it has no plan of."""
    case = Case(**{f.name: row[f.name] for f in dataclasses.fields(Case)})
    kind = kind_of(row["device"])
    if kind is None or case.clip or case.host == "all" or case.optimizer == QLORA:
        return None
    model, target = model_of(case, False), f"{kind.name}x1"
    costs = PlanCosts(model, case.tx(), machine_of(target, kind), length=case.length)
    plan = ParallelPlan(
        microbatch=case.sequences,
        microbatches=case.microbatches,
        offload="update" if case.host == "update" else case.host == "optimizer",
        update_in_backward=case.update == "backward",
    )
    try:
        plan.check(model)
    except ValueError:
        return None
    return costs.fullest(plan), costs.seconds(plan, costs.passes(plan)).seconds


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table's."""
    for row in rows:
        batch = f"{row['microbatches']} x {row['sequences']} x {row['length']}"
        case = row["model"], row["optimizer"] + ", clipped" * row["clip"], batch
        plan = predicted(row)
        peak = row["peak"] / GIB if row["peak"] > row["before"] else None
        seconds = statistics.median(row["seconds"])
        tokens = row["microbatches"] * row["sequences"] * row["length"] / seconds
        cells = [
            row["update"],
            row["host"] or "",
            f"{plan[0] / GIB:.2f}" if plan else "",
            f"{row['program'] / GIB:.2f}",
            f"{peak:.2f}" if peak else f"under {row['before'] / GIB:.2f}",
            f"{row['host_bytes'] / GIB:.1f}" if row["host"] else "",
            f"{plan[1]:.3f}" if plan else "",
            f"{seconds:.3f}",
            f"{plan[1] / seconds:.2f}" if plan else "",
            f"{tokens:,.0f}",
            f"{row['compile']:.0f}",
        ]
        yield f"| {' | '.join([*case, *cells])} |"


def report() -> None:
    """Writes the table of what was measured."""
    rows = [json.loads(text) for text in ROWS.read_text().splitlines()]
    columns = (
        *("model", "optimizer", "batch", "update", "on the host", "GiB planned", "of the program"),
        *("peak of the device", "of the host", "s planned", "s a step", "planned / measured"),
        *("tokens a second", "compiled in, s"),
    )
    header = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    last = rows[-1]
    _results.write(
        "one_gpu",
        "Steps of large models on one GPU",
        f"Planned so; measured on one {last['device']} at commit {last['commit']}, {last['date']}, "
        f"jax {last['jax']}. bfloat16, every layer computed again, medians of "
        f"{len(last['seconds'])} steps; a batch is micro-batches x sequences x tokens.",
        _results.table(header, lines(rows)),
    )


def main() -> None:
    """Measures, reports, or is the process of a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after these")
    parser.add_argument("--rounds", type=int, default=8)
    numbers = range(len(CASES))
    parser.add_argument("--cases", type=int, nargs="+", choices=numbers, default=numbers)
    parser.add_argument("--report", action="store_true", help="write the table, and end")
    parser.add_argument("--smoke", action="store_true", help="tiny; prints only")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # a case's process
    options = parser.parse_args()
    if options.report:
        return report()
    if options.one is not None:
        with tempfile.TemporaryDirectory() as folder:  # the step is compiled once
            jax.config.update("jax_compilation_cache_dir", folder)
            print(json.dumps(run_one(CASES[options.one], options.smoke, options.rounds)))
        return None
    cases = (0, 1, 7, 10, 16) if options.smoke else options.cases  # of each kind
    for row in waves(cases, options.smoke, options.minutes, options.rounds):
        print({k: row[k] for k in ("model", "optimizer", "update", "host", "peak", "seconds")})
        if not options.smoke:
            with pathlib.Path(ROWS).open("a") as file:
                file.write(json.dumps(row) + "\n")
    return None


if __name__ == "__main__":
    main()
