"""Spreads the matrices of all parameters over the devices, an owner for each, and back."""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sharding._types import Tree
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import axes_of, entry_of, path_str
from sharding.step.owners._split_update import MIN_SIZE, MatrixUpdate, SplitUpdate


def distribute(updates: list[MatrixUpdate], layout: Layout, wire: Any) -> list[tuple[Tree, Tree]]:
    """The update and new state of every parameter, by owners where there are enough matrices."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, update in enumerate(updates):
        groups[update.kind, _place(layout, update, update.shape)].append(i)
    results: dict[int, tuple[Tree, Tree]] = {}
    for (_, place), members in groups.items():
        axes, stay = place.axes or layout.axes, bool(place.axes) and not place.dim
        group = _Group([updates[i] for i in members], layout, axes, stay, wire)
        results |= zip(members, group.run(), strict=True)
    return [results[i] for i in range(len(updates))]


class _Place(NamedTuple):
    """How a stack of matrices is sharded over the data axes."""

    axes: tuple[str, ...] = ()  # none for a replicated one
    dim: int = 0  # 0 if the stack is sharded; else the dim of the matrix, counted from 1


def _place(layout: Layout, update: MatrixUpdate, shape: tuple[int, ...]) -> _Place:
    """Where the data axes are in the spec of an array of a parameter's update."""
    for dim, entry in enumerate(layout.manual_spec(_spec(layout, update, shape))):
        if entry is not None:
            return _Place(axes_of(entry), max(dim - len(update.stack) + 1, 0))
    return _Place()


def _spec(layout: Layout, update: MatrixUpdate, shape: tuple[int, ...]) -> P:
    if shape == update.shape and update.spec is not None:
        return update.spec
    if math.prod(shape[len(update.stack) :]) < MIN_SIZE:
        return P()
    return layout.shard_spec(jax.ShapeDtypeStruct(shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class _Group:
    """Parameters whose matrices have one shape and one update, and are sharded alike."""

    updates: Sequence[MatrixUpdate]  # of the parameters
    layout: Layout
    axes: tuple[str, ...]  # that the owners are along
    stay: bool  # the stack itself is sharded, so that each device has the matrices it owns
    wire: Any  # see ``by_owner``; None for none

    @functools.cached_property
    def num_owners(self) -> int:
        return math.prod(self.layout.mesh.shape[axis] for axis in self.axes)

    @functools.cached_property
    def num_matrices(self) -> int:
        return sum(math.prod(update.stack) for update in self.updates)

    def run(self) -> list[tuple[Tree, Tree]]:
        first = self.updates[0]
        enough = self.stay or 2 * self.num_matrices >= self.num_owners
        split = first.split() if enough else None
        if split is None or not split.outs:
            return [update.alone() for update in self.updates]

        kept = [update.before(split) for update in self.updates]
        ins = [[x for v, x in zip(split.kept, row, strict=True) if v in split.ins] for row in kept]
        outs = jax.eval_shape(first.over_stack(split.core), *ins[0])
        in_dims, out_dims = self._dims_of(ins[0]), self._dims_of(outs)
        with jax.named_scope("by_owner"):
            in_specs, out_specs = (
                [[self._data_spec(update, dim) for dim in dims] for update in self.updates]
                for dims in (in_dims, out_dims)
            )
            on_device = functools.partial(self._on_device, split, in_dims, out_dims)
            outs = over_data_axes(self.layout, on_device, (in_specs,), out_specs)(ins)
        columns = zip(self.updates, kept, outs, strict=True)
        return [update.over_stack(split.after)(*values) for update, *values in columns]

    def _dims_of(self, arrays: Sequence[Any]) -> list[int]:
        """For arrays of the first parameter: the dim along which each is sharded, else 0."""
        first = self.updates[0]
        dims = [_place(self.layout, first, x.shape).dim for x in arrays]
        return [
            dim if dim and x.shape[len(first.stack) + dim - 1] % self.num_owners == 0 else 0
            for x, dim in zip(arrays, dims, strict=True)
        ]

    def _data_spec(self, update: MatrixUpdate, dim: int) -> P:
        """The spec on the data axes of any of a parameter's arrays."""
        num_stack = len(update.stack)
        if self.stay:
            spec = _spec(self.layout, update, update.shape)
            return P(*self.layout.manual_spec(spec)[:num_stack])
        return P(*[None] * (num_stack + dim - 1), entry_of(self.axes)) if dim else P()

    def _on_device(
        self,
        split: SplitUpdate,
        in_dims: Sequence[int],
        out_dims: Sequence[int],
        ins: list[list[jax.Array]],
    ) -> list[list[jax.Array]]:
        """Per parameter its ``ins`` -> per parameter its ``outs``, as this device has them."""
        sizes = [len(update.stack) for update in self.updates]
        stacks = [row[0].shape[:size] for row, size in zip(ins, sizes, strict=True)]
        own = []
        for v, dim, *column in zip(split.ins, in_dims, *ins, strict=True):
            # (stack..., rows, cols) of each parameter -> (matrices, rows, cols) of all
            flat = [x.reshape(-1, *x.shape[n:]) for x, n in zip(column, sizes, strict=True)]
            own.append(self._to_owners(jnp.concatenate(flat), dim, self._wire_of(split, v)))
        # Traced again: operations that were traced for the full mesh cannot run in a shard_map.
        local = self.updates[0].split()
        if local.types != split.types:
            raise ValueError(
                f"by_owner: the update of {path_str(self.updates[0].path)!r} depends on the mesh "
                f"of its trace, so that it cannot run on one device: it needs {local.types}, not "
                f"{split.types}."
            )
        updated = zip(split.outs, jax.vmap(local.core)(*own), out_dims, strict=True)
        outs = [self._from_owners(x, dim, self._wire_of(split, v)) for v, x, dim in updated]
        ends = list(itertools.accumulate(map(math.prod, stacks)))
        return [
            [x[end - math.prod(stack) : end].reshape(*stack, *x.shape[1:]) for x in outs]
            for end, stack in zip(ends, stacks, strict=True)
        ]

    def _wire_of(self, split: SplitUpdate, value: int) -> Any:
        """The dtype in which a value of the traced update is sent."""
        dtype = split.graph.types[value].dtype
        if self.wire is None or value in split.exact or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return min(dtype, self.wire, key=lambda each: each.itemsize)

    def _to_owners(self, x: jax.Array, dim: int, wire: Any) -> jax.Array:
        """(matrices, ...), sharded along ``dim`` -> the owner's (matrices, ...), unsharded."""
        if self.stay:
            return x
        num_own = -(-self.num_matrices // self.num_owners)
        missing = num_own * self.num_owners - self.num_matrices
        if missing:  # by a real matrix: on zeros, a loop until convergence might not end
            x = jnp.concatenate([x, jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))])
        if not dim:
            return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * num_own, num_own)
        sent = lax.all_to_all(x.astype(wire), self.axes, split_axis=0, concat_axis=dim, tiled=True)
        return sent.astype(x.dtype)

    def _from_owners(self, x: jax.Array, dim: int, wire: Any) -> jax.Array:
        """Inverts ``_to_owners``."""
        if self.stay:
            return x
        sent = x.astype(wire)
        if dim:
            sent = lax.all_to_all(sent, self.axes, split_axis=dim, concat_axis=0, tiled=True)
        else:
            sent = lax.all_gather(sent, self.axes, tiled=True)
        return sent.astype(x.dtype)[: self.num_matrices]
