"""The executor of asynchronous pipelines: updates in the loop over ticks, versions in slots."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sharding._types import OptState
from sharding.pipeline._executor import (
    Buffers,
    Column,
    Executor,
    ForLater,
    Params,
    Result,
    Totals,
    read_slot,
    write_slot,
)
from sharding.pipeline._instructions import Code, Stored, Versions, assign_slots
from sharding.pipeline._operations import Op
from sharding.pipeline._stage import LayerParams
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule
from sharding.step._microbatches import inverse_weight

Parts = tuple[Any, Any]  # the layers, and the shared parameters


def versions_of(schedule: AsyncSchedule) -> Versions:
    """The slots in which stages keep versions of their parameters, and which ones a tick uses."""
    stored = [
        Stored(stage, start, end, (stage, version))
        for (stage, version), (start, end) in schedule.version_ends().items()
    ]
    slots, num_slots = assign_slots(stored)
    columns = {name: np.zeros_like(schedule.op) for name in ("version", "new_version")}
    for tick, stage, task in schedule.tasks():
        version = int(schedule.version[tick, stage])
        if task.op == Op.UPDATE:  # from the version before
            columns["new_version"][tick, stage] = slots[stage, version]
            version -= 1
        columns["version"][tick, stage] = slots[stage, version]
    last = tuple(slots[stage, schedule.num_updates] for stage in range(schedule.num_stages))
    return Versions(columns, num_slots, last)


@dataclasses.dataclass
class AsyncExecutor(Executor):
    """One stage of an asynchronous pipeline, which trains all of its parameters."""

    schedule: AsyncSchedule
    tx: optax.GradientTransformationExtraArgs  # of this stage
    to_tree: Callable[[Parts], Any]  # the parameters that tx sees
    of_tree: Callable[[Any], Parts]
    # (params, opt_state) -> parameters of backward passes; None for the version of the table.
    backward_params: Callable[[Any, Any], Any] | None

    def run_updates(
        self, opt_state: OptState, tables: Sequence[dict[str, jax.Array]], last_version: Any
    ) -> tuple[Parts, Any, Totals]:
        """Runs all ticks from a state of this stage: its last parameters and state, and totals."""
        buffers = self._empty_buffers()
        self._check_residuals()
        with jax.named_scope("weights"):
            self._weights = self._weights_of_updates()
        slots = self.program.num_versions

        def every_slot(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (slots, *x.shape))

        versions = jax.tree.map(every_slot, (self.layers.trained, self.shared.trained))
        sum_, weight, aux = buffers.totals
        sum_, weight = (jnp.zeros((len(self._weights), *x.shape), x.dtype) for x in (sum_, weight))
        totals = Totals(sum_, weight, aux)
        buffers = buffers._replace(totals=totals, versions=versions, opt_state=opt_state)
        buffers = self.run(tables, buffers)
        return read_slot(buffers.versions, last_version), buffers.opt_state, buffers.totals

    def _check_residuals(self) -> None:
        """Raises if a backward pass would read parameters of the forward pass, unasked."""
        stashes = self.schedule.stashes_weights and self.backward_params is None
        if self.pipeline.recompute or stashes:
            return
        column = {name: jnp.zeros((), jnp.int32) for name in ("microbatch", "virtual_stage")}
        scope = self._scope(column)
        if self.stage.stores_changed_params(self.layers, self._no_message(), scope):
            raise ValueError(
                "block changes its parameters before it uses them, for example by a cast or a "
                "reshape. With recompute=False the result is stored, and the backward pass would "
                "read it in place of the parameters of its own version. Use recompute=True, or "
                "parameters in the form in which block uses them."
            )

    def _weights_of_updates(self) -> jax.Array:
        """[updates]: the weights of the minibatches, which depend on the batch alone."""

        def of_microbatch(number: jax.Array) -> jax.Array:
            scope = self._scope({"microbatch": number, "virtual_stage": jnp.zeros((), jnp.int32)})
            _, (weight, _) = self._head(self.shared, self._no_message(), scope)
            return weight.astype(jnp.promote_types(weight.dtype, jnp.float32))

        weights = lax.map(of_microbatch, jnp.arange(self.schedule.num_microbatches))
        return jnp.sum(weights.reshape(-1, self.schedule.microbatches_per_update), axis=1)

    def _operations(self) -> dict[Op, Callable[[Code, Buffers, Column], Result]]:
        return super()._operations() | {Op.UPDATE: self._update}

    def _written(self, code: Code) -> set[str]:
        if code.op == Op.UPDATE:
            return {"versions", "opt_state", "layer_grads", "shared_grads"}
        return super()._written(code)

    def _params(self, code: Code, buffers: Buffers, column: Column) -> Params:
        leaves = read_slot(buffers.versions, column["version"])
        # The last stage runs its forward pass as the first half of its backward pass.
        if code.op == Op.BACKWARD and not code.last and self.backward_params is not None:
            with jax.named_scope("backward_params"):
                params = self.backward_params(self.to_tree(leaves), buffers.opt_state)
                leaves = self.of_tree(params)
        layers, shared = leaves
        return LayerParams(layers), LayerParams(shared)

    def _update(self, code: Code, buffers: Buffers, column: Column) -> Result:
        del code
        with jax.named_scope("update"):
            leaves = read_slot(buffers.versions, column["version"])
            scale = inverse_weight(self._weights[self._update_of(column)])
            sums = buffers.layer_grads, buffers.shared_grads
            grads = jax.tree.map(lambda g, x: (g * scale).astype(x.dtype), sums, leaves)
            params, old = self.to_tree(leaves), buffers.opt_state
            updates, opt_state = self.tx.update(self.to_tree(grads), old, params)
            new = self.of_tree(optax.apply_updates(params, updates))
            buffers = buffers._replace(
                versions=write_slot(buffers.versions, column["new_version"], new),
                opt_state=jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), opt_state, old),
                layer_grads=jax.tree.map(jnp.zeros_like, sums[0]),
                shared_grads=jax.tree.map(jnp.zeros_like, sums[1]),
            )
        return None, ForLater(), buffers

    def _update_of(self, column: Column) -> jax.Array:
        return column["microbatch"] // self.schedule.microbatches_per_update

    def _with_totals(self, buffers: Buffers, column: Column, new: Totals) -> Buffers:
        totals, update = buffers.totals, self._update_of(column)
        sum_ = totals.sum.at[update].add(new.sum.astype(totals.sum.dtype))
        weight = totals.weight.at[update].add(new.weight.astype(totals.weight.dtype))
        aux = write_slot(totals.aux, column["microbatch"], new.aux)
        return buffers._replace(totals=Totals(sum_, weight, aux))
