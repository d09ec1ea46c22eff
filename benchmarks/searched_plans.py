"""What the search chooses, and programs of plans beside what is planned: memory, bytes, operations.

Programs are compiled for accelerators and not run: pip install '.[aot]'.

  python benchmarks/searched_plans.py            # prints the tables, writes benchmarks/results/
  python benchmarks/searched_plans.py --smoke    # a tiny model on virtual CPU devices, prints only
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import optax

from sharding.plan import (
    MODELS,
    Decoder,
    ParallelPlan,
    PlanFile,
    fit,
    kind_of,
    search,
    targets,
    verify,
)
from sharding.plan.cost._parallel_plan import short
from sharding.plan.cost._plan_costs import PlanCosts
from sharding.plan.search._search import machine_of

GIB = 2**30
TX = optax.adamw(1e-3)
GPT3 = Decoder(96, 12288, 96, 96, 49152, 51200, 2048, gated=False, tied=True)
OF_7B = (MODELS["llama2-7b"], "h100x8", 32, 2048)
ON_L40S = (MODELS["llama2-7b"], "l40sx8", 32, 2048)
# By name: model, target, sequences, their length; and what the search keeps.
CASES = {
    "7B on 8 H100": (MODELS["llama2-7b"], "h100x8", 32, 4096),
    "13B on 64 H100": (MODELS["llama2-13b"], "h100x64", 128, 2048),
    "70B on 64 v5p": (MODELS["llama2-70b"], "v5p:4x4x4", 256, 4096),
    "175B on 64 A100": (GPT3, "a100-80x64", 64, 2048),
    "70B on 1,024 v5p": (MODELS["llama2-70b"], "v5p:8x8x16", 1024, 4096),
    "405B on 1,024 H100": (MODELS["llama3-405b"], "h100x1024", 2048, 8192),
    # Of some kinds, beside those; docs/how_to/let_it_choose.md has their figures.
    "7B on 8 H100, one replica": (
        *(MODELS["llama2-7b"], "h100x8", 32, 4096),
        {"data": 8, "replicas": 1},
    ),
    "175B, 8 stages of 8": (*(GPT3, "a100-80x64", 64, 2048), {"tensor": 8, "pipe": 8}),
    "70B on 1,024 H100": (MODELS["llama2-70b"], "h100x1024", 1024, 4096),
    "7B in 8 stages": (*OF_7B, {"pipe": 8}),
    "7B in 8 stages, ZB-V": (*OF_7B, {"pipe": 8, "schedule": "zb-v"}),
    "7B on 8 L40S": ON_L40S,
    "7B on 8 L40S, 8 stages": (*ON_L40S, {"pipe": 8}),
    "7B on 8 L40S, without a flush": (*ON_L40S, {"pipe": 8, "schedule": "2bw"}),
}
P = ParallelPlan
ZB_H1 = P(
    data=2, pipe=4, microbatch=2, microbatches=16, stage=2, schedule="zb-h1", recompute="none"
)
# Model, length, plan.
PLANS = (
    ("gpt2-small", 1024, P(data=8, stage=1, microbatch=2, recompute="none")),
    ("gpt2-small", 1024, P(data=8, stage=2, microbatch=8, recompute="minimal_with_context")),
    ("gpt2-small", 1024, P(data=8, stage=3, microbatch=4, microbatches=2)),
    ("llama2-7b", 1024, P(data=8, stage=2)),
    ("llama2-7b", 2048, P(data=8, stage=3)),
    ("llama2-7b", 4096, P(data=8, stage=3)),
    ("llama2-7b", 2048, P(data=8, stage=3, microbatch=4, recompute="save_qkv_proj")),
    ("llama3-8b", 2048, P(data=8, stage=3, microbatches=2)),
    ("llama3-8b", 2048, P(data=8, stage=2, microbatch=2, recompute="minimal")),
    ("gpt2-small", 1024, P(data=2, tensor=4, stage=1, microbatch=2, recompute="none")),
    ("llama2-7b", 2048, P(data=4, tensor=2, stage=3, microbatch=2)),
    ("llama2-7b", 2048, P(data=2, tensor=4, stage=2, microbatches=2, recompute="minimal")),
    ("llama2-7b", 2048, P(tensor=8, microbatch=4, microbatches=2, recompute="none")),
    ("llama2-7b", 2048, P(data=8, stage=1, replicas=2, spread=True, microbatches=2)),
    ("llama2-7b", 2048, P(data=8, stage=2, replicas=4, spread=True)),
    ("llama2-7b", 2048, P(data=8, stage=2, replicas=2)),
    ("llama2-7b", 2048, P(data=8, stage=3, replicas=2, spread=True, microbatch=2)),
    ("llama2-7b", 2048, P(data=8, stage=3, replicas=2, spread=True, microbatches=2)),
    ("gpt2-medium", 1024, P(data=8, stage=1, weights="master")),
    ("gpt2-medium", 1024, P(data=8, stage=2, weights="stochastic")),
    ("gpt2-medium", 1024, P(data=8, stage=1, sync="powersgd(4)")),
    ("gpt2-medium", 1024, P(data=8, stage=2, microbatches=2, sync="qsgd(8)")),
    ("gpt2-medium", 1024, P(data=8, stage=3, replicas=2, microbatches=2, sync="powersgd(4)")),
    ("gpt2-small", 1024, P(data=2, pipe=4, stage=2, microbatch=2, microbatches=16)),
    (
        "gpt2-small",
        1024,
        P(data=4, pipe=2, stage=2, microbatches=16, schedule="1f1b", recompute="none"),
    ),
    ("gpt2-small", 1024, ZB_H1),
    ("llama2-7b", 2048, P(pipe=8, microbatches=32)),
    ("llama2-7b", 2048, P(pipe=8, microbatches=32, recompute="save_qkv_proj")),
    ("llama2-7b", 2048, P(tensor=2, pipe=4, microbatches=16)),
    (
        "llama2-7b",
        2048,
        P(*(2, 2, 2), microbatches=8, stage=1, schedule="1f1b", recompute="minimal"),
    ),
    ("llama2-7b", 2048, P(data=4, pipe=2, stage=3, microbatches=8, schedule="gpipe")),
    ("llama2-7b", 1024, P(pipe=8, microbatches=16, schedule="zb-v", chunks=2, recompute="none")),
    ("llama2-7b", 2048, P(pipe=8, microbatches=16, schedule="2bw")),
)
# For TPUs, with the number of layers.
TPU_PLANS = (
    ("llama2-7b", 2048, P(data=8, stage=2, recompute="none"), 4),
    ("llama2-7b", 2048, P(data=8, stage=3), 24),
    ("llama2-7b", 2048, P(data=8, stage=3, microbatches=2), 24),
    ("llama2-7b", 2048, P(data=8, stage=3, microbatches=2, microbatch=4), 24),
    ("llama2-7b", 2048, P(data=8, stage=3, recompute="minimal_with_context"), 24),
    ("llama2-7b", 2048, P(data=8, stage=3, replicas=2, spread=True), 24),
    ("llama2-7b", 2048, P(data=4, tensor=2, stage=3), 24),
    ("gpt2-small", 1024, P(data=8, stage=1, weights="master"), 12),
    ("gpt2-small", 1024, P(data=2, pipe=4, stage=2, microbatch=2, microbatches=16), 12),
    ("gpt2-small", 1024, ZB_H1, 12),
)
# Losses that ``fit`` plans and compiles beside a search of the decoder that they are: 64 sequences.
FITS = [(name, target) for name in ("llama2-7b", "llama2-13b") for target in ("h100x8", "v5e:4x4")]
FIT_TEXT = """\
## Any loss

