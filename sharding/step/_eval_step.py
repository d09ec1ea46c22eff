"""Steps without an update: a function of parameters and a batch; loss and gradients alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding._types import Batch, Tree
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import on_mesh, over_data_axes
from sharding.placement._specs import entry_of, is_spec
from sharding.placement._train_state import model_state_of, params_of, resolve_trained
from sharding.recovery._replica_program import StepCopies
from sharding.step._checks import check_placed
from sharding.step._choose_program import (
    check_of_devices,
    choose_evaluation,
    choose_program,
)
from sharding.step._compiled_step import CompiledStep, StepProgram, check_passed
from sharding.step._global_gradients import eval_global
from sharding.step._gradients import average_scalars, call_loss, gradients, mark_scalars
from sharding.step._loss import Inputs, StepLoss, inverse_weight, loss_args, microbatch_key
from sharding.step._placed_state import param_shardings
from sharding.step._step_plan import StepSpec, plan_step
from sharding.step._sync_state import sync_state_types


class EvalStep(CompiledStep):
    """A compiled function of parameters and a batch; see ``Zero.eval_step``."""

    def __init__(self, zero: Any, loss: StepLoss, is_loss: bool):
        super().__init__(zero)
        self.loss, self.is_loss = loss, is_loss

    def select(self, state: Tree) -> Any:
        return params_of(state), model_state_of(state, self.loss.model_state)

    def compile(self, selected: Tree, inputs: Inputs, copies: StepCopies | None) -> StepProgram:
        params, fields = selected
        placed = self.zero._layout.place(params)
        given = inputs if inputs.model_state is not None else inputs._replace(model_state=fields)
        of_loss = self.loss, self.is_loss, params, placed.params, given
        chosen = choose_evaluation(self.zero, *of_loss)
        spec = self.spec_of(chosen, placed, jax.tree.map(lambda _: False, params))
        layout = spec.layout
        replicated = jax.tree.map(lambda _: layout.replicated, fields)
        shardings = param_shardings(self.zero, params, placed.params), replicated
        check_placed(selected, shardings)
        ins = shardings, layout.batch_shardings(inputs.batch), None, layout.replicated
        run = on_mesh(layout, functools.partial(self.run, spec), layout.output_shardings)
        jitted = jax.jit(run, in_shardings=ins)
        return StepProgram(jitted, shardings, chosen, spec)

    def run(
        self, spec: StepSpec, layout: Layout, selected: Tree, batch: Batch, key: Any, passed: Any
    ) -> Any:
        """What the function returns, on the mesh: scalars averaged, arrays concatenated."""
        spec = spec._replace(layout=layout)
        check_passed(passed, self.loss.model_state)
        params, fields = selected
        key = jax.random.key(0) if key is None else key
        keys = microbatch_key(self.loss.rngs, key, 0, batch)
        args = loss_args(self.loss, batch, fields if passed is None else passed, keys)
        fn = self.parts if self.is_loss else self.loss.fn
        if not layout.per_device:
            return self.joined(eval_global(spec, fn, params, args))
        leaves, treedef = jax.tree.flatten(params)
        specs = [layout.manual_spec(s) for s in treedef.flatten_up_to(spec.placed.params)]
        arg_specs = (layout.batch_specs(batch), *(PartitionSpec() for _ in args[1:]))

        def on_device(leaves: list[Any], args: tuple[Any, ...]) -> Any:
            plan = plan_step(spec, params, False, fn, *args, reduce_in_backward=False)
            # Nothing is differentiated: parameters themselves are in the place of taps.
            return mark_scalars(call_loss(plan, leaves, leaves, args))

        out_specs = PartitionSpec(entry_of(layout.data_axes))
        mapped = over_data_axes(layout, on_device, (specs, arg_specs), out_specs)
        return self.joined(average_scalars(mapped(leaves, args)))

    def parts(self, params: Tree, *args: Any) -> Any:
        """Of a loss: its total, its weight if it has one, its aux."""
        total, weight, _, aux = self.loss.split(self.loss.fn(params, *args))
        total = to_sum_dtype(total)
        return total, jnp.asarray(weight, total.dtype) if self.loss.weighted else None, aux

    def joined(self, out: Any) -> Any:
        """What the step returns: of a loss its mean, which is divided once, and its aux."""
        if not self.is_loss:
            return out
        total, weight, aux = out
        value = total if weight is None else total * inverse_weight(weight)
        return (value, aux) if self.loss.has_aux else value


# --- Loss and gradients, for a step of one's own --------------------------------------------------


class ValueAndGrad(CompiledStep):
    """``(params, batch, key, model_state) -> (loss, grads)``; see ``Zero.value_and_grad``."""

    def __init__(self, zero: Any, loss: StepLoss, trainable: Tree, param_specs: Tree):
        super().__init__(zero, loss.microbatches)
        self.loss, self.trainable, self.param_specs = loss, trainable, param_specs

    def __call__(
        self, params: Tree, batch: Batch, key: Any = None, model_state: Tree = None
    ) -> Any:
        check_passed(model_state, bool(self.loss.model_state))
        if self.loss.rngs and key is None:
            raise ValueError("rngs requires a key: value_and_grad(...)(params, batch, key).")
        value, aux, new, grads = super().__call__(params, batch, key, model_state)
        if self.loss.model_state:
            aux = (new, aux) if self.loss.has_aux else new
        return ((value, aux) if self.loss.has_aux or self.loss.model_state else value), grads

    def signature(self, selected: Tree) -> Any:
        """With the placement, which inside ``jit`` no error would show."""
        placed = self.zero._layout.place(selected, self.param_specs)
        specs = jax.tree.leaves(placed.shards, is_leaf=is_spec)
        return (super().signature(selected), *specs)

    def _program(
        self, key: Any, selected: Tree, inputs: Inputs, copies: StepCopies | None
    ) -> StepProgram:
        """Inside ``jit`` a program is traced anew, as the loss may close over what is traced."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((selected, inputs))):
            return self.compile(selected, inputs, copies)
        return super()._program(key, selected, inputs, copies)

    def compile(self, selected: Tree, inputs: Inputs, copies: StepCopies | None) -> StepProgram:
        sync, placed = self.zero.sync, self.zero._layout.place(selected, self.param_specs)
        program = choose_program(self.zero, self.loss, selected, placed.params, inputs)
        check_of_devices(program, self.zero.needs_devices)
        if sync and sync_state_types(self.zero._layout, sync, selected, placed) is not None:
            raise ValueError(
                "value_and_grad cannot return the state of the gradient sync; use train_step, "
                "or sharding.sync.transformation in a shard_map of your own."
            )
        spec = self.spec_of(program, placed, resolve_trained(selected, self.trainable))
        layout = spec.layout
        shardings = param_shardings(self.zero, selected, placed.shards)

        def run(layout: Layout, params: Tree, *inputs: Any) -> Any:
            own, given = spec._replace(layout=layout), Inputs(*inputs)
            given = given._replace(batch=program.with_totals(given.batch))
            reduced = gradients(own, program.loss, params, given, None, False)
            metrics = reduced.metrics
            return metrics["loss"], metrics.get("aux"), reduced.model_state, reduced.grads

        def out_shardings(out: Tree) -> Any:
            replicated = jax.tree.map(lambda _: layout.replicated, out[2])
            return *layout.output_shardings(out[:2]), replicated, shardings

        # Called eagerly, a shard_map over some of the axes knows nothing of the others.
        outs = (None, None, None, shardings)
        jitted = jax.jit(on_mesh(layout, run, out_shardings), out_shardings=outs)
        return StepProgram(jitted, None, program, spec)
