"""The command ``search``: the fastest plan that fits, ``plan.json``, and its program."""

import dataclasses
import pathlib
import sys
from argparse import Namespace
from typing import Any

import optax

from sharding.cli import _load as loading
from sharding.cli import _setup as opts
from sharding.cli._output import print_json, writing
from sharding.plan._format import Table, show, size
from sharding.plan.cost._ledger import table_of_differences
from sharding.plan.machine.targets import Target
from sharding.plan.model._models import MODELS
from sharding.plan.search._chosen_plan import SearchResult
from sharding.plan.search._plan_file import PlanFile
from sharding.plan.search._search import search
from sharding.plan.search._traced_model import AnyModel, TracedModel
from sharding.plan.search._verify import Verification, verify


def run_search(options: Namespace) -> int:
    """Searches, verifies, prints and writes; 2 where no plan holds."""
    target = opts.target_of(options)
    device = opts.known_device(options)
    _check_search_options(options, target)
    if options.verify:
        opts.compile_on_cpu(target)
    dtype = opts.dtype_of(options)
    tx = loading.optimizer_of(options.optimizer, options.update_in_backward)
    _, model = loading.model_of(options.model, dtype, options.length)
    if model is None:
        raise ValueError(
            f"search needs a model whose layers are known, one of {', '.join(MODELS)}, or a "
            f"TracedModel or Decoder as MODULE:NAME; --model {options.model} is not."
        )
    length = options.length or model.length
    bits, rank = opts.fine_tuning_of(options, model)
    if rank:
        model, tx = TracedModel.fine_tuned(model, tx, frozen=bits, lora=rank)
    sizes = {"sequences": opts.sequences_of(options.batch, length), "length": length}
    result = _searched(options, model, tx, dtype=dtype, device=device, **sizes)
    names = {name: getattr(options, name) for name in ("model", "optimizer", "target")}
    names |= {"frozen": bits, "lora": rank}
    files = [PlanFile.of(plan, length=length, dtype=str(dtype), **names) for plan in result.plans]
    verified = _verified(options, result.memory, files, model, tx)
    holding = [i for i in range(len(files)) if i not in verified or not verified[i].failures]
    if options.json:
        figures = result.to_dict()
        for i, beside in verified.items():
            figures["plans"][i]["program"] = beside.to_dict()
        figures["chosen"] = holding[0] if holding else None
        asked = {"sequences": result.sequences, "length": length}
        print_json(options, figures, params=model.abstract(dtype), **asked)
    else:
        notes: list[str] = []
        if holding:
            plans = tuple(result.plans[i] for i in holding)
            notes = [*dataclasses.replace(result, plans=plans).notes]
        if not options.master and dtype.itemsize == 2:
            notes.append("Parameters have 16 bits; --master adds float32 master weights.")
        notes += _compared(verified, holding[0] if options.write and holding else None)
        show(result.tables() + _programs(verified), notes)
        if holding:
            print("", *files[holding[0]].code(), sep="\n")
    if options.write and holding:
        _write_plan(options.write, files[holding[0]], verified.get(holding[0]))
    if not holding:
        unwritten = f", and {options.write} was not written" * bool(options.write)
        none = f"none of the first {len(files)} plans holds{unwritten}"
        print(f"error: {none}; a larger --top and --verify tries more.", file=sys.stderr)
    return 0 if holding else 2


def _searched(
    options: Namespace, model: AnyModel, tx: optax.GradientTransformation, **sizes: Any
) -> SearchResult:
    """The plans that are found by the options of the command."""
    lossless = "master" if options.master else "plain"
    return search(
        *(model, tx, options.target),
        **sizes,
        keep=_kept_values(options.keep),
        offload="update" if options.update_on_host else not options.no_offload,
        asynchronous=options.asynchronous,
        update_in_backward=options.update_in_backward,
        state_formats=(None, *options.state),
        weights=(lossless, "stochastic") if options.stochastic_rounding else (lossless,),
        syncs=(None, *options.sync),
        matmuls=(None, *options.matmuls),
        headroom=options.headroom,
        top=max(options.top, options.verify),
    )


def _write_plan(path: str, file: PlanFile, program: Verification | None) -> None:
    """Writes a plan, with the memory of its program where that is known."""
    if program:
        promised = file.promised | {"memory": program.memory}
        file = dataclasses.replace(file, promised=promised)
    with writing("--write", path):
        file.write(path)


def _check_search_options(options: Namespace, target: Target) -> None:
    """Raises for options that contradict each other, and files that cannot be written."""
    if options.no_offload and options.update_on_host:
        raise ValueError("--update-on-host is offload, and --no-offload none: give one of them.")
    if options.verify and not target.compiles:
        raise ValueError(f"{options.target} can be searched, not compiled for: leave out --verify.")
    if options.write and not pathlib.Path(options.write).absolute().parent.is_dir():
        raise ValueError(f"{options.write} cannot be written: there is no such folder.")


def _programs(verified: dict[int, Verification]) -> list[Table]:
    """Programs beside their plans."""
    if not verified:
        return []
    columns = ("plan", "memory", "/ planned", "wire / planned", "operations / planned")
    rows = [(str(i + 1), size(found.memory), *found.ratios) for i, found in verified.items()]
    differ = {f"{i + 1}: ": found.differences for i, found in verified.items()}
    return [Table("compiled for the target", columns, rows), *table_of_differences(differ)]


def _kept_values(texts: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--keep must look like stage=3, got {text!r}.")
        if name in kept:
            raise ValueError(f"--keep {name} is given twice; a plan has one value.")
        none = None if name in ("state_format", "sync") else "none"
        word = int(value) if value.isdigit() else value
        kept[name] = {"true": True, "false": False, "none": none}.get(value.lower(), word)
    return kept


def _verified(
    options: Namespace, memory: float, files: list[PlanFile], model: AnyModel, tx: Any
) -> dict[int, Verification]:
    """The first plans beside their programs; a line as soon as one is compiled."""
    target = opts.target_of(options)
    device = opts.device_of(options)
    verified: dict[int, Verification] = {}
    for i, file in enumerate(files[: options.verify]):
        if file.plan.offload and not target.is_torus and target.kind != "cpu":
            reason = "compile-only GPUs have no host memory for its optimizer state"
            print(f"  plan {i + 1}: not verified, {reason}", file=sys.stderr)
            continue
        verified[i] = verify(file, model, tx, memory=memory, device=device)
        print(f"  plan {i + 1}: {verified[i].summary}", file=sys.stderr, flush=True)
    return verified


def _compared(verified: dict[int, Verification], written: int | None) -> list[str]:
    """Which programs need other memory than planned, and which plans do not hold."""
    corrected = []
    dropped = []
    for i, found in verified.items():
        if found.failures:
            reasons = "; ".join(found.failures)
            dropped.append(f"warning: plan {i + 1} does not hold and is dropped: it {reasons}.")
        elif found.correction:
            file = "; the file has that of the program" if i == written else ""
            corrected.append(f"The program of plan {i + 1} {found.correction}{file}.")
    return corrected + dropped
