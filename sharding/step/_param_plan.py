"""What crosses the wire in a step: parameters on their way in, gradients on their way out."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._array_layout import ArrayLayout
from sharding.collectives._reduce_scatter import reduce_scatter_arrays
from sharding.placement._layout import Layout, Placement
from sharding.placement._specs import axes_of, path_str
from sharding.step import _gather_params, _lookup
from sharding.step._gather_params import How, Shard, gather
from sharding.step._param_uses import uses
from sharding.step._precision import Precision
from sharding.sync import GradientSync, RowMethod


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
      paths: their names.
      sync: what makes the mean of gradients, in place of a sum: over ``layout.replica_axes`` if
        there are such, else over ``layout.axes``.
      keeps_state: whether ``sync`` has a state.
      rows: how ``sync`` takes the gradients of rows that were looked up, between the shards; None
        where it does not.
      later: which parameters the loss makes whole itself, or looks up rows of them; found by
        ``of_loss``.
    """

    layout: Layout
    precision: Precision
    shapes: list[tuple[int, ...]]
    dtypes: list[Any]
    cuts: list[ArrayLayout]
    replica_cuts: list[ArrayLayout]
    trained: list[bool]
    paths: list[str]
    sync: GradientSync | None = None
    keeps_state: bool = False
    rows: tuple[RowMethod | None, ...] = ()
    later: tuple[bool, ...] = ()

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch reduces its gradients, so that only shards accumulate.

        What an exchange did not send, it would keep whole: it is asked once a step.
        """
        once = self.keeps_state and not self.layout.replica_axes
        return self.layout.stage >= 2 and not once

    @property
    def _syncs_axes(self) -> bool:
        """Whether ``sync`` is what exchanges gradients over ``layout.axes``."""
        return self.sync is not None and not self.layout.replica_axes

    @property
    def by_rows(self) -> list[bool]:
        """Of the trained parameters, whose gradients the derivative of ``lookup`` has summed."""
        return [
            later and self.layout.stage < 3
            for later, t in zip(self.later, self.trained, strict=True)
            if t
        ]

    # --- In -----------------------------------------------------------------------------------

    def of_loss(self, loss: Callable[..., Any], *args: Any) -> "Exchange":
        """Itself, knowing which parameters a loss of their list makes whole, or looks up, itself.

        Warns:
          UserWarning: at stage 3, if it does so for none of those that are cut; if it looks up
            rows of a table that ``sync`` would exchange by rows, but in a way that needs all of it.
        """
        by_rows = {i for i, rows in enumerate(self.rows) if rows}
        if self.layout.stage < 3:
            by_rows = {i for i in by_rows if self.trained[i]}
        if self.layout.stage < 3 and not by_rows:
            return self._replace(later=(False,) * len(self.shapes))
        whole = [
            jax.ShapeDtypeStruct(shape, self.precision.of_loss(dtype))
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        found = uses(loss, whole, [_gather_params.MARK, _lookup.MARK], *args)
        looked_up = found.marked[_lookup.MARK]
        wanted = by_rows & looked_up.keys()
        for i in wanted & found.otherwise:
            _warn_whole(f"the loss looks up rows of {self.paths[i]!r}, and uses it otherwise too")
        for i in wanted & found.marked[_gather_params.MARK].keys():
            _warn_whole(f"the loss looks up rows of {self.paths[i]!r}, and gathers it too")
        if by_rows:
            for shape in found.unknown[_lookup.MARK]:
                _warn_whole(
                    f"the loss looks up rows of an array of shape {shape} that is no parameter as "
                    "it came: it was gathered, cast or computed"
                )
        if self.layout.stage < 3:
            own = wanted - found.otherwise
            for i in own & found.branched:
                # Devices that take another branch would wait for those that exchange.
                _warn_whole(f"the loss looks up rows of {self.paths[i]!r} in a branch or a while")
            own -= found.branched
            # Of a stack that is cut along a dim that loops take off, no slice has a piece.
            own = {i for i in own if -self.cuts[i].dim <= looked_up[i]}
            return self._replace(later=tuple(i in own for i in range(len(whole))))
        own = set().union(*found.marked.values()) - found.otherwise
        cut = {i for i, cut in enumerate(self.cuts) if cut.dim}
        if cut and not cut & own:
            size = sum(math.prod(whole[i].shape) * whole[i].dtype.itemsize for i in cut)
            warnings.warn(
                "stage 3 with a loss that gathers no layer where it is used: all parameters, "
                f"{size / 2**20:.1f} MiB, are gathered at once, and each device holds them whole "
                "from the forward to the backward pass. Wrap the model's blocks in zero.gathered, "
                "or call zero.gather in each layer.",
                stacklevel=2,
            )
        return self._replace(later=tuple(i in own for i in range(len(whole))))

    def primals(self, params: list[jax.Array]) -> list[jax.Array]:
        """The parameters as the gradient is taken of them, which has the same shape and dtype."""
        if self.layout.stage < 3:
            return [
                self._tap(i, x) if later else x.astype(self.precision.of_loss(x.dtype))
                for i, (x, later) in enumerate(zip(params, self.later, strict=True))
            ]
        # Reduced by the transpose of the gather, which ends in the dtype of the shard.
        return [
            x.astype(jnp.promote_types(x.dtype, self.precision.of_result(x.dtype))) for x in params
        ]

    def _tap(self, i: int, x: jax.Array) -> jax.Array:
        """Zeros for what this device keeps of a gradient that is exchanged by rows."""
        shape, dim = list(x.shape), self.cuts[i].dim
        if dim:
            shape[dim] //= self.layout.num_shards
        dtype = self.precision.of_sum(self.precision.of_loss(x.dtype))
        return jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))

    def open(self, primals: list[jax.Array], params: list[jax.Array]) -> list[Any]:
        """What the loss gets: whole parameters, and in their own form those that it takes so."""
        if not (self.layout.stage == 3 or any(self.later)):
            return primals
        leaves: list[Any] = []
        for x, param, later, how in zip(primals, params, self.later, self._hows(), strict=True):
            if self.layout.stage == 3 and how.dim:
                leaves.append(Shard(x, how))
            elif self.layout.stage < 3 and later:
                leaves.append(_lookup.Table(param.astype(how.dtype), x, how))
            else:
                leaves.append(x.astype(how.dtype))
        if self.layout.stage < 3:
            return leaves
        at_once = gather([x for x, later in zip(leaves, self.later, strict=True) if not later])
        rest = iter(at_once)
        return [x if later else next(rest) for x, later in zip(leaves, self.later, strict=True)]

    def _hows(self) -> list[How]:
        """How each parameter is cut, gathered, looked up."""
        hows = []
        for cut, dtype, shape, sum_by, rows in zip(
            self.cuts, self.dtypes, self.shapes, self._sums(), self.rows, strict=True
        ):
            dtype = self.precision.of_loss(dtype)
            entries = tuple(cut.spec) + (None,) * (len(shape) - len(cut.spec))
            reduce_dtype = self.precision.of_sum(dtype)
            bits = self.precision.gather_bits
            hows.append(How(self.layout, cut.dim, entries, dtype, reduce_dtype, sum_by, rows, bits))
        return hows

    # --- Out ----------------------------------------------------------------------------------

    def reduce_each(self, grads: list[jax.Array]) -> list[jax.Array]:
        """One micro-batch's gradients: what is cut is summed over the shards, not the replicas.

        At stage 3 the transpose of the gather has done it.
        """
        if self.layout.stage != 2 or not self.reduces_each:
            return grads
        is_cut = [bool(cut.dim) for cut in self.out()]
        chosen = [cut and not rows for cut, rows in zip(is_cut, self.by_rows, strict=True)]
        if self._syncs_axes:
            return self._sync(grads, chosen, self.no_state())[0]
        return self._reduce(grads, self.layout.axes, chosen)

    def reduce_rest(self, grads: list[jax.Array]) -> list[jax.Array]:
        """The accumulated gradients, summed over all that they were not summed over yet."""
        is_cut = [bool(cut.dim) for cut in self.out()]
        if not self.reduces_each:
            grads = self._reduce(grads, self.layout.axes, is_cut)
        if self.layout.replica_axes:
            cuts = [cut for cut, t in zip(self.replica_cuts, self.trained, strict=True) if t]
            grads = self._reduce(grads, self.layout.replica_axes, is_cut, cuts)
        return self._reduce(grads, self.layout.data_axes, [not cut for cut in is_cut])

    def sync_rest(
        self, grads: list[jax.Array], state: Any, scale: Any
    ) -> tuple[list[jax.Array], Any]:
        """``reduce_rest`` times ``scale`` by ``sync``, and its new state.

        Scaled before they are sent: what is kept for later is of the gradient, not of a sum.
        """
        left = [
            not (rows or (cut.dim and self.reduces_each))
            for cut, rows in zip(self.out(), self.by_rows, strict=True)
        ]
        if self.layout.replica_axes:
            grads = self._reduce(grads, self.layout.axes, left)
            left = [True] * len(grads)
        return self._sync([g * scale for g in grads], left, state)

    def _sync(
        self, grads: list[jax.Array], chosen: list[bool], state: Any
    ) -> tuple[list[jax.Array], Any]:
        """The chosen leaves' sums as ``sync`` makes them, and its new state."""
        assert self.sync is not None
        replicas = self.layout.replica_axes
        axes = replicas or self.layout.axes
        every = self.replica_cuts if replicas else self.cuts
        cuts = [cut for cut, t in zip(every, self.trained, strict=True) if t]
        paths = [path for path, t in zip(self.paths, self.trained, strict=True) if t]
        cast = self._cast(grads)
        tree: dict[str, Any] = dict.fromkeys(self.paths)
        dims = dict.fromkeys(self.paths, 0)
        for path, g, choice, cut in zip(paths, cast, chosen, cuts, strict=True):
            if choice:
                tree[path], dims[path] = g, cut.dim
        with jax.named_scope("reduce_gradients"):
            means, state = self.sync.reduce_scatter(tree, state, axes, dims)
        num = lax.axis_size(axes)
        return [
            means[path] * num if choice else g
            for path, g, choice in zip(paths, grads, chosen, strict=True)
        ], state

    def no_state(self) -> Any:
        """The state of a ``sync`` that keeps none."""
        if self.sync is None:
            return None
        types = zip(self.paths, self.shapes, self.dtypes, strict=True)
        return self.sync.init({p: jax.ShapeDtypeStruct(s, d) for p, s, d in types})

    def _sums(self) -> list[Callable[[jax.Array, int], jax.Array] | None]:
        """What sums the gradients of parameters that are gathered where they are used."""
        if self.sync is None or not self._syncs_axes or self.layout.stage < 3:
            return [None] * len(self.paths)
        sync, axes, state = self.sync, self.layout.axes, self.no_state()
        tree, dims = dict.fromkeys(self.paths), dict.fromkeys(self.paths, 0)

        def sum_of(path: str) -> Callable[[jax.Array, int], jax.Array]:
            def run(g: jax.Array, dim: int) -> jax.Array:
                means, _ = sync.reduce_scatter(tree | {path: g}, state, axes, dims | {path: dim})
                return means[path] * lax.axis_size(axes)

            return run

        return list(map(sum_of, self.paths))

    def _cast(self, grads: list[jax.Array]) -> list[jax.Array]:
        """In the dtypes in which gradients are sent."""
        dtypes = [dtype for dtype, t in zip(self.dtypes, self.trained, strict=True) if t]
        return [
            g.astype(self.precision.of_sum(self.precision.of_loss(dtype)))
            for g, dtype in zip(grads, dtypes, strict=True)
        ]

    def out(self) -> list[ArrayLayout]:
        """How the gradients of trained parameters are cut."""
        return [cut for cut, trained in zip(self.cuts, self.trained, strict=True) if trained]

    def _reduce(
        self,
        grads: list[jax.Array],
        axes: tuple[str, ...],
        chosen: list[bool],
        cuts: list[ArrayLayout] | None = None,
    ) -> list[jax.Array]:
        """Sums the chosen leaves over axes."""
        picked = [i for i, choice in enumerate(chosen) if choice]
        if not picked:
            return grads
        cuts = cuts or self.out()
        cast = self._cast(grads)
        with jax.named_scope("reduce_gradients"):
            sums = reduce_scatter_arrays(
                self.layout, axes, [cast[i] for i in picked], [cuts[i] for i in picked]
            )
        new = dict(zip(picked, sums, strict=True))
        return [new.get(i, g) for i, g in enumerate(grads)]


def _warn_whole(what: str) -> None:
    warnings.warn(
        f"{what}: its gradient is exchanged whole, and at stage 3 it is gathered.", stacklevel=3
    )


def exchange_of(
    layout: Layout,
    precision: Precision,
    params: Any,
    placed: Placement,
    trained: Any,
    sync: GradientSync | None = None,
    keeps_state: bool = False,
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
        cuts.append(ArrayLayout(dim, other))
        replica_cuts.append(ArrayLayout(dim if axes & set(layout.replica_axes) else 0, other))
    paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    trained = treedef.flatten_up_to(trained)
    rows: list[RowMethod | None] = [None] * len(leaves)
    if sync is not None and sync.rows is not None:
        rows = [sync.rows(path, x) for path, x in zip(paths, leaves, strict=True)]
    return Exchange(
        layout,
        precision,
        [tuple(x.shape) for x in leaves],
        [x.dtype for x in leaves],
        cuts,
        replica_cuts,
        trained,
        paths,
        sync,
        keeps_state,
        tuple(rows),
    )
