"""From a plan to the step that runs it: ``Zero``, transformation, loss, step and abstract state."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding._types import Batch, DType, Tree
from sharding._zero import Tx, Zero
from sharding.loss._loss_options import Loss, as_loss
from sharding.matmuls._quantized_loss import quantized_matmuls
from sharding.pipeline import pipedream_2bw
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline.asynchronous._async_pipeline import AsyncPipeline, AsyncState
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_schedules import schedule_of
from sharding.plan.cost._plan_costs import (
    shared_axes,
    specs_of_plan,
    transformation_of,
    zero_of,
)
from sharding.plan.cost._wire_and_flops import TENSOR_AXIS
from sharding.plan.machine import targets
from sharding.plan.model._experts import EXPERT_AXIS
from sharding.plan.model._models import PARTLY, PRESETS, Decoder
from sharding.plan.search._traced_model import AnyModel, TracedModel
from sharding.tiles._tiled_loss import tiled_where_possible


@dataclasses.dataclass(frozen=True)
class BuiltStep:
    """The step of a plan, and what makes and places what it takes."""

    plan: ParallelPlan  #: how the step is shared
    zero: Zero  #: how state and step are sharded
    tx: Tx  #: of a state that is a pair, in the plan's format
    make_state: Callable[..., Any]  #: makes the train state
    loss: Any  #: the function that is differentiated, or the ``Pipeline``
    step: Any  #: ``step(state, batch) -> (state, metrics)``, a ``TrainStep``
    param_specs: Tree  #: of the parameters on the axes that ZeRO does not use
    batch: Any  #: the types of a batch of all devices

    def init(self, *args: Any) -> Any:
        """The train state of the arguments of ``make_state``, such as a key; see ``Zero.init``."""
        return self.zero.init(self.make_state, *args, tx=self.tx, param_specs=self.param_specs)

    def abstract_state(self, *args: Any) -> Any:
        """Its types and shardings, into which a checkpoint of any plan is restored."""
        options = {"tx": self.tx, "param_specs": self.param_specs}
        return self.zero.abstract_state(self.make_state, *args, **options)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The step of abstract arrays; ``args`` are those of ``make_state``."""
        lowered: jax.stages.Lowered = self.step.lower(self.abstract_state(*args), self.batch)
        return lowered

    @property
    def is_partitioned(self) -> bool:
        """Whether the compiler decides what is sent: devices do not run the loss of own rows."""
        program = self.step.loss_program(self.abstract_state(), self.batch)
        return not program.per_device


@dataclasses.dataclass(frozen=True)
class BuiltUpdates(BuiltStep):
    """A pipeline without a flush: its ``step`` makes several updates."""

    def init(self, *args: Any) -> Any:
        return self.make_state(*args)

    def abstract_state(self, *args: Any) -> Any:
        mesh = self.zero.mesh
        pipeline = self.loss
        params, opt_state = jax.eval_shape(self.make_state, *args)
        of_state = jax.tree.map(lambda _: P(pipeline.axis), opt_state)
        params = _typed_on(mesh, params, pipeline.param_specs(params))
        return AsyncState(params, _typed_on(mesh, opt_state, of_state))

    @property
    def is_partitioned(self) -> bool:
        return False


