"""Reads the options of the commands, with one sentence for each wrong one.

``_main`` and the file of each command declare them, with their help.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_ext
from sharding._zero import Zero
from sharding.placement._specs import AnyMesh
from sharding.plan.cost._estimate import Plan, estimate
from sharding.plan.machine import targets
from sharding.plan.machine._devices import DeviceKind, kind_of
from sharding.plan.model._models import MODELS, Decoder, count_to_params
from sharding.step._precision import Precision
from sharding.step.owners._by_owner import by_owner

_TYPES = {"N": int, "V": int, "TOKENS": int, "SHARE": float, "GIB": float, "GB/S": float}


def add_options(group: Any, helps: Mapping[str, str], **kinds: dict[str, Any]) -> None:
    """Adds options by name and metavar, such as ``--batch N``, with their help.

    ``kinds`` are further arguments of ``add_argument``. Without any and without a metavar, an
    option is a flag.
    """
    for words, text in helps.items():
        name, *metavar = words.split(" ", 1)
        kind = kinds.get(name[2:].replace("-", "_"), {} if metavar else {"action": "store_true"})
        if metavar:
            types = {"type": _TYPES[metavar[0]]} if metavar[0] in _TYPES else {}
            kind = {"metavar": metavar[0]} | types | kind
        group.add_argument(name, help=text, **kind)


def print_json(figures: dict[str, Any]) -> None:
    """Infinite figures, such as an unknown bandwidth, are null."""
    finite = json.loads(json.dumps(figures), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1))


def save(plot: Callable[[Any], Any], figures: Any, path: str) -> None:
    """Writes the picture that ``plot`` makes."""
    with writing("--plot", path):
        plot(figures).savefig(path, dpi=150)


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Names the option whose file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}.") from error


# The options that make an unknown device known.
FIGURES = "--memory GIB, and for times --tflops, --bandwidth and --link"


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, its optimizer and its ``Zero``, as the options say."""

    params: Any  # abstract parameters
    model: Decoder | None  # the model, where it is one of ``MODELS``
    tx: optax.GradientTransformation  # the transformation, without ``--state``
    zero: Zero  # stage 3 on an abstract mesh; hybrid where the mesh has several axes
    device: DeviceKind | None  # its figures, where they are known
    batch: int  # sequences of one device in a micro-batch
    microbatches: int  # the number of micro-batches
    length: int  # tokens of a sequence; 0 where that is unknown
    activations: float | None = None  # bytes of one device, where they are planned

    @property
    def sequences(self) -> int:
        """Sequences of one device in a step."""
        return self.batch * self.microbatches

    def plan(
        self,
        zero: Zero,
        tx: optax.GradientTransformation | None = None,
        state_format: str | None = None,
    ) -> Plan:
        """The plan of a ``Zero``, with another transformation or a format of its state."""
        tokens = float(self.sequences * self.length)
        num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))
        flops = self.model.flops(tokens, self.length) if self.model else 6.0 * num_params * tokens
        return estimate(
            self.params,
            tx or self.tx,
            zero,
            microbatches=self.microbatches,
            batch=4.0 * self.sequences * (self.length + 1) if self.length else 0.0,
            state_format=state_format,
            device=self.device,
            gathered_once=self.model.gathered_once if self.model else None,
            tokens=tokens * zero.num_devices,
            flops=flops,
            activations=self.activations,
        )


def setup_of(options: argparse.Namespace) -> Setup:
    """Reads the options about model, optimizer, machine and batch."""
    mesh_axes = mesh_axes_of(options, target_of(options))
    if not options.model:
        raise ValueError("--model is missing: a number, a name, or module:function.")
    params, model = params_of_model(options.model, dtype_of(options), options.length)
    tx = optimizer_of(options.optimizer)
    return Setup(
        params=params,
        model=model,
        tx=optax_ext.master_weights(tx) if options.master else tx,
        zero=_zero(options, abstract_mesh(mesh_axes)),
        device=device_of(options),
        batch=options.batch or 1,
        microbatches=options.microbatches,
        length=options.length or (model.length if model else 0),
    )


