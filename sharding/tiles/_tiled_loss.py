"""A loss whose large inner values exist one tile at a time: an unmodified loss, traced.

The chains that are found in it, also inside its loops and checkpoints, run under a loop over tiles
of their rows. Sums over tiles, of the loss and of gradients, are float32 at least, in one order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext.equations import Remat, Scan, record_of, trace
from optax_ext.traced_graph import Graph, Value, bind
from sharding._jaxprs import run_scan
from sharding._traced_types import varying_alike
from sharding._types import Array
from sharding.collectives._sum_dtype import sum_dtype
from sharding.loss._loss_options import AnyLoss, Loss, Rewrite, as_loss
from sharding.loss._row_walk import last_line
from sharding.tiles._chains import LEAST, Chain, ChainSearch
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


def _as_loss(loss: Any) -> Loss:
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
        return item.read if isinstance(item, Chain) else self._graph.equations[item].operands

    def _results(self, item: int | Chain, values: dict[Value, Any]) -> dict[Value, Any]:
        if isinstance(item, Chain):
            is_forward = self._forward_gradient
            if is_forward is None:
                is_forward = not self._is_inner
            outs = _TiledChain(self._graph, item, is_forward)([values[v] for v in item.read])
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
        lines, sizes = [], [self._search.nbytes(found.largest) for found in self._found]
        for found, nbytes in zip(self._found, sizes, strict=True):
            before = self._graph.equations[: self._graph.producer[found.largest] + 1]
            line = last_line(before)
            inside = self._text([found.largest])
            at = f" ({line})" if line else ""
            if isinstance(found, Chain):
                lines.append(f"{self._rows(found, inside)}{at}")
            elif nbytes >= sizes[0] / LEAST and (found.is_coupled or not coupled):
                lines.append(f"not in tiles: {inside}{at}: {found.cause}")
        lines += [line for body in self._bodies.values() for line in body.report(coupled)]
        return list(dict.fromkeys(lines))

    def _rows(self, chain: Chain, inside: str) -> str:
        """What of a chain is there at a time."""
        full, rest = divmod(chain.count, chain.rows)
        more = f" and {rest} more" if rest else ""
        read, returned = self._text(chain.sliced), self._text(chain.outputs)
        return (
            f"{full} tiles of {chain.rows} rows{more}: "
            f"{inside} inside, {read} read, {returned} returned"
        )

    def _text(self, values: Sequence[Value]) -> str:
        return ", ".join(self._graph.types[v].str_short() for v in values)


def _first_equation(item: int | Chain) -> int:
    """Where an equation or a chain is in the trace."""
    return item.equations[0] if isinstance(item, Chain) else item


def _is_floating(x: Any) -> bool:
    """Whether an array or a type of one is differentiated."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


class _Rows(NamedTuple):
    """Values that a chain reads or returns: a tile has some rows of each, if that has rows."""

    types: list[Any]
    states: list[Any]

    @classmethod
    def of(cls, graph: Graph, chain: Chain, values: Sequence[Value]) -> "_Rows":
        return cls([graph.types[v] for v in values], [chain.states.get(v) for v in values])

    @property
    def floating(self) -> "_Rows":
        at = [k for k, t in enumerate(self.types) if _is_floating(t)]
        return _Rows([self.types[k] for k in at], [self.states[k] for k in at])

    def tile(self, arrays: Sequence[Any], start: Any, rows: int) -> list[Any]:
        pairs = zip(arrays, self.states, strict=True)
        return [part_of(x, state, start, rows) for x, state in pairs]

    def zeros(self, like: Sequence[Array]) -> list[Array]:
        """Where rows are written, and sums of tiles are added up, in float32 at least."""
        is_sum = [row_dim(state) is None and _is_floating(x) for x, state in self._with(like)]
        pairs = zip(like, is_sum, strict=True)
        return [jnp.zeros_like(x, dtype=sum_dtype(x.dtype) if wide else None) for x, wide in pairs]

    def added(self, arrays: Sequence[Array], of_tile: Any, start: Any, rows: int) -> list[Array]:
        """The arrays with those of a tile."""
        return [
            x + y.astype(x.dtype) if row_dim(state) is None else with_part(x, y, state, start, rows)
            for (x, state), y in zip(self._with(arrays), of_tile, strict=True)
        ]

    def cast(self, arrays: Sequence[Array]) -> list[Array]:
        return [x.astype(t.dtype) for x, t in zip(arrays, self.types, strict=True)]

    def _with(self, arrays: Sequence[Any]) -> Any:
        return zip(arrays, self.states, strict=True)


