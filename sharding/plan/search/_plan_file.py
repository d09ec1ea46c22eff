"""plan.json: a chosen plan with what it is for, and the lines of code that build it."""

import dataclasses
import inspect
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from sharding._types import Tree
from sharding._zero import Zero
from sharding.pipeline import AsyncSchedule, Schedule, pipedream_2bw
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline._schedules import schedule_call
from sharding.pipeline.asynchronous._async_pipeline import AsyncPipeline, AsyncState
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_schedules import schedule_of
from sharding.plan.cost._plan_costs import WRAPPERS, zero_of
from sharding.plan.cost._wire_and_flops import TENSOR_AXIS
from sharding.plan.machine import targets
from sharding.plan.model._models import MODELS, PARTLY, PRESETS, Decoder
from sharding.plan.search._search import ChosenPlan
from sharding.plan.search._traced_model import AnyModel

_VERSION = 1
# Of a step of an asynchronous pipeline: in the code, and in the program that is verified.
_UPDATES, LOWERED_UPDATES = 100, 2


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
    def mesh_axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes, from the devices furthest apart to the nearest."""
        pipe = {"pipe": self.plan.pipe} if self.plan.pipe > 1 else {}
        sizes = dict(zero_of(self.plan).mesh.shape)
        tensor = {TENSOR_AXIS: sizes.pop(TENSOR_AXIS)} if self.plan.tensor > 1 else {}
        del sizes["data"]
        return pipe | sizes | self.data_axes | tensor

    @property
    def data_axes(self) -> dict[str, int]:
        """The axes of ZeRO's shards: ``"data"``, or those of the torus that they span.

        Over one axis of all devices of a torus XLA makes all-reduces of other collectives, which
        send twice as much.
        """
        target = targets.parse(self.target, other_gpus=True)
        nearer, left = self.plan.tensor, self.plan.shards
        axes: dict[str, int] = {}
        if target.is_torus:
            for name, size in reversed([*zip("xyz", target.shape, strict=False)]):
                shared = math.gcd(nearer, size)
                axes[name] = math.gcd(left, size // shared)
                nearer, left = nearer // shared, left // axes[name]
            axes = {"slice": left} | dict(reversed(axes.items()))
            axes = {name: size for name, size in axes.items() if size > 1}
        several = len(axes) > 1 and left in (1, target.groups) and nearer == 1
        return axes if several else {"data": self.plan.shards}

    @property
    def axis_order(self) -> tuple[str, ...]:
        """The order of the axes in the mesh: that of ``mesh_axes`` but for one case.

        In a pipeline of shared layers the stages come behind data parallelism. The compilers of jax
        0.11 and 0.12 end the process if they do not.
        """
        first, *others = self.mesh_axes
        if first != "pipe" or self.plan.tensor == 1:
            return (first, *others)
        return (*others[:-1], first, others[-1])

    def arranged(self, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
        """A mesh with ``mesh_axes``, its axes in ``axis_order``; every device stays where it is."""
        order = [mesh.axis_names.index(name) for name in self.axis_order]
        types = (jax.sharding.AxisType.Auto,) * len(order)
        return jax.sharding.Mesh(mesh.devices.transpose(order), self.axis_order, axis_types=types)

    @property
    def recompute(self) -> str:
        """What the loss computes again: an update in the backward pass computes its layers."""
        return "none" if self.plan.update_in_backward else self.plan.recompute

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of what layers save beside their input; empty where no preset says it."""
        return PRESETS[self.plan.recompute] if self.plan.recompute in PARTLY else ()

    def zero(self, mesh: Any) -> Zero:
        """The ``Zero`` of the plan, on a mesh with ``mesh_axes``."""
        fields = {"mesh": mesh, "axis": tuple(self.data_axes)}
        return dataclasses.replace(zero_of(self.plan), **fields)

    def param_specs(self, model: AnyModel) -> Any:
        """How devices share the parameters of each layer; None where they do not."""
        tensor = self.plan.tensor
        if tensor > 1 and isinstance(model, Decoder):
            return model.specs(TENSOR_AXIS, tensor)
        return None

    def schedule(self) -> Schedule:
        """That of its pipeline, or of an evaluation without a flush; else a ``ValueError``."""
        plan = self.plan
        if plan.pipe == 1:
            raise ValueError("the plan has no pipeline, and so no schedule.")
        return schedule_of(plan.schedule, plan.pipe, plan.microbatches, plan.chunks)

    def async_schedule(self, updates: int) -> AsyncSchedule:
        """The schedule of so many updates without a flush; a ``ValueError`` if it has flushes."""
        plan = self.plan
        if not plan.asynchronous:
            raise ValueError("the plan has no asynchronous pipeline.")
        return pipedream_2bw(plan.pipe, plan.microbatches, updates)

    @property
    def policy(self) -> Any:
        """What ``jax.checkpoint`` stores of a layer; None for its input alone."""
        return jax.checkpoint_policies.save_only_these_names(*self.saved) if self.saved else None

    def pipeline(self, mesh: Any, model: AnyModel) -> Pipeline:
        """Its pipeline of a ``Decoder``, else a ``ValueError``, on a mesh with ``mesh_axes``."""
        if not isinstance(model, Decoder):
            raise ValueError("a plan with a pipeline needs a Decoder: its embedding and its head.")
        stored: Any = jax.checkpoint(model.block, policy=self.policy)
        block = stored if self.plan.checkpoints_layers else model.block
        return Pipeline(
            *(mesh, self.schedule()),
            num_layers=self.layers,
            embed=model.embed,
            block=block,
            head=model.head,
            recompute=False,  # forward passes store what each layer stores
        )

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
        zero = shd.Zero(mesh, stage=2, axis='data')
        layer = jax.checkpoint(zero.gathered(model.apply_layer))
        loss = model.make_loss(layer)
        step = zero.train_step(loss, tx=tx, microbatches=4)
        """
        plan, axes, names = self.plan, self.mesh_axes, self.saved
        data = tuple(self.data_axes)
        fields = [f"stage={plan.stage}", f"axis={data if len(data) > 1 else data[0]!r}"]
        fields += ["replica_axis='replica'"] if plan.replicas > 1 else []
        fields += ["shard_state_over_replicas=True"] if plan.spread else []
        fields += [f"offload={zero_of(plan).offload!r}"] if plan.offload else []
        fields += ["update_on='host'"] if plan.offload == "update" else []
        fields += [f"sync=shd.sync.{plan.sync}"] if plan.sync else []
        lines = [
            "import jax, optax, optax_ext, sharding as shd",
            *_model_lines(self.model),
            *_optimizer_lines(self.optimizer, plan.update_in_backward),
            f"auto = (jax.sharding.AxisType.Auto,) * {len(axes)}",
            f"mesh = jax.make_mesh({tuple(axes.values())}, {tuple(axes)}, auto)",
        ]
        if self.axis_order != tuple(axes):
            order = tuple(map([*axes].index, self.axis_order))
            moved = f"mesh.devices.transpose{order}, {self.axis_order}"
            lines.append(f"mesh = jax.sharding.Mesh({moved}, axis_types=auto)")
        lines += [] if plan.asynchronous else [f"zero = shd.Zero(mesh, {', '.join(fields)})"]
        if plan.tensor > 1:
            specs = f"model.specs({TENSOR_AXIS!r}, {plan.tensor})"
            lines.append(f"param_specs = {specs}")
        if plan.state_format:
            form = f"optax_ext.STATE_FORMATS[{plan.state_format!r}]"
            lines.append(f"tx = optax_ext.low_precision_state(tx, {form})")
        wrap = WRAPPERS.get(plan.weights)
        lines += [f"tx = optax_ext.{wrap}(tx)"] if wrap else []
        policy = ", policy=policy" if names else ""
        if names and self.layers:
            lines.append(f"policy = jax.checkpoint_policies.save_only_these_names(*{names})")
        gathered = "" if plan.checkpoints_layers else policy
        layer = "model.block" if plan.pipe > 1 else f"zero.gathered(model.apply_layer{gathered})"
        layer = f"jax.checkpoint({layer}{policy})" if plan.checkpoints_layers else layer
        layer = "model.apply_layer" if plan.update_in_backward else layer
        if plan.pipe > 1:
            sizes = [plan.pipe, plan.microbatches]
            sizes += [plan.chunks] if plan.schedule == "interleaved" else []
            name = "aligned" if plan.asynchronous else plan.schedule  # of an evaluation
            lines += [
                f"schedule = shd.pipeline.{schedule_call(name, *sizes)}",
                f"block = {layer}",
                "pipeline = shd.Pipeline(",
                f"    mesh, schedule, num_layers={self.layers},",
                "    embed=model.embed, block=block, head=model.head, recompute=False,",
                ")",
            ]
            if plan.asynchronous:
                made = f"pipedream_2bw({plan.pipe}, {plan.microbatches}, minibatches={_UPDATES})"
                lines += [
                    f"updates = shd.pipeline.{made}",
                    "training = shd.AsyncPipeline(pipeline, updates, tx)",
                    "step = jax.jit(training.run, donate_argnums=0)",
                ]
            else:
                lines.append("step = zero.train_step(pipeline, tx=tx)")
        else:
            of_layers = [f"layer = {layer}", "loss = model.make_loss(layer)"]
            lines += of_layers if self.layers else [f"loss = model.loss({self.recompute!r})"]
            how = (
                f"microbatches={plan.microbatches}"
                + ", update='backward'" * plan.update_in_backward
            )
            lines.append(f"step = zero.train_step(loss, tx=tx, {how})")
        return lines + self._running() * run

    def _running(self) -> list[str]:
        """The lines that make a state and run a step."""
        plan, params, shape = self.plan, f"model.init({self.dtype!r})", "x.shape"
        params = f"pipeline.stack({params})" if plan.pipe > 1 else params
        examples = f"model.batch({plan.sequences})"
        if self.model in MODELS:
            examples = f"jax.ShapeDtypeStruct(({plan.sequences}, {self.length + 1}), 'int32')"
        if plan.asynchronous:
            shape = f"({_UPDATES}, {plan.microbatches}, {plan.microbatch}, *x.shape[1:])"
        zeros = f"lambda x: jax.numpy.zeros({shape}, x.dtype)"
        lines = [f"batch = jax.tree.map({zeros}, {examples})  # yours takes its place"]
        if plan.asynchronous:
            lines.append(f"state = training.init({params})")
            return [*lines, "state, metrics = step(state, batch)"]
        specs = "param_specs" if plan.tensor > 1 else "None"
        if plan.pipe > 1:
            specs = f"pipeline.param_specs(jax.eval_shape(make_state)[0], {specs})"
        return [
            *lines,
            "def make_state():",
            f"    params = {params}",
            "    return params, tx.init(params)",
            f"state = zero.init(make_state, tx=tx, param_specs={specs})",
            "state, metrics = step(state, zero.put(batch))",
        ]


def _model_lines(name: str) -> list[str]:
    if ":" in name:
        return [_imported(name, "model"), "model = model() if callable(model) else model"]
    return [f"model = shd.plan.MODELS[{name!r}]"] if name in MODELS else []


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


class LoweredStep(NamedTuple):
    lowered: jax.stages.Lowered
    per_device: bool  # whether each device runs the loss of its own rows


def lowered_step(
    file: PlanFile, mesh: Any, model: AnyModel, tx: optax.GradientTransformation
) -> LoweredStep:
    """The step of a plan, lowered for a mesh; ``tx`` is that of ``transformation_of(plan, ...)``.

    Of an asynchronous pipeline it is the first two updates.
    """
    plan, zero, specs = file.plan, file.zero(mesh), file.param_specs(model)
    if plan.asynchronous:
        return LoweredStep(_lowered_updates(file, mesh, model, tx), per_device=True)
    pipeline = file.pipeline(mesh, model) if plan.pipe > 1 else None

    def make_state() -> tuple[Any, Any]:
        params = model.init(file.dtype)
        params = pipeline.stack(params) if pipeline else params
        return params, tx.init(params)

    if pipeline:
        specs = pipeline.param_specs(jax.eval_shape(make_state)[0], specs)
        step = zero.train_step(pipeline, tx=tx)
    else:
        if not isinstance(model, Decoder):
            loss = model.loss(file.recompute, device=mesh.devices.flat[0])
        elif plan.update_in_backward:
            loss = model.make_loss()
        elif plan.checkpoints_layers:
            layer = jax.checkpoint(zero.gathered(model.apply_layer), policy=file.policy)
            loss = model.make_loss(layer)
        else:
            loss = model.make_loss(zero.gathered(model.apply_layer, policy=file.policy))
        update = "backward" if plan.update_in_backward else "after"
        step = zero.train_step(loss, tx=tx, microbatches=plan.microbatches, update=update)
    state = zero.abstract_state(make_state, tx=tx, param_specs=specs)
    args = state, model.batch(plan.sequences)
    return LoweredStep(step.lower(*args), step.loss_program(*args).per_device)


def _lowered_updates(
    file: PlanFile, mesh: Any, model: AnyModel, tx: optax.GradientTransformation
) -> jax.stages.Lowered:
    pipeline = file.pipeline(mesh, model)
    training = AsyncPipeline(pipeline, file.async_schedule(LOWERED_UPDATES), tx)

    def placed(tree: Tree, specs: Tree) -> Any:
        return jax.tree.map(lambda x, s: x.update(sharding=NamedSharding(mesh, s)), tree, specs)

    params = jax.eval_shape(lambda: pipeline.stack(model.init(file.dtype)))
    params = placed(params, pipeline.param_specs(params))
    opt_state = jax.eval_shape(training.init, params).opt_state
    opt_state = placed(opt_state, jax.tree.map(lambda _: P(pipeline.axis), opt_state))
    tokens = model.batch(file.plan.sequences)
    shape = (LOWERED_UPDATES, file.plan.microbatches, file.plan.microbatch, *tokens.shape[1:])
    batches = placed(tokens.update(shape=shape), P())
    run = jax.jit(training.run, donate_argnums=0)
    return run.lower(AsyncState(params, opt_state), batches)
