"""Loss and gradients without an update, for a step of one's own."""

from typing import Any

import jax

from sharding._types import Batch, Tree
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import on_mesh
from sharding.placement._specs import is_spec
from sharding.placement._train_state import resolve_trainable
from sharding.recovery._replica_program import StepCopies
from sharding.step._compiled_step import CompiledStep, check_passed
from sharding.step._gradients import gradients
from sharding.step._loss import Inputs, Loss
from sharding.step._step_plan import StepSpec
from sharding.step._sync_state import sync_state_types


class ValueAndGrad(CompiledStep):
    """``(params, batch, key, model_state) -> (loss, grads)``; see ``Zero.value_and_grad``."""

    def __init__(self, zero: Any, loss: Loss, trainable: Tree, param_specs: Tree):
        super().__init__(zero, loss.microbatches)
        self.loss, self.trainable, self.param_specs = loss.check(), trainable, param_specs

    def __call__(
        self, params: Tree, batch: Batch, key: Any = None, model_state: Tree = None
    ) -> Any:
        check_passed(model_state, self.loss.model_state)
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
        self, program: Any, selected: Tree, batch: Batch, copies: StepCopies | None
    ) -> Any:
        """Inside ``jit`` a program is traced anew, as the loss may close over what is traced."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((selected, batch))):
            return self.compile(selected, batch, copies)
        return super()._program(program, selected, batch, copies)

    def compile(self, selected: Tree, batch: Batch, copies: StepCopies | None) -> Any:
        layout, sync = self.zero._layout, self.zero.sync
        placed = layout.place(selected, self.param_specs)
        if sync and sync_state_types(layout, sync, selected, placed) is not None:
            raise ValueError(
                "value_and_grad cannot return the state of the gradient sync; use train_step, "
                "or sharding.sync.transformation in a shard_map of your own."
            )
        trained = resolve_trainable(selected, self.trainable)
        spec = StepSpec(self.zero.precision, placed, trained, sync)
        shardings = layout.shardings(placed.shards)

        def run(layout: Layout, params: Tree, *inputs: Any) -> Any:
            reduced = gradients(layout, spec, self.loss, params, Inputs(*inputs))
            metrics = reduced.metrics
            return metrics["loss"], metrics.get("aux"), reduced.model_state, reduced.grads

        def out_shardings(out: Tree) -> Any:
            replicated = jax.tree.map(lambda _: layout.replicated, out[2])
            return *layout.output_shardings(out[:2]), replicated, shardings

        # Called eagerly, a shard_map over some of the axes knows nothing of the others.
        outs = (None, None, None, shardings)
        return jax.jit(on_mesh(layout, run, out_shardings), out_shardings=outs)
