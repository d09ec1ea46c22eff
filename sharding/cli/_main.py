"""The command line: ``optax-ext plan`` and ``optax-ext audit``, or ``python -m sharding ...``."""

import argparse
import os
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from optax_ext import __version__
from sharding.cli._audit_command import run_audit
from sharding.cli._check_command import run_check
from sharding.cli._options import audit_options, machine_check_options, plan_options, search_options
from sharding.cli._plan_command import run_plan
from sharding.cli._search_command import run_search
from sharding.plan._format import nearest
from sharding.plan.machine import targets
from sharding.plan.machine._devices import KINDS

_ABOUT = """\
plan computes in closed form what each stage of ZeRO holds and sends; audit compiles one step,
also for compile-only targets, and reads from the program what it costs; search compares all plans
of a step, and lists the fastest that fit; check runs every feature on this machine's devices, and
compares it with a reference.
"""
_EPILOG = """\
examples:
  {prog} plan --model llama2-7b --optimizer came --target v5e:16x16
  {prog} plan --model 7.5e9 --optimizer adam --master --target h100x64
  {prog} plan --model my_project.model:abstract_params --target v6e:8x8
  {prog} plan --model llama2-7b --target h100x64 --batch 256 --remat auto
  {prog} audit --model gpt2-small --target cpu:8 --stage 3
  {prog} audit --model llama2-7b --optimizer came --target v5e:8x8 --find-batch
  {prog} audit --step my_project.train:lowered --target v5e:4x4
  {prog} search --model llama2-13b --optimizer came --target h100x64 --batch 4M-tokens
  {prog} check

targets to plan and to compile for (audit; all but CPUs need
pip install '.[aot]' in a checkout):
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
    try:
        parser = _parser("optax-ext" if installed else "python -m sharding")
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            known = [f"--{name.replace('_', '-')}" for name in vars(options)]
            raise ValueError(f"{unknown[0]} is no option{nearest(unknown[0], known)}.")
        for name, value in vars(options).items():
            if "" in (value if isinstance(value, list) else [value]):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is empty: give it a value, or leave it out.")
        if options.command != "check":
            # Nothing runs on accelerators: where their compilers are installed and they are not
            # there, jax would look for them for 20 seconds, and print a traceback.
            jax.config.update("jax_platforms", "cpu")
        return options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:  # as of ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        print(
            f"error: the compiler of {getattr(options, 'target', 'this machine')} failed: {reason}",
            file=sys.stderr,
        )
    return 2


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, in one sentence."""

    def error(self, message: str) -> NoReturn:
        subject, colon, reason = message.removeprefix("argument ").partition(": ")
        raise ValueError(f"{subject}{' ' if colon else ''}{reason}.")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=_ABOUT,
        epilog=_EPILOG.format(prog=prog, **_target_names()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"optax-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="plan|audit|search|check")

    def add(name: str, add_options: Any, run: Any, summary: str, description: str) -> None:
        command = commands.add_parser(name, help=summary, description=description)
        add_options(command)
        command.set_defaults(run=run, command=name, defaults=command.get_default)

    add(
        *("plan", plan_options, run_plan, "closed form: at once, nothing is compiled"),
        "What each stage of ZeRO holds and sends, in closed form; with --remat also the "
        "activations, planned and compiled.",
    )
    add(
        *("audit", audit_options, run_audit, "compile a step and read its program"),
        "Memory, with activations, traffic, work and warnings, read from the program of one "
        "training step, which is compiled and not run.",
    )
    add(
        *("search", search_options, run_search, "closed form: the fastest plan that fits"),
        "Compares every way to share a step among devices, and lists the fastest that fit, with a "
        "bound that none goes below; with --verify their programs beside them.",
    )
    add(
        *(
            "check",
            machine_check_options,
            run_check,
            "every feature on this machine, beside a reference",
        ),
        "Runs every feature on the devices that jax shows, in small, and compares it with NumPy or "
        "a CPU. The exit status is 1 if something differs.",
    )
    return parser


def _target_names() -> dict[str, str]:
    """Examples of targets for the help text, by what can be done with them."""
    tpus = {"v4": "2x2x2", "v5e": "4x4", "v5p": "4x4x4", "v6e": "16x16", "tpu7x": "2x2x1"}
    names = {name: f"{name}:{tpus[name]}" if name in tpus else f"{name}x8" for name in KINDS}
    names["cpu"] = "cpu:8"
    found: dict[str, list[str]] = {"compiled": [], "planned": []}
    for example in names.values():
        found["compiled" if targets.parse(example).compiles else "planned"].append(example)
    wrapper = textwrap.TextWrapper(78, break_on_hyphens=False)
    wrapper.initial_indent = wrapper.subsequent_indent = "  "
    return {word: wrapper.fill(", ".join(examples)) for word, examples in found.items()}
