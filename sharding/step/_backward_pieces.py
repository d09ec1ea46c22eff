"""A traced loss in pieces, which are differentiated one by one, from the last to the first.

A stack is a piece. Others end where the backward pass completes gradients of many parameters.
Operations on parameters alone belong to each piece that uses their results.

``jax.vjp`` of the loss, with rules of layers that write refs, would not do: refs have no memory
space, so that stacks in host memory are carried by the loop that writes them, and the micro-batches
inside of a layer need that loop, too. Pieces would stay for all parameters outside of stacks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import Equation, Graph, Value, evaluate
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.loss._derivatives import Differentiated, carried_derivatives, members
from sharding.loss._effects import Prints, has_prints, printing_less
from sharding.loss._evaluate import use
from sharding.loss._stack import Operand, ParamNumber, Result, View, cast_params, param_numbers
from sharding.step._global_gradients import GlobalLoss
from sharding.step._loss import inverse_weight
from sharding.step._stack_backward import Microbatches, StackBackward, StackPasses, Take

_MOST = 32  # pieces, of as many bytes of parameters each, beside stacks


class Piece(NamedTuple):
    """A piece of a loss."""

    equations: list[Equation]  # without the stack's loop
    printed: list[Equation]  # that nothing needs, but for what they print
    params: list[Value]  # parameters, cast or not
    given: list[Value]  # values of earlier pieces, and arguments of the loss beside parameters
    values: list[Value]  # that the equations compute: results, or operands of the stack
    passes: StackPasses | None  # of the stack, if it is one
    complete: list[ParamNumber]  # that no earlier piece uses

    @property
    def results(self) -> tuple[Value, ...]:
        return tuple(self.values) if self.passes is None else self.passes.stack.eqn.results


class ForwardPass(NamedTuple):
    """What the backward pass needs of the forward pass; of several micro-batches, stacked."""

    values: dict[Value, Any]
    pieces: list[Any]  # of each but the last: its derivative, or what enters each layer of a stack
    cotangents: dict[Value, Any]  # by the last piece, which is differentiated in the forward pass
    grads: dict[ParamNumber, Any]  # by the last piece; the sums over micro-batches


@dataclasses.dataclass
class Pending:
    """What the backward pass hands on to earlier pieces, as it stands behind one of them."""

    grads: dict[ParamNumber, Any]  # that are not complete
    cotangents: dict[Value, Any]  # of what earlier pieces compute


class _Division:
    """A loss in steps, in order: operations on values of the batch, and stacks."""

    def __init__(
        self,
        graph: Graph,
        views: dict[Value, View],
        held: list[jax.Array],
        differentiated: Differentiated,
        passes: list[StackPasses],
    ):
        self.graph, self.views, self.differentiated = graph, views, differentiated
        self.sizes = [x.size * x.dtype.itemsize for x in held]
        self.passes = {one.stack.eqn.results: one for one in passes}
        of_stacks = {i for one in passes for i in one.stack.params}
        trained = set(members(differentiated.params))
        self.outside = {i for i in param_numbers(len(held)) if i in trained} - of_stacks
        inputs = map(Value, range(len(held), len(graph.types)))
        self.inputs = {v for v in inputs if v not in graph.producer and v not in graph.constants}
        self.of_batch = set(self.inputs)  # with all values that depend on these
        self.needed = {e.results for e in graph.needed(graph.outputs, graph.constants)[0]}
        self.steps: list[Equation] = []
        self.first: dict[ParamNumber, int] = {}  # the step that uses each first, outside of stacks
        for eqn in graph.equations:
            stack = self.passes.get(eqn.results)
            of_batch_or_stack = stack is not None or self.of_batch.intersection(eqn.operands)
            if has_prints(eqn) or (eqn.results in self.needed and of_batch_or_stack):
                self._use(stack.stack.others.values() if stack else eqn.operands, len(self.steps))
                self.of_batch.update(eqn.results)
                self.steps.append(eqn)
        self._use(graph.outputs, max(len(self.steps) - 1, 0))

    def _use(self, values: Iterable[Value], step: int) -> None:
        """Notes the parameters that a step uses by values that are of them alone."""
        for v in sorted(self.differentiated.values.intersection(values) - self.of_batch):
            read = set(members(self.differentiated.reads[v]))
            found = (i for i in self.outside if i in read and i not in self.first)
            self.first |= dict.fromkeys(found, step)

    def pieces(self) -> list[Piece]:
        bounds = [*self._starts(), len(self.steps)]
        return [self._piece(start, end) for start, end in itertools.pairwise(bounds)]

    def _starts(self) -> list[int]:
        """The first step of each piece: where gradients of enough bytes are complete."""
        enough = sum(self.sizes[i] for i in members(self.differentiated.params)) / _MOST
        starts, pending = {0}, 0
        for k in reversed(range(len(self.steps))):
            pending += sum(self.sizes[i] for i, step in self.first.items() if step == k)
            if self.steps[k].results in self.passes:
                starts |= {k, k + 1}  # what follows the last stack is a piece, be it empty
            elif pending and pending >= enough:
                starts.add(k)
            pending *= k not in starts
        return sorted(starts)

    def _piece(self, start: int, end: int) -> Piece:
        """The steps from ``start`` to ``end``, with what they need of parameters alone."""
        graph, own = self.graph, self.steps[start:end]
        before = self.inputs.union(v for eqn in self.steps[:start] for v in eqn.results)
        later = {v for eqn in self.steps[end:] for v in eqn.operands} | set(graph.outputs)
        passes = self.passes.get(own[0].results) if own else None
        if passes is not None:
            others = passes.stack.others
            stacked = frozenset(k for k, v in others.items() if v in self.of_batch)
            passes, values = passes._replace(stacked=stacked), list(others.values())
        elif end == len(self.steps):
            values = list(graph.outputs)
        else:
            values = [v for eqn in own for v in eqn.results if v in later]
        not_needed = [] if passes else [e for e in own if e.results not in self.needed]
        printed = [eqn for eqn in not_needed if has_prints(eqn)]
        roots = [*values, *(v for eqn in printed for v in eqn.operands)]
        known = before | graph.constants.keys() | self.views.keys()
        equations, _ = graph.needed(roots, known)
        read = {v for eqn in equations for v in eqn.operands}.union(roots)
        params, given = sorted(read & self.views.keys()), sorted(read & before)
        complete = [i for i, step in self.first.items() if start <= step < max(end, 1)]
        return Piece(equations, printed, params, given, values, passes, complete)


class LossPieces:
    """A loss of parameters, which are the first inputs of an exact graph, in pieces.

    The loss returns a total, its weight, a model state, and more.
    """

    def __init__(
        self,
        loss: GlobalLoss,
        held: list[jax.Array],
        graph: Graph,
        differentiated: Differentiated,
        passes: list[StackPasses],
        microbatches: Microbatches,
    ):
        self.loss, self.held, self.graph, self.microbatches = loss, held, graph, microbatches
        self._views, self._differentiated = cast_params(graph, len(held)), differentiated
        self.pieces = _Division(graph, self._views, held, differentiated, passes).pieces()

    def _is_active(self, value: Value) -> bool:
        """Whether the derivative passes through a value."""
        return value in self._differentiated.values

    @property
    def read(self) -> set[ParamNumber]:
        """The parameters that are read outside of the layers of stacks."""
        return {self._views[v].param for piece in self.pieces for v in piece.params}

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

        def inputs_of(model_state: Any, x: Any) -> list[Any]:
            return jax.tree.leaves(arguments(model_state, x))

        def one(model_state: Any, x: Any) -> tuple[Any, Any]:
            """A micro-batch: what the backward pass needs of earlier pieces; the last one."""
            values, stored = self._earlier(inputs_of(model_state, x), many._replace(number=1))
            return (self._kept(values), stored), self._last(values)

        if many.number == 1:
            kept, (results, cotangents, grads) = one(model_state, each)
        elif many.in_turn:
            kept, (results, cotangents, grads) = self._summed(one, model_state, each)
        else:  # all of them in a piece, then the next one
            args = many.each(functools.partial(inputs_of, model_state), each)
            values, stored = self._earlier(args, many)
            given = {v: values[v] for v in self.pieces[-1].given}
            last = lambda _, x: (None, self._last(x))  # noqa: E731
            _, (results, cotangents, grads) = self._summed(last, model_state, given)
            kept = self._kept(values), stored
        values, stored = kept
        return results, ForwardPass(values, stored, cotangents, grads)

    def _summed(
        self, one: Callable[[Any, Any], tuple[Any, Any]], model_state: Any, each: Any
    ) -> tuple[Any, Any]:
        """``one`` of all micro-batches, one after the other; gradients are summed, others stacked.

        The last piece divides by the weight of its micro-batch; what leaves here, by that of all.
        """

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            model_state, sums = carry
            kept, ((total, weight, model_state, more), cotangents, grads) = one(model_state, x)
            for i, g in grads.items():
                sums = sums | {i: sums[i] + (g * weight.astype(g.dtype)).astype(sums[i].dtype)}
            return (model_state, sums), (kept, (total, weight, more), cotangents)

        zeros = self._by_param(self._taps(self.pieces[-1], self.microbatches.sum_dtype))
        carry, (kept, results, cotangents) = jax.lax.scan(step, (model_state, zeros), each)
        (model_state, grads), (total, weight, more) = carry, results
        weights = to_sum_dtype(weight)  # (microbatch,)
        all_weights = jnp.sum(weights)
        share = weights * inverse_weight(all_weights)

        def scale(x: jax.Array) -> jax.Array:
            return x * jnp.expand_dims(share, range(1, x.ndim)).astype(x.dtype)

        cotangents = {v: scale(x) for v, x in cotangents.items()}
        grads = {i: g * inverse_weight(all_weights).astype(g.dtype) for i, g in grads.items()}
        return kept, ((total, weight, model_state, more), cotangents, grads)

    def _kept(self, values: dict[Value, Any]) -> dict[Value, Any]:
        return {v: values[v] for piece in self.pieces[:-1] for v in piece.given}

    def _earlier(self, args: Any, microbatches: Microbatches) -> tuple[dict[Value, Any], list[Any]]:
        """The values of all pieces but the last, and what each stores."""
        inputs = map(Value, range(len(self.held), len(self.graph.types)))
        values = dict(zip(inputs, args, strict=False))
        pieces: list[Any] = []
        # One micro-batch, whose parameters devices hold, is not computed again.
        stores = self.microbatches.number == 1 and not self.loss.layout.recomputes
        for piece in self.pieces[:-1]:
            if piece.passes is not None:
                operands = self._operands(piece, {}, values, Prints.ALL)
                outs, kept = piece.passes.forward(operands, microbatches)
            elif stores:
                by = set(filter(self._is_active, piece.values))
                outs, kept = self._derivative(piece, values, by)
            else:
                given = {v: values[v] for v in piece.given}
                run = functools.partial(self._run, piece, {})
                outs, kept = microbatches.each(run, given), None
            values |= zip(piece.results, outs, strict=True)
            pieces.append(kept)
        return values, pieces

    def _last(
        self, values: dict[Value, Any]
    ) -> tuple[Any, dict[Value, Any], dict[ParamNumber, Any]]:
        """The results of the loss, the cotangents of earlier values, and gradients."""
        last = self.pieces[-1]
        outs, derivative = self._derivative(last, values, {last.values[0]})
        results = jax.tree.unflatten(self.graph.out_treedef, outs)
        total, weight = results[:2]
        # Divided before it is differentiated: float16 overflows in sums.
        seed = inverse_weight(jnp.asarray(weight, total.dtype))
        grads, cotangents = derivative({last.values[0]: seed})
        return results, cotangents, self._by_param(grads)

    # --- A piece ----------------------------------------------------------------------------------

    def _taps(self, piece: Piece, sum_dtype: Any = lambda dtype: None) -> dict[Value, jax.Array]:
        """What is differentiated in the place of parameters: zeros."""
        views = {v: self._views[v].param for v in piece.params if self._is_active(v)}
        return {
            v: self.loss.leaves[i].tap(self.held[i].shape, sum_dtype(self.held[i].dtype))
            for v, i in views.items()
        }

    def _by_param(self, grads: dict[Value, Any]) -> dict[ParamNumber, Any]:
        """From gradients of parameters as they are cast, those of the parameters."""
        sums: dict[ParamNumber, Any] = {}
        for v, x in grads.items():
            _add_to(sums, {self._views[v].param: x})
        return sums

    def _run(
        self,
        piece: Piece,
        taps: dict[Value, Any],
        values: dict[Value, Any],
        prints: Prints = Prints.ALL,
    ) -> list[Any]:
        """What a piece computes; ``values`` may have parameters as they are held."""
        held: dict[Any, Any] = dict(enumerate(self.held)) | values
        values = self.graph.constants | values
        for v in piece.params:
            view = self._views[v]
            values[v] = use(self.loss.leaves[view.param], view.cast(held[view.param]), taps.get(v))
        printed = piece.printed if prints is Prints.ALL else []
        equations = (printing_less(eqn, prints) for eqn in [*piece.equations, *printed])
        evaluate([eqn for eqn in equations if eqn is not None], values)
        return [values[v] for v in piece.values]

    def _operands(
        self, piece: Piece, taps: dict[Value, Any], values: dict[Value, Any], prints: Prints
    ) -> dict[Operand, Any]:
        """Those of a stack that its loop gets as they are."""
        assert piece.passes is not None
        others = piece.passes.stack.others
        return dict(zip(others, self._run(piece, taps, values, prints), strict=True))

    def _derivative(
        self,
        piece: Piece,
        values: dict[Value, Any],
        by: set[Value],
        prints: Prints = Prints.ALL,
    ) -> tuple[Any, Any]:
        """What a piece computes; a function of the cotangents of some of it: those it takes."""

        def run(taps: dict[Value, Any], given: dict[Value, Any]) -> tuple[Any, Any]:
            outs = self._run(piece, taps, values | given, prints)
            return {v: x for v, x in zip(piece.values, outs, strict=True) if v in by}, outs

        given = {v: values[v] for v in piece.given if self._is_active(v)}
        _, derivative, outs = jax.vjp(run, self._taps(piece), given, has_aux=True)
        return outs, derivative

    # --- Backward ---------------------------------------------------------------------------------

    def backward(
        self, number: int, pending: Pending, take: Take, kept: ForwardPass, prints: Prints
    ) -> tuple[dict[ParamNumber, Any], Any]:
        """Runs a piece backward, behind all later ones.

        Args:
          number: of the piece. The forward pass differentiated the last one.
          pending: by later pieces; changed to what is pending for earlier ones.
          take: takes the gradients of a layer of a stack.
          kept: by the forward pass.
          prints: what the piece prints, which runs again.

        Returns:
          The gradients that are complete; what the layers of a stack return, stacked, else None.
        """
        piece, taken = self.pieces[number], None
        more: dict[Value, Any] = {}
        given: dict[Value, Any] = {}
        if piece is not self.pieces[-1]:
            stored, cotangents = kept.pieces[number], pending.cotangents
            own = {v: cotangents.pop(v) for v in piece.results if v in cotangents}
            if piece.passes is not None:
                if own:  # else a loop of frozen layers, before which nothing is trained
                    all_of = piece, kept, stored, own, prints, take
                    more, given, taken = self._stack_backward(*all_of)
            elif stored is not None:
                more, given = stored(own)
            else:
                more, given = self._piece_backward(piece, kept, own, prints)
            _add_to(pending.grads, self._by_param(more))
            _add_to(cotangents, given)
        return {i: pending.grads.pop(i) for i in piece.complete}, taken

    def _piece_backward(
        self, piece: Piece, kept: ForwardPass, own: dict[Value, Any], prints: Prints
    ) -> Any:
        """Gradients and cotangents by a piece that is computed again."""
        held = {i: self.held[i] for i in {self._views[v].param for v in piece.params}}
        each = {v: kept.values[v] for v in piece.given}, own
        held, each = jax.lax.optimization_barrier((held, each))  # else XLA stores what runs again

        def one(each: Any) -> tuple[Any, Any]:
            values, cotangents = each
            _, derivative = self._derivative(piece, held | values, set(cotangents), prints)
            return derivative(cotangents)

        return self.microbatches.run(one, each, self._taps(piece, self.microbatches.sum_dtype))

    def _stack_backward(
        self,
        piece: Piece,
        kept: ForwardPass,
        entered: dict[Operand, Any],
        own: dict[Value, Any],
        prints: Prints,
        take: Take,
    ) -> tuple[dict[Value, Any], dict[Value, Any], Any]:
        """Gradients outside of the stack, cotangents, and what its layers return, stacked."""
        assert piece.passes is not None
        stack, many = piece.passes.stack, self.microbatches
        others, carried = stack.others, stack.carried
        operands = self._operands(piece, {}, kept.values, prints)
        active = {k for k, v in others.items() if self._is_active(v)}
        results = {Result(j): own[v] for j, v in enumerate(piece.results) if v in own}
        moved = {k for k, v in others.items() if self._differentiated.reads[v]}
        body = stack.scan.body.jaxpr
        moved |= {k for k, view in stack.own.items() if view.param in piece.passes.update.of}
        in_layers = carried_derivatives(body, carried, moved, results)
        by = sorted(active.difference(carried).union(map(Operand, in_layers)))
        not_carried = {k: x for k, x in operands.items() if k not in carried}
        given = piece.passes, not_carried, entered, results, by
        found, taken = StackBackward(*given, many, prints).run(take)
        # Operands are values of the batch, or of parameters alone: the same in all micro-batches.
        cotangents: dict[Value, Any] = {}
        of_params = {}
        for k in active & found.keys():
            x = found[k]
            if k in piece.passes.stacked:
                _add_to(cotangents, {others[k]: x})
                continue
            if k in carried and many.number > 1:
                x = jnp.sum(x.astype(many.sum_dtype(x.dtype)), axis=0)
            of_params[k] = x.astype(operands[k].dtype)

        def run(taps: dict[Value, Any]) -> dict[Operand, Any]:
            outs = self._operands(piece, taps, kept.values, prints)
            return {k: x for k, x in outs.items() if k in of_params}

        (grads,) = jax.vjp(run, self._taps(piece))[1](of_params)
        if many.number > 1:
            grads = {v: g.astype(many.sum_dtype(g.dtype)) for v, g in grads.items()}
        return grads, cotangents, taken


def _add_to(sums: dict[Any, Any], more: dict[Any, Any]) -> None:
    for key, x in more.items():
        sums[key] = sums[key] + x if key in sums else x