def build(
    plan: ParallelPlan,
    model: AnyModel,
    tx: Tx,
    mesh: Any,
    *,
    layers: Sequence[int] = (),
    dtype: DType = jnp.bfloat16,
    updates: int = 100,
    loss: Callable[..., Any] | Loss | None = None,
    make_state: Callable[..., Any] | None = None,
    tx_in_state: bool = False,
    **options: Any,
) -> BuiltStep:
    """The step of a plan, as ``fit``, ``verify``, ``audit`` and the code in a plan file make it.

    Args:
      plan: how the step is shared, as ``search`` found it.
      model: what is trained, a ``Decoder`` or a ``TracedModel``.
      tx: the transformation, without the format of the plan's state and its weights.
      mesh: a mesh with the plan's axes, such as ``PlanFile.mesh_axes``: ``"pipe"``, ``"replica"``
        and ``"model"`` where a plan has them, all others are ZeRO's; or a ``Zero`` on a mesh of
        one's own, which keeps its axes and dtypes.
      layers: of each chunk of a pipeline, from the first to the last.
      dtype: of the parameters.
      updates: of a step of a pipeline without a flush.
      loss: in the place of the loss of the model, such as a ``Loss`` that returns more.
      make_state: ``make_state(tx, *args)`` makes the train state of a transformation; None: a pair.
      tx_in_state: whether the state holds its transformation, as a ``TrainState`` does.
      **options: others of ``Zero.train_step``.

    Returns:
      ``zero``, ``tx``, ``loss``, ``step``, ``param_specs`` and the types of a ``batch``; and
      ``init()`` makes a state, ``abstract_state()`` its types, ``lower()`` the lowered step.

    Raises:
      ValueError: the model does not fit the plan, or the plan the mesh.

    Example:
      >>> import jax, optax
      >>> from sharding.plan import Decoder, ParallelPlan
      >>> model = Decoder(2, 32, 2, 2, 64, 128, 16)
      >>> plan = ParallelPlan(stage=2, microbatch=4, recompute="minimal")
      >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> built = build(plan, model, optax.adamw(1e-3), mesh, dtype="float32")
      >>> batch = jax.numpy.zeros(built.batch.shape, built.batch.dtype)
      >>> state, metrics = built.step(built.init(), built.zero.put(batch))
      >>> metrics["loss"].shape
      ()
    """
    zero = zero_on(plan, mesh)
    own = None if tx is None else transformation_of(plan.state_format, plan.weights, tx)
    if plan.pipe > 1:
        chosen = _pipeline(plan, zero.mesh, model, layers)
    else:
        chosen = _loss_of(plan, zero, model, loss)

    def make_params() -> Any:
        params = model.init(dtype)
        return chosen.stack(params) if plan.pipe > 1 else params

    def make_pair(tx: Any) -> Any:
        params = make_params()
        return params, tx.init(params)

    specs = _param_specs(plan, model)
    if plan.pipe > 1:
        specs = chosen.param_specs(jax.eval_shape(make_params), specs)
    else:
        options |= {"microbatches": plan.microbatches}
        options |= {"update": "backward" if plan.update_in_backward else "after"}
        options = {"trainable": model.trainable} | options
    fields: dict[str, Any] = {"plan": plan, "zero": zero, "loss": chosen, "param_specs": specs}
    batch = model.batch(plan.sequences)
    if plan.asynchronous:
        table = pipedream_2bw(plan.pipe, plan.microbatches, updates)
        training = AsyncPipeline(chosen, table, own)
        shape = (updates, plan.microbatches, plan.microbatch, *batch.shape[1:])
        return BuiltUpdates(
            tx=own,
            make_state=lambda: training.init(make_params()),
            step=jax.jit(training.run, donate_argnums=0),
            batch=_typed_on(zero.mesh, batch.update(shape=shape), P()),
            **fields,
        )
    given = None if tx_in_state else own
    return BuiltStep(
        tx=given,
        make_state=functools.partial(make_state or make_pair, own),
        step=zero.train_step(chosen, tx=given, **options),
        batch=batch,
        **fields,
    )


def mesh_axes(plan: ParallelPlan, target: str) -> dict[str, int]:
    """The sizes of the axes of a plan's mesh, from the devices furthest apart to the nearest.

    ZeRO's shards have one axis, or those of the torus that they span: over one axis of all devices
    of a torus XLA makes all-reduces of other collectives, which send twice as much.

    >>> mesh_axes(ParallelPlan(data=8, tensor=2, stage=2), "v5e:4x4")
    {'x': 4, 'y': 2, 'model': 2}
    """
    axes = {"pipe": plan.pipe, "replica": plan.replicas}
    axes = {name: size for name, size in axes.items() if size > 1}
    axes |= _data_axes(plan, target)
    return axes | shared_axes(plan)


