"""plan.json: a chosen plan with what it is for, and the lines of code that build it."""

import dataclasses
import inspect
import json
import pathlib
from typing import Any

import jax
import optax
import optax.contrib

import optax_ext
from sharding._zero import Tx
from sharding.plan.cost._parallel_plan import ParallelPlan, short
from sharding.plan.model._models import MODELS, Decoder
from sharding.plan.search._build import BuiltStep, build, mesh_axes, saved_names, zero_on
from sharding.plan.search._chosen_plan import ChosenPlan
from sharding.plan.search._traced_model import AnyModel

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """What ``plan.json`` holds."""

    model: str  #: the name of the model
    optimizer: str  #: the name of the optimizer
    target: str  #: the name of the machine
    length: int  #: tokens of a sequence
    dtype: str  #: of the parameters
    layers: tuple[int, ...]  #: of each chunk of a pipeline; of a ``TracedModel`` none
    plan: ParallelPlan  #: how a step is shared
    #: seconds; bytes of memory, the program's once it is compiled, and their planned parts
    promised: dict[str, float]
    frozen: int = 0  #: bits of frozen matrices of layers, as ``TracedModel.fine_tuned``
    lora: int = 0  #: the rank of their adapters; 0: all parameters are trained

    @classmethod
    def of(cls, chosen: ChosenPlan, **names: Any) -> "PlanFile":
        """The file of a chosen plan; ``names`` are the other fields."""
        promised = {"memory": chosen.memory, "seconds": chosen.seconds.seconds}
        promised |= {part: nbytes for part, nbytes in chosen.held.items() if part != "total"}
        return cls(layers=chosen.layers, plan=chosen.plan, promised=promised, **names)

    def write(self, path: str | pathlib.Path) -> None:
        """Writes it, with the code as a list of lines."""
        figures = {"version": _VERSION} | dataclasses.asdict(self) | {"code": self.code()}
        pathlib.Path(path).write_text(json.dumps(figures, indent=2) + "\n")

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "PlanFile":
        """Reads what ``write`` wrote.

        Raises:
          ValueError: the file is of another form.
        """
        try:
            figures = json.loads(pathlib.Path(path).read_text())
            if figures.pop("version") != _VERSION:
                raise ValueError(f"{path} is not of version {_VERSION}.")
            figures.pop("code")
            fields = figures.pop("plan")
            for name in ("param_bytes", "grad_bytes", "state_bytes"):  # of earlier files
                fields.pop(name, None)
            plan = ParallelPlan(**fields)
            return cls(plan=plan, layers=tuple(figures.pop("layers")), **figures)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no plan that search wrote: {error}.") from error

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of what layers save beside their input; empty where no preset says it."""
        return saved_names(self.plan)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The sizes of the axes of its mesh; from the furthest devices to the nearest."""
        return mesh_axes(self.plan, self.target)

    def build(self, model: AnyModel, tx: Tx, mesh: Any, **options: Any) -> BuiltStep:
        """The step of the plan, for sequences of its length; see ``sharding.plan.build``."""
        if isinstance(model, Decoder):
            model = dataclasses.replace(model, length=self.length)
        sized: Any = {"layers": self.layers, "dtype": self.dtype}
        return build(self.plan, model, tx, mesh, **sized, **options)

    def code(self, *, run: bool = True) -> list[str]:
        """The lines that build the step of the plan; if ``run``, a state, and one step of it, too.

        They make the model and the transformation by their names in a command; of other names,
        ``model`` and ``tx`` are expected. A step of an asynchronous pipeline is 100 updates.

        >>> plan = ParallelPlan(data=8, stage=2, microbatches=4, recompute="full")
        >>> file = PlanFile("llama2-7b", "adamw", "h100x8", 2048, "bfloat16", (32,), plan, {})
        >>> print(*file.code(run=False), sep=chr(10))
        import jax, optax, optax_ext, sharding as shd
        model = shd.plan.MODELS['llama2-7b']
        tx = optax.adamw(1e-3)
        auto = (jax.sharding.AxisType.Auto,) * 1
        mesh = jax.make_mesh((8,), ('data',), auto)
        # stage 2 over 8; 4 micro-batches of 1; recompute full
        plan = shd.plan.ParallelPlan(data=8, microbatches=4, stage=2)
        built = shd.plan.build(plan, model, tx, mesh, dtype='bfloat16')
        zero, step = built.zero, built.step  # Zero(mesh, stage=2, axis='data')
        """
        axes = self.mesh_axes
        fields = ", ".join(
            f"{name}={value!r}" for name, value in _fields_that_build(self.plan).items()
        )
        layers = f", layers={self.layers}" if self.plan.pipe > 1 else ""
        about = f"Zero(mesh, {_about_zero(self)})"
        lines = [
            "import jax, optax, optax_ext, sharding as shd",
            *_model_lines(self.model, self.length),
            *_optimizer_lines(self.optimizer, self.plan.update_in_backward),
            *self._lines_of_adapters(),
            f"auto = (jax.sharding.AxisType.Auto,) * {len(axes)}",
            f"mesh = jax.make_mesh({tuple(axes.values())}, {tuple(axes)}, auto)",
            f"# {short(self.plan)}",
            f"plan = shd.plan.ParallelPlan({fields})",
            f"built = shd.plan.build(plan, model, tx, mesh, dtype={self.dtype!r}{layers})",
            f"zero, step = built.zero, built.step  # {about}",
        ]
        if not run:
            return lines
        put = "batch" if self.plan.asynchronous else "zero.put(batch)"
        zeros = "lambda x: jax.numpy.zeros(x.shape, x.dtype)"
        return [
            *lines,
            f"batch = jax.tree.map({zeros}, built.batch)  # yours takes its place",
            "state = built.init()",
            f"state, metrics = step(state, {put})",
        ]

    def _lines_of_adapters(self) -> list[str]:
        options = f"frozen={self.frozen}, lora={self.lora}"
        line = f"model, tx = shd.plan.TracedModel.fine_tuned(model, tx, {options})"
        return [line] if self.lora else []