def _zero(options: argparse.Namespace, mesh: AnyMesh) -> Zero:
    axis = tuple(options.axis.split(",")) if options.axis else mesh.axis_names
    replica = tuple(options.replica_axis.split(",")) if options.replica_axis else axis[:-1][:1]
    precision = Precision(
        compute=_floating_dtype("--compute-dtype", options.compute_dtype),
        reduce=_floating_dtype("--reduce-dtype", options.reduce_dtype),
    )
    return Zero(
        mesh,
        stage=3,
        axis=tuple(name for name in axis if name not in replica),
        replica_axis=replica or None,
        precision=precision,
    )


def abstract_mesh(mesh_axes: dict[str, int]) -> jax.sharding.AbstractMesh:
    """A mesh of these axes without devices."""
    return jax.sharding.AbstractMesh(tuple(mesh_axes.values()), tuple(mesh_axes))


def target_of(options: argparse.Namespace) -> targets.Target:
    """The target; GPUs of any name where their figures are given."""
    try:
        return targets.parse(options.target, other_gpus=bool(options.memory))
    except ValueError as error:
        if not str(error).startswith("unknown target"):
            raise
        raise ValueError(
            f"{error} Any other can be planned as NAMExNUMBER with its figures: {FIGURES}."
        ) from None


def compile_on_cpu(target: targets.Target) -> None:
    """Compiles on this machine's CPUs, of which a target of CPUs has as many as it names."""
    jax.config.update("jax_platforms", "cpu")
    if target.kind == "cpu":
        jax.config.update("jax_num_cpu_devices", target.num_devices)


def check_positive(options: argparse.Namespace) -> None:
    """Raises unless all numbers are above 0."""
    names = ("microbatches", "batch", "length", "memory", "bandwidth", "tflops", "link", "network")
    for name in (*names, "pipeline", "chunks", "efficiency"):
        value = getattr(options, name, None)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be above 0, got {value}.")


def mesh_axes_of(options: argparse.Namespace, target: targets.Target) -> dict[str, int]:
    """The sizes of the mesh's axes: of ``--mesh``, else those that suit the target."""
    if not options.mesh:
        return target.mesh_axes
    axes: dict[str, int] = {}
    for part in options.mesh.split(","):
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", part)
        if not match:
            raise ValueError(f"--mesh must look like x=4,y=8, got {options.mesh!r}.")
        if match[1] in axes:
            raise ValueError(f"--mesh {options.mesh}: axis {match[1]!r} is named twice.")
        axes[match[1]] = int(match[2])
    if math.prod(axes.values()) != target.num_devices:
        sizes = " * ".join(map(str, axes.values()))
        raise ValueError(
            f"--mesh {options.mesh}: {sizes} = {math.prod(axes.values())} devices requested, but "
            f"{options.target} has {target.num_devices}."
        )
    return axes


def dtype_of(options: argparse.Namespace) -> Any:
    """The dtype of the parameters."""
    # XLA:CPU widens the sums of bfloat16.
    default = "float32" if options.target.startswith("cpu") else "bfloat16"
    return _floating_dtype("--dtype", options.dtype or default)


def _floating_dtype(option: str, name: str | None) -> Any:
    if name is None:
        return None
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{option} {name!r} is no dtype; bfloat16 and float32 are.") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{option} must be a floating dtype, got {dtype}.")
    return dtype


def params_of_model(text: str, dtype: Any, length: int | None) -> tuple[Any, Decoder | None]:
    """Abstract parameters, and the model where it is one of ``MODELS``."""
    if ":" in text:
        try:
            return jax.eval_shape(load(text, "--model")), None
        except Exception as error:  # of the user's code
            raise ValueError(
                f"--model {text} must make parameters without arguments, but failed: "
                f"{in_short(error)}."
            ) from error
    if model := MODELS.get(text):
        if length and not model.biased:
            model = dataclasses.replace(model, length=length)
        elif length and length > model.length:
            raise ValueError(
                f"{text} has {model.length} positions, --length {length} was requested."
            )
        return model.abstract(dtype), model
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.lower())
    if not match:
        raise ValueError(f"--model {text!r} is no number and no model{_nearest(text, MODELS)}.")
    scale = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]
    count = float(match[1]) * scale
    if not 1 <= count <= 1e15:
        raise ValueError(f"--model {text!r}: from 1 to 1e15 parameters can be planned.")
    return count_to_params(round(count), dtype), None


