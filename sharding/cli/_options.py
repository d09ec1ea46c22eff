"""The options of each command, with their help."""

import functools
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from optax_ext import STATE_FORMATS
from sharding.plan._format import check_choice, read_size
from sharding.plan.cost._parallel_plan import MATMULS
from sharding.plan.machine._devices import HEADROOM
from sharding.plan.model._models import MODELS
from sharding.plan.search._plan_space import KEPT


def _number(kind: type, least: float, most: float = 1e9) -> Callable[[str], Any]:
    """Reads a number in a range."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            whole = "whole " if kind is int else ""
            alone = " without a unit" if re.match(r"[\d.]+ *[a-zA-Z]", text) else ""
            raise ArgumentTypeError(f"must be a {whole}number{alone}, got {text!r}") from None
        if not least <= value <= most:
            raise ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text}")
        return value

    return parse


def _checked(check: Callable[[str], Any]) -> Callable[[str], str]:
    """Takes a text as it is, if a check does not raise."""

    def parse(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error).strip(" .")) from None
        return text

    return parse


def _one_of(known: Iterable[str]) -> dict[str, Any]:
    """The kind of an option that is one of some words."""
    check = functools.partial(check_choice, "", known=tuple(known))
    return {"type": _checked(check), "metavar": "|".join(known)}


_TYPES: dict[str, Any] = dict.fromkeys(("N", "TOKENS"), _number(int, 1))
_TYPES |= dict.fromkeys(("GIB", "GB/S"), _number(float, 1e-9)) | {"SHARE": _number(float, 0, 0.99)}
_TYPES["BYTES"] = _checked(lambda text: text == "auto" or read_size(text))
_STAGES = ["0", "1", "2", "3"]
_SEVERAL: dict[str, Any] = {"action": "append", "default": []}

# Options by name and metavar, such as ``--batch N``, with their help.
_NAMED = f"or one of {', '.join(MODELS)}"
_MODEL = {
    "--model": "a number of parameters such as 7e9 (plan), MODULE:NAME of a function that returns "
    f"abstract parameters (plan), or of a sharding.plan.Decoder, {_NAMED}",
    "--optimizer": "of optax_ext or optax, by name, or MODULE:ATTRIBUTE (default: adamw)",
    "--master": "float32 master weights beside the parameters",
    "--dtype": "of the parameters (default: bfloat16, for CPUs float32)",
}
_FROZEN = ("4bit", "8bit")
_FINE_TUNING = {
    "--frozen FORMAT": "matrices of layers are stored so, and not trained: 4bit (NF4), 8bit",
    "--lora N": "the rank of their adapters, which are trained",
}
_MATMULS = {"--matmuls": "recipe of quantized products of layers, which are lossy: fp8 or int8"}
_DTYPES = {
    "--compute-dtype DTYPE": "of the loss (default: that of the parameters)",
    "--reduce-dtype DTYPE": "in which gradients are summed over devices",
}
_TARGET = {
    "--target": "v5e:16x16, v5p:4x4x4, v5e:4x4*2 (two slices), h100x8, h200x64, cpu:8 ...; "
    "--help without a command lists all kinds"
}
_MESH = {
    "--mesh AXES": "such as x=16,y=16 (default: axes that suit the links)",
    "--axis AXES": "what ZeRO shards over, such as x,y (default: all axes)",
    "--replica-axis AXES": "of the replicas of a hybrid (default: slice, host, or the first of "
    "several axes)",
}
_FIGURES = {
    "--memory GIB": "its memory",
    "--bandwidth GB/S": "of that memory",
    "--tflops": "of dense bfloat16 matrix products",
    "--link GB/S": "what it sends at best",
    "--network GB/S": "what it sends to other hosts or slices: its share of the host's network, "
    "such as 0.39 of 25 Gbit/s that 8 devices share",
    "--machine FILE": "figures that check --measure wrote on it, in the place of published ones",
}
_OF_ALL = (
    "of all devices in a step: sequences such as 1024, or tokens such as 4M-tokens (units of "
    "2^20), in full sequences"
)
_LENGTH = {"--length TOKENS": "of a sequence (default: as the model has it)"}
_BATCH = {
    "--batch BATCH": f"{_OF_ALL} (default: one sequence of each device in each micro-batch)",
    "--microbatches N": "accumulated in a step (default: 1)",
    **_LENGTH,
}
_REMAT = "such as 8GiB, or auto for what the state leaves of the device; compiles for the target"
_IN_BACKWARD = "update each layer once its gradient exists"
_AND_LAYERS = "; with --update-in-backward, layers"
_ON_HOST = {"--update-on-host": "update the state on the CPU, offloaded as by --offload"}


def plan_options(parser: ArgumentParser) -> None:
    state = {
        "--state": "format of large leaves of the optimizer state (default: as the optimizer has "
        "them)",
        "--offload": "keep the optimizer state in host memory" + _AND_LAYERS,
        **_ON_HOST,
        "--update-in-backward": _IN_BACKWARD,
    }
    remat = {"--remat BYTES": f"plan activations of one device for so many bytes, {_REMAT}"}
    kinds = {"state": _one_of(STATE_FORMATS), "frozen": _one_of(_FROZEN)}
    kinds |= {"matmuls": _one_of(MATMULS)}
    every = _MODEL | _FINE_TUNING | _DTYPES | state | _MATMULS
    _add(parser, "model and optimizer", every, **kinds)
    local = {"--local-steps N": "between two averages of the parameters of replicas (LocalSteps)"}
    _add_machine(parser, _TARGET | _MESH | local)
    _add(parser, "batch", _BATCH | remat, microbatches={"default": 1})
    _add_output(parser)


def audit_options(parser: ArgumentParser) -> None:
    step = {
        "--step MODULE:FUNCTION": "instead of a model, a step of your own: function(mesh) returns "
        "what jax.jit(f).lower(...) returns, or that and the sharding.Pipeline that it runs; with "
        "--find-batch it is function(mesh, batch)"
    }
    stage = {
        "--stage": "ZeRO stage; give it several times for several (default: 3)",
        "--hybrid": "replicas over the first mesh axis, not shards",
    }
    more = {
        "--no-remat": "at stages 0 to 2 keep all activations of a layer",
        "--update-in-backward": _IN_BACKWARD,
        "--offload": "keep the optimizer state in host memory" + _AND_LAYERS,
        **_ON_HOST,
        "--remat BYTES": f"layers store the fastest choice of activations within bytes {_REMAT}",
        "--find-batch": "find the largest --batch that fits, by compiling several sizes from "
        "--batch on",
        "--headroom SHARE": "with --find-batch: the share of the memory that is left free "
        f"(default: {HEADROOM})",
    }
    kinds = {"frozen": _one_of(_FROZEN), "matmuls": _one_of(MATMULS)}
    every = _MODEL | _FINE_TUNING | _DTYPES | step | _MATMULS
    _add(parser, "model and optimizer", every, **kinds)
    stages = {"action": "append"} | _one_of(_STAGES)
    _add_machine(parser, _TARGET | _MESH | stage, stage=stages)
    _add(parser, "batch", _BATCH | more, microbatches={"default": 1})
    _add_output(parser)


def search_options(parser: ArgumentParser) -> None:
    """Adds the options of ``search``, which decides meshes and dtypes of computing by itself."""
    model = {
        "--model": "MODULE:NAME of a sharding.plan.TracedModel or Decoder, or of a function that "
        f"makes one, {_NAMED}"
    }
    plans = {
        "--batch BATCH": _OF_ALL,
        **_LENGTH,
        "--keep NAME=VALUE": f"compare only plans with this value; names are {', '.join(KEPT)}",
        "--no-offload": "keep the optimizer state in device memory",
        "--update-on-host": "compare plans that update state in host memory on the CPU, too",
        "--state": "compare plans with this lossy format of the optimizer state, too",
        "--stochastic-rounding": "compare plans with lossy stochastic rounding of the parameters, "
        "too",
        "--sync NAME": "compare plans with this lossy synchronization of gradients, too: "
        "'powersgd(RANK)', 'qsgd(8)' or 'qsgd(4)'",
        "--matmuls": "compare plans with this recipe of quantized products of layers, too",
        "--asynchronous": "compare lossy pipelines without a flush, too, whose gradients are one "
        "update late",
        "--update-in-backward": "compare plans that update each layer as soon as its gradient "
        "exists, too",
        "--headroom SHARE": f"of the memory that is left to the allocator (default: {HEADROOM})",
        "--top N": "plans to list (default: 5)",
        "--write FILE": "write the best plan as JSON, with the code that builds it",
        "--verify N": "compile the first N plans for the target, and drop those that do not hold",
    }
    frozen = _one_of(_FROZEN)
    _add(parser, "model and optimizer", _MODEL | model | _FINE_TUNING, frozen=frozen)
    _add_machine(parser, _TARGET)
    _add(
        *(parser, "batch and plans", plans),
        batch={"required": True},
        state=_SEVERAL | _one_of(STATE_FORMATS),
        keep=_SEVERAL,
        sync=_SEVERAL,
        matmuls=_SEVERAL | _one_of(MATMULS),
        headroom={"default": HEADROOM},
        top={"default": 5},
        verify={"default": 0, "type": _number(int, 0)},
    )
    _add_output(parser)


def machine_check_options(parser: ArgumentParser) -> None:
    checks = {
        "--match TEXT": "only checks with this text in their name",
        "--folder DIR": "also save and restore by orbax in this folder, which all processes see",
        "--measure FILE": "instead measure products, memory, links and the host, for --machine",
    }
    _add(parser, "checks", checks)
    _add_output(parser)


def _add_machine(parser: ArgumentParser, helps: Mapping[str, str], **kinds: dict[str, Any]) -> None:
    _add(parser, "machine and sharding", helps, target={"required": True}, **kinds)
    title = "figures of a device: of an unknown one, or other than known"
    _add(parser, title, _FIGURES, tflops={"type": _TYPES["GB/S"]})


def _add_output(parser: ArgumentParser) -> None:
    _add(parser, "output", {"--json": "everything, as JSON"})


def _add(
    parser: ArgumentParser, title: str, helps: Mapping[str, str], **kinds: dict[str, Any]
) -> None:
    """Adds a group of options.

    ``kinds`` are further arguments of ``add_argument``. Without any and without a metavar, an
    option is a flag.
    """
    group = parser.add_argument_group(title)
    kinds = {"model": {}, "optimizer": {"default": "adamw"}, "dtype": {}} | kinds
    for words, text in helps.items():
        name, *metavar = words.split(" ", 1)
        kind = kinds.get(name[2:].replace("-", "_"), {} if metavar else {"action": "store_true"})
        if metavar:
            types = {"type": _TYPES[metavar[0]]} if metavar[0] in _TYPES else {}
            kind = {"metavar": metavar[0]} | types | kind
        group.add_argument(name, help=text, **kind)
