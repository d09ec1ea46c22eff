"""What a loss does with the rows of its batch, proven from its trace: no numbers are computed.

``rows_of_loss`` says it in one word:

| word | the loss | of several devices, micro-batches or tiles |
|---|---|---|
| ``mean`` | is a mean of what each row gives alone | is the mean of theirs |
| ``sum`` | is a sum of that | is the sum of theirs |
| ``weighted`` | is made of ratios of two such sums | needs the sums and weights of all |
| ``random`` | is one of these, but a row's random numbers depend on its index | has other numbers |
| ``coupled`` | is none of these, or is not known to be | is another loss |

It is traced with n rows and with 2 n. The traces must be one program, but for sizes and numbers:
what a function decides by the number of its rows, at other numbers, is beyond the proof. What has
no rule counts as coupled.

Derivatives follow from values, except those that a user wrote: the rule of a ``custom_vjp`` or a
``custom_jvp`` is traced where it is met, and must give cotangents in which rows are apart. A kernel
is opaque, and so is a callback, unless ``keeps_rows_apart`` declares it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import Graph
from sharding.loss._row_states import (
    CLIPPED,
    Coupled,
    Rows,
    RowsMeet,
    Shared,
    State,
    Value,
    unknown,
)
from sharding.loss._row_walk import OTHER_PROGRAM, Walk, constant, located, steps_of


@dataclasses.dataclass(frozen=True)
class LossRows:
    """What is proven of a loss."""

    word: str  # mean, sum, weighted, random or coupled
    graph: Graph  # of its trace
    states: dict[Value, State]  # of the values of the graph
    walk: Callable[..., dict[Value, State]]  # which finds these
    cause: Coupled | None = None  # why it is coupled

    def given(self, values: Collection[Value]) -> "LossRows":
        """What is proven where some numbers of the graph are given, the same for all rows."""
        return _in_a_word(self.graph, functools.partial(self.walk, given=values))

    def type_of(self, result: int) -> Any:
        """Of a leaf that the loss returns."""
        return self.graph.types[self.graph.outputs[result]]

    @property
    def results(self) -> list[State]:
        """The states of all leaves that the loss returns; the first is the loss itself."""
        return [self.states[value] for value in self.graph.outputs]

    @property
    def ratios(self) -> list[tuple[Value | None, Value]]:
        """Of a weighted loss: pairs of values of the graph, a sum and the weight that it is over.

        Over devices or micro-batches both are added if the power of their states is 1, averaged if
        it is 0. With the weights of all rows in their place, the rest of the loss is linear in the
        sums. A sum is None where rows are divided before they are added. A value inside of another
        function is its variable.
        """
        loss = self.results[0]
        return sorted(loss.ratios, key=str) if isinstance(loss, Rows) else []

    def __str__(self) -> str:
        return f"{self.word}: {self.cause}" if self.cause else self.word


def rows_of_loss(
    fn: Callable[..., Any], args: Sequence[Any], has_rows: Sequence[bool], parts: int = 1
) -> LossRows:
    """What a loss does with the rows of those arguments that have rows, in their first dims.

    Arguments are trees of arrays, or of their types; scalars among them are shared by all rows.
    The loss is traced with all rows, and with those of one of so many parts, as a device gets them
    (with 2 in the place of 1); of one part, with twice as many.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    given = zip(has_rows, args, strict=True)
    rows = [has and jnp.ndim(x) > 0 for has, arg in given for x in jax.tree.leaves(arg)]
    counts = {x.shape[0] for x, has in zip(leaves, rows, strict=True) if has}
    if len(counts) > 1:
        raise ValueError(
            f"the arrays of a batch have {sorted(counts)} rows, in their first dims. Each needs as "
            "many; what is no batch is another argument."
        )
    count = max(2, *counts, 2)  # a single row looks as what is broadcast
    of_twin = max(2, count // parts)
    if of_twin == count or count % parts:
        of_twin = 2 * count

    def traced(count: int) -> Graph:
        avals = [x if isinstance(x, jax.ShapeDtypeStruct) else plain_type(x) for x in leaves]
        types = [
            x.update(shape=(count, *x.shape[1:])) if has else x
            for x, has in zip(avals, rows, strict=True)
        ]
        flat = lambda leaves: fn(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        return Graph(flat, types, [False] * len(types), exact=True)

    graph = traced(count)
    try:
        twin = traced(of_twin)
    except Exception as error:  # of the user's function, whatever it raises
        reason = f"it cannot be traced with {of_twin} rows in place of {count}: {error}"
        return _in_a_word(graph, functools.partial(_states, graph, None, rows, count, 2), reason)
    growth = Fraction(of_twin, count)
    return _in_a_word(graph, functools.partial(_states, graph, twin, rows, count, growth))


def plain_type(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, a number or a type, without a sharding."""
    if not hasattr(x, "dtype"):
        x = jnp.asarray(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    dtype = x.dtype if is_key else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)


def _states(
    graph: Graph,
    twin: Graph | None,
    rows: list[bool],
    count: int,
    growth: Fraction | int,
    given: Collection[Value] = (),
) -> dict[Value, State]:
    """The states of all values of a graph, beside that of ``growth`` times the rows."""
    states: dict[Value, State] = {
        value: Rows((0,), count) if has else unknown(graph.types[value])
        for value, has in enumerate(rows)
    }
    if twin and graph.constants.keys() != twin.constants.keys():
        return dict.fromkeys(graph.outputs, Coupled(OTHER_PROGRAM))
    for value, number in graph.constants.items():
        states[value] = constant(number, twin and twin.constants.get(value), growth)
    twins = (twin.equations, twin.types) if twin else (None, ())
    try:
        steps = steps_of(graph.equations, twins[0], graph.types, twins[1], growth)
        Walk(growth).run(steps, states, given)
    except RowsMeet as meet:
        return dict.fromkeys(graph.outputs, Coupled(str(meet)))
    return states


def _in_a_word(
    graph: Graph, walk: Callable[..., dict[Value, State]], untraced: str = ""
) -> LossRows:
    """What is proven of a loss; ``untraced`` says why there is no other trace to compare with."""
    states = walk()
    loss: Any = states[graph.outputs[0]]
    if untraced and not isinstance(loss, Coupled):
        states = dict.fromkeys(graph.outputs, Coupled(untraced))
        loss = states[graph.outputs[0]]
    found = functools.partial(LossRows, graph=graph, states=states, walk=walk)
    if isinstance(loss, Coupled):
        return found("coupled", cause=loss)
    ratios = loss.ratios if isinstance(loss, Rows) else frozenset()
    if not isinstance(loss, Rows | Shared):
        reason = CLIPPED
    elif isinstance(loss, Rows) and not loss.is_sum:
        reason = "the loss is no sum over rows"
    elif loss.power is None:
        reason = "the loss depends on the number of rows"
    elif loss.power != 0 and (ratios or loss.power != 1):
        reason = f"with k times the rows the loss is k ** {loss.power} times as large"
    elif isinstance(loss, Rows) and loss.random:
        return found("random")
    else:
        return found("weighted" if ratios else "sum" if loss.power else "mean")
    return found("coupled", cause=_at_its_end(graph, reason))


def _at_its_end(graph: Graph, reason: str) -> Coupled:
    """Why a loss is coupled, with the equation that computes it."""
    if graph.outputs[0] not in graph.producer:  # an input
        return Coupled(reason)
    number = graph.producer[graph.outputs[0]]
    return located(Coupled(reason), steps_of(graph.equations, None, graph.types), number)
