"""``plan --pipeline``: stages of a pipeline, and whether ZeRO alone is faster."""

import argparse
import dataclasses
from typing import Any

from sharding.cli._options import dtype_of, setup_of
from sharding.cli._output import print_json
from sharding.plan._format import show
from sharding.plan.cost._estimate_pipeline import estimate_pipeline
from sharding.plan.cost._pipeline_schedules import SCHEDULES

_ONLY_HERE = ("schedule", "chunks", "stage", "efficiency", "no_remat")
_NOT_HERE = ("mesh", "axis", "replica_axis", "remat", "plot")


def pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a pipeline."""
    add = parser.add_argument_group("pipeline").add_argument
    add(
        "--pipeline",
        type=int,
        metavar="N",
        help="plan N pipeline stages with ZeRO over their replicas, and compare them with ZeRO "
        "alone; --microbatches are those of a pipeline (default: 4 N)",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help="of the pipeline (default: aligned); zb-h1 and zb-v need --no-remat",
    )
    add(
        "--chunks",
        type=int,
        metavar="V",
        help="groups of layers on each device, with --schedule interleaved (default: 2)",
    )
    add("--stage", choices=["0", "1", "2", "3"], help="of ZeRO over the replicas (default: 1)")
    add("--no-remat", action="store_true", help="keep all activations of a layer")
    add(
        "--efficiency",
        type=float,
        metavar="SHARE",
        help="of the peak that compute reaches (default: 0.5)",
    )


def reject_pipeline_options(options: argparse.Namespace) -> None:
    """Raises if an option of pipelines is given without ``--pipeline``."""
    _reject(options, _ONLY_HERE, "needs --pipeline N")


def run_pipeline(options: argparse.Namespace) -> int:
    """Plans and prints; 2 where neither the pipeline nor ZeRO fits."""
    _reject(options, _NOT_HERE, "cannot be combined with --pipeline")
    microbatches = options.microbatches
    options.microbatches = microbatches or 1
    setup = setup_of(options)
    if setup.model is None:
        raise ValueError(
            f"--pipeline needs a model whose layers are known, one of --help's names; --model "
            f"{options.model} is not."
        )
    device = setup.device
    if device is None or float("inf") in (device.flops, device.link):
        raise ValueError(
            f"--pipeline needs the figures of {options.target}: --memory GIB, --tflops and --link."
        )
    zero = dataclasses.replace(
        setup.zero,
        stage=int(options.stage or 1),
        offload="optimizer" if options.offload else setup.zero.offload,
    )
    plan = estimate_pipeline(
        setup.model,
        setup.tx,
        zero,
        device=device,
        num_stages=options.pipeline,
        microbatches=microbatches,
        schedule=options.schedule or "aligned",
        chunks=options.chunks,
        batch=setup.batch,
        length=setup.length,
        dtype=dtype_of(options),
        recompute=not options.no_remat,
        efficiency=options.efficiency or 0.5,
        state_format=options.state,
    )
    if options.json:
        print_json(plan.to_dict())
    else:
        show(plan.tables(), plan.notes)
    return 0 if plan.recommended else 2


def _reject(options: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    given: list[Any] = [name for name in names if getattr(options, name) not in (None, False)]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} {reason}.")
