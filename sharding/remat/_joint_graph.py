"""A loss and its gradient as one graph: the values worth storing, and the steps of the gradient."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.equations import inner_jaxprs, name_of
from optax_ext.traced_graph import Equation, Graph
from sharding.plan.machine._devices import DeviceKind, num_bytes
from sharding.plan.model._traced_work import (
    ANY_DEVICE,
    MOVES,
    Work,
    bytes_inside,
    is_fused,
    is_light,
    work_of_group,
)
from sharding.remat._schedule_search import ScheduledTask, ScheduleSearch, Step, Value

# A fused operation has no place in memory if what it reads is hardly larger.
_LARGER = 1.1


class LossNode(NamedTuple):
    """Operations that run together, and leave in memory what others read."""

    equations: tuple[Equation, ...]
    reads: frozenset[int]  # nodes
    values: tuple[int, ...]  # results that others read
    nbytes: float  # of these, without results of the function
    inside: float  # bytes in memory while it runs, beside what it reads and its values
    work: Work
    in_place: bool  # whether its value may take the place of one that it reads
    heavy: bool  # whether XLA does not fuse it with others


class _FusedGroup(NamedTuple):
    """What becomes a node, or is fused; equations and groups by their numbers."""

    equations: set[int]
    reads: set[int]


class JointGraph:
    """The operations of a loss, then those of its gradient, in the order that JAX has them.

    Attributes:
      results: values that the loss returns.
      grads: values of the gradients of trained inputs.
      nodes: of the loss, ``forward`` of them, then of the gradient.
      work: of all nodes.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],  # of inputs; its first result is the loss
        inputs: Sequence[Any],
        loss: Any,  # the type of this result
        trained: Sequence[bool],
        kind: DeviceKind | None,
        shards: int = 1,  # devices that share each value
        fine: bool = False,  # what products read may be stored, too
    ):
        self._options = trained, kind, shards, fine

        def joint(args: list[Any]) -> Any:
            *args, cotangent = args

            def loss(own: list[Any]) -> tuple[Any, list[Any]]:
                given = iter(own)
                mixed = [next(given) if t else x for x, t in zip(args, trained, strict=True)]
                first, *others = fn(mixed)
                return first, others

            own = [x for x, t in zip(args, trained, strict=True) if t]
            first, vjp, others = jax.vjp(loss, own, has_aux=True)
            return [first, *others], vjp(cotangent)[0]

        deferred = [False] * len(inputs) + [True]
        self.graph = Graph(joint, [*inputs, loss], deferred, exact=True)
        self.seed = len(inputs)
        outputs = self.graph.outputs
        count = len(outputs) - sum(trained)
        self.results, self.grads = outputs[:count], outputs[count:]
        equations = self.graph.needed(outputs, self.graph.constants)[0]
        needed = [part for eqn in equations for part in _results_one_by_one(eqn, self.graph.types)]
        # What does not depend on the cotangent belongs to the loss.
        self._equations = sorted(needed, key=self._is_gradient)
        self._uses: collections.Counter[int] = collections.Counter(
            v for e in needed for v in set(e.operands)
        )
        self._uses.update(2 * outputs)  # nothing is fused with what reads a result
        self._returned = set(outputs)
        self._maker: dict[int, Equation] = {v: eqn for eqn in needed for v in eqn.results}
        heavy = (eqn for eqn in needed if fine and not is_light(eqn))
        self._kept = {self._behind_moves(v) for eqn in heavy for v in eqn.operands}.union(outputs)
        groups = self._groups()
        number = {k: n for n, k in enumerate(groups)}
        self._kind = kind or ANY_DEVICE
        self._shards = shards
        self.nodes = [self._node(k, own, number) for k, own in groups.items()]
        self.forward = sum(not self._is_gradient(self._equations[k]) for k in groups)
        self.work = sum((node.work for node in self.nodes), Work(0.0, 0.0))

    def traced_with(self, fn: Any, inputs: Sequence[Any], loss: Any) -> "JointGraph":
        """The same of inputs of other shardings, or inside a ``shard_map``."""
        same = JointGraph(fn, inputs, loss, *self._options)
        nbytes = ([node.nbytes for node in graph.nodes] for graph in (self, same))
        if next(nbytes) != next(nbytes) or self.forward != same.forward:
            raise ValueError(
                "the loss has other operations here than when it was planned, with arrays of other "
                f"shardings: plan it with arrays of these types: {[*map(str, inputs)]!s:.300}."
            )
        return same

    def _is_gradient(self, eqn: Equation) -> bool:
        return any(self.graph.reads[v] for v in eqn.results)

    def _behind_moves(self, v: int) -> int:
        while v in self._maker and name_of(self._maker[v]) in MOVES:
            v = self._maker[v].operands[0]
        return v

    def _groups(self) -> dict[int, _FusedGroup]:
        """Fuses operations; by the number of the last one."""
        groups: dict[int, _FusedGroup] = {}
        group_of: dict[int, int] = {}  # of values in memory
        fused: dict[int, _FusedGroup] = {}  # of others: what computes them from values in memory
        for i, eqn in enumerate(self._equations):
            own = _FusedGroup({i}, set())
            for v in eqn.operands:
                if v in group_of:
                    own.reads.add(group_of[v])
                elif v in fused:
                    own.equations.update(fused[v].equations)
                    own.reads.update(fused[v].reads)
            # A constant is moved to the mesh of arrays of explicit sharding.
            moved = eqn.primitive.name == "reshard" and not own.reads
            can_fuse = (is_fused(eqn) or moved) and len(eqn.results) == 1
            before = next(reversed(groups), -1)  # nothing is computed between it and this one
            takes = can_fuse and before in own.reads and self._is_read_by(before, eqn)
            if takes:
                part = groups.pop(before)
                own = _FusedGroup(own.equations | part.equations, own.reads - {before} | part.reads)
            size = self._nbytes(eqn) * _LARGER
            small = sum(self._nbytes(self._equations[k]) for k in own.reads) <= size
            if can_fuse and small and not takes and self._kept.isdisjoint(eqn.results):
                fused[eqn.results[0]] = own
            else:
                groups[i] = own
                group_of |= dict.fromkeys(eqn.results, i)
        # XLA fuses a softmax unless its maximum is stored.
        maxima = {i for i, eqn in enumerate(self._equations) if eqn.primitive is lax.reduce_max_p}
        for k in [k for k, own in groups.items() if own.equations & maxima]:
            own = groups[k]
            readers = [each for each in groups.values() if k in each.reads]
            inner = self._returned.isdisjoint(self._equations[k].results)
            if inner and all(own.reads <= each.reads for each in readers):
                del groups[k]
                for each in readers:
                    each.equations.update(own.equations)
                    each.reads.discard(k)
        return groups

    def _values(self, eqn: Equation) -> tuple[int, ...]:
        return tuple(v for v in eqn.results if self._uses[v])

    def _nbytes(self, eqn: Equation) -> int:
        return _device_bytes([self.graph.types[v] for v in self._values(eqn)])

    def _is_read_by(self, k: int, eqn: Equation) -> bool:
        """Whether one operation alone reads a group, in the same pass, and can be fused with it."""
        last = self._equations[k]
        if self._is_gradient(last) != self._is_gradient(eqn):
            return False
        values = self._values(last)
        alone = len(values) == 1 and self._uses[values[0]] == 1 and values[0] in eqn.operands
        return alone and 2 * self._nbytes(last) > self._nbytes(eqn)  # and is no reduction

    def _node(self, last: int, own: _FusedGroup, number: dict[int, int]) -> LossNode:
        graph = self.graph
        inside = 0.0
        shards = self._shards
        equations = [self._equations[i] for i in sorted(own.equations)]
        made = {v: eqn for eqn in equations for v in eqn.results}
        for eqn in equations:
            inside += sum(map(bytes_inside, inner_jaxprs(eqn)))
            if not (is_light(eqn) or eqn.primitive.name == "gather"):
                # What is computed for it is in memory.
                given = {v for v in eqn.operands if v in made}
                given = {v for v in given if name_of(made[v]) not in MOVES}
                inside += num_bytes([graph.types[v] for v in given])
        eqn = self._equations[last]
        values = self._values(eqn)
        held = _device_bytes([graph.types[v] for v in values if v not in self._returned])
        read = {v for eqn in equations if not is_light(eqn) for v in eqn.operands}
        work = work_of_group(
            equations, graph, {*map(self._behind_moves, read), *values}, self._kind
        )
        return LossNode(
            tuple(equations),
            frozenset(number[k] for k in own.reads),
            values,
            held / shards,
            inside / shards,
            Work(*(x / shards for x in work)),
            is_fused(eqn),
            not all(map(is_light, equations)),
        )

    def equations(self, tasks: Iterable[ScheduledTask]) -> list[Equation]:
        """Of nodes that run."""
        nodes = (self.nodes[task.value] for task in tasks if not task.fetches)
        return [eqn for node in nodes for eqn in node.equations]

    def search(self, host_link: float | None = None) -> ScheduleSearch:
        """For which of its values are stored; with a link, also in host memory."""
        given = enumerate(self.nodes[: self.forward])
        returned = [k for k, node in given if not set(self.results).isdisjoint(node.values)]
        return ScheduleSearch(self._stored_values(host_link), self._steps(), returned)

    def _stored_values(self, host_link: float | None) -> list[Value]:
        types = self.graph.types
        needed = self.graph.needed(self.results, self.graph.constants)[0]
        made = {v for eqn in needed for v in eqn.results if not in_host_memory(types[v])}
        made = {v for v in made if jnp.issubdtype(types[v].dtype, jnp.floating)}
        values = []
        for node in self.nodes[: self.forward]:
            value = Value(node.nbytes, node.work.seconds, tuple(node.reads), node.inside)
            if host_link and made.issuperset(node.values):
                # Out and back: neither runs beside what is behind a barrier.
                value = value._replace(fetch=2 * node.nbytes / host_link)
            values.append(value)
        return values

    def _steps(self) -> list[Step]:
        """The operations of the gradient, and what it holds beside values of the loss."""
        gradient = list(enumerate(self.nodes))[self.forward :]
        last = {k: i for i, node in gradient for k in node.reads if k >= self.forward}
        steps = list[Step]()
        live = dict[int, float]()
        for i, node in gradient:
            before = sum(live.values())
            ends = [live.pop(k) for k in node.reads if last.get(k) == i]
            replaces = node.in_place and max(ends, default=0.0) >= node.nbytes
            during = before + node.inside + (0.0 if replaces else node.nbytes)
            reads = [k for k in node.reads if k < self.forward]
            larger = [k for k in reads if self.nodes[k].nbytes >= node.nbytes > 0]
            over = larger[0] if node.in_place and larger and not replaces else -1
            steps.append(Step(tuple(reads), before, during, over, node.nbytes))
            if i in last:
                live[i] = node.nbytes
        return steps


def _results_one_by_one(eqn: Equation, types: Sequence[Any]) -> Iterator[Equation]:
    """The results of a split one by one, each with uses of its own; others as they are."""
    if eqn.primitive is not lax.split_p:
        yield eqn
        return
    shape, axis = types[eqn.operands[0]].shape, eqn.params["axis"]
    start = 0
    for v, length in zip(eqn.results, eqn.params["sizes"], strict=True):
        starts = tuple(start if dim == axis else 0 for dim in range(len(shape)))
        start += length
        limits = (*shape[:axis], start, *shape[axis + 1 :])
        params = {"start_indices": starts, "limit_indices": limits, "strides": None}
        yield dataclasses.replace(eqn, primitive=lax.slice_p, params=params, results=(v,))


def in_host_memory(t: Any) -> bool:
    return bool(t.memory_space == jax.memory.Space.Host)


def _device_bytes(types: Sequence[Any]) -> int:
    return num_bytes([t for t in types if not in_host_memory(t)])