# Figures of a plan that build nothing.
_FIGURES = ("param_bytes", "grad_bytes", "state_bytes")


def _fields_that_build(plan: ParallelPlan) -> dict[str, Any]:
    """The fields of a plan that build its step, but for those that are the default."""
    default = dataclasses.asdict(ParallelPlan())
    fields = dataclasses.asdict(plan).items()
    return {name: x for name, x in fields if x != default[name] and name not in _FIGURES}


def _about_zero(file: PlanFile) -> str:
    """The arguments of the plan's ``Zero``, for a comment."""
    sizes = file.mesh_axes
    zero = zero_on(file.plan, jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    axis = zero.axis if len(zero.axis) > 1 else zero.axis[0]
    words = [f"stage={zero.stage}", f"axis={axis!r}"]
    usual = {field.name: field.default for field in dataclasses.fields(zero)}
    for name in ("replica_axis", "shard_state_over_replicas", "offload", "update_on"):
        if (value := getattr(zero, name)) != usual[name]:
            words.append(f"{name}={value!r}")
    words += [f"sync=shd.sync.{file.plan.sync}"] if file.plan.sync else []
    return ", ".join(words)


def _model_lines(name: str, length: int) -> list[str]:
    if ":" in name:
        return [_imported(name, "model"), "model = model() if callable(model) else model"]
    if name not in MODELS:
        return []
    made = f"shd.plan.MODELS[{name!r}]"
    if MODELS[name].length == length:
        return [f"model = {made}"]
    return [f"import dataclasses; model = dataclasses.replace({made}, length={length})"]


def _optimizer_lines(name: str, by_layer: bool) -> list[str]:
    if ":" in name:
        return [_imported(name, "tx"), "tx = tx() if callable(tx) else tx"]
    if name == "muon":
        matrices = "shd.by_owner(optax.contrib.muon(1e-3), factoring=optax_ext.flax_transformer())"
        return [
            f"inner = {{True: {matrices}, False: optax.adamw(1e-3)}}",
            "tx = optax.partition(inner, optax_ext.hidden_matrices)",
        ]
    modules = {"optax_ext": optax_ext, "optax": optax, "optax.contrib": optax.contrib}
    found = [text for text, module in modules.items() if name and hasattr(module, name)]
    if not found:
        return []
    takes = inspect.signature(getattr(modules[found[0]], name)).parameters
    given = ["1e-3"] * ("learning_rate" in takes)
    given += ["factoring=optax_ext.flax_transformer()"] * (by_layer and "factoring" in takes)
    return [f"tx = {found[0]}.{name}({', '.join(given)})"]


def _imported(path: str, name: str) -> str:
    return f"import {path.partition(':')[0]}; {name} = {path.replace(':', '.')}"
