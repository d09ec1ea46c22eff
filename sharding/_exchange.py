"""What crosses the wire in a step: parameters on their way in, gradients on their way out."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharding._collectives import Cut, reduce_scatter
from sharding._gather import How, Shard, gather, gathered_leaves
from sharding._layout import Layout, Placement
from sharding._precision import Precision
from sharding._specs import axes_of


class Exchange(NamedTuple):
    """How each parameter travels; lists have an entry for each leaf of the parameters.

    Attributes:
      layout: the mesh.
      precision: in which dtypes.
      shapes: whole, as the loss sees them.
      dtypes: the parameters' own.
      cuts: how they and their gradients are cut over ``layout.axis``.
      replica_cuts: how gradients are cut further, over the replicas.
      trained: whether they have a gradient.
    """

    layout: Layout
    precision: Precision
    shapes: list[tuple[int, ...]]
    dtypes: list[Any]
    cuts: list[Cut]
    replica_cuts: list[Cut]
    trained: list[bool]

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch reduces its gradients, so that only shards accumulate."""
        return self.layout.stage >= 2

    # --- In -----------------------------------------------------------------------------------

    def gathered_by(self, loss: Callable[..., Any], *args: Any) -> list[bool]:
        """Which parameters a loss of their list gathers itself, where it uses them.

        Warns:
          UserWarning: if it does so for none of those that are cut.
        """
        if self.layout.stage < 3:
            return [False] * len(self.shapes)
        whole = [
            jax.ShapeDtypeStruct(shape, self.precision.of_loss(dtype))
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        found = gathered_leaves(loss, whole, *args)
        cut = [x for x, how in zip(whole, self.cuts, strict=True) if how.dim]
        if cut and not any(f and how.dim for f, how in zip(found, self.cuts, strict=True)):
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in cut)
            warnings.warn(
                "stage 3 with a loss that gathers no layer where it is used: all parameters, "
                f"{size / 2**20:.1f} MiB, are gathered at once, and each device holds them whole "
                "from the forward to the backward pass. Wrap the model's blocks in zero.gathered, "
                "or call zero.gather in each layer.",
                stacklevel=2,
            )
        return found

    def primals(self, params: list[jax.Array]) -> list[jax.Array]:
        """The parameters as the gradient is taken of them, which has the same dtype."""
        if self.layout.stage < 3:
            return [x.astype(self.precision.of_loss(x.dtype)) for x in params]
        # Reduced by the transpose of the gather, which ends in the dtype of the shard.
        return [
            x.astype(jnp.promote_types(x.dtype, self.precision.of_result(x.dtype))) for x in params
        ]

    def open(self, primals: list[jax.Array], layered: list[bool]) -> list[Any]:
        """What the loss gets: whole parameters, and shards of those that it gathers itself."""
        if self.layout.stage < 3:
            return primals
        leaves: list[Any] = []
        for x, cut, dtype, shape in zip(primals, self.cuts, self.dtypes, self.shapes, strict=True):
            dtype = self.precision.of_loss(dtype)
            if not cut.dim:
                leaves.append(x.astype(dtype))
                continue
            entries = tuple(cut.spec) + (None,) * (len(shape) - len(cut.spec))
            reduce_dtype = self.precision.of_sum(dtype)
            leaves.append(Shard(x, How(self.layout, cut.dim, entries, dtype, reduce_dtype)))
        at_once = gather([x for x, later in zip(leaves, layered, strict=True) if not later])
        rest = iter(at_once)
        return [x if later else next(rest) for x, later in zip(leaves, layered, strict=True)]

    # --- Out ----------------------------------------------------------------------------------

    def reduce_each(self, grads: list[jax.Array]) -> list[jax.Array]:
        """One micro-batch's gradients: what is cut is summed over the shards, not the replicas.

        At stage 3 the transpose of the gather has done it.
        """
        if self.layout.stage != 2:
            return grads
        return self._reduce(grads, self.layout.axes, [bool(cut.dim) for cut in self._out()])

    def reduce_rest(self, grads: list[jax.Array]) -> list[jax.Array]:
        """The accumulated gradients, summed over all that they were not summed over yet."""
        is_cut = [bool(cut.dim) for cut in self._out()]
        if not self.reduces_each:
            grads = self._reduce(grads, self.layout.axes, is_cut)
        if self.layout.replica_axes:
            cuts = [cut for cut, t in zip(self.replica_cuts, self.trained, strict=True) if t]
            grads = self._reduce(grads, self.layout.replica_axes, is_cut, cuts)
        return self._reduce(grads, self.layout.data_axes, [not cut for cut in is_cut])

    def _out(self) -> list[Cut]:
        return [cut for cut, trained in zip(self.cuts, self.trained, strict=True) if trained]

    def _reduce(
        self,
        grads: list[jax.Array],
        axes: tuple[str, ...],
        chosen: list[bool],
        cuts: list[Cut] | None = None,
    ) -> list[jax.Array]:
        """Sums the chosen leaves over axes."""
        picked = [i for i, choice in enumerate(chosen) if choice]
        if not picked:
            return grads
        cuts = cuts or self._out()
        dtypes = [dtype for dtype, t in zip(self.dtypes, self.trained, strict=True) if t]
        cast = [
            grads[i].astype(self.precision.of_sum(self.precision.of_loss(dtypes[i])))
            for i in picked
        ]
        with jax.named_scope("reduce_gradients"):
            sums = reduce_scatter(self.layout, axes, cast, [cuts[i] for i in picked])
        new = dict(zip(picked, sums, strict=True))
        return [new.get(i, g) for i, g in enumerate(grads)]


def exchange_of(
    layout: Layout, precision: Precision, params: Any, placed: Placement, trained: Any
) -> Exchange:
    """The exchange of a tree of parameters, whole ones or their types."""
    treedef: Any = jax.tree.structure(params)
    leaves = treedef.flatten_up_to(params)
    cuts, replica_cuts = [], []
    for spec, shards, dim in zip(
        *(treedef.flatten_up_to(tree) for tree in (placed.params, placed.shards, placed.dims)),
        strict=True,
    ):
        other = layout.other_spec(spec)
        axes = {axis for entry in shards for axis in axes_of(entry)}
        cuts.append(Cut(dim, other))
        replica_cuts.append(Cut(dim if axes & set(layout.replica_axes) else 0, other))
    return Exchange(
        layout,
        precision,
        [tuple(x.shape) for x in leaves],
        [x.dtype for x in leaves],
        cuts,
        replica_cuts,
        treedef.flatten_up_to(trained),
    )
