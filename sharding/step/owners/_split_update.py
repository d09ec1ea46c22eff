"""The update of a stack of matrices, of which one is traced and split around its matrix products.

- *before*: operations on elements, up to the first one that the matrix products depend on and that
  is no operation on elements (momentum); on shards;
- *core*: from there to the last matrix product; at the owner, between two all-to-alls;
- *after*: the rest (scale, weight decay, learning rate); on shards.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Graph, evaluate
from sharding._types import Tree
from sharding.placement._specs import KeyPath

MIN_SIZE = 1024  # elements of an array that is worth an all-to-all
_SHAPE_NAMES = "broadcast_in_dim concatenate iota pad reshape rev slice squeeze transpose"
_SHAPES = frozenset(_SHAPE_NAMES.split())  # primitives that change shapes alone
# Primitives that change the placement alone; a trace inside a shard_map has none of them.
_PLACEMENT = frozenset({"mesh_cast", "reshard", "sharding_constraint"})


def over_stack(fn: Callable[..., Tree], num_dims: int) -> Callable[..., Tree]:
    """A function of one matrix as one of a stack of this many leading dims."""
    for _ in range(num_dims):
        fn = jax.vmap(fn)
    return fn


class MatrixUpdate:
    """The update of one parameter, a stack of matrices."""

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        path: KeyPath,
        trees: tuple[Tree, Tree, Tree],
        extra_args: dict[str, Any],
        spec: PartitionSpec | None,
    ):
        self._tx, self.path = tx, path
        self.shape: tuple[int, ...] = tuple(trees[0].shape)  # (stack..., rows, cols)
        self.spec = spec  # of an array of this shape; None where it is not known
        self.stack = self.shape[:-2]
        # Gradient, state and parameter, flat; all have the leading dims.
        self.arrays, self._treedef = jax.tree.flatten(trees)
        self._extra_args, self._extra_treedef = jax.tree.flatten(extra_args)
        # The extra arguments that can be traced: arrays and numbers.
        self._traced = [
            i
            for i, x in enumerate(self._extra_args)
            if hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)
        ]
        self._arguments = [self._extra_args[i] for i in self._traced]

    @property
    def kind(self) -> Any:
        """Equal for parameters whose matrices have the same update."""
        num = len(self.stack)
        return tuple((x.shape[num:], x.dtype) for x in self.arrays), self._treedef

    def over_stack(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        return over_stack(fn, len(self.stack))

    def _update_one(self, *inputs: Any) -> tuple[Tree, Tree]:
        """The update of one matrix, from its arrays and the traced extra arguments."""
        num = len(self.arrays)
        g, s, p = jax.tree.unflatten(self._treedef, inputs[:num])
        extra_args = dict(enumerate(self._extra_args))
        extra_args |= zip(self._traced, inputs[num:], strict=True)
        extra_args = jax.tree.unflatten(self._extra_treedef, list(extra_args.values()))
        return self._tx.update(g, s, p, **extra_args)

    def alone(self) -> tuple[Tree, Tree]:
        """The update and the new state, without owners."""
        return self.over_stack(lambda *x: self._update_one(*x, *self._arguments))(*self.arrays)

    def split(self) -> "SplitUpdate":
        """The update of one matrix, traced in the current mesh."""
        num = len(self.stack)
        one = [jnp.zeros(x.shape[num:], x.dtype) for x in self.arrays]
        inputs = one + self._arguments
        graph = Graph(lambda inputs: self._update_one(*inputs), inputs, [True] * len(inputs))
        num_state = len(jax.tree.leaves(jax.tree.unflatten(self._treedef, one)[1]))
        return SplitUpdate(graph, num_state)

    def before(self, split: "SplitUpdate") -> list[jax.Array]:
        """The values that the core or the operations after it need."""
        run = self.over_stack(lambda *x: split.before([*x, *self._arguments]))
        return run(*self.arrays)


class SplitUpdate:
    """The traced update of one matrix in three parts: before, core and after.

    An equation is in the core if it is on the way from a first equation on a large array that is no
    operation on elements to a last matrix operation, or only changes the shape of what comes from
    there. So nothing in the core depends on what comes after it.
    """

    def __init__(self, graph: Graph, num_state: int):
        self.graph, equations = graph, graph.equations
        users: dict[int, list[int]] = defaultdict(list)
        for i, eqn in enumerate(equations):
            for v in eqn.operands:
                users[v].append(i)

        # Which equations lead to a matrix operation, from the last one backwards.
        leads = [self._works_on_large(i, _CHEAP) for i in range(len(equations))]
        for i in reversed(range(len(equations))):
            leads[i] = leads[i] or any(leads[u] for v in equations[i].results for u in users[v])
        core: set[int] = set()
        after: set[int] = set()
        for i, eqn in enumerate(equations):
            sources = {graph.producer.get(v) for v in eqn.operands}
            of_core, of_after = bool(sources & core), bool(sources & after)
            on_way = leads[i] and (of_core or self._works_on_large(i, ELEMENTWISE | _PLACEMENT))
            if on_way or (of_core and not of_after and eqn.primitive.name in _SHAPES):
                core.add(i)
            elif of_core or of_after:
                after.add(i)

        made = {v for i in core for v in equations[i].results}
        late = {v for i in after for v in equations[i].results}
        used = {v for i in core for v in equations[i].operands}
        used_late = {v for i in after for v in equations[i].operands} | set(graph.outputs)
        # A value that depends on no input is computed where it is used.
        self.ins = sorted(v for v in used - made if graph.reads[v])  # of the core
        self.outs = sorted(made & used_late)  # of the core, for what comes after
        # Of what comes before, for the others; the core's among them.
        self.kept = sorted({v for v in used_late - made - late if graph.reads[v]} | set(self.ins))
        state = range(1, 1 + num_state)  # inputs are gradient, state, parameter, arguments
        new_state = graph.outputs[1:]
        exact_outs = self._read(new_state, [*self.kept, *self.outs]) & set(self.outs)
        exact_ins = (self._read(exact_outs, self.ins) | set(state)) & set(self.ins)
        self.exact = exact_ins | exact_outs  # state, and what it depends on: never rounded

    def _read(self, values: Iterable[int], known: Iterable[int]) -> set[int]:
        """These values, and all that they are computed from, no further than the known ones."""
        values, known = set(values), set(known)
        equations, inputs = self.graph.needed(values - known, known)
        return values | set(inputs) | {v for eqn in equations for v in eqn.operands}

    def _works_on_large(self, equation: int, apart_from: frozenset[str]) -> bool:
        """Whether an equation has a large operand, and is none of these primitives."""
        eqn = self.graph.equations[equation]
        large = (math.prod(self.graph.shape(v)) >= MIN_SIZE for v in eqn.operands)
        return eqn.primitive.name not in apart_from and any(large)

    @property
    def types(self) -> tuple[list[str], list[str]]:
        types = [f"{t.dtype}{list(t.shape)}" for t in self.graph.types]
        return [types[v] for v in self.ins], [types[v] for v in self.outs]

    def _evaluate(self, known: dict[Any, Any], wanted: Sequence[int]) -> list[jax.Array]:
        values = self.graph.constants | known
        evaluate(self.graph.needed(wanted, values)[0], values)
        return [jnp.asarray(values[v]) for v in wanted]

    def before(self, inputs: Sequence[Any]) -> list[jax.Array]:
        """``kept``, from the inputs."""
        return self._evaluate(dict(enumerate(inputs)), self.kept)

    def core(self, *ins: jax.Array) -> list[jax.Array]:
        """``outs``, from ``ins``."""
        return self._evaluate(dict(zip(self.ins, ins, strict=True)), self.outs)

    def after(self, kept: Sequence[jax.Array], outs: Sequence[jax.Array]) -> tuple[Tree, Tree]:
        """The update and the new state."""
        known = dict(zip(self.kept, kept, strict=True)) | dict(zip(self.outs, outs, strict=True))
        results = self._evaluate(known, self.graph.outputs)
        return jax.tree.unflatten(self.graph.out_treedef, results)


_CHEAP = ELEMENTWISE | REDUCTIONS | _SHAPES | _PLACEMENT
