"""The command line: ``optax-ext plan`` and ``optax-ext audit``, or ``python -m sharding ...``."""

import argparse
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import jax

from optax_ext import STATE_FORMATS, __version__
from sharding.cli._audit_command import run_audit
from sharding.cli._model_activations import add_remat_option
from sharding.cli._options import add_options, check_positive
from sharding.cli._plan_command import pipeline_options, run_plan
from sharding.cli._search_command import run_search, search_options
from sharding.plan.machine import targets
from sharding.plan.machine._devices import KINDS
from sharding.plan.model._models import MODELS

_ABOUT = """\
plan computes in closed form what each stage of ZeRO holds and sends; audit compiles one step,
also for compile-only targets, and reads from the program what it costs; search compares all plans
of a step, and lists the fastest that fit.
"""
_EPILOG = """\
examples:
  {prog} plan --model llama2-7b --optimizer came --target v5e:16x16
  {prog} plan --model 7.5e9 --optimizer adam --master --target h100x64
  {prog} plan --model my_project.model:abstract_params --target v6e:8x8
  {prog} plan --model llama2-13b --target h100x64 --pipeline 8 --microbatches 32
  {prog} plan --model llama2-7b --target h100x64 --batch 4 --remat auto
  {prog} audit --model gpt2-small --target cpu:8 --stage 3
  {prog} audit --model llama2-7b --optimizer came --target v5e:8x8 --find-batch
  {prog} audit --step my_project.train:lowered --target v5e:4x4
  {prog} search --model llama2-13b --optimizer came --target h100x64 --batch 4M-tokens

targets to plan and to compile for (audit; needs pip install 'optax-ext[aot]' but for CPUs):
{compiled}
targets to plan only:
{planned}
any other: NAMExNUMBER with its figures, such as --target newx8 --memory 96 --tflops 1000

optax-ext and python -m sharding are the same command. Where the working folder has a file
sharding.py, python -m sharding runs that file instead, in silence; optax-ext does not.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 after one sentence on what is wrong."""
    installed = pathlib.Path(sys.argv[0]).stem == "optax-ext"
    options = _parser("optax-ext" if installed else "python -m sharding").parse_args(arguments)
    try:
        check_positive(options)
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
    commands = parser.add_subparsers(required=True, metavar="plan|audit|search")
    plan = commands.add_parser(
        "plan",
        help="closed form: at once, nothing is compiled",
        description="What each stage of ZeRO holds and sends, in closed form; with --remat also "
        "the activations, planned and compiled.",
    )
    plan.set_defaults(run=run_plan)
    check = commands.add_parser(
        "audit",
        help="compile a step and read its program",
        description="Memory, with activations, traffic, work and warnings, read from the program "
        "of one training step, which is compiled and not run.",
    )
    check.set_defaults(run=run_audit, defaults=check.get_default)
    find = commands.add_parser(
        "search",
        help="closed form: the fastest plan that fits",
        description="Compares every way to share a step among devices, and lists the fastest that "
        "fit, with a bound that none goes below; with --verify their programs beside them.",
    )
    find.set_defaults(run=run_search)
    _plan_options(plan)
    _audit_options(check)
    _model_options(find, searched=True)
    _machine_options(find, searched=True)
    search_options(find)
    _output_options(find)
    return parser


def _plan_options(parser: argparse.ArgumentParser) -> None:
    helps = {
        "--state": "format of large leaves of the optimizer state (default: as the optimizer has "
        "them)",
        "--offload": "keep the optimizer state in host memory",
    }
    add_options(_model_options(parser), helps, state={"choices": STATE_FORMATS})
    _machine_options(parser)
    batch = _batch_options(parser)
    add_remat_option(batch, "plan activations of one device for so many bytes,")
    pipeline_options(parser)
    _output_options(parser)
    parser.set_defaults(microbatches=None)  # those of a pipeline have another default


