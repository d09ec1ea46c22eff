"""The command ``audit``: compiles steps and reads their programs."""

import dataclasses
import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from sharding.cli import _setup as opts
from sharding.cli._load import load
from sharding.cli._model_activations import planned_loss
from sharding.cli._output import print_json
from sharding.placement._specs import axes_of
from sharding.plan._format import Table, document, entry, show
from sharding.plan.audit._audit import Audit, audit
from sharding.plan.audit._find_batch import FoundBatch, Tried, audit_or_bytes, find_batch, needed
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.machine import targets
from sharding.plan.machine._devices import HEADROOM
from sharding.plan.model._models import MODELS, Decoder
from sharding.plan.search._build import build

# Options about a named model, which a step of the user's own does not read.
_OF_MODELS = (
    *("model", "optimizer", "master", "dtype", "compute_dtype", "reduce_dtype"),
    *("axis", "replica_axis", "stage", "hybrid", "microbatches", "length", "no_remat", "remat"),
    *("update_in_backward", "offload", "update_on_host", "frozen", "lora"),
    "matmuls",
)


_STORED = "layers store their input alone: plan and search time what stores more, where it fits"


class _Step(NamedTuple):
    audit: Callable[[int], Audit]  # compiles it with a batch
    plan: ParallelPlan | None = None  # how it is shared, of a named model


def run_audit(options: Namespace) -> int:
    """Audits and prints; 2 where a step does not fit."""
    target = opts.target_of(options)
    opts.compile_on_cpu(target)
    _check_options(options)

    # Compile: each step once, or with several batches.
    headroom = HEADROOM if options.headroom is None else options.headroom
    device = opts.device_of(options)
    audits = dict[str, Audit]()
    searches = dict[str, FoundBatch]()
    setup, steps, batch, unit = _steps(options, target)
    for name, step in steps.items():
        if not options.find_batch:
            found, memory = audit_or_bytes(functools.partial(step.audit, batch), None)
            if found is None:
                raise ValueError(
                    "the step does not fit, so that its compiler gave up: it needs "
                    f"{needed(memory)}."
                )
            audits[name] = found
            continue
        print(f"{name}: trying batches", file=sys.stderr)
        sizes: Any = {"start": batch, "unit": unit, "headroom": headroom}
        searches[name] = find_batch(step.audit, device=device, report=_report, **sizes)
        if best := searches[name].audit:
            audits[name] = best

    # Show.
    if options.json:
        rows = [_row(options, name, step, batch, audits, searches) for name, step in steps.items()]
        machine: dict[str, Any] = {"device": device, "num_devices": target.num_devices}
        machine["headroom"] = headroom if options.find_batch else 0.0
        notes = [text for found in audits.values() for text in found.sentences]
        asked: dict[str, Any] = {}
        if setup:
            asked = {"params": setup.params, "sequences": batch, "length": setup.length}
        print_json(options, document(rows, **machine, notes=notes), **asked)
    else:
        _show_audits(options, audits, searches)
    fits = [found.fits for found in audits.values()]
    fits += [search.batch > 0 for search in searches.values()]
    return 2 if False in fits else 0


def _check_options(options: Namespace) -> None:
    """Raises for options that would be ignored, or lack another."""
    if options.find_batch and opts.device_of(options) is None:
        raise ValueError(
            f"--find-batch needs the memory of a device, and none is known of {options.target}: "
            "give --memory GIB."
        )
    if options.find_batch and not opts.target_of(options).compiles:
        raise ValueError(
            f"--find-batch compiles steps, and {options.target} can be planned only: plan prints "
            "how many sequences fit (docs: how_to/plan)."
        )
    if options.headroom is not None and not options.find_batch:
        raise ValueError("--headroom is read with --find-batch only: give both, or neither.")
    if options.step:
        given = [name for name in _OF_MODELS if getattr(options, name) != options.defaults(name)]
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(
                f"{names} would be ignored: --step {options.step} makes the full step, with its "
                "own model, optimizer and stage. Leave out one or the other."
            )
        if options.batch is not None and not options.find_batch:
            raise ValueError(
                f"--batch would be ignored: --step {options.step} has a batch of its own. Leave "
                "--batch out, or give --find-batch, which starts from it."
            )
    if options.no_remat and options.remat is not None:
        raise ValueError("--remat plans what --no-remat forbids: give one of them.")
    if options.no_remat and set(_stages(options)) == {3}:
        raise ValueError(
            "--no-remat is read at stages 0 to 2 only: stage 3 always gathers and computes layers "
            "again. Leave it out, or give --stage 0, 1 or 2."
        )


def _stages(options: Namespace) -> list[int]:
    return [int(stage) for stage in options.stage or ["3"]]


def _show_audits(
    options: Namespace, audits: dict[str, Audit], searches: dict[str, FoundBatch]
) -> None:
    def named(name: str, tables: list[Table]) -> list[Table]:
        return [table._replace(title=f"{name}: {table.title}") for table in tables]

    for name, found in audits.items():
        batch = f", batch {searches[name].batch}" if name in searches else ""
        notes = found.sentences
        if found.kind is None:
            notes.append(
                f"Whether it fits, and how long it takes at least, is not known: no figures of "
                f"{options.target}. Give them: --memory, --bandwidth, --tflops, --link."
            )
        show(named(f"{name}{batch}", found.tables()), notes)
    for name, search in searches.items():
        show(named(name, search.tables()), [f"{name}: {text}" for text in search.sentences])