def _data_axes(plan: ParallelPlan, target: str) -> dict[str, int]:
    parsed = targets.parse(target, other_gpus=True)
    nearer = plan.tensor * plan.experts
    left = plan.shards
    axes: dict[str, int] = {}
    if parsed.is_torus:
        for name, size in reversed([*zip("xyz", parsed.shape, strict=False)]):
            shared = math.gcd(nearer, size)
            axes[name] = math.gcd(left, size // shared)
            nearer = nearer // shared
            left = left // axes[name]
        axes = {"slice": left} | dict(reversed(axes.items()))
        axes = {name: size for name, size in axes.items() if size > 1}
    several = len(axes) > 1 and left in (1, parsed.groups) and nearer == 1
    return axes if several else {"data": plan.shards}


def saved_names(plan: ParallelPlan) -> tuple[str, ...]:
    """The names of what layers save beside their input; empty where no preset says it."""
    return PRESETS[plan.recompute] if plan.recompute in PARTLY else ()


def zero_on(plan: ParallelPlan, mesh: Any) -> Zero:
    """The ``Zero`` of a plan on its mesh, or as one of the user's says."""
    if isinstance(mesh, Zero):
        return zero_of(plan, mesh)
    # In a pipeline of shared layers the stages come behind data parallelism: the compilers of jax
    # 0.11 and 0.12 end the process if they do not. Every device stays where it is.
    last = [name for name in ("pipe", EXPERT_AXIS, TENSOR_AXIS) if name in mesh.axis_names]
    names = (*(name for name in mesh.axis_names if name not in last), *last)
    if len(last) > 1 and names != mesh.axis_names and isinstance(mesh, jax.sharding.Mesh):
        devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in names])
        types = (jax.sharding.AxisType.Auto,) * len(names)
        mesh = jax.sharding.Mesh(devices, names, axis_types=types)
    others = ("pipe", "replica", EXPERT_AXIS, TENSOR_AXIS)
    axis = tuple(x for x in mesh.axis_names if x not in others)
    return dataclasses.replace(zero_of(plan), mesh=mesh, axis=axis)


def _param_specs(plan: ParallelPlan, model: AnyModel) -> Any:
    """How devices share the parameters of each layer; None where they do not."""
    if isinstance(model, TracedModel):
        return model.param_specs
    return specs_of_plan(plan, model)


def _policy(plan: ParallelPlan) -> Any:
    """What ``jax.checkpoint`` stores of a layer; None for its input alone."""
    names = saved_names(plan)
    return jax.checkpoint_policies.save_only_these_names(*names) if names else None


def _loss_of(plan: ParallelPlan, zero: Zero, model: AnyModel, loss: Any) -> Any:
    """The loss, whose layers are gathered and computed again as the plan says."""
    if plan.matmuls:
        loss = quantized_matmuls(loss or _plain_loss(plan, model), plan.matmuls)
    if isinstance(model, TracedModel):
        # An update in the backward pass computes its layers again by itself.
        recompute = "none" if plan.update_in_backward else plan.recompute
        devices = getattr(zero.mesh, "devices", None)  # an abstract mesh has none
        device = None if devices is None else devices.flat[0]
        given = as_loss(loss or model.loss_fn)
        run = dataclasses.replace(given, fn=model.loss(recompute, given.fn, device))
        return tiled_where_possible(run, plan.tiles) if plan.tiles > 1 else run
    if loss is not None:
        return loss
    if plan.update_in_backward:  # which computes layers again that are scanned
        return model.make_loss(None if model.scan else jax.checkpoint(model.apply_layer))
    if plan.checkpoints_layers:
        layer = jax.checkpoint(zero.gathered(model.apply_layer), policy=_policy(plan))
        return model.make_loss(layer)
    return model.make_loss(zero.gathered(model.apply_layer, policy=_policy(plan)))


def _plain_loss(plan: ParallelPlan, model: AnyModel) -> Any:
    """The loss whose products are quantized; the step gathers its layers one by one."""
    if isinstance(model, TracedModel):
        return model.loss_fn
    if plan.update_in_backward and model.scan:
        return model.make_loss()
    again = plan.recompute not in ("none", "selective")
    return model.make_loss(
        jax.checkpoint(model.apply_layer, policy=_policy(plan)) if again else None
    )


def _pipeline(plan: ParallelPlan, mesh: Any, model: AnyModel, layers: Sequence[int]) -> Pipeline:
    if not isinstance(model, Decoder):
        raise ValueError("a plan with a pipeline needs a Decoder: its embedding and its head.")
    block: Any = model.block
    if plan.checkpoints_layers:
        block = jax.checkpoint(block, policy=_policy(plan))
    return Pipeline(
        *(mesh, schedule_of(plan.schedule, plan.pipe, plan.microbatches, plan.chunks)),
        num_layers=tuple(layers),
        embed=model.embed,
        block=quantized_matmuls(block, plan.matmuls) if plan.matmuls else block,
        head=model.head,
        recompute=False,  # forward passes store what each layer stores
    )


def _typed_on(mesh: Any, tree: Batch, specs: Tree) -> Any:
    return jax.tree.map(lambda x, s: x.update(sharding=NamedSharding(mesh, s)), tree, specs)