def _audit_options(parser: argparse.ArgumentParser) -> None:
    step = (
        "instead of a model, a step of your own: function(mesh) returns what jax.jit(f).lower(...) "
        "returns, or that and the sharding.Pipeline that it runs; with --find-batch it is "
        "function(mesh, batch)"
    )
    add_options(_model_options(parser), {"--step MODULE:FUNCTION": step})
    helps = {
        "--stage": "ZeRO stage; give it several times for several (default: 3)",
        "--hybrid": "replicas over the first mesh axis, not shards",
    }
    stages = {"action": "append", "choices": ["0", "1", "2", "3"]}
    add_options(_machine_options(parser), helps, stage=stages)
    batch = _batch_options(parser)
    add_options(batch, {"--no-remat": "at stages 0 to 2 keep all activations of a layer"})
    add_remat_option(batch, "layers store the fastest choice of activations within bytes")
    helps = {
        "--find-batch": "find the largest --batch that fits, by compiling several sizes from "
        "--batch on",
        "--headroom SHARE": "with --find-batch: the share of the memory that is left free "
        "(default: 0.1)",
    }
    add_options(batch, helps)
    _output_options(parser)


def _model_options(parser: argparse.ArgumentParser, *, searched: bool = False) -> Any:
    """Adds them; a search decides dtypes of computing and reducing by itself."""
    group = parser.add_argument_group("model and optimizer")
    others = (
        "MODULE:NAME of a sharding.plan.TracedModel or Decoder, or of a function that makes one"
        if searched
        else "a number of parameters such as 7e9 (plan), MODULE:FUNCTION that returns abstract "
        "parameters (plan)"
    )
    helps = {
        "--model": f"{others}, or one of {', '.join(MODELS)}",
        "--optimizer": "of optax_ext or optax, by name, or MODULE:ATTRIBUTE (default: adamw)",
        "--master": "float32 master weights beside the parameters",
        "--dtype": "of the parameters (default: bfloat16, for CPUs float32)",
    }
    if not searched:
        helps["--compute-dtype DTYPE"] = "of the loss (default: that of the parameters)"
        helps["--reduce-dtype DTYPE"] = "in which gradients are summed over devices"
    add_options(group, helps, model={}, optimizer={"default": "adamw"}, dtype={})
    return group


def _machine_options(parser: argparse.ArgumentParser, *, searched: bool = False) -> Any:
    """Adds them; a search decides about meshes by itself."""
    group = parser.add_argument_group("machine and sharding")
    helps = {
        "--target": "v5e:16x16, v5p:4x4x4, v5e:4x4*2 (two slices), h100x8, h200x64, cpu:8 ...; "
        "--help without a command lists all kinds",
    }
    if not searched:
        helps |= {
            "--mesh AXES": "such as x=16,y=16 (default: axes that suit the links)",
            "--axis AXES": "what ZeRO shards over, such as x,y (default: all axes)",
            "--replica-axis AXES": "of the replicas of a hybrid (default: slice, host, or the "
            "first of several axes)",
        }
    add_options(group, helps, target={"required": True})
    figures = {
        "--memory GIB": "its memory",
        "--bandwidth GB/S": "of that memory",
        "--tflops": "of dense bfloat16 matrix products",
        "--link GB/S": "what it sends at best",
        "--network GB/S": "what it sends to other hosts or slices",
    }
    title = "figures of a device: of an unknown one, or other than known"
    add_options(parser.add_argument_group(title), figures, tflops={"type": float})
    return group


def _batch_options(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("batch")
    helps = {
        "--batch N": "sequences of one device in a micro-batch (default: 1)",
        "--microbatches N": "accumulated in a step (default: 1)",
        "--length TOKENS": "of a sequence (default: as the model has it)",
    }
    add_options(group, helps, microbatches={"default": 1})
    return group


def _output_options(parser: argparse.ArgumentParser) -> None:
    helps = {
        "--json": "everything, as JSON",
        "--plot FILE": "a picture of the memory of one device",
    }
    add_options(parser.add_argument_group("output"), helps)


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
