"""Stacks: the loops of a traced loss over stacked parameters. How they are found, and how they run.

What is taken out of its loss is found here. A step that evaluates the whole loss finds loops as it
meets them (``Evaluator._scan``).

Remat and the planner run a stack's loop with layers of their own; the update in the backward pass
runs its layers with passes of its own (``StackPasses``). Layers with numbers, of other operations
each perhaps, are no stack: pieces of a loss, or layers of a plan.

What numbers number, with ``update="backward"``, too, has a type for each, which mypy keeps apart:

| type | numbers | is also |
|---|---|---|
| ``Value`` | values of a graph: of the loss in ``LossPieces``, elsewhere of the update | |
| ``Slot`` | parameters, and behind them leaves of the optimizer state | an input of the update |
| ``ParamNumber`` | parameters, in the order of their tree | a ``Slot``; an input of the loss |
| ``Operand`` | operands of a stack's loop | an input of its body |
| ``Result`` | results of a stack's loop | an output of its body |

The outputs of the update replace its slots, in their order. What is carried by a loop is an operand
and a result, whose numbers differ by the number of constants before it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, NewType

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from optax_ext.equations import Scan, record_of
from optax_ext.traced_graph import Equation, Graph, Value, bind
from sharding._jaxprs import run_scan, without_checkpoints
from sharding.loss._derivatives import Differentiated
from sharding.offload._layer_rules import UNSLICED, bind_to_layer, operand_dims

Slot = NewType("Slot", Value)
ParamNumber = NewType("ParamNumber", Slot)
Operand = NewType("Operand", int)
Result = NewType("Result", int)

_KINDS = (jnp.floating, jnp.complexfloating)


def param_numbers(count: int) -> list[ParamNumber]:
    return [ParamNumber(Slot(Value(i))) for i in range(count)]


class View(NamedTuple):
    """A parameter as a loss reads it."""

    param: ParamNumber
    casts: tuple[Equation, ...] = ()  # to other floats, before it is gathered
    # What changes each layer of it by itself, after that: equations, and their constant operands.
    changes: tuple[tuple[Equation, tuple[Any, ...]], ...] = ()

    def cast(self, x: jax.Array) -> jax.Array:
        for eqn in self.casts:
            (x,) = bind(eqn, [x])
        return x

    def change(self, x: jax.Array) -> jax.Array:
        """What the loop slices, of a parameter, for one layer: (...) to (...)."""
        if not self.changes:
            return x
        x = x[None]  # rules of layers are of arrays with a dim of layers
        for eqn, constants in self.changes:
            operands = [x if constant is None else constant for constant in constants]
            (x,) = bind_to_layer(eqn, 0, operands, None)
        return x[0]


class Stack(NamedTuple):
    """A loop over layers. Its operands are the inputs of its body, its results the outputs."""

    eqn: Equation
    own: dict[Operand, View]  # trained parameters that it slices, and that nothing else reads
    frozen: dict[Operand, View]  # untrained parameters that it slices

    @property
    def scan(self) -> Scan:
        record = record_of(self.eqn)
        assert isinstance(record, Scan)
        return record

    @property
    def params(self) -> list[ParamNumber]:
        return [view.param for view in self.own.values()]

    @property
    def others(self) -> dict[Operand, Value]:
        """The operands that the loop gets as they are."""
        every = {Operand(k): v for k, v in enumerate(self.eqn.operands)}
        return {k: v for k, v in every.items() if k not in self.own}

    @property
    def carried(self) -> range:
        """The operands that are carried; constants are before them, slices behind them."""
        return range(self.scan.num_consts, self.scan.num_consts + self.scan.num_carry)

    def of(self, params: Container[ParamNumber]) -> "Stack":
        """With these parameters, trained or not, as its own; it gets others as they are."""
        both = self.own | self.frozen
        return self._replace(own={k: x for k, x in both.items() if x.param in params})

    def run(
        self,
        operands: Sequence[Any],
        layer: Callable[..., Sequence[Any]],
        segment: int = 1,
        **options: Any,
    ) -> list[Any]:
        """The results, with another function in the place of the body.

        So many layers as ``segment`` says are computed again as one.
        """
        scan, length = self.scan, self.scan.options["length"]
        if segment == 1:
            return run_scan(scan, operands, layer, **options)

        def layers(*args: Any) -> list[Any]:
            return run_scan(scan, args, layer, **options, length=segment)

        last, num_carry = self.carried.stop, scan.num_carry
        shape = length // segment, segment
        parts = [x.reshape(*shape, *x.shape[1:]) for x in operands[last:]]
        again = jax.checkpoint(layers, prevent_cse=False)
        outs = run_scan(scan, [*operands[:last], *parts], again, **options, length=shape[0])
        return [*outs[:num_carry], *(x.reshape(length, *x.shape[2:]) for x in outs[num_carry:])]


# --- How stacks are found -------------------------------------------------------------------------


def find_stacks(graph: Graph, num_params: int, differentiated: Differentiated) -> list[Stack]:
    """The loops of an exact graph, whose first inputs are parameters, over layers.

    A loop owns the trained parameters that it slices, cast or not, by which the first output has no
    other derivative. One that owns none is a stack, too. Of untrained ones nothing is asked.
    """
    equations = graph.needed(graph.outputs, graph.constants)[0]
    views = _layer_views(graph, num_params)
    values = differentiated.values - views.keys()
    active = {eqn.results: eqn for eqn in equations if values.intersection(eqn.results)}
    read = (v for eqn in active.values() for v in eqn.operands if v in views)
    uses = Counter(views[v].param for v in read)
    stacks: list[Stack] = []
    for eqn in equations:
        scan = record_of(eqn)
        if not isinstance(scan, Scan) or not scan.options["length"]:
            continue
        own, frozen = dict[Operand, View](), dict[Operand, View]()
        first = scan.num_consts + scan.num_carry  # the first slice
        sliced = {Operand(k): views[v] for k, v in enumerate(eqn.operands) if v in views}
        for k, view in sliced.items():
            is_trained = differentiated.params >> view.param & 1
            if k >= first and not is_trained:
                frozen[k] = view
            elif k >= first and eqn.results in active and uses[view.param] == 1:
                own[k] = view
        stacks.append(Stack(eqn, own, frozen))
    return stacks


def params_of_one_loop(closed: ClosedJaxpr, params: int) -> set[ParamNumber]:
    """Those parameters of a loss that one loop slices, cast or not, and nothing else reads.

    Args:
      closed: the traced loss, whose first inputs are parameters; checkpoints are looked into.
      params: the bits of inputs.
    """
    graph = Graph.of(without_checkpoints(closed))
    stacks = find_stacks(graph, params.bit_length(), Differentiated.of(graph, params))
    views = [view for stack in stacks for view in stack.own.values()]
    return {view.param for view in views if not view.changes}


def numbered_layers(names: Sequence[str]) -> list[str]:
    """The layer of each parameter, such as ``layers/3`` of ``layers/3/kernel``, or "" of none.

    It ends with the first number in the path that is one of several. Lists of modules have them,
    and modules of linen.
    """
    ends = [[x.span() for x in re.finditer(r"\d+(?=/|$)", name)] for name in names]
    numbers = defaultdict(set)
    for name, of_name in zip(names, ends, strict=True):
        for start, end in of_name:
            numbers[name[:start]].add(name[start:end])
    return [
        next((name[:end] for start, end in of_name if len(numbers[name[:start]]) > 1), "")
        for name, of_name in zip(names, ends, strict=True)
    ]


def cast_params(graph: Graph, num_params: int) -> dict[Value, View]:
    """Values of a graph that are parameters, its first inputs, cast or not."""
    views: dict[Value, View] = {i: View(i) for i in param_numbers(num_params)}
    for eqn in graph.equations:
        if _is_float_cast(graph, eqn) and eqn.operands[0] in views:
            view = views[eqn.operands[0]]
            views[eqn.results[0]] = view._replace(casts=(*view.casts, eqn))
    return views


def _layer_views(graph: Graph, num_params: int) -> dict[Value, View]:
    """Those, and others that operations make of each layer of a parameter by itself."""
    views = cast_params(graph, num_params)
    for eqn in graph.equations:
        changed = [k for k, v in enumerate(eqn.operands) if v in views]
        others = {v for v in eqn.operands if v not in views}
        if len(changed) != 1 or len(eqn.results) != 1 or eqn.results[0] in views:
            continue
        dims = operand_dims(graph, eqn, 0) if graph.constants.keys() >= others else None
        # All but the parameter is used in full, whose layers are its first dim, too.
        if dims == [0 if k in changed else UNSLICED for k in range(len(eqn.operands))]:
            view = views[eqn.operands[changed[0]]]
            change = eqn, tuple(map(graph.constants.get, eqn.operands))
            views[eqn.results[0]] = view._replace(changes=(*view.changes, change))
    return views


def _is_float_cast(graph: Graph, eqn: Equation) -> bool:
    """Whether an equation casts to what has a gradient, and from it."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = graph.types[eqn.operands[0]].dtype, eqn.params["new_dtype"]
    return any(jnp.issubdtype(before, kind) and jnp.issubdtype(after, kind) for kind in _KINDS)
