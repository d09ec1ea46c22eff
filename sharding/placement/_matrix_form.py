"""The matrix form of a parameter: (stack..., rows, cols), by a factoring rule, and its placement.

Attention kernels (embed, heads, head_dim) become matrices (embed, heads * head_dim). Of a merged
dim only the major one can be sharded, in ranges of rows or columns: other axes are moved.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from optax_ext import FactoringRule
from sharding._types import Array
from sharding.placement._layout import Layout, choose_sharded_dim
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import AnyMesh, axes_of, by_dim, num_shards, trim


class MatrixForm(NamedTuple):
    """How one parameter becomes a stack of matrices."""

    param_shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]  # for each dim of the form, the dims that it merges
    # In a step of ``Zero``, inside ``on_mesh``: its layout, and the spec of the parameter.
    on: tuple[Layout, P] | None = None

    @classmethod
    def of(cls, rule: FactoringRule, name: str, shape: tuple[int, ...]) -> "MatrixForm | None":
        """The form of a parameter that a rule factors; other dims than rows and columns stack."""
        chosen = rule.resolve(name, shape)  # a rule or a Factoring
        factoring = chosen and chosen.resolve(name, shape)
        if not factoring or not factoring.factored:
            return None
        rows, cols = factoring.rows, factoring.cols
        stack = (d for d in range(len(shape)) if d not in rows + cols)
        return cls(shape, (*((d,) for d in stack), rows, cols))

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the parameter, in the order of the matrix form."""
        return tuple(d for group in self.groups for d in group)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix form."""
        return tuple(math.prod(self.param_shape[d] for d in group) for group in self.groups)

    @property
    def is_identity(self) -> bool:
        return self.shape == self.param_shape and self.order == tuple(range(len(self.order)))

    # --- Specs ------------------------------------------------------------------------------------

    @property
    def _majors(self) -> tuple[int, ...]:
        """For each group, the dim along which a shard of the merged dim is a range."""
        return tuple(next((d for d in g if self.param_shape[d] > 1), g[0]) for g in self.groups)

    def mergeable(self, spec: P, mesh: AnyMesh) -> P:
        """The spec of the parameter, axes of minor dims at the best free dim that divides."""
        entries = by_dim(spec, len(self.param_shape))
        for dim, entry in enumerate(entries):
            if entry is None or dim in self._majors:
                continue
            count = num_shards(mesh, P(entry))
            free = [
                i
                for i, major in enumerate(self._majors)
                if entries[major] is None and self.param_shape[major] % count == 0
            ]
            best = choose_sharded_dim(self.shape, free, [count])
            entries[dim] = None
            if best is not None:
                entries[self._majors[best]] = entry
        return trim(entries)

    def spec(self, spec: P, mesh: AnyMesh) -> P:
        """The spec of the matrix form, for the spec of the parameter."""
        if self.is_identity:
            return spec
        entries = dict(enumerate(self.mergeable(spec, mesh)))
        return trim([entries.get(d) for d in self._majors])

    @property
    def sharded_as(self) -> P | None:
        """The spec of the matrix form in a step of ``Zero``; None where it is not known."""
        return None if self.on is None else self.spec(self.on[1], self.on[0].mesh)

    # --- Arrays -----------------------------------------------------------------------------------

    def to_matrices(self, x: Array) -> Any:
        """A parameter or its gradient in matrix form, placed as by ``spec``; None for None."""
        if x is None or self.is_identity:
            return x
        if self.on is not None:
            layout, spec = self.on
            x = _moved(layout, x, spec, self.mergeable(spec, layout.mesh))
            return layout.constrain(self._replace(on=None).to_matrices(x), self.sharded_as)
        sharding = jax.typeof(x).sharding
        out = None
        if any(sharding.spec):
            x = jax.sharding.reshard(x, self.mergeable(sharding.spec, sharding.mesh))
            out = self.spec(sharding.spec, sharding.mesh)
        x = jnp.transpose(x, self.order)  # (stack..., dims of rows..., dims of cols...)
        return jnp.reshape(x, self.shape, out_sharding=out)  # (stack..., rows, cols)

    def from_matrices(self, x: jax.Array, like: Array) -> jax.Array:
        """Inverts ``to_matrices``; where types hold shardings, placed as ``like``."""
        if self.is_identity:
            return x
        if self.on is not None:
            layout, spec = self.on
            x = self._replace(on=None).from_matrices(layout.constrain(x, self.sharded_as), x)
            return _moved(layout, x, self.mergeable(spec, layout.mesh), spec)
        sharding = jax.typeof(like).sharding
        split = None
        if any(sharding.spec):
            entries = dict(enumerate(self.mergeable(sharding.spec, sharding.mesh)))
            split = P(*[entries.get(d) for d in self.order])
        ordered = tuple(self.param_shape[d] for d in self.order)
        back = tuple(self.order.index(d) for d in range(len(self.order)))
        x = jnp.reshape(x, ordered, out_sharding=split)  # (stack..., rows..., cols...)
        x = jnp.transpose(x, back)  # as the parameter
        return x if split is None else jax.sharding.reshard(x, sharding.spec)


def _moved(layout: Layout, x: jax.Array, spec: P, to: P) -> jax.Array:
    """An array with another spec; data axes that change their dim do so by one all-to-all."""
    x = layout.constrain(x, spec)
    if spec == to:
        return x
    here, there = (by_dim(layout.manual_spec(s), x.ndim) for s in (spec, to))
    changed = [d for d in range(x.ndim) if here[d] != there[d]]
    if len(changed) == 2 and sum(here[d] is None for d in changed) == 1:
        source, target = sorted(changed, key=lambda d: here[d] is None)
        axes = axes_of(here[source])

        def send(x: jax.Array) -> jax.Array:
            return lax.all_to_all(x, axes, split_axis=target, concat_axis=source, tiled=True)

        with jax.named_scope("by_owner"):
            x = over_data_axes(layout, send, (P(*here),), P(*there))(x)
    return layout.constrain(x, to)
