"""Evaluates a step leaf by leaf, so that quantized or offloaded state is live for one leaf only.

XLA may compute every parameter's intermediates before it uses the first. Here a barrier keeps the
deferred inputs of one output, such as transfers from host memory, from being read before the
previous outputs have been computed.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax

from optax_ext import _matrix_passes
from optax_ext._types import Array, Tree
from optax_ext.traced_graph import Graph, evaluate


def output_groups(graph: Graph, roots: Sequence[int]) -> list[list[int]]:
    """Returns groups of outputs in execution order: each root, with all that need no later one."""
    groups = []
    read = 0
    left = set(range(len(graph.outputs)))
    for root in [*roots, *range(len(graph.outputs))]:
        if root not in left:
            continue
        read |= graph.reads[graph.outputs[root]]
        ready = [j for j in sorted(left) if not graph.reads[graph.outputs[j]] & ~read]
        left -= set(ready)
        groups.append(ready)
    return groups


class ScheduledRun:
    """One evaluation of a graph whose outputs replace its inputs, group by group."""

    def __init__(self, graph: Graph, inputs: Sequence[Any], after: Sequence[Any] = ()):
        self.graph = graph
        self.inputs = inputs  # as many outputs as inputs
        self.values: dict[Any, Any] = dict(graph.constants)  # computed so far
        self.values |= {i: x for i, x in enumerate(inputs) if not graph.reads[i]}
        self.outputs: dict[int, Any] = {}  # computed so far
        self.barrier = tuple(after)  # arrays computed before the next deferred input is read

    def run(self, roots: Sequence[int]) -> list[Any]:
        """Evaluates the graph in the execution order of ``roots``; returns all outputs."""
        for group in output_groups(self.graph, roots):
            self.run_group(group)
        return [self.outputs[j] for j in range(len(self.graph.outputs))]

    def run_group(self, outputs: list[int]) -> None:
        """Computes some outputs; the next group's deferred inputs wait for them."""
        self.compute([self.graph.outputs[j] for j in outputs])
        self.outputs |= {j: self.store(j, self.values[self.graph.outputs[j]]) for j in outputs}
        replaced = tuple(self.outputs[j] for j in outputs if self.replaces_deferred(j))
        self.barrier = replaced or self.barrier

    def compute(self, values: Sequence[int]) -> None:
        """Computes values, and reads the deferred inputs that they need."""
        equations, inputs = self.graph.needed(values, self.values)
        if inputs:
            held = self.after_barrier([self.inputs[i] for i in inputs])
            self.values |= zip(inputs, self.load(held), strict=True)
        evaluate(equations, self.values)

    def after_barrier(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays, not read before those of ``barrier`` have been computed."""
        return _matrix_passes.hold(list(arrays), self.barrier)

    def replaces_deferred(self, output: int) -> bool:
        """Whether an output is the new value of a deferred input and depends on no other."""
        return self.graph.reads[output] == 1 << output

    def load(self, arrays: list[Any]) -> list[Any]:
        """Converts deferred inputs to operands of the graph's equations."""
        return arrays

    def store(self, output: int, x: Array) -> Any:
        """Converts a computed output to what the caller receives."""
        return x


def run_by_leaf(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    tree: Tree,
    state: Tree,
    is_deferred: Callable[[Any], bool],  # whether an array of the state waits for such a leaf
    make_run: Callable[[Graph, list[Any]], ScheduledRun] = ScheduledRun,
    portable: bool = False,
    kept: Container[str] = (),
) -> tuple[Any, Any]:
    """Evaluates ``fn(tree, state) -> (tree, state)`` for one leaf of ``tree`` after the other."""
    inputs, treedef = jax.tree.flatten((tree, state))
    num_roots = len(jax.tree.leaves(tree))
    deferred = [i >= num_roots and is_deferred(x) for i, x in enumerate(inputs)]

    def on_leaves(inputs: list[Any]) -> tuple[Any, Any]:
        return fn(*jax.tree.unflatten(treedef, inputs))

    graph = Graph(on_leaves, inputs, deferred, portable, kept)
    if str(graph.out_treedef) != str(treedef):
        raise ValueError(
            f"the transformation changes the structure of (updates, state) from {treedef} to "
            f"{graph.out_treedef}; it must return both in the structure it receives."
        )
    return jax.tree.unflatten(treedef, make_run(graph, inputs).run(range(num_roots)))
