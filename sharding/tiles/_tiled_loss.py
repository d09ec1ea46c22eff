"""A loss whose large inner values exist one tile at a time: an unmodified loss, traced.

The chains that are found in it, also inside its loops and checkpoints, run under a loop over tiles
of their rows. Sums over tiles, of the loss and of gradients, are float32 at least, in one order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext.equations import Remat, Scan, record_of, trace
from optax_ext.traced_graph import Graph, Value, bind
from optax_ext.user_line import line_of
from sharding._jaxprs import run_scan
from sharding._traced_types import varying_alike
from sharding._types import Array
from sharding.collectives._sum_dtype import sum_dtype
from sharding.loss._loss_options import AnyLoss, Loss, Rewrite, as_loss
from sharding.tiles._chains import Chain, ChainSearch, NoChain
from sharding.tiles._tile_equations import (
    TileEvaluation,
    for_each_tile,
    part_of,
    row_dim,
    with_part,
)

TILES = (4, 16, 64, 256)  # that planners try, from the fewest on


def tiled(loss: AnyLoss, tiles: int = 16, *, forward_gradient: bool | None = None) -> Loss:
    """The same loss, whose largest inner values exist one tile at a time.

    Chains of equations that keep the rows of some dim apart, as tokens, examples or pixels, are
    found in its trace: the head of a language model, its MLPs, attention over queries. The values
    inside are neither stored for the backward pass nor ever there for all rows.

    Args:
      loss: a ``Loss`` or a function of any arrays, as the ``head`` of a ``Pipeline``; it is not
        changed. Of one that is in tiles already, these are other ones.
      tiles: in how many tiles a chain runs, of equal numbers of rows but for the last one.
      forward_gradient: whether a chain that ends in one sum, as that of a head, makes its gradient
        in the forward pass, so that no product is computed twice. It stores gradients of parameters
        in float32. None: where it is neither in a loop nor in a checkpoint. Other chains are
        computed again in the backward pass.

    Returns:
      A ``Loss`` with the same options.

    Raises:
      ValueError: if ``tiles`` is no positive int; when it is called, if no chain is found.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> def loss(w, x):
      ...     return jnp.mean(jax.nn.logsumexp(x @ w, axis=-1))
      >>> w, x = jnp.ones((4, 64)), jnp.ones((8, 4))
      >>> bool(jnp.allclose(shd.tiles.tiled(loss, tiles=4)(w, x), loss(w, x)))
      True
      >>> print(shd.tiles.report_tiles(loss, w, x, tiles=4)[0].split(" (")[0])
      4 tiles of 2 rows: float32[8,64] inside, float32[8,4] read, float32[] returned
    """
    _check_tiles(tiles)
    inner = _as_loss(loss)
    if rewrite := Rewrite.of(inner.fn):
        inner = dataclasses.replace(inner, fn=rewrite.plain)
    return dataclasses.replace(inner, fn=_in_tiles(inner.fn, tiles, forward_gradient))


def tiled_where_possible(loss: Loss, tiles: int) -> Loss:
    """The same loss; as it is where nothing of it can run in tiles, as of few rows of a device."""
    return dataclasses.replace(loss, fn=_in_tiles(loss.fn, tiles, None, must=False))


def _in_tiles(
    plain: Callable[..., Any], tiles: int, forward_gradient: bool | None, must: bool = True
) -> Callable[..., Any]:
    """The same function, in tiles; an error if it ``must`` have some and has none."""

    @functools.wraps(plain)
    def fn(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        flat = lambda *leaves: plain(*treedef.unflatten(leaves))  # noqa: E731
        closed, results = trace(flat, *leaves)
        run = _TiledGraph(closed, tiles, forward_gradient)
        is_empty = any(0 in jnp.shape(x) for x in leaves)
        if must and not run.is_tiled and not is_empty:
            said = "\n  ".join(run.report(coupled=False)) or "it has no large values"
            raise ValueError(
                f"no equations of the loss can run in {tiles} tiles of their rows:\n  {said}\n"
                "Take fewer tiles, or leave tiled out (docs: how_to/tiles)."
            )
        return jax.tree.unflatten(jax.tree.structure(results), run(leaves))

    def again(plain: Callable[..., Any]) -> Callable[..., Any]:
        return _in_tiles(plain, tiles, forward_gradient, must)

    vars(fn)["rewrite"] = Rewrite(fn, plain, again)
    return fn


def report_tiles(loss: AnyLoss, *args: Any, tiles: int = 16) -> list[str]:
    """What of a loss runs in tiles, and what large values do not, with the user's lines.

    Args:
      loss: as of ``tiled``.
      *args: what it is called with, arrays or their types.
      tiles: in how many tiles a chain runs.

    Returns:
      A line for each chain, and for each large value that has none since rows meet.

    Raises:
      ValueError: if ``tiles`` is no positive int.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> def loss(w, x):
      ...     return jnp.mean(jax.nn.softmax(x @ w, axis=(0, 1)) ** 2)
      >>> said = shd.tiles.report_tiles(loss, jnp.ones((4, 64)), jnp.ones((8, 4)), tiles=8)
      >>> "reduce_max: rows are reduced" in said[0]
      True
    """
    _check_tiles(tiles)
    leaves, treedef = jax.tree.flatten(args)
    fn = _as_loss(loss).fn
    closed, _ = trace(lambda *leaves: fn(*treedef.unflatten(leaves)), *leaves)
    return _TiledGraph(closed, tiles, None).report()


def _as_loss(loss: AnyLoss) -> Loss:
    """A ``Loss``; of any arguments, as are those of the head of a ``Pipeline``."""
    is_function = callable(loss) and not isinstance(loss, Loss) and not hasattr(loss, "as_loss")
    return Loss(loss) if is_function else as_loss(loss)


def _check_tiles(tiles: int) -> None:
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise ValueError(f"tiles must be a positive int, got {tiles!r}.")


class _TiledGraph:
    """A traced function whose chains run in tiles, and those of its loops and checkpoints."""

    def __init__(
        self, closed: Any, tiles: int, forward_gradient: bool | None, is_inner: bool = False
    ):
        self._graph, self._tiles, self._is_inner = Graph.of(closed), tiles, is_inner
        self._forward_gradient = forward_gradient
        self._bodies: dict[int, _TiledGraph] = {}
        for number, eqn in enumerate(self._graph.equations):
            record = record_of(eqn)
            if isinstance(record, Scan | Remat):
                body = _TiledGraph(record.body, tiles, forward_gradient, is_inner=True)
                self._bodies[number] = body
        self._inner = {k: body for k, body in self._bodies.items() if body.is_tiled}
        self._search = ChainSearch(self._graph, tiles)
        self._found = list(self._search.find(set(self._inner)))
        self._chains = [x for x in self._found if isinstance(x, Chain)]

    @property
    def is_tiled(self) -> bool:
        return bool(self._chains or self._inner)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """What the function returns."""
        graph = self._graph
        values: dict[Value, Any] = {Value(k): x for k, x in enumerate(args)} | graph.constants
        inside = {number for chain in self._chains for number in chain.equations}
        left: list[Any] = [k for k in range(len(graph.equations)) if k not in inside]
        left = sorted([*left, *self._chains], key=_first_equation)
        while left:
            waiting = []
            for item in left:
                if all(v in values for v in self._reads(item)):
                    values |= self._results(item, values)
                else:
                    waiting.append(item)
            assert len(waiting) < len(left), "chains wait for each other"
            left = waiting
        return [values[v] for v in graph.outputs]

    def _reads(self, item: int | Chain) -> Sequence[Value]:
        if isinstance(item, Chain):
            return (*item.sliced, *item.shared)
        return self._graph.equations[item].operands

    def _results(self, item: int | Chain, values: dict[Value, Any]) -> dict[Value, Any]:
        if isinstance(item, Chain):
            is_forward = self._forward_gradient
            if is_forward is None:
                is_forward = not self._is_inner
            given = ([values[v] for v in vs] for vs in (item.sliced, item.shared))
            outs = _TiledChain(self._graph, item, is_forward)(*given)
            return dict(zip(item.outputs, outs, strict=True))
        eqn = self._graph.equations[item]
        operands = [values[v] for v in eqn.operands]
        return dict(zip(eqn.results, self._equation(item, eqn, operands), strict=True))

    def _equation(self, number: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if number not in self._inner:
            return bind(eqn, operands)
        body, record = self._inner[number], record_of(eqn)
        if isinstance(record, Scan):
            return run_scan(record, operands, lambda *args: body(args))
        assert isinstance(record, Remat)
        outs: list[Any] = jax.checkpoint(lambda *args: body(args), **record.options)(*operands)
        return outs

    def report(self, coupled: bool = True) -> list[str]:
        """A line for each chain, and for large values in none: all, or where rows meet alone."""
        lines = []
        for found in self._found:
            eqn = self._graph.equations[self._graph.producer[found.largest]]
            at = line_of(eqn.source_info)
            at = f" ({at})" if at else ""
            inside = self._text([found.largest])
            if isinstance(found, NoChain) and coupled and not found.is_coupled:
                continue
            if isinstance(found, NoChain):
                lines.append(f"not in tiles: {inside}{at}: {found.cause}")
                continue
            full, rest = divmod(found.count, found.rows)
            rows = f"{full} tiles of {found.rows} rows"
            if rest:
                rows += f" and {rest} more"
            read, returned = self._text(found.sliced), self._text(found.outputs)
            lines.append(f"{rows}: {inside} inside, {read} read, {returned} returned{at}")
        lines += [line for body in self._bodies.values() for line in body.report(coupled)]
        return list(dict.fromkeys(lines))

    def _text(self, values: Sequence[Value]) -> str:
        return ", ".join(self._graph.types[v].str_short() for v in values)


def _first_equation(item: int | Chain) -> int:
    """Where an equation or a chain is in the trace."""
    return item.equations[0] if isinstance(item, Chain) else item


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _dtype_of_sum(dtype: Any) -> Any:
    """The dtype of a sum over tiles."""
    is_floating = jnp.issubdtype(dtype, jnp.inexact)
    return sum_dtype(dtype) if is_floating else dtype


class _TiledChain:
    """A chain, run tile by tile, and its gradient."""

    def __init__(self, graph: Graph, chain: Chain, forward_gradient: bool):
        self._graph, self._chain, self._rows = graph, chain, chain.rows
        self._equations = [graph.equations[number] for number in chain.equations]
        self._of_sliced = [chain.states[v] for v in chain.sliced]
        self._of_outputs = [chain.states[v] for v in chain.outputs]
        self._is_sum = [row_dim(state) is None for state in self._of_outputs]
        self._types = [graph.types[v] for v in chain.outputs]
        floating = [k for k, aval in enumerate(self._types) if _is_floating(aval)]
        is_one_sum = len(floating) == 1 and self._types[floating[0]].shape == ()
        self._of_loss = floating[0] if is_one_sum and forward_gradient else None

    def __call__(self, sliced: list[Any], shared: list[Any]) -> list[Any]:
        """Its outputs."""
        run = jax.custom_vjp(lambda *given: self._forward(*given))
        if self._of_loss is None:
            run.defvjp(lambda *given: (self._forward(*given), given), self._backward)
        else:
            run.defvjp(self._with_gradient, self._scaled)
        every = varying_alike([*sliced, *shared])
        return run(every[: len(sliced)], every[len(sliced) :])

    def _tile(self, sliced: Sequence[Any], shared: Sequence[Any], start: Any, rows: int) -> Any:
        """The outputs of one tile."""
        chain = self._chain
        values = dict(self._graph.constants) | dict(zip(chain.sliced, sliced, strict=True))
        values |= zip(chain.shared, shared, strict=True)
        TileEvaluation(self._graph, chain.states, start, rows).run(self._equations, values)
        return [values[v] for v in chain.outputs]

    def _parts(self, arrays: Sequence[Any], states: Sequence[Any], start: Any, rows: int) -> Any:
        pairs = zip(arrays, states, strict=True)
        return [part_of(x, state, start, rows) for x, state in pairs]

    def _for_each(self, tile: Callable[[Any, Any, int], Any], zeros: Any, given: Any) -> Any:
        """What ``tile(carry, start, rows)`` makes of all tiles, one after the other.

        The first one carries zeros, on the axes of a ``shard_map`` that ``given`` arrays vary over.
        """
        leaves, treedef = jax.tree.flatten(zeros)
        carry = treedef.unflatten(varying_alike([*leaves, *given])[: len(leaves)])
        return for_each_tile(tile, carry, self._chain.count, self._rows)

    def _zeros(self) -> list[Array]:
        """Where outputs are written, or added up."""
        pairs = zip(self._types, self._is_sum, strict=True)
        return [
            jnp.zeros(t.shape, _dtype_of_sum(t.dtype) if is_sum else t.dtype) for t, is_sum in pairs
        ]

    def _added(self, outs: Sequence[Array], of_tile: Any, start: Any, rows: int) -> list[Array]:
        """Outputs, with those of a tile."""
        each = zip(outs, of_tile, self._of_outputs, self._is_sum, strict=True)
        return [
            x + y.astype(x.dtype) if is_sum else with_part(x, y, state, start, rows)
            for x, y, state, is_sum in each
        ]

    def _results(self, outs: Sequence[Array]) -> list[Array]:
        return [x.astype(t.dtype) for x, t in zip(outs, self._types, strict=True)]

    def _forward(self, sliced: list[Any], shared: list[Any]) -> list[Array]:
        def tile(outs: list[Array], start: Any, rows: int) -> list[Array]:
            own = self._parts(sliced, self._of_sliced, start, rows)
            return self._added(outs, self._tile(own, shared, start, rows), start, rows)

        return self._results(self._for_each(tile, self._zeros(), [*sliced, *shared]))

    def _zero_grads(self, sliced: list[Any], shared: list[Any]) -> Any:
        """Of what is differentiated: None for others."""
        of_sliced = [jnp.zeros_like(x) if _is_floating(x) else None for x in sliced]
        sums = [
            jnp.zeros_like(x, _dtype_of_sum(x.dtype)) if _is_floating(x) else None for x in shared
        ]
        return of_sliced, sums

    def _with_grads(self, grads: Any, pull: Any, cotangents: Any, start: Any, rows: int) -> Any:
        """Gradients, with those of a tile."""
        of_sliced, sums = (iter(part) for part in pull(cotangents))
        each = zip(grads[0], self._of_sliced, strict=True)
        written = [
            x if x is None else with_part(x, next(of_sliced), state, start, rows)
            for x, state in each
        ]
        added = [x if x is None else x + next(sums).astype(x.dtype) for x in grads[1]]
        return written, added

    def _pullback(self, own: list[Any], shared: list[Any], start: Any, rows: int) -> Any:
        """The floating outputs of a tile, and their pullback; all its outputs."""

        def fn(floating: Any) -> Any:
            of_sliced, of_shared = map(iter, floating)
            given = [next(of_sliced) if _is_floating(x) else x for x in own]
            consts = [next(of_shared) if _is_floating(x) else x for x in shared]
            outs = self._tile(given, consts, start, rows)
            return [x for x in outs if _is_floating(x)], outs

        floating = [[x for x in xs if _is_floating(x)] for xs in (own, shared)]
        _, pull, outs = jax.vjp(fn, floating, has_aux=True)
        return (lambda cotangents: pull(cotangents)[0]), outs

    def _backward(self, stored: Any, cotangents: list[Any]) -> Any:
        """The gradient, for which each tile is computed again."""
        sliced, shared = stored

        def tile(grads: Any, start: Any, rows: int) -> Any:
            own = self._parts(sliced, self._of_sliced, start, rows)
            pull, _ = self._pullback(own, shared, start, rows)
            each = zip(cotangents, self._of_outputs, self._types, strict=True)
            given = [part_of(x, state, start, rows) for x, state, t in each if _is_floating(t)]
            return self._with_grads(grads, pull, given, start, rows)

        grads = self._for_each(tile, self._zero_grads(sliced, shared), [*sliced, *shared])
        return self._as_given(grads, stored)

    def _with_gradient(self, sliced: list[Any], shared: list[Any]) -> Any:
        """Outputs, and the gradient of the one sum among them."""

        def tile(carry: Any, start: Any, rows: int) -> Any:
            outs, grads = carry
            own = self._parts(sliced, self._of_sliced, start, rows)
            pull, of_tile = self._pullback(own, shared, start, rows)
            assert self._of_loss is not None
            one = jnp.ones((), self._types[self._of_loss].dtype)
            one, _ = varying_alike([one, of_tile[self._of_loss]])
            grads = self._with_grads(grads, pull, [one], start, rows)
            return self._added(outs, of_tile, start, rows), grads

        grads = self._zero_grads(sliced, shared)
        outs, grads = self._for_each(tile, (self._zeros(), grads), [*sliced, *shared])
        types = [[jnp.zeros((), x.dtype) for x in xs] for xs in (sliced, shared)]
        return self._results(outs), (grads, types)

    def _scaled(self, stored: Any, cotangents: list[Any]) -> Any:
        """The gradient of a loss that is this sum times a number."""
        grads, types = stored
        assert self._of_loss is not None
        factor = cotangents[self._of_loss]
        scaled = jax.tree.map(lambda x: x * factor.astype(x.dtype), grads)
        return self._as_given(scaled, types)

    def _as_given(self, grads: Any, given: Any) -> Any:
        """Gradients in the dtypes of what they are of."""
        return tuple(
            [None if grad is None else grad.astype(x.dtype) for grad, x in zip(*pair, strict=True)]
            for pair in zip(grads, given, strict=True)
        )