class _TiledChain:
    """A chain, run tile by tile, and its gradient."""

    def __init__(self, graph: Graph, chain: Chain, forward_gradient: bool):
        self._graph, self._chain = graph, chain
        self._equations = [graph.equations[number] for number in chain.equations]
        self._read = _Rows.of(graph, chain, chain.read)
        self._outputs = _Rows.of(graph, chain, chain.outputs)
        floating = self._outputs.floating.types
        self._is_loss = forward_gradient and [t.shape for t in floating] == [()]

    def __call__(self, given: list[Any]) -> list[Any]:
        """Its outputs."""
        run = jax.custom_vjp(lambda *given: self._forward(given))
        if self._is_loss:
            run.defvjp(self._with_gradient, self._scaled)
        else:
            run.defvjp(lambda *given: (self._forward(given), given), self._backward)
        return run(*varying_alike(given))

    def _tile(self, given: Sequence[Any], start: Any, rows: int) -> list[Any]:
        """The outputs of one tile."""
        values = self._graph.constants | dict(zip(self._chain.read, given, strict=True))
        evaluation = TileEvaluation(self._graph, self._chain.states, start, rows)
        evaluation.run(self._equations, values)
        return [values[v] for v in self._chain.outputs]

    def _for_each(self, tile: Callable[[Any, Any, int], Any], zeros: Any, given: Any) -> Any:
        """What ``tile(carry, start, rows)`` makes of all tiles, one after the other.

        The first one carries zeros, on the axes of a ``shard_map`` that ``given`` arrays vary over.
        """
        leaves, treedef = jax.tree.flatten(zeros)
        carry = treedef.unflatten(varying_alike([*leaves, *given])[: len(leaves)])
        return for_each_tile(tile, carry, self._chain.count, self._chain.rows)

    def _zeros(self) -> list[Array]:
        return self._outputs.zeros([jnp.zeros(t.shape, t.dtype) for t in self._outputs.types])

    def _forward(self, given: Sequence[Any]) -> list[Array]:
        def tile(outs: list[Array], start: Any, rows: int) -> list[Array]:
            own = self._tile(self._read.tile(given, start, rows), start, rows)
            return self._outputs.added(outs, own, start, rows)

        return self._outputs.cast(self._for_each(tile, self._zeros(), given))

    def _gradients(self, given: Sequence[Any], cotangents: Sequence[Any], outs: Any) -> Any:
        """Outputs, if ``outs`` has zeros for them; and gradients of what is floating."""
        floating = self._read.floating

        def tile(carry: Any, start: Any, rows: int) -> Any:
            outs, grads = carry
            own = self._read.tile(given, start, rows)

            def fn(*xs: Any) -> Any:
                of = iter(xs)
                found = self._tile([next(of) if _is_floating(x) else x for x in own], start, rows)
                return [x for x in found if _is_floating(x)], found

            _, pull, of_tile = jax.vjp(fn, *filter(_is_floating, own), has_aux=True)
            parts = self._outputs.floating.tile(cotangents, start, rows)
            grads = floating.added(grads, pull(parts), start, rows)
            return outs and self._outputs.added(outs, of_tile, start, rows), grads

        grads = floating.zeros([x for x in given if _is_floating(x)])
        return self._for_each(tile, (outs, grads), given)

    def _backward(self, given: Sequence[Any], cotangents: list[Any]) -> Any:
        """The gradient, for which each tile is computed again."""
        of_outputs = zip(cotangents, self._outputs.types, strict=True)
        floating = [x for x, t in of_outputs if _is_floating(t)]
        return self._of_all(self._gradients(given, floating, [])[1])

    def _with_gradient(self, *given: Any) -> Any:
        """Outputs, and the gradient of the one sum among them."""
        (loss,) = self._outputs.floating.types
        one, *_ = varying_alike([jnp.ones((), loss.dtype), *given])
        outs, grads = self._gradients(given, [one], self._zeros())
        return self._outputs.cast(outs), grads

    def _scaled(self, grads: Any, cotangents: list[Any]) -> Any:
        """The gradient of a loss that is this sum times a number."""
        of_outputs = zip(cotangents, self._outputs.types, strict=True)
        (factor,) = [x for x, t in of_outputs if _is_floating(t)]
        return self._of_all([x * factor.astype(x.dtype) for x in grads])

    def _of_all(self, grads: list[Array]) -> tuple[Any, ...]:
        """Gradients in the dtypes of what they are of; None of what is not floating."""
        of = iter(self._read.floating.cast(grads))
        return tuple(next(of) if _is_floating(t) else None for t in self._read.types)
