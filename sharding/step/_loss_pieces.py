"""A traced loss in pieces, which are differentiated one by one, from the last to the first.

A loop over stacked layers is a piece. Others end where the backward pass completes gradients of
many parameters. Operations on parameters alone belong to each piece that uses their results.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import Equation, Graph
from sharding.collectives._map_arrays import to_sum_dtype
from sharding.loss._derivatives import Differentiated, bits, members
from sharding.loss._effects import Run, evaluate, prints
from sharding.step._global_gradients import GlobalLoss
from sharding.step._layer_scan import (
    LayerScan,
    LoopCotangents,
    Microbatches,
    Read,
    Take,
    cast_params,
)
from sharding.step._microbatches import inverse_weight

_MOST = 32  # pieces, of as many bytes of parameters each, beside loops


class Piece(NamedTuple):
    """A piece; parameters and values are numbered as in the graph."""

    equations: list[Equation]  # without the loop
    printed: list[Equation]  # that nothing needs, but for what they print
    params: list[int]  # parameters, cast or not
    given: list[int]  # values of earlier pieces, and arguments of the loss beside parameters
    values: list[int]  # that the equations compute: results, or operands of the loop
    loop: LayerScan | None
    complete: list[int]  # parameters that no earlier piece uses

    @property
    def results(self) -> tuple[int, ...]:
        return tuple(self.values) if self.loop is None else self.loop.eqn.results


class ForwardPass(NamedTuple):
    """What the backward pass needs of the forward pass; of several micro-batches, stacked."""

    values: dict[int, Any]
    pieces: list[Any]  # of each but the last: its derivative, or what enters each layer of a loop
    cotangents: dict[int, Any]  # by the last piece, which is differentiated in the forward pass
    grads: dict[int, Any]  # by the last piece; the sums over micro-batches


# From the gradients that a piece completes, what the layers of a loop return, and the cotangents of
# earlier pieces to the latter, perhaps behind a barrier.
Visit = Callable[[dict[int, Any], Any, dict[int, Any]], dict[int, Any]]


class LossPieces:
    """A loss of parameters, which are the first inputs of an exact graph, in pieces.

    The loss returns a total, its weight, a model state, and more.
    """

    def __init__(
        self,
        loss: GlobalLoss,
        held: list[jax.Array],
        graph: Graph,
        loops: list[LayerScan],
        microbatches: Microbatches,
        read: Read,  # reads the parameters of a layer of a loop
    ):
        self.loss, self.held, self.graph, self.microbatches = loss, held, graph, microbatches
        self._views = cast_params(graph, len(held))
        trained = {i for i, leaf in enumerate(loss.leaves) if leaf.trained}
        self._trained = bits(trained)
        self._differentiated = Differentiated.of(graph, self._trained)
        self._outside = trained.difference(*(loop.params for loop in loops))
        known = graph.producer.keys() | graph.constants.keys()
        self._of_batch = set(range(len(held), len(graph.types))) - known
        loops = [loop._replace(loss=loss, read=read) for loop in loops]
        self.pieces = self._divide({loop.eqn.results: loop for loop in loops})

    def _is_active(self, value: int) -> bool:
        """Whether the derivative passes through a value."""
        return value in self._differentiated.values

    @property
    def _stores_derivatives(self) -> bool:
        """Whether pieces are not computed again: of one micro-batch, if devices hold parameters."""
        return self.microbatches.number == 1 and not self.loss.layout.recomputes

    @property
    def read(self) -> set[int]:
        """The parameters that are read outside of the layers of loops."""
        return {self._views[v].param for piece in self.pieces for v in piece.params}

    # --- Division ---------------------------------------------------------------------------------

    def _divide(self, loops: dict[tuple[int, ...], LayerScan]) -> list[Piece]:
        graph, of_batch = self.graph, self._of_batch
        inputs = set(of_batch)
        needed = {e.results for e in graph.needed(graph.outputs, graph.constants)[0]}
        steps: list[Equation] = []  # in order: those on values of the batch
        first: dict[int, int] = {}  # of parameters outside of loops, the step that uses each first

        def use(values: Any, step: int) -> None:
            for v in filter(self._is_active, set(values) - of_batch):
                read = members(self._differentiated.reads[v])
                first.update({i: step for i in read if i in self._outside and i not in first})

        for eqn in graph.equations:
            loop = loops.get(eqn.results)
            of_batch_or_loop = loop is not None or of_batch.intersection(eqn.operands)
            if prints(eqn) or (eqn.results in needed and of_batch_or_loop):
                use(loop.others.values() if loop else eqn.operands, len(steps))
                of_batch.update(eqn.results)
                steps.append(eqn)
        use(graph.outputs, max(len(steps) - 1, 0))

        # A piece starts where the backward pass has completed gradients of enough bytes.
        sizes = {i: x.size * x.dtype.itemsize for i, x in enumerate(self.held)}
        starts, pending = {0}, 0
        enough = sum(x for i, x in sizes.items() if self._trained >> i & 1) / _MOST
        for k in reversed(range(len(steps))):
            pending += sum(sizes[i] for i, step in first.items() if step == k)
            if steps[k].results in loops:
                starts |= {k, k + 1}  # what follows the last loop is a piece, be it empty
            elif pending and pending >= enough:
                starts.add(k)
            pending *= k not in starts

        bounds = [*sorted(starts), len(steps)]
        pieces = []
        for start, end in itertools.pairwise(bounds):
            later = {v for eqn in steps[end:] for v in eqn.operands} | set(graph.outputs)
            own = steps[start:end]
            loop = loops.get(own[0].results) if own else None
            if loop is not None:
                stacked = frozenset(k for k, v in loop.others.items() if v in of_batch)
                loop, values = loop._replace(stacked=stacked), list(loop.others.values())
            elif end == len(steps):
                values = list(graph.outputs)
            else:
                values = [v for eqn in own for v in eqn.results if v in later]
            printed = [] if loop else [e for e in own if prints(e) and e.results not in needed]
            roots = [*values, *(v for eqn in printed for v in eqn.operands)]
            before = inputs.union(v for eqn in steps[:start] for v in eqn.results)
            known = before | graph.constants.keys() | self._views.keys()
            equations, _ = graph.needed(roots, known)
            read = {v for eqn in equations for v in eqn.operands}.union(roots)
            complete = [i for i, step in first.items() if start <= step < max(end, 1)]
            reads = sorted(read & self._views.keys()), sorted(read & before)
            pieces.append(Piece(equations, printed, *reads, values, loop, complete))
        return pieces

    # --- Forward ----------------------------------------------------------------------------------

    def forward(
        self, arguments: Callable[[Any, Any], Any], model_state: Any, each: Any
    ) -> tuple[Any, ForwardPass]:
        """The results of the loss, stacked except for the model state; and for the backward pass.

        Args:
          arguments: of a model state and one of ``each``: those of the loss.
          model_state: the first.
          each: of the micro-batches, stacked if there are several.
        """
        many = self.microbatches
        if many.number == 1 or not many.in_turn:
            args = many.each(lambda x: jax.tree.leaves(arguments(model_state, x)), each)
            values, pieces = self._earlier(args, many)
            each = {v: values[v] for v in self.pieces[-1].given}
            values = self._kept(values)
        if many.number == 1:
            results, cotangents, grads = self._last(each)
            return results, ForwardPass(values, pieces, cotangents, grads)

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            (model_state, sums), kept = carry, None
            if many.in_turn:
                args = jax.tree.leaves(arguments(model_state, x))
                x, pieces = self._earlier(args, many._replace(number=1))
                kept = self._kept(x), pieces
            (total, weight, model_state, more), cotangents, grads = self._last(x)
            for i, g in grads.items():
                sums = sums | {i: sums[i] + (g * weight.astype(g.dtype)).astype(sums[i].dtype)}
            return (model_state, sums), ((total, weight, more), cotangents, kept)

        zeros = self._by_param(self._taps(self.pieces[-1], many.sum_dtype))
        carry, (results, cotangents, kept) = jax.lax.scan(step, (model_state, zeros), each)
        (model_state, grads), (total, weight, more) = carry, results
        if many.in_turn:
            values, pieces = kept
        weights = to_sum_dtype(weight)
        share = weights * inverse_weight(jnp.sum(weights))

        def scale(x: jax.Array) -> jax.Array:
            return x * jnp.expand_dims(share, range(1, x.ndim)).astype(x.dtype)

        cotangents = {v: scale(x) for v, x in cotangents.items()}
        grads = {i: g * inverse_weight(jnp.sum(weights)).astype(g.dtype) for i, g in grads.items()}
        return (total, weight, model_state, more), ForwardPass(values, pieces, cotangents, grads)

    def _kept(self, values: dict[int, Any]) -> dict[int, Any]:
        return {v: values[v] for piece in self.pieces[:-1] for v in piece.given}

    def _earlier(self, args: Any, microbatches: Microbatches) -> tuple[dict[int, Any], list[Any]]:
        """The values of all pieces but the last, and what each stores."""
        values = dict(zip(range(len(self.held), len(self.graph.types)), args, strict=False))
        pieces: list[Any] = []
        for piece in self.pieces[:-1]:
            if piece.loop is not None:
                operands = dict(zip(piece.loop.others, self._run(piece, {}, values), strict=True))
                outs, kept = piece.loop.forward(operands, microbatches)
            elif self._stores_derivatives:
                outs, kept = self._derivative(
                    piece, values, set(filter(self._is_active, piece.values))
                )
            else:  # computed again
                given = {v: values[v] for v in piece.given}
                run = functools.partial(self._run, piece, {})
                outs, kept = microbatches.each(run, given), None
            values |= zip(piece.results, outs, strict=True)
            pieces.append(kept)
        return values, pieces

    def _last(self, values: dict[int, Any]) -> tuple[Any, dict[int, Any], dict[int, Any]]:
        """The results of the loss, the cotangents of earlier values, and gradients."""
        last = self.pieces[-1]
        outs, derivative = self._derivative(last, values, {last.values[0]})
        results = jax.tree.unflatten(self.graph.out_treedef, outs)
        total, weight = results[:2]
        # Divided before it is differentiated: float16 overflows in sums.
        seed = inverse_weight(jnp.asarray(weight, total.dtype))
        grads, cotangents = derivative({last.values[0]: seed})
        return results, cotangents, self._by_param(grads)

    def _taps(self, piece: Piece, sum_dtype: Any = lambda dtype: None) -> dict[int, jax.Array]:
        """What is differentiated in the place of parameters: zeros."""
        views = {v: self._views[v].param for v in piece.params if self._is_active(v)}
        return {
            v: self.loss.tap(i, self.held[i].shape, sum_dtype(self.held[i].dtype))
            for v, i in views.items()
        }

    def _by_param(self, grads: dict[int, Any]) -> dict[int, Any]:
        """From gradients of parameters as they are cast, those of the parameters."""
        sums: dict[int, Any] = {}
        for v, x in grads.items():
            _add_to(sums, {self._views[v].param: x})
        return sums

    def _run(
        self, piece: Piece, taps: dict[int, Any], values: dict[int, Any], run: Run = Run.FIRST
    ) -> list[Any]:
        """What a piece computes; ``values`` may have parameters as they are held."""
        held, values = dict(enumerate(self.held)) | values, self.graph.constants | values
        sliced = {piece.loop.eqn.operands[k] for k in piece.loop.frozen} if piece.loop else ()
        for v in piece.params:
            view = self._views[v]
            cast = view.cast(held[view.param])
            values[v] = cast if v in sliced else self.loss.use(view.param, cast, taps.get(v))
        evaluate(piece.equations, values, run)
        if run is Run.FIRST:
            evaluate(piece.printed, values, run)
        return [values[v] for v in piece.values]

    def _derivative(
        self, piece: Piece, values: dict[int, Any], by: set[int], how: Run = Run.FIRST
    ) -> tuple[Any, Any]:
        """What a piece computes; a function of the cotangents of some of it: those it takes."""

        def run(taps: dict[int, Any], given: dict[int, Any]) -> tuple[Any, Any]:
            outs = self._run(piece, taps, values | given, how)
            return {v: x for v, x in zip(piece.values, outs, strict=True) if v in by}, outs

        given = {v: values[v] for v in piece.given if self._is_active(v)}
        _, derivative, outs = jax.vjp(run, self._taps(piece), given, has_aux=True)
        return outs, derivative

    # --- Backward ---------------------------------------------------------------------------------

    def backward(self, take: Take, kept: ForwardPass, visit: Visit, how: Run) -> None:
        """Runs the pieces backward.

        Args:
          take: takes the gradients of a layer of a loop.
          kept: by the forward pass.
          visit: called with each piece when it has run.
          how: what runs again.
        """
        grads, cotangents = dict(kept.grads), dict(kept.cotangents)
        for k, piece in reversed(list(enumerate(self.pieces))):
            taken = None
            if k < len(self.pieces) - 1:
                own = {v: cotangents.pop(v) for v in piece.results if v in cotangents}
                if piece.loop is None:
                    more, given = self._backward(piece, kept, kept.pieces[k], own, how)
                else:
                    of_loop = piece, kept, kept.pieces[k], own, how
                    more, given, taken = self._loop_backward(*of_loop, take)
                _add_to(grads, self._by_param(more))
                _add_to(cotangents, given)
            complete = {i: grads.pop(i) for i in piece.complete}
            cotangents = visit(complete, taken, cotangents)

    def _backward(
        self, piece: Piece, kept: ForwardPass, derivative: Any, own: Any, how: Run
    ) -> Any:
        if derivative is not None:
            return derivative(own)
        held = {i: self.held[i] for i in {self._views[v].param for v in piece.params}}
        each = {v: kept.values[v] for v in piece.given}, own
        held, each = jax.lax.optimization_barrier((held, each))  # computed again

        def one(each: Any) -> tuple[Any, Any]:
            values, cotangents = each
            _, derivative = self._derivative(piece, held | values, set(cotangents), how)
            return derivative(cotangents)

        return self.microbatches.run(one, each, self._taps(piece, self.microbatches.sum_dtype))

    def _loop_backward(
        self, piece: Piece, kept: ForwardPass, entered: Any, own: Any, how: Run, take: Take
    ) -> tuple[Any, Any, Any]:
        loop = piece.loop
        assert loop is not None
        others, carried = loop.others, loop.carried
        operands = dict(zip(others, self._run(piece, {}, kept.values, how), strict=True))
        active = {k for k, v in others.items() if self._is_active(v)}
        at = LoopCotangents.of(
            loop,
            {k: x for k, x in operands.items() if k not in carried},
            entered,
            {j: own[v] for j, v in enumerate(piece.results) if v in own},
            active.difference(carried),
            by={k for k, v in others.items() if self._differentiated.reads[v]},
            microbatches=self.microbatches,
            how=how,
        )
        found, taken = loop.backward(at, take)
        cotangents: dict[int, Any] = {}
        of_params = {}  # of operands that are the same for all micro-batches
        for k in active & found.keys():
            if others[k] in self._of_batch:
                _add_to(cotangents, {others[k]: found[k]})
            else:
                x = found[k]
                if k in carried and self.microbatches.number > 1:
                    x = jnp.sum(x.astype(self.microbatches.sum_dtype(x.dtype)), axis=0)
                of_params[k] = x.astype(operands[k].dtype)

        def run(taps: dict[int, Any]) -> dict[int, Any]:
            outs = zip(others, self._run(piece, taps, kept.values, how), strict=True)
            return {k: x for k, x in outs if k in of_params}

        (grads,) = jax.vjp(run, self._taps(piece))[1](of_params)
        if self.microbatches.number > 1:
            grads = {i: g.astype(self.microbatches.sum_dtype(g.dtype)) for i, g in grads.items()}
        return grads, cotangents, taken


def _add_to(sums: dict[int, Any], more: dict[int, Any]) -> None:
    for key, x in more.items():
        sums[key] = sums[key] + x if key in sums else x