def optimizer_of(text: str) -> optax.GradientTransformation:
    """A transformation by its name, or by the path of one or of a function that makes one."""
    if ":" in text:
        return load_made(text, "--optimizer", optax.GradientTransformation, "optimizer")
    if text == "muon":
        return _muon()
    makers = {
        name: getattr(module, name)
        for module in (optax.contrib, optax, optax_ext)
        for name in dir(module)
        if name.islower() and not name.startswith("_") and callable(getattr(module, name))
    }
    for options in ({"learning_rate": 1e-3}, {}) if text in makers else ():
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            made = makers[text](**options)
            if isinstance(made, optax.GradientTransformation):
                return made
    raise ValueError(f"--optimizer {text!r} is no optimizer{_nearest(text, _optimizers(makers))}.")


def _muon() -> optax.GradientTransformation:
    """Muon for the matrices of hidden layers, AdamW for all others.

    ``optax.contrib.muon`` takes arrays of two dims: not stacked layers, but their biases.
    """
    matrices = by_owner(optax.contrib.muon(1e-3), factoring=optax_ext.flax_transformer())
    return optax.partition({True: matrices, False: optax.adamw(1e-3)}, optax_ext.hidden_matrices)


def _optimizers(makers: dict[str, Callable[..., Any]]) -> list[str]:
    """The names that look like optimizers: they take a learning rate."""

    def takes_a_rate(make: Callable[..., Any]) -> bool:
        code = getattr(getattr(make, "__wrapped__", make), "__code__", None)
        return "learning_rate" in getattr(code, "co_varnames", ())

    return [name for name, make in makers.items() if takes_a_rate(make)]


def _nearest(text: str, names: Any) -> str:
    near = difflib.get_close_matches(text, list(names), n=4, cutoff=0.4)
    return f"; nearest are {', '.join(near)}" if near else f"; known are {', '.join(sorted(names))}"


def load_made(path: str, option: str, kind: Any, name: str) -> Any:
    """What ``module:attribute`` names, or makes without arguments; of this kind."""
    made = load(path, option)
    if not isinstance(made, kind):
        try:
            made = made()
        except Exception as error:
            raise ValueError(
                f"{option} {path} must make one without arguments, but failed: {in_short(error)}."
            ) from error
    if not isinstance(made, kind):
        raise ValueError(f"{option} {path} made no {name}, but {made!r}.")
    return made


def load(path: str, option: str) -> Any:
    """What ``module:attribute`` names; modules of the working folder, too."""
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # the module runs
        raise ValueError(f"{option} {path}: {in_short(error)}.") from error


def in_short(error: Exception) -> str:
    """An error of a user's code in one line."""
    first = next(iter(str(error).splitlines()), "").rstrip(".")
    if isinstance(error, ImportError | AttributeError):
        return first
    return f"{type(error).__name__}: {first}"


def device_of(options: argparse.Namespace) -> DeviceKind | None:
    """The figures of the target, replaced by those that are given."""
    units = {"memory": 2**30, "bandwidth": 1e9, "tflops": 1e12, "link": 1e9, "network": 1e9}
    given = {
        {"tflops": "flops"}.get(name, name): getattr(options, name) * unit
        for name, unit in units.items()
        if getattr(options, name)
    }
    known = kind_of(options.target)
    if known is not None:
        return dataclasses.replace(known, **given)
    if "memory" not in given:
        if given:
            raise ValueError(
                f"nothing is known of {options.target}: beside --bandwidth, --tflops, --link and "
                "--network a device needs --memory GIB."
            )
        return None
    figures: dict[str, Any] = {"name": target_of(options).kind, "network": None, "source": "given"}
    figures |= dict.fromkeys(("bandwidth", "flops", "link"), math.inf)
    return DeviceKind(**(figures | given))
