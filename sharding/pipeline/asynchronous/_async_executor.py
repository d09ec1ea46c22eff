"""The executor of asynchronous pipelines: updates in the loop over ticks, versions in slots."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sharding._types import OptState
from sharding.pipeline import _executor
from sharding.pipeline._instructions import Code
from sharding.pipeline._operations import Op
from sharding.pipeline._stage import LayerParams
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule
from sharding.step._loss import inverse_weight

Parts = tuple[Any, Any]  # the layers, and the shared parameters


@dataclasses.dataclass
class AsyncExecutor(_executor.Executor):
    """One stage of an asynchronous pipeline, which trains all of its parameters."""

    schedule: AsyncSchedule
    tx: optax.GradientTransformationExtraArgs  # of this stage
    to_tree: Callable[[Parts], Any]  # the parameters that tx sees
    # (params, opt_state) -> parameters of backward passes; None for the version of the table.
    backward_params: Callable[[Any, Any], Any] | None

    def run_updates(
        self, opt_state: OptState, tables: Sequence[_executor.Column]
    ) -> tuple[Parts, Any, _executor.Totals]:
        """Runs all ticks from a state of this stage: its last parameters and state, and totals."""
        buffers = self._empty_buffers()
        self._check_residuals()
        with jax.named_scope("weights"):
            self._weights = self._weights_of_updates()

        def repeated(x: jax.Array, count: int) -> jax.Array:
            return jnp.broadcast_to(x, (count, *x.shape))

        slots = self.program.num_versions
        sum_, weight, aux = buffers.totals
        sum_, weight = (repeated(x, len(self._weights)) for x in (sum_, weight))  # zeros
        own = self.layers.trained, self.shared.trained
        buffers = buffers._replace(
            totals=_executor.Totals(sum_, weight, aux),
            versions=jax.tree.map(lambda x: repeated(x, slots), own),
            opt_state=opt_state,
        )
        buffers = self.run(tables, buffers)
        last = jnp.asarray(self.program.last_version)[lax.axis_index(self.pipeline.axis)]
        return _executor.read(buffers.versions, last), buffers.opt_state, buffers.totals

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

    def _operations(self) -> dict[Op, Callable[[Code, _executor.Column], _executor.Result]]:
        return super()._operations() | {Op.UPDATE: self._update}

    def _params(self, code: Code, column: _executor.Column) -> _executor.Params:
        leaves = _executor.read(self.buffers.versions, column["version"])
        # The last stage runs its forward pass as the first half of its backward pass.
        if code.op == Op.BACKWARD and not code.last and self.backward_params is not None:
            with jax.named_scope("backward_params"):
                state = _executor.read(self.buffers.opt_state)
                params = self.backward_params(self.to_tree(leaves), state)
                leaves = self.pipeline._parts(params)
        layers, shared = leaves
        return LayerParams(layers), LayerParams(shared)

    def _update(self, code: Code, column: _executor.Column) -> _executor.Result:
        buffers = self.buffers
        with jax.named_scope("update"):
            leaves = _executor.read(buffers.versions, column["version"])
            state = _executor.read(buffers.opt_state)
            scale = inverse_weight(self._weights[self._sums_of(column)])
            sums = buffers.layer_grads, buffers.shared_grads
            grads = jax.tree.map(lambda g, x: (g[...] * scale).astype(x.dtype), sums, leaves)
            params = self.to_tree(leaves)
            updates, new_state = self.tx.update(self.to_tree(grads), state, params)
            new = self.pipeline._parts(optax.apply_updates(params, updates))
            _executor.write(buffers.versions, new, column["new_version"])
            _executor.write(buffers.opt_state, new_state)
            for ref in jax.tree.leaves(sums):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)
        return None, {}

    def _sums_of(self, column: _executor.Column) -> jax.Array:
        """The number of the micro-batch's update: totals are [updates]."""
        return column["microbatch"] // self.schedule.microbatches_per_update
