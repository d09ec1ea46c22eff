"""The command line: ``optax-ext plan`` and ``optax-ext audit``, or ``python -m sharding ...``."""

import argparse
import dataclasses
import difflib
import functools
import importlib
import json
import math
import pathlib
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_ext
from optax_ext import __version__
from sharding._zero import Zero
from sharding.plan import _plan, targets
from sharding.plan._audit import Audit, audit
from sharding.plan._batch import FoundBatch, Tried, find_batch, needed
from sharding.plan._devices import KINDS, DeviceKind, kind_of
from sharding.plan._models import MODELS, Decoder
from sharding.plan._plot import plot_audits, plot_plans
from sharding.plan._report import size
from sharding.plan._show import show
from sharding.step._precision import Precision

_ABOUT = """\
plan computes in closed form what each stage of ZeRO holds and sends; audit compiles one step,
also for a machine that is not here, and reads from the program what it costs.
"""
_FIGURES = "--memory GIB, and for times --tflops, --bandwidth and --link"
_EPILOG = """\
examples:
  {prog} plan --model llama2-7b --optimizer came --target v5e:16x16
  {prog} plan --model 7.5e9 --optimizer adam --master --target h100x64
  {prog} plan --model my_project.model:abstract_params --target v6e:8x8
  {prog} audit --model gpt2-small --target cpu:8 --stage 3
  {prog} audit --model llama2-7b --optimizer came --target v5e:8x8 --find-batch
  {prog} audit --step my_project.train:lowered --target v5e:4x4

targets to plan and to compile for (audit; needs pip install 'optax-ext[aot]' but for CPUs):
{compiled}
targets to plan only:
{planned}
any other: NAMExNUMBER with its figures, such as --target newx8 --memory 96 --tflops 1000

optax-ext and python -m sharding are the same command. Where the working folder has a file
sharding.py, python -m sharding runs that file instead, in silence; optax-ext does not.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 2 with a sentence on what is wrong."""
    installed = pathlib.Path(sys.argv[0]).stem == "optax-ext"
    options = _parser("optax-ext" if installed else "python -m sharding").parse_args(arguments)
    try:
        _check_positive(options)
        return options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        print(f"error: the compiler of {options.target} failed: {reason}", file=sys.stderr)
    return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_ABOUT,
        epilog=_EPILOG.format(prog=prog, **_target_names()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"optax-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="plan|audit")
    plan = commands.add_parser(
        "plan",
        help="closed form: at once, nothing is compiled",
        description="What each stage of ZeRO holds and sends, in closed form; without activations.",
    )
    plan.set_defaults(run=_run_plan)
    check = commands.add_parser(
        "audit",
        help="compile a step and read its program",
        description="Memory, with activations, traffic, work and warnings, read from the program "
        "of one training step, which is compiled and not run.",
    )
    check.set_defaults(run=_run_audit)
    _plan_options(plan)
    _audit_options(check)
    return parser


def _plan_options(parser: argparse.ArgumentParser) -> None:
    model = _model_options(parser)
    model.add_argument(
        "--state",
        choices=optax_ext.STATE_FORMATS,
        help="format of large leaves of the optimizer state (default: as the optimizer has them)",
    )
    model.add_argument(
        "--offload", action="store_true", help="keep the optimizer state in host memory"
    )
    _machine_options(parser)
    _batch_options(parser)
    _output_options(parser)


def _audit_options(parser: argparse.ArgumentParser) -> None:
    model = _model_options(parser)
    model.add_argument(
        "--step",
        metavar="MODULE:FUNCTION",
        help="instead of a model, a step of your own: function(mesh) returns what jax.jit(f)"
        ".lower(...) returns; with --find-batch it is function(mesh, batch)",
    )
    machine = _machine_options(parser)
    machine.add_argument(
        "--stage",
        action="append",
        choices=["0", "1", "2", "3"],
        help="ZeRO stage; give it several times for several (default: 3)",
    )
    machine.add_argument(
        "--hybrid", action="store_true", help="replicas over the first mesh axis, not shards"
    )
    batch = _batch_options(parser)
    batch.add_argument(
        "--no-remat", action="store_true", help="at stages 0 to 2 keep all activations of a layer"
    )
    batch.add_argument(
        "--find-batch",
        action="store_true",
        help="find the largest --batch that fits, by compiling several sizes from --batch on",
    )
    batch.add_argument(
        "--headroom",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="with --find-batch: the share of the memory that is left free (default: 0.1)",
    )
    _output_options(parser)


def _model_options(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("model and optimizer")
    add = group.add_argument
    add(
        "--model",
        help="a number of parameters such as 7e9 (plan), MODULE:FUNCTION that returns abstract "
        f"parameters (plan), or one of {', '.join(MODELS)}",
    )
    add(
        "--optimizer",
        default="adamw",
        help="of optax_ext or optax, by name, or MODULE:ATTRIBUTE (default: adamw)",
    )
    add("--master", action="store_true", help="float32 master weights beside the parameters")
    # XLA:CPU widens the sums of bfloat16.
    add("--dtype", help="of the parameters (default: bfloat16, for CPUs float32)")
    add("--compute-dtype", metavar="DTYPE", help="of the loss (default: that of the parameters)")
    add("--reduce-dtype", metavar="DTYPE", help="in which gradients are summed over devices")
    return group


def _machine_options(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("machine and sharding")
    add = group.add_argument
    add(
        "--target",
        required=True,
        help="v5e:16x16, v5p:4x4x4, v5e:4x4*2 (two slices), h100x8, h200x64, cpu:8 ...; --help "
        "without a command lists all kinds",
    )
    add("--mesh", metavar="AXES", help="such as x=16,y=16 (default: axes that suit the links)")
    add("--axis", metavar="AXES", help="what ZeRO shards over, such as x,y (default: all axes)")
    add(
        "--replica-axis",
        metavar="AXES",
        help="of the replicas of a hybrid (default: slice, host, or the first of several axes)",
    )
    figures = parser.add_argument_group(
        "figures of a device: of an unknown one, or other than known"
    )
    figures.add_argument("--memory", type=float, metavar="GIB", help="its memory")
    figures.add_argument("--bandwidth", type=float, metavar="GB/S", help="of that memory")
    figures.add_argument("--tflops", type=float, help="of dense bfloat16 matrix products")
    figures.add_argument("--link", type=float, metavar="GB/S", help="what it sends at best")
    return group


def _batch_options(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("batch")
    add = group.add_argument
    add(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="sequences of one device in a micro-batch (default: 1)",
    )
    add(
        "--microbatches",
        type=int,
        default=1,
        metavar="N",
        help="how many are accumulated in a step (default: 1)",
    )
    add("--length", type=int, metavar="TOKENS", help="of a sequence (default: as the model has it)")
    return group


def _output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="everything, as JSON")
    group.add_argument("--plot", metavar="FILE", help="a picture of the memory of one device")


def _target_names() -> dict[str, str]:
    """Examples of targets for the help text, by what can be done with them."""
    tpus = {"v4": "2x2x2", "v5e": "4x4", "v5p": "4x4x4", "v6e": "16x16", "tpu7x": "2x2x1"}
    names = {name: f"{name}:{tpus[name]}" if name in tpus else f"{name}x8" for name in KINDS}
    names["cpu"] = "cpu:8"
    kinds = {name: targets.parse(example).compiles for name, example in names.items()}
    return {
        word: textwrap.fill(
            ", ".join(names[name] for name, compiles in kinds.items() if compiles == wanted),
            width=78,
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for word, wanted in (("compiled", True), ("planned", False))
    }


# --- Reading the options --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Setup:
    """What both commands need to know."""

    params: Any
    model: Decoder | None
    tx: optax.GradientTransformation
    mesh_axes: dict[str, int]
    axis: tuple[str, ...]
    replica_axis: tuple[str, ...]
    precision: Precision
    device: DeviceKind | None
    length: int


def _setup(options: argparse.Namespace) -> _Setup:
    target = _target(options)
    mesh_axes = _mesh_axes(options, target)
    axis = tuple(options.axis.split(",")) if options.axis else tuple(mesh_axes)
    replica = tuple(options.replica_axis.split(",")) if options.replica_axis else ()
    if not replica and len(axis) > 1:
        replica = axis[:1]
    axis = tuple(name for name in axis if name not in replica)
    if not options.model:
        raise ValueError("--model is missing: a number, a name, or module:function")
    params, model = _params(options.model, _dtype(options), options.length)
    precision = Precision(
        compute=_floating("--compute-dtype", options.compute_dtype),
        reduce=_floating("--reduce-dtype", options.reduce_dtype),
    )
    tx = _optimizer(options.optimizer)
    length = options.length or (model.length if model else 0)
    device = _device(options)
    tx = optax_ext.master_weights(tx) if options.master else tx
    return _Setup(params, model, tx, mesh_axes, axis, replica, precision, device, length)


def _target(options: argparse.Namespace) -> targets.Target:
    """The target; one that is not known, GPUs by any name, where its figures are given."""
    try:
        return targets.parse(options.target)
    except ValueError as error:
        if not str(error).startswith("unknown target"):
            raise
        match = re.fullmatch(r"([a-z][\w.-]*?)x([1-9]\d*)", options.target)
        if match and options.memory:
            return targets.gpus(options.target, match[1], int(match[2]))
        raise ValueError(
            f"{error}. Any other can be planned as NAMExNUMBER with its figures: {_FIGURES}"
        ) from None


def _check_positive(options: argparse.Namespace) -> None:
    for name in ("microbatches", "batch", "length", "memory", "bandwidth", "tflops", "link"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be above 0, got {value}")


def _mesh_axes(options: argparse.Namespace, target: targets.Target) -> dict[str, int]:
    if not options.mesh:
        return target.mesh_axes
    axes = {}
    for part in options.mesh.split(","):
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", part)
        if not match:
            raise ValueError(f"--mesh must look like x=4,y=8, got {options.mesh!r}")
        if match[1] in axes:
            raise ValueError(f"--mesh {options.mesh}: axis {match[1]!r} is named twice")
        axes[match[1]] = int(match[2])
    if math.prod(axes.values()) != target.num_devices:
        sizes = " * ".join(map(str, axes.values()))
        raise ValueError(
            f"--mesh {options.mesh}: {sizes} = {math.prod(axes.values())} devices asked for, but "
            f"{options.target} has {target.num_devices}"
        )
    return axes


def _dtype(options: argparse.Namespace) -> Any:
    default = "float32" if options.target.startswith("cpu") else "bfloat16"
    return _floating("--dtype", options.dtype or default)


def _floating(option: str, name: str | None) -> Any:
    if name is None:
        return None
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{option} {name!r} is no dtype; bfloat16 and float32 are") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{option} must be a floating dtype, got {dtype}")
    return dtype


def _params(text: str, dtype: Any, length: int | None) -> tuple[Any, Decoder | None]:
    """Abstract parameters, and the model where it is one of ours."""
    if ":" in text:
        try:
            return jax.eval_shape(_load(text, "--model")), None
        except TypeError as error:
            raise ValueError(
                f"--model {text} must make parameters, given nothing: {error}"
            ) from error
    if model := MODELS.get(text):
        if length and not model.biased:
            model = dataclasses.replace(model, length=length)
        elif length and length > model.length:
            raise ValueError(f"{text} has {model.length} positions, --length {length} asked for")
        return model.abstract(dtype), model
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.lower())
    if not match:
        raise ValueError(f"--model {text!r} is no number and no model{_nearest(text, MODELS)}")
    scale = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]
    count = float(match[1]) * scale
    if not 1 <= count <= 1e15:
        raise ValueError(f"--model {text!r}: from 1 to 1e15 parameters can be planned")
    return _plan.count_to_params(round(count), dtype), None


def _optimizer(text: str) -> optax.GradientTransformation:
    """A transformation by its name, or by the path of one or of a function that makes one."""
    if ":" in text:
        found = _load(text, "--optimizer")
        if not isinstance(found, optax.GradientTransformation):
            try:
                found = found()
            except TypeError as error:
                raise ValueError(
                    f"--optimizer {text} must make one, given nothing: {error}"
                ) from error
        if not isinstance(found, optax.GradientTransformation):
            raise ValueError(f"--optimizer {text} made no optimizer, but {found!r}")
        return found
    makers: dict[str, Callable[..., Any]] = {}
    for module in (optax.contrib, optax, optax_ext):
        makers |= {
            name: getattr(module, name)
            for name in dir(module)
            if name.islower() and not name.startswith("_") and callable(getattr(module, name))
        }
    if text in makers:
        for options in ({"learning_rate": 1e-3}, {}):
            try:
                found = makers[text](**options)
            except (TypeError, ValueError, AttributeError):
                continue
            if isinstance(found, optax.GradientTransformation):
                return found
    raise ValueError(f"--optimizer {text!r} is no optimizer{_nearest(text, _optimizers(makers))}")


def _optimizers(makers: dict[str, Callable[..., Any]]) -> list[str]:
    """The names that look like optimizers: they take a learning rate."""
    found = []
    for name, make in makers.items():
        code = getattr(make, "__wrapped__", make)
        if "learning_rate" in getattr(getattr(code, "__code__", None), "co_varnames", ()):
            found.append(name)
    return found


def _nearest(text: str, names: Any) -> str:
    near = difflib.get_close_matches(text, list(names), n=4, cutoff=0.4)
    return f"; nearest are {', '.join(near)}" if near else f"; known are {', '.join(sorted(names))}"


def _load(path: str, option: str) -> Any:
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {path}: {error}") from error


def _device(options: argparse.Namespace) -> DeviceKind | None:
    """The target's figures, those that are given taking their places."""
    given = {
        "memory": options.memory and options.memory * 2**30,
        "bandwidth": options.bandwidth and options.bandwidth * 1e9,
        "flops": options.tflops and options.tflops * 1e12,
        "link": options.link and options.link * 1e9,
    }
    given = {name: value for name, value in given.items() if value}
    known = kind_of(options.target)
    if known is not None:
        return dataclasses.replace(known, **given)
    if "memory" not in given:
        if given:
            raise ValueError(
                f"nothing is known of {options.target}: beside --bandwidth, --tflops and --link a "
                "device needs --memory GIB."
            )
        return None
    kind = _target(options).kind
    rest = dict.fromkeys(("bandwidth", "flops", "link"), math.inf)
    return DeviceKind(**({"name": kind} | rest | given), network=None, source="given")


# --- plan -----------------------------------------------------------------------------------------


def _run_plan(options: argparse.Namespace) -> int:
    setup = _setup(options)
    make = functools.partial(_plan_of, options, setup)
    found = make(setup.tx, options.state, options.offload)
    notes = list(found.notes)
    if found.device is None:
        notes[0] = f"What fits is not known: no figures of {options.target}. Give them: {_FIGURES}"
    if any(map(found.seconds, found.stages)):
        notes.append(_about_times(options, setup))
    if found.recommended and not re.search("adamw?$", options.optimizer):
        notes += _beside_adamw(options, setup, found)
    if re.search("adamw?$", options.optimizer) and len(setup.mesh_axes) == 1:
        theirs = _plan.deepspeed_stage_2(found.num_params, math.prod(setup.mesh_axes.values()))
        words = " and ".join(f"{size(value)} by its {name}" for name, value in theirs.items())
        notes.append(f"DeepSpeed's estimator for stage 2, with Adam and master weights: {words}.")
    if found.fits is False:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts that are only tried
            notes += _what_would_fit(options, setup)
    found = dataclasses.replace(found, notes=tuple(notes))
    if options.json:
        _print_json(found.to_dict())
    else:
        show(found.tables(), found.notes)
    if options.plot:
        _save(plot_plans, {"": found}, options.plot)
    return 2 if found.fits is False else 0


def _about_times(options: argparse.Namespace, setup: _Setup) -> str:
    assert setup.device is not None
    sequences = options.batch * options.microbatches
    attention = ", attention in full" if setup.model else ", without attention"
    return (
        f"Times are lower bounds at the peak figures of a {setup.device.name}, for "
        f"{sequences} sequence{'s' if sequences > 1 else ''} of {setup.length:,} tokens on each "
        f"device in a step: 6 operations a parameter and token{attention}, no recomputation."
    )


def _beside_adamw(options: argparse.Namespace, setup: _Setup, found: _plan.Plan) -> list[str]:
    """What the optimizer saves beside AdamW; where it saves nothing, why."""
    adamw = optax.adamw(1e-3)
    adamw = optax_ext.master_weights(adamw) if options.master else adamw
    other = _plan_of(options, setup, adamw, None, False)
    names = (options.optimizer, "adamw")
    notes = [_plan.saving_of(found, other, found.recommended, names)]
    mine, theirs = (
        next(stage.opt_state for stage in plan.stages if stage.name == found.recommended)
        for plan in (found, other)
    )
    if mine > theirs:
        notes.append(_plan.why_wider(setup.params, setup.tx, adamw, names))
    return [note for note in notes if note]


def _plan_of(
    options: argparse.Namespace,
    setup: _Setup,
    tx: optax.GradientTransformation,
    state: str | None,
    offload: bool,
    mesh_axes: dict[str, int] | None = None,
) -> _plan.Plan:
    mesh_axes = mesh_axes or setup.mesh_axes
    sequences = options.batch * options.microbatches
    tokens = float(sequences * setup.length)
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(setup.params))
    flops = setup.model.flops(tokens, setup.length) if setup.model else 6.0 * num_params * tokens
    num_devices = math.prod(mesh_axes.get(name, 1) for name in (*setup.replica_axis, *setup.axis))
    return _plan.estimate(
        setup.params,
        tx,
        jax.sharding.AbstractMesh(tuple(mesh_axes.values()), tuple(mesh_axes)),
        axis=setup.axis,
        replica_axis=setup.replica_axis or None,
        precision=setup.precision,
        microbatches=options.microbatches,
        batch=4.0 * sequences * (setup.length + 1) if setup.length else 0.0,
        state_format=state,
        offload=offload,
        device=setup.device,
        gathered_once=setup.model.gathered_once if setup.model else "(?!)",
        tokens=tokens * num_devices,
        flops=flops,
    )


def _what_would_fit(options: argparse.Namespace, setup: _Setup) -> list[str]:
    """Changes of which each alone makes the model fit."""
    found = []
    came = optax_ext.came(1e-3, mu_dtype=jnp.bfloat16)
    tries: list[tuple[str, Callable[[], _plan.Plan]]] = [
        ("--state 8bit", lambda: _plan_of(options, setup, setup.tx, "8bit", options.offload)),
        ("--offload", lambda: _plan_of(options, setup, setup.tx, options.state, True)),
        (
            "CAME with a bfloat16 momentum and no master weights",
            lambda: _plan_of(options, setup, came, None, options.offload),
        ),
    ]
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        name = setup.axis[-1]
        more = setup.mesh_axes | {name: setup.mesh_axes[name] * factor}
        plan = _plan_of(options, setup, setup.tx, options.state, options.offload, more)
        if plan.fits:
            num = math.prod(more.values())
            found.append(f"{num} devices instead of {num // factor}")
            break
    found += [name for name, make in tries if make().fits]
    if not found:
        return ["No change that is known here makes it fit: cut it over a model axis, too."]
    return [f"Each of these makes it fit, before activations: {'; '.join(found)}."]


# --- audit ----------------------------------------------------------------------------------------


def _run_audit(options: argparse.Namespace) -> int:
    target = _target(options)
    jax.config.update("jax_platforms", "cpu")
    if target.kind == "cpu":
        jax.config.update("jax_num_cpu_devices", target.num_devices)
    device = _device(options)
    if options.find_batch and device is None:
        raise ValueError(
            f"--find-batch needs the memory of a device, and none is known of {options.target}: "
            "give --memory GIB"
        )
    if not 0 <= options.headroom < 1:
        raise ValueError(f"--headroom must be from 0 to below 1, got {options.headroom}")
    steps = _steps(options, target)
    searches = {}
    if options.find_batch:
        for name, make in steps.items():
            print(f"{name}: trying batches", file=sys.stderr)
            searches[name] = find_batch(
                make, device=device, headroom=options.headroom, start=options.batch, report=_report
            )
        found = {name: each.audit for name, each in searches.items() if each.audit}
    else:
        found = {name: _that_compiles(make, options.batch) for name, make in steps.items()}
    if options.json:
        rows = {name: each.to_dict() for name, each in found.items()}
        for name, search in searches.items():
            rows[name] = rows.get(name, {}) | {"find_batch": search.to_dict()}
        _print_json(rows)
    else:
        _show_audits(options, found, searches)
    if options.plot and found:
        _save(plot_audits, found, options.plot)
    fits = [each.fits for each in found.values()] + [each.batch > 0 for each in searches.values()]
    return 2 if False in fits else 0


def _show_audits(
    options: argparse.Namespace, found: dict[str, Audit], searches: dict[str, FoundBatch]
) -> None:
    for name, each in found.items():
        batch = f", batch {searches[name].batch}" if name in searches else ""
        tables = [table._replace(title=f"{name}{batch}: {table.title}") for table in each.tables()]
        notes = each.sentences
        if each.kind is None:
            notes.append(
                f"Whether it fits, and how long it takes at least, is not known: no figures of "
                f"{options.target}. Give them: --memory, --bandwidth, --tflops, --link"
            )
        show(tables, notes)
    for name, search in searches.items():
        tables = [table._replace(title=f"{name}: {table.title}") for table in search.tables()]
        show(tables, [f"{name}: {search.sentence}"])


def _report(tried: Tried) -> None:
    """A line as soon as a size is known: compiling takes its time."""
    verdict = "fits" if tried.fits else "too much"
    print(f"  batch {tried.batch}: {needed(tried.memory)}, {verdict}", file=sys.stderr, flush=True)


def _steps(
    options: argparse.Namespace, target: targets.Target
) -> dict[str, Callable[[int], Audit]]:
    """For each step that is asked for a function that audits it with a batch of some size."""
    if options.step:
        axes = _mesh_axes(options, target)
        mesh = targets.mesh(options.target, tuple(axes.values()), tuple(axes))
        make = _load(options.step, "--step")
        device = _device(options)

        def audit_step(batch: int) -> Audit:
            lowered = make(mesh, batch) if options.find_batch else make(mesh)
            return audit(lowered, mesh=mesh, device=device)

        return {options.step: audit_step}
    setup = _setup(options)
    if setup.model is None:
        raise ValueError(
            "audit compiles a step, so --model must be one of "
            f"{', '.join(MODELS)}; of a model of your own give the step: --step"
        )
    return {
        f"stage {stage}": functools.partial(_audit_stage, options, setup, int(stage))
        for stage in options.stage or ["3"]
    }


def _audit_stage(options: argparse.Namespace, setup: _Setup, stage: int, batch: int) -> Audit:
    lowered, mesh, num_devices = lower_stage(options, setup, stage, batch)
    hybrid = options.hybrid and bool(setup.replica_axis)
    name = "3 hybrid" if hybrid and stage == 3 else f"stage {stage}"
    plan = _plan_of(options, setup, setup.tx, None, False)
    theory = next(each.wire for each in plan.stages if each.name == name)
    return audit(
        lowered,
        mesh=mesh,
        device=setup.device,
        expected_wire=None if hybrid and stage < 3 else theory,
        tokens=float(num_devices * batch * options.microbatches * setup.length),
    )


def lower_stage(
    options: argparse.Namespace, setup: _Setup, stage: int, batch: int
) -> tuple[jax.stages.Lowered, jax.sharding.Mesh, int]:
    """The step of a named model at a stage, its mesh, and the number of data-parallel devices."""
    model = setup.model
    assert model is not None
    axes = setup.mesh_axes
    mesh = targets.mesh(options.target, tuple(axes.values()), tuple(axes))
    hybrid = options.hybrid and bool(setup.replica_axis)
    zero = Zero(
        mesh,
        stage,
        setup.axis if hybrid else (*setup.replica_axis, *setup.axis),
        setup.replica_axis if hybrid else None,
        precision=setup.precision,
    )
    layer: Callable[..., Any] = zero.gathered(model.apply_layer)
    if stage < 3 and not options.no_remat:
        layer = jax.checkpoint(layer)

    def make_state() -> Any:
        params = model.init(_dtype(options))
        return params, setup.tx.init(params)

    step = zero.train_step(model.make_loss(layer), tx=setup.tx, microbatches=options.microbatches)
    sequences = zero.num_devices * batch * options.microbatches
    tokens = jax.ShapeDtypeStruct((sequences, setup.length + 1), jnp.int32)
    lowered = step.lower(zero.abstract_state(make_state, tx=setup.tx), tokens)
    return lowered, mesh, zero.num_devices


def _that_compiles(make: Callable[[int], Audit], batch: int) -> Audit:
    try:
        return make(batch)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        lines = [
            line.strip() for line in str(error).splitlines() if "xceed" in line or "Used" in line
        ]
        raise ValueError(
            f"the step does not fit, so that its compiler gave up: {' '.join(lines[:2])}"
        ) from error


# --- Showing --------------------------------------------------------------------------------------


def _print_json(found: dict[str, Any]) -> None:
    """What is infinite, such as a bandwidth that nothing is known of, is null."""
    finite = json.loads(json.dumps(found), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1))


def _save(plot: Callable[[Any], Any], found: Any, path: str) -> None:
    """Writes the picture that ``plot`` makes."""
    try:
        plot(found).savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}") from error
