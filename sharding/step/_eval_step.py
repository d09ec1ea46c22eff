"""A function of the parameters and a batch, each device with its own rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding._types import Batch, Tree
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import on_mesh, over_data_axes
from sharding.placement._specs import entry_of
from sharding.placement._train_state import model_state_of, params_of
from sharding.recovery._replica_program import StepCopies
from sharding.step._checks import check_placed
from sharding.step._compiled_step import CompiledStep, check_passed
from sharding.step._global_gradients import eval_global
from sharding.step._gradients import average_scalars, mark_scalars
from sharding.step._loss_params import call_loss
from sharding.step._step_plan import StepSpec, plan_step


class EvalStep(CompiledStep):
    """A compiled function of parameters and a batch; see ``Zero.eval_step``."""

    def __init__(self, zero: Any, fn: Callable[..., Any], model_state: Any):
        super().__init__(zero)
        self.fn, self.model_state = fn, model_state

    def select(self, state: Tree) -> Any:
        return params_of(state), model_state_of(state, self.model_state)

    def compile(self, selected: Tree, batch: Batch, copies: StepCopies | None) -> Any:
        params, fields = selected
        layout = self.zero._layout
        placed = layout.place(params)
        replicated = jax.tree.map(lambda _: layout.replicated, fields)
        shardings = layout.shardings(placed.params), replicated
        check_placed(selected, shardings)
        untrained = jax.tree.map(lambda _: False, params)
        spec = StepSpec(self.zero.precision, placed, untrained, self.zero.sync)
        return jax.jit(
            on_mesh(layout, functools.partial(self.run, spec=spec), layout.output_shardings),
            in_shardings=(shardings, layout.batch_shardings(batch), None, layout.replicated),
        )

    def run(
        self, layout: Layout, selected: Tree, batch: Batch, key: Any, passed: Any, *, spec: StepSpec
    ) -> Any:
        """What the function returns, on the mesh: scalars averaged, arrays concatenated."""
        del key
        check_passed(passed, self.model_state)
        params, fields = selected
        args: tuple[Any, ...] = (batch,)
        if self.model_state:
            args = batch, passed if self.model_state is True else fields
        if layout.view == "global":
            return eval_global(layout, spec, self.fn, params, args)
        leaves, treedef = jax.tree.flatten(params)
        specs = [layout.manual_spec(s) for s in treedef.flatten_up_to(spec.placed.params)]
        arg_specs = (layout.batch_specs(batch), *(PartitionSpec() for _ in args[1:]))
        on_device = functools.partial(self._on_device, layout, spec, params)
        out_specs = PartitionSpec(entry_of(layout.data_axes))
        return average_scalars(
            over_data_axes(layout, on_device, (specs, arg_specs), out_specs)(leaves, args)
        )

    def _on_device(
        self, layout: Layout, spec: StepSpec, types: Any, leaves: list[Any], args: tuple[Any, ...]
    ) -> Any:
        plan = plan_step(layout, spec, types, False, self.fn, *args, reduce_in_backward=False)
        # Nothing is differentiated: parameters themselves are in the place of taps.
        return mark_scalars(call_loss(plan, leaves, leaves, args))
