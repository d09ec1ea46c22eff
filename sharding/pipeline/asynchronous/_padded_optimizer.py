"""The optimizer of a stage whose rows are padded: it sees no padding."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sharding._types import Array, Tree
from sharding.pipeline._layers import StageRows


@dataclasses.dataclass(frozen=True)
class PaddedOptimizer:
    """Calls an optimizer with the layers that a stage has, within a ``shard_map`` over stages."""

    tx: optax.GradientTransformationExtraArgs
    rows: StageRows  # of the stages; those of padding are the last
    layers: str  # their key in the tree of parameters

    def init(self, params: Tree) -> Any:
        types = [self._state_types(params, count) for count in self._counts]
        if len({str(jax.tree.map(lambda x: (x.ndim, x.dtype), tree)) for tree in types}) > 1:
            raise ValueError(
                f"stages have {self._counts} layers, and tx makes different states for so many: "
                "other arrays, or arrays of other ranks. Give stages as many layers each, or tx "
                "rules that do not depend on their number."
            )

        def largest(*types: Any) -> jax.ShapeDtypeStruct:
            shape = map(max, *(t.shape for t in types))
            return jax.ShapeDtypeStruct(tuple(shape), types[0].dtype)

        like = jax.tree.map(largest, *types)
        return self._on_stage(lambda count: self.tx.init(self._own_layers(params, count)), like)

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Any, Any]:
        def of(count: int) -> Any:
            own = self._own_layers(grads, count), self._own_state(state, params, count)
            return self.tx.update(*own, self._own_layers(params, count))

        return self._on_stage(of, (grads, state))

    def backward_params(self, fn: Callable[[Any, Any], Any], params: Tree, state: Tree) -> Any:
        def of(count: int) -> Any:
            return fn(self._own_layers(params, count), self._own_state(state, params, count))

        return self._on_stage(of, params)

    @functools.cached_property
    def _counts(self) -> list[int]:
        return sorted({int(n) for n in np.sum(self.rows.layer >= 0, axis=1)})

    def _on_stage(self, fn: Callable[[int], Any], like: Array) -> Any:
        """``fn`` of the number of layers that this stage has, with zeros at the end of its dims."""
        # All stages run one program: it has a branch for each number of layers.

        def pad(x: Array, like: Array) -> jax.Array:
            x = jnp.asarray(x, like.dtype)
            more = [(0, n - m, 0) for n, m in zip(like.shape, x.shape, strict=True)]
            return lax.pad(x, jnp.zeros((), x.dtype), more)

        branch = np.searchsorted(self._counts, np.sum(self.rows.layer >= 0, axis=1))  # [stages]
        branches = [lambda n=n: jax.tree.map(pad, fn(n), like) for n in self._counts]
        return lax.switch(jnp.asarray(branch)[lax.axis_index(self.rows.axis)], branches)

    def _own_layers(self, params: Tree, count: int) -> Any:
        own = jax.tree.map(lambda x: x[:count], params[self.layers])
        return type(params)({**params, self.layers: own})

    def _state_types(self, params: Tree, count: int) -> Any:
        return jax.eval_shape(lambda params: self.tx.init(self._own_layers(params, count)), params)

    def _own_state(self, state: Tree, params: Tree, count: int) -> Any:
        types = self._state_types(params, count)
        return jax.tree.map(lambda x, t: x[tuple(map(slice, t.shape))], state, types)