`fit` gets the loss of a decoder, 64 sequences of 2,048 tokens, and compiles what it chooses; beside
it the time that `search` predicts for the decoder, without pipelines and shared layers."""
FIT_HEADER = """\
| loss | target | chosen | predicted, s | / search | planned, GiB | program, GiB | of GiB |
|---|---|---|---|---|---|---|---|"""
CASE_HEADER = """\
| case | plans | best | predicted, s | all hidden | none hidden | bound | MFU | memory, GiB |\
 searched in, s |
|---|---|---|---|---|---|---|---|---|---|"""
PLAN_HEADER = """\
| model | length | plan | planned, GiB | program, GiB | program / plan | sent / planned \
| operations / planned |
|---|---|---|---|---|---|---|---|"""


def case_rows() -> Iterator[str]:
    """A line for each case."""
    for name, (model, target, sequences, length, *kept) in CASES.items():
        keep = dict(*kept)
        options = {"keep": keep, "asynchronous": keep.get("schedule") == "2bw"}
        start = time.perf_counter()
        found = search(model, TX, target, sequences=sequences, length=length, **options)
        seconds, best = time.perf_counter() - start, found.best
        times = (
            best.seconds.seconds,
            best.seconds.full_overlap,
            best.seconds.no_overlap,
            found.bound,
        )
        yield (
            f"| {name} | {found.compared:,} | {best.summary} "
            f"| {' | '.join(f'{each:.4g}' for each in times)} | {100 * best.utilization:.0f} % "
            f"| {best.memory / GIB:.1f} | {seconds:.1f} |"
        )


def fit_row(name: str, model: Decoder, target: str, dtype: str, **options: Any) -> str:
    """A line of one loss, of which nothing but its trace is known."""

    def make_state() -> Any:
        params = model.init(dtype)
        return params, TX.init(params)

    loss, keep = model.make_loss(), {"offload": False}
    found = fit(loss, make_state, model.batch(64), tx=TX, target=target, keep=keep, **options)
    options = {"device": found.machine.kind, "dtype": dtype}
    keep |= {"pipe": 1, "tensor": 1}
    best = search(model, TX, target, sequences=64, keep=keep, **options).best
    proof = found.proofs[0]
    return (
        f"| {name} | {target} | {short(found.plan)} | {proof.predicted:.3f} "
        f"| {proof.predicted / best.seconds.seconds:.3f} | {proof.planned / GIB:.2f} "
        f"| {proof.memory / GIB:.2f} | {found.machine.usable / GIB:.1f} |"
    )


def plan_row(name: str, model: Decoder, target: str, plan: ParallelPlan, dtype: str) -> str:
    """A line of one plan: planned, and compiled."""
    device = kind_of(target) or kind_of("h100")
    machine = dataclasses.replace(machine_of(f"h100x{plan.num_devices}"), device=device)
    memory = PlanCosts(model, TX, machine, dtype=dtype)
    promised = {"memory": memory.fullest(plan)}
    file = PlanFile(
        *(name, "adamw", target, model.length, dtype), memory.passes(plan).chunks, plan, promised
    )
    found = verify(file, model, TX, memory=float("inf"), device=device)
    ratios = (
        found.memory / found.planned_memory,
        found.wire / found.planned_wire,
        found.flops / found.planned_flops,
    )
    return (
        f"| {name} | {model.length:,} | {short(plan)} | {found.planned_memory / GIB:.2f} "
        f"| {found.memory / GIB:.2f} | {ratios[0]:.3f} | {ratios[1]:.4f} | {ratios[2]:.4f} |"
    )


def main() -> None:
    """Searches and compiles; writes the tables of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model; no file")
    if parser.parse_args().smoke:
        jax.config.update("jax_num_cpu_devices", 8)
        model = Decoder(4, 64, 4, 4, 128, 96, 32)
        plan = ParallelPlan(data=8, stage=3, microbatches=2)
        _results.table(PLAN_HEADER, [plan_row("tiny", model, "cpu:8", plan, "float32")])
        device = dataclasses.replace(kind_of("h100"), memory=2.0**30)
        _results.table(FIT_HEADER, [fit_row("tiny", model, "cpu:8", "float32", device=device)])
        return
    targets.topology("h100x8")  # raises where its compiler is not installed
    cases = _results.table(CASE_HEADER, case_rows())
    fits = _results.table(
        FIT_HEADER,
        (
            fit_row(name, dataclasses.replace(MODELS[name], length=2048), target, "bfloat16")
            for name, target in FITS
        ),
    )
    programs = _results.table(
        PLAN_HEADER,
        (
            plan_row(
                *(name, dataclasses.replace(MODELS[name], length=length), "h100x8", plan),
                "bfloat16",
            )
            for name, length, plan in PLANS
        ),
    )
    tpu_programs = _results.table(
        PLAN_HEADER,
        (
            plan_row(
                f"{name}, {layers} layers",
                dataclasses.replace(MODELS[name], length=length, layers=layers),
                "v5e:2x4",
                plan,
                "bfloat16",
            )
            for name, length, plan, layers in TPU_PLANS
        ),
    )
    _results.write(
        "searched_plans",
        "Searched plans and their programs",
        "AdamW, parameters and state in bfloat16; nothing is run.",
        "## What is chosen\n\n"
        "Of all plans that fit, without lossy options. `All hidden` and `none hidden` are the ends "
        "of the prediction: all wires run beside computing, or nothing does. No plan that fits "
        "goes below the bound, even at the peak.",
        cases,
        "## Plans beside programs\n\n"
        "Compiled for 8 H100. Memory of one device is planned in closed form; wire and operations "
        "are those that `--verify` compares.",
        programs,
        "The same for 8 TPUs v5e.",
        tpu_programs,
        FIT_TEXT,
        fits,
    )


if __name__ == "__main__":
    main()
