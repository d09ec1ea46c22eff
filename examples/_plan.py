"""train_lm.py with --plan: ``auto``, or what ``python -m sharding search`` wrote."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from _model import CONFIGS

import sharding as shd
from sharding.plan import ParallelPlan, PlanFile

# The names of the script for the schedules of plans.
_NAMES = {"aligned": "1f1b"} | {name: name for name in ("gpipe", "interleaved", "zb-h1", "zb-v")}


# Options of steps that ``--plan auto`` does not make.
_NOT_WITH_AUTO = (
    *("pipeline", "schedule", "noise_scale", "peer_checkpoints", "update_in_backward", "sync"),
)


def not_with_auto(options: argparse.Namespace) -> str:
    """The options that were given and ``--plan auto`` does not take."""
    unset = (None, False, "dense")
    given = (name for name in _NOT_WITH_AUTO if getattr(options, name) not in unset)
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def choose_plan(
    options: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    loss_fn: Callable[..., Any],
    make_state: Callable[..., Any],
    batch: Any,
    folder: pathlib.Path,
) -> Any:
    """The fastest step that fits the devices of a mesh, with what other options fix.

    Raises:
      ValueError: nothing fits, or nothing is known of the memory.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and not options.memory:
        raise ValueError("--plan auto on CPUs needs the memory of a device: give --memory.")
    if not on_cpu and mesh.size != jax.device_count():
        raise ValueError(f"--plan auto takes all devices: leave out --devices {mesh.size}.")
    found = shd.plan.fit(
        *(loss_fn, make_state, batch),
        target=f"cpu:{mesh.size}" if on_cpu else None,
        memory=options.memory,
        keep=options.keep,
        folder=folder,
    )
    options.stage, options.microbatches = found.plan.stage, found.plan.microbatches
    return found


def take_plan(options: argparse.Namespace) -> None:
    """Sets the options that a plan decides; those of model and optimizer remain.

    Raises:
      ValueError: the script cannot run the plan, or another option contradicts it.
    """
    file = PlanFile.read(options.plan)
    plan = file.plan
    for reason in _obstacles(plan):
        raise ValueError(f"--plan {options.plan} {reason}.")
    if options.pipeline or options.microbatches or options.schedule:
        raise ValueError(
            "--plan decides --pipeline, --schedule and --microbatches: leave them out."
        )
    if plan.state_format and options.state not in ("float32", plan.state_format):
        raise ValueError(f"--plan decides --state, {plan.state_format}: leave it out.")
    if file.model in CONFIGS:
        options.config = file.model
    layers = CONFIGS[options.config].layers
    if plan.pipe > 1 and sum(file.layers) != layers:
        raise ValueError(
            f"--plan {options.plan} has {sum(file.layers)} layers, --config {options.config} has "
            f"{layers}."
        )
    options.stage, options.offload = plan.stage, plan.offload
    options.replicas, options.spread = plan.replicas, plan.spread
    options.state = plan.state_format or options.state
    options.devices = options.devices or plan.num_devices
    options.batch_size = options.batch_size or plan.sequences
    options.microbatches = plan.microbatches
    options.recompute = "layer" if plan.checkpoints_layers else ""
    options.saved = file.saved
    if plan.pipe > 1:
        options.pipeline, options.schedule = plan.pipe, _NAMES[plan.schedule]
        options.layers = file.layers


def _obstacles(plan: ParallelPlan) -> list[str]:
    """What the script does not have."""
    found = []
    if plan.replicas > 1 and plan.pipe > 1:
        found.append("has replicas in a pipeline, which this script has not: --keep replicas=1")
    if plan.tensor > 1:
        found.append("shares each layer, which this script does not do: --keep tensor=1")
    if plan.weights != "plain":
        found.append("has master weights or rounds: search without options for these")
    if plan.sync:
        found.append(f"synchronizes gradients by {plan.sync}: --keep sync=none, and give --sync")
    if plan.state_format and plan.pipe > 1:
        found.append("has a format of the state in a pipeline: --keep state_format=none")
    if plan.pipe > 1 and plan.schedule not in _NAMES:
        found.append(f"has the schedule {plan.schedule!r}: --keep schedule=aligned")
    if plan.chunks not in (1, 2):
        found.append("has more than two groups of layers a stage: --keep chunks=2")
    return found
