"""The loss of one device, traced once, and how it uses its parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from optax_ext.equations import name_of, params_of, trace
from sharding._jaxprs import inner_jaxprs
from sharding._types import Tree
from sharding._user_line import line_of
from sharding.placement._layout import Layout
from sharding.placement._specs import is_spec
from sharding.step._gather_params import CALL, marking
from sharding.step._layer_hooks import MOVES, HookedLoss, HookedParam

# Operations on one array, and perhaps indices, whose results are parts of it ...
_PARTS = {"dynamic_slice", "slice", "split"}
# ... or hold it in another order, shape or dtype.
_MOVES = {*MOVES, "mesh_cast", "reshard", "rev", "sharding_constraint", "stop_gradient"}
# Of both, the parameter that has the size of the dim that devices have shards of.
_SIZES = {"dynamic_slice": "slice_sizes", "reshape": "new_sizes", "slice": "limit_indices"}


class Fetch(NamedTuple):
    """A place where a loss gets a parameter unsharded, or a part of it."""

    number: int
    in_layer: bool  # or in what the backward pass computes again
    repeats: bool  # the same in each run of a loop
    is_part: bool
    early: bool  # gathered before a branch that gathers, or by an index of this device
    eqn: Any  # that uses it

    @property
    def place(self) -> str:
        """The operation, and the line of the user's code that it is from."""
        eqn = self.eqn
        if eqn is None:
            return "as an output"
        name = name_of(eqn)
        name = params_of(eqn)["name"] if name in ("jit", "pjit") else name
        line = line_of(eqn.source_info)
        return f"in {name}" + (f" at {line}" if line else "")