def _row(
    options: Namespace,
    name: str,
    step: _Step,
    batch: int,
    audits: dict[str, Audit],
    searches: dict[str, FoundBatch],
) -> dict[str, Any]:
    """A step as JSON: how it is shared, and its program."""
    figures: dict[str, Any] = {}
    if search := searches.get(name):
        batch = search.batch
        figures["find_batch"] = search.to_dict()
    if name not in audits:
        return entry(name, {}, fits=False, **figures)
    found = audits[name]
    plan = step.plan
    if plan:
        plan = dataclasses.replace(plan, microbatch=batch // (plan.data * plan.microbatches))
    figures |= {"at_least": found.seconds, "wire": found.wire_bytes}
    figures |= {"seconds": found.predicted.to_dict()} if found.predicted else {}
    figures |= {"tokens": found.tokens or None, "program": found.to_dict()}
    row = entry(name, found.by_part, plan, **figures)
    if options.remat is not None:
        row["plan"]["recompute"] = None  # what the plan of activations says
    return row


def _report(tried: Tried) -> None:
    """A line as soon as a size is known, since each takes a compilation."""
    verdict = "fits" if tried.fits else "too much"
    print(f"  batch {tried.batch}: {needed(tried.memory)}, {verdict}", file=sys.stderr, flush=True)


def _steps(
    options: Namespace, target: targets.Target
) -> tuple[opts.Setup | None, dict[str, _Step], int, int]:
    """The setup of a named model, the requested steps, the batch, and its unit."""
    mesh_axes = opts.mesh_axes_of(options, target)
    if options.step:
        mesh = targets.mesh(options.target, tuple(mesh_axes.values()), tuple(mesh_axes))
        make = load(options.step, "--step")
        device = opts.device_of(options)

        def audit_step(batch: int) -> Audit:
            lowered = make(mesh, batch) if options.find_batch else make(mesh)
            return audit(lowered, mesh=mesh, device=device)

        return None, {options.step: _Step(audit_step)}, int(options.batch or 1), 1
    setup = opts.setup_of(options)
    if setup.model is None or not (setup.is_fine_tuned or isinstance(setup.model, Decoder)):
        raise ValueError(
            f"audit compiles a step, so --model must be one of {', '.join(MODELS)}; of a model of "
            "your own give the step: --step."
        )
    if not options.hybrid and options.replica_axis:
        raise ValueError("--replica-axis is read with --hybrid only: give both, or neither.")
    if options.hybrid and not setup.zero.replica_axis:
        raise ValueError(
            f"--hybrid needs an axis of replicas beside --axis, and the mesh has {mesh_axes}: give "
            "a --mesh of several axes."
        )
    mesh = targets.mesh(options.target, tuple(mesh_axes.values()), tuple(mesh_axes))
    zero = dataclasses.replace(setup.zero, mesh=mesh)
    if not options.hybrid:
        axis = (*axes_of(zero.replica_axis), *axes_of(zero.axis))
        zero = dataclasses.replace(zero, axis=axis, replica_axis=None)
    unit = zero.num_devices * setup.microbatches
    steps = dict[str, _Step]()
    for stage in _stages(options):
        staged = dataclasses.replace(zero, stage=stage)
        again = stage == 3 or not options.no_remat
        of_stage = dataclasses.replace(setup, zero=staged, recompute=again)
        make = functools.partial(_audit_stage, options, of_stage)
        steps[f"stage {stage}"] = _Step(make, of_stage.parallel_plan(staged))
    return setup, steps, unit * setup.batch, unit


def _audit_stage(options: Namespace, setup: opts.Setup, batch: int) -> Audit:
    """The audit of a step of a named model."""
    zero = setup.zero
    loss = None
    setup = dataclasses.replace(setup, batch=batch // (zero.num_devices * setup.microbatches))
    plan = setup.plan(zero)
    model = setup.model
    assert model is not None
    if options.remat is not None:
        planned, about = planned_loss(options, setup, plan, plan.requested)
        loss = planned
        print(about, file=sys.stderr)
        found: Any = {"activations": planned.peak, "extra_time": planned.extra_time}
        setup = dataclasses.replace(setup, **found)
        plan = setup.plan(zero)
    shared = setup.parallel_plan(zero)
    dtype = opts.dtype_of(options)
    built = build(shared, model, setup.optimizer, zero, dtype=dtype, loss=loss)
    found = audit(
        dataclasses.replace(built, batch=model.batch(batch)).lower(),
        mesh=zero.mesh,
        device=setup.device,
        expected=plan.stage(plan.requested),
        predicted=setup.seconds(shared) if setup.timed else None,
        tokens=plan.tokens,
    )
    notes = [_STORED] * (setup.recompute and options.remat is None)
    return dataclasses.replace(found, notes=(*found.notes, *notes))
