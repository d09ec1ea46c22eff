"""A training step, in its order: gradients of this device's rows, their sums, the update.

``gradients`` runs the loss (``_gradients``), which gathers parameters, and reduces gradients of
layers (``_gather_and_reduce``); it reduces or synchronizes others (``_reduce_later``).
``update`` then gathers new shards.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding._types import Batch, Tree
from sharding.matmuls._scaled_params import check_counted
from sharding.placement import _train_state
from sharding.placement._describe import Description
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import on_mesh
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.recovery._replica_program import StepCopies
from sharding.step import _update
from sharding.step._checks import check_placed
from sharding.step._choose_program import LossProgram, check_of_devices, choose_program
from sharding.step._compiled_step import CompiledStep, StepProgram, check_passed
from sharding.step._gradients import gradients
from sharding.step._loss import Inputs, StepLoss, step_key
from sharding.step._placed_state import places
from sharding.step._reduce_later import num_local_gradients
from sharding.step._step_plan import StepSpec
from sharding.step._sync_state import join_sync_state, split_sync_state
from sharding.step._update_in_backward import check_alone, update_in_backward


class TrainStep(CompiledStep):
    """A training step; see ``Zero.train_step``."""

    def __init__(
        self,
        zero: Any,
        loss: StepLoss,
        tx: Any,
        trainable: Tree,
        grad_norm: bool,
        snapshot: PeerCheckpoints | None,
        donate: bool,
        update: str,
    ):
        _train_state.check_tx(tx)
        if update not in ("after", "backward"):
            raise ValueError(f"update must be 'after' or 'backward', got {update!r}.")
        # Nothing else takes stacks of parameters that are in host memory.
        self.updates_in_backward = update == "backward" or zero.offload == "all"
        if self.updates_in_backward:
            check_alone(zero, snapshot)
        super().__init__(zero, loss.microbatches)
        self.loss, self.tx = loss, tx
        self.trainable, self.grad_norm = trainable, grad_norm
        self.blocks = zero.gathered_blocks
        self.snapshot, self.donates = snapshot, donate
        if snapshot is not None:
            if zero.mesh != snapshot.mesh:
                raise ValueError(
                    f"snapshot stores states on the mesh {dict(snapshot.mesh.shape)}, Zero has "
                    f"{dict(zero.mesh.shape)} or other devices: make PeerCheckpoints with "
                    "zero.mesh."
                )
            snapshot.copy_in_steps()

    def describe(
        self, state: Tree, batch: Batch = None, *, param_specs: Tree = None
    ) -> Description:
        """``Zero.describe`` of a state, real or abstract, with gradients of what is trained.

        With a batch, real or abstract, it says how the loss runs: per device or partitioned.
        """
        options: Any = {"param_specs": param_specs, "trainable": self.trainable}
        found: Description = self.zero.describe(state, tx=self.tx, **options)
        if batch is None:
            return found
        return dataclasses.replace(found, loss_program=str(self.loss_program(state, batch)))

    def compile(self, selected: Tree, inputs: Inputs, copies: StepCopies | None) -> StepProgram:
        shardings, placed, opt_specs = places(self.zero, selected, self.tx)
        check_placed(selected, shardings)
        own = _train_state.model_state_of(selected, self.loss.model_state)
        given = inputs if own is None else inputs._replace(model_state=own)
        params = _train_state.params_of(selected)
        check_counted(params, _train_state.opt_state_of(selected))
        chosen = choose_program(self.zero, self.loss, params, placed.params, given)
        check_of_devices(chosen, self.zero.needs_devices)
        trained = _train_state.resolve_trained(params, self.trainable)
        spec = self.spec_of(chosen, placed, trained, opt_specs=opt_specs, blocks=self.blocks)
        layout = spec.layout

        def out_shardings(out: Tree) -> Any:
            metrics = layout.output_shardings(out[1])
            if "model_state" in metrics:
                metrics["model_state"] = jax.tree.map(
                    lambda _: layout.replicated, metrics["model_state"]
                )
            return shardings, metrics

        run = on_mesh(layout, functools.partial(self.step, spec, chosen), out_shardings)
        of_batch = layout.batch_shardings(inputs.batch)
        ins: tuple[Any, ...] = shardings, of_batch, None, layout.replicated
        outs: tuple[Any, Any] = shardings, None
        if copies is not None:
            run, ins, outs = copies.beside(run), (*ins, None), (outs, None)
        donated = (0,) if self.donates else ()
        jitted = jax.jit(run, in_shardings=ins, out_shardings=outs, donate_argnums=donated)
        return StepProgram(jitted, shardings, chosen, spec)

    def step(
        self,
        spec: StepSpec,
        chosen: LossProgram,
        layout: Layout,
        state: Tree,
        batch: Batch,
        key: Any,
        passed: Any,
        copied: Any = None,
    ) -> tuple[Any, dict[str, Any]]:
        """The new state and the metrics; ``copied`` is known once a snapshot has the state."""
        spec = spec._replace(layout=layout)
        check_passed(passed, self.loss.model_state)
        key = step_key(state, key) if self.loss.rngs in (True, "per_example") else key
        own = _train_state.model_state_of(state, self.loss.model_state)
        batch = chosen.with_totals(batch)
        inputs = Inputs(batch, key, passed if own is None else own)
        state, sync_state = split_sync_state(state)
        if self.updates_in_backward:
            new, metrics, changed = update_in_backward(
                spec, chosen.loss, state, inputs, self.tx, self.grad_norm
            )
            return self._with_model_state(new, metrics, changed, layout)
        params, opt_state, tx = _train_state.parts(state, self.tx)
        plain = _update.shard_update(spec, tx)
        # Evaluated with arguments of the same types, it is not traced again.
        transform: Any = jax.jit(functools.partial(plain, num_pieces=2), inline=True)
        traits = _update.update_traits(spec, transform, params, opt_state)

        loss = dataclasses.replace(chosen.loss, local_norm=traits.local_norm)
        check_of_devices(chosen, {"gradient_noise_scale": traits.local_norm})
        early = traits.sums and layout.stage in (1, 2)
        reduced = gradients(spec, loss, params, inputs, sync_state, early)

        metrics = reduced.metrics
        if traits.local_norm:
            num = num_local_gradients(layout, self.microbatches)
            transform = functools.partial(plain, num_pieces=num)
        arrays = _update.UNREAD | {"value": metrics["loss"]} | metrics.pop("local", {})
        transform = functools.partial(transform, arrays)
        if self.grad_norm:
            metrics["grad_norm"] = _update.global_norm(spec, reduced.grads)
        if copied is not None:
            # Without an order of copies and update, XLA duplicates what both access.
            state, _ = jax.lax.optimization_barrier((state, copied))
        new = _update.update(spec, state, reduced.grads, transform, reduced.shards)
        new, metrics = self._with_model_state(new, metrics, reduced.model_state, layout)
        return join_sync_state(new, reduced.sync_state), metrics

    def _with_model_state(
        self, new: Tree, metrics: dict[str, Any], model_state: Tree, layout: Layout
    ) -> tuple[Any, dict[str, Any]]:
        """A new state and its metrics, one of which has the model state of the step."""
        if self.loss.model_state is True:
            # Replicated, as the next call gets it, also where other axes shard features.
            specs = jax.tree.map(lambda _: PartitionSpec(), model_state)
            metrics["model_state"] = layout.constrain(model_state, specs)
        elif self.loss.model_state:
            new = _train_state.with_model_state(new, self.loss.model_state, model_state)
        return new, metrics