class TracedLoss:
    """A loss of parameters, a list, and of a device's other arguments.

    The user's mesh axes are Auto in it. If it names one, as ``out_sharding`` and ``reshard`` do,
    they become Explicit: arrays then have the types that they have under ``jit``.
    """

    def __init__(
        self, layout: Layout, fn: Callable[..., Any], params: Tree, specs: Tree, args: Any
    ):
        """Traces ``fn(params, *args)`` of types; ``specs`` are those of ``params`` between steps.

        Raises:
          ValueError: if devices could wait for each other in a collective of the loss.
        """
        self.layout = layout
        types, treedef = jax.tree.flatten(params)
        self.specs = [layout.other_spec(s) for s in jax.tree.leaves(specs, is_leaf=is_spec)]
        # Of each parameter, the dims that other axes shard, counted from the end.
        self.named_dims = [
            [d - x.ndim for d, entry in enumerate(spec) if entry]
            for x, spec in zip(types, self.specs, strict=True)
        ]
        flat, structure = jax.tree.flatten(args)

        def call(params: list[Any], *flat: Any) -> list[Any]:
            out = fn(treedef.unflatten(params), *structure.unflatten(flat))
            leaves, self._results = jax.tree.flatten(out)
            return leaves

        with marking():
            try:
                self.typed = False
                closed, _ = trace(call, types, *flat)
            except ValueError as error:
                self.typed = bool(layout.other_axes) and "AxisType.Auto." in str(error)
                if not self.typed:
                    raise
                closed = self._trace_typed(call, types, flat)
        every = [True] * len(closed.jaxpr.outvars)
        live = partial_eval.dce_jaxpr(closed.jaxpr, every, instantiate=True)[0]
        self.closed = ClosedJaxpr(live, closed.consts)
        varies = [i >= len(types) for i in range(len(live.invars))]
        self.apart = diverging(live, varies, layout.data_axes)
        if found := collective_in(live, self.apart):
            raise ValueError(
                f"the loss has a collective ({found}, such as that of a BatchNorm with the "
                "statistics of all devices) in a branch or a loop that devices take by their own "
                "data: devices would exchange what does not belong together. Move it out of the "
                "branch, or pass sync_batch_norm=False (docs: how_to/batch_norm)."
            )

    def _trace_typed(self, call: Callable[..., Any], types: list[Any], flat: list[Any]) -> Any:
        closed: Any = None

        def run(params: list[Any], *flat: Any) -> Any:
            nonlocal closed
            closed, _ = trace(call, self.reshard(params), *flat)
            return ()

        jax.eval_shape(self.on_explicit_axes(run), types, *flat)
        return closed

    def on_explicit_axes(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if not self.typed:
            return run
        axes = tuple(sorted(self.layout.other_axes))
        return jax.sharding.explicit_axes(run, axes=axes, in_sharding=PartitionSpec())

    def reshard(self, params: list[Any]) -> list[Any]:
        """Parameters, or their shards, with the types that they have in ``on_explicit_axes``."""
        if not self.typed:
            return params
        return [jax.sharding.reshard(x, s) for x, s in zip(params, self.specs, strict=True)]

    def result(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self._results, leaves)

    def uses(self, dims: list[int], types: list[Any], args: Any) -> "Uses":
        """How the loss uses its parameters, of which ``dims`` are sharded, counted from the end."""
        found = Uses(self)

        def run(params: list[Any], *flat: Any) -> Any:
            given = [
                HookedParam(i, x, x, {}, dim=dim, dtype=x.dtype)
                for i, (x, dim) in enumerate(zip(self.reshard(params), dims, strict=True))
            ]
            return found.run([*given, *flat])

        jax.eval_shape(self.on_explicit_axes(run), types, *jax.tree.leaves(args))
        return found


class DeviceHooks(HookedLoss):
    """A traced loss of one device: what is made of shards alone stays sharded."""

    def __init__(self, loss: TracedLoss, fetch: Callable[[HookedParam], Any], recompute: bool):
        """``fetch`` makes what is held unsharded, in its ``dtype``; gradients arrive at the tap."""
        super().__init__(loss.closed, recompute, fetch)
        self.loss = loss
        self.fetches: list[Fetch] = []

    def _fetch(self, x: HookedParam) -> jax.Array:
        by_device = id(self.eqn) in self.loss.apart and self.eqn.primitive.name in _PARTS
        inside = self.eqn and self._has_mark(self.eqn) and not self._is_mark(self.eqn)
        where = x.in_layer, x.repeats, x.is_part, by_device or bool(inside)
        self.fetches.append(Fetch(x.number, *where, self.eqn))
        return self.fetch(x)

    def _is_mark(self, eqn: Any) -> bool:
        return eqn.primitive is CALL or super()._is_mark(eqn)

    def _views(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        if not operands:
            return None
        x, *rest = operands
        others = any(isinstance(y, HookedParam) for y in rest)
        if not isinstance(x, HookedParam) or others:
            return None
        name = eqn.primitive.name
        if name in _PARTS:
            moved = self._of_held(x)
            return moved and self._view(eqn, moved, rest)
        if name == "convert_element_type" and not x.moves:
            old, new = jnp.dtype(x.dtype), jnp.dtype(eqn.params["new_dtype"])
            floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
            if floating and new.itemsize < old.itemsize:
                return [x._replace(dtype=new)]  # less is gathered
        if name not in _MOVES:
            return None
        # What a loop or an index has sliced off has no other uses.
        views = self._view(eqn, x, rest) if x.is_part and not x.moves else None
        return views or [x._replace(moves=(*x.moves, eqn))]

    def _to_slice(self, param: HookedParam) -> Any:
        moved = self._of_held(param)
        return moved if moved and moved.dim != -moved.held.ndim else self._full(param)

    def _of_held(self, x: HookedParam) -> HookedParam | None:
        """A parameter whose moves, but for casts, are made of what is held; None if they cannot."""
        casts = tuple(e for e in x.moves if e.primitive.name == "convert_element_type")
        for eqn in x.moves:
            if eqn not in casts:
                views = self._view(eqn, x, [])
                if views is None:
                    return None
                (x,) = views
        return x._replace(moves=casts)

    def _view(self, eqn: Any, x: HookedParam, rest: list[Any]) -> list[Any] | None:
        """The results of a view, made of what is held; None if shards of it are no views."""
        dim = _sharded_dim(eqn, x.dim, self.loss.named_dims[x.number])
        if dim is None or id(eqn) in self.loss.apart:
            return None
        options = dict(eqn.params)
        if x.dim and (key := _SIZES.get(eqn.primitive.name)):
            sizes = list(options[key])
            sizes[dim] = x.held.shape[x.dim]
            options[key] = tuple(sizes)

        def of_shard(x: jax.Array) -> list[jax.Array]:
            with eqn.ctx.manager:
                out = eqn.primitive.bind(x, *rest, **options)
            return out if eqn.primitive.multiple_results else [out]

        both = zip(of_shard(x.held), of_shard(x.tap), strict=True)
        part = x._replace(dim=dim, is_part=True)
        return [part._replace(held=held, tap=tap, fetched={}) for held, tap in both]


class Uses(DeviceHooks):
    """How a loss uses its parameters, found by running it without values."""

    def __init__(self, loss: TracedLoss):
        super().__init__(loss, lambda x: x.held.astype(x.dtype), recompute=False)
        self.by_rows: dict[int, list[int]] = {}  # of tables: the numbers of dims, in ``lookup``
        self.not_tables: list[tuple[int, ...]] = []  # shapes of what ``lookup`` gets otherwise

    def of(self, number: int) -> list[Fetch]:
        return [x for x in self.fetches if x.number == number]

    def _call(self, eqn: Any, operands: list[Any]) -> list[Any]:
        self.eqn, held = eqn, []
        for k, x in enumerate(operands):
            by_rows = eqn.params["by_rows"] and not k
            if not isinstance(x, HookedParam):
                if by_rows:
                    self.not_tables.append(x.shape)
                held.append(x)
            elif by_rows and not (x.moves or x.is_part or x.dtype != x.held.dtype):
                self.by_rows.setdefault(x.number, []).append(x.held.ndim)
                held.append(x.held)
            else:
                if by_rows:
                    self.not_tables.append(x.held.shape)
                held.append(self._full(x._replace(in_layer=True, repeats=True)))
        return jaxpr_as_fun(eqn.params["default"])(*held)


def _sharded_dim(eqn: Any, dim: int, named_dims: list[int]) -> int | None:
    """The sharded dim of a view, counted from the end; None for what is no view of shards.

    ``named_dims``, which other axes shard, have to stay what and where they are.
    """
    name, options = eqn.primitive.name, eqn.params
    if name in ("broadcast_in_dim", "convert_element_type", "mesh_cast", "reshard"):
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dims = list(range(len(before)))
    # For each dim of the result the unchanged dim that it is: shards of a view are views of shards.
    same: list[int | None]
    if name in ("sharding_constraint", "stop_gradient"):
        same = [*dims]
    elif name == "reshape":  # several dims of the first one, for loops within loops
        others = len(before) - 1
        splits = 0 < others < len(after) and after[len(after) - others :] == before[1:]
        if not splits or options["sharding"]:
            return None
        same = [*[None] * (len(after) - others), *dims[1:]]
    elif name == "transpose":
        same = [*options["permutation"]]
    elif name == "squeeze":
        same = [d for d in dims if d not in options["dimensions"]]
    elif name in ("slice", "dynamic_slice"):
        same = [d if before[d] == after[d] else None for d in dims]
    elif name == "rev":
        same = [None if d in options["dimensions"] else d for d in dims]
    else:
        same = [None if d == options["axis"] else d for d in dims]

    def place(dim: int) -> int | None:
        found = len(before) + dim
        return same.index(found) - len(same) if found in same else None

    if any(place(d) != d for d in named_dims if -d <= len(before)):
        return None
    return place(dim) if dim else 0


# --- Branches, loops and slices of devices by their own data: predicates and places that differ ---

# Their results are the same on all devices of their axes.
_COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def collective_in(jaxpr: Jaxpr, apart: set[int], inside: bool = False) -> str | None:
    """The name of a collective in an equation that diverges; some devices would wait in it."""
    for eqn in jaxpr.eqns:
        name: str | None = eqn.primitive.name
        if inside and name in _COLLECTIVES | {"reduce_scatter", "all_to_all", "ppermute"}:
            return name
        for sub in inner_jaxprs(eqn):
            name = collective_in(sub, apart, inside or id(eqn) in apart)
            if name:
                return name
    return None


def diverging(jaxpr: Jaxpr, varies: Sequence[bool], axes: Sequence[str]) -> set[int]:
    """The ids of all equations whose predicate or place differs over ``axes``, as inputs do."""
    apart: set[int] = set()
    _outputs_vary(jaxpr, list(varies), set(axes), apart)
    return apart


def _outputs_vary(jaxpr: Jaxpr, varies: list[bool], axes: set[str], apart: set[int]) -> list[bool]:
    """Whether each output of a jaxpr differs; adds the equations that diverge to ``apart``."""
    known = dict(zip(jaxpr.invars, varies, strict=True))
    for eqn in jaxpr.eqns:
        operands = [not isinstance(x, Literal) and known.get(x, False) for x in eqn.invars]
        known |= zip(eqn.outvars, _results_vary(eqn, operands, axes, apart), strict=True)
    return [not isinstance(x, Literal) and known.get(x, False) for x in jaxpr.outvars]


def _results_vary(eqn: Any, varies: list[bool], axes: set[str], apart: set[int]) -> list[bool]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "dynamic_slice" and any(varies[1:]):
        apart.add(id(eqn))
    if name == "axis_index":
        return [True]
    if name in _COLLECTIVES:
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        same = axes <= set(over if isinstance(over, tuple) else (over,))
        return [any(varies) and not same] * count
    if name == "cond":
        branches = [_outputs_vary(b, varies[1:], axes, apart) for b in inner_jaxprs(eqn)]
        if varies[0]:
            apart.add(id(eqn))
        return [varies[0] or any(out) for out in zip(*branches, strict=True)]
    if name == "while":
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        # constants of the predicate, constants of the body, what is carried
        first, second = len(cond.invars) - count, len(body.invars) - count
        carried, stops, again = varies[first + second :], False, True
        while again:
            stops = _outputs_vary(cond, varies[:first] + carried, axes, apart)[0]
            new = _outputs_vary(body, varies[first : first + second] + carried, axes, apart)
            new = [a or b or stops for a, b in zip(carried, new, strict=True)]
            again, carried = new != carried, new
        if stops:
            apart.add(id(eqn))
        return carried
    sizes = len(varies), count
    inner = [f for f in inner_jaxprs(eqn) if (len(f.invars), len(f.outvars)) == sizes]
    if not inner:
        return [any(varies)] * count
    called: Any = inner[0]
    outs = _outputs_vary(called, varies, axes, apart)
    if name != "scan":
        return outs
    # What is carried has as many dims in the body; what is sliced or stacked has one less.
    xs = sum(a.aval.ndim != b.aval.ndim for a, b in zip(eqn.invars, called.invars, strict=True))
    ys = sum(a.aval.ndim != b.aval.ndim for a, b in zip(eqn.outvars, called.outvars, strict=True))
    start, stop = len(varies) - xs - (count - ys), len(varies) - xs
    while True:
        after = [a or b for a, b in zip(varies[start:stop], outs[: count - ys], strict=True)]
        if after == varies[start:stop]:
            return outs
        varies = varies[:start] + after + varies[stop:]
        outs = _outputs_vary(called, varies, axes, apart)
