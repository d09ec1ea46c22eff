"""A plan for any loss: a schedule of its graph, and the function that keeps to it."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import evaluate
from sharding._own_gradient import with_own_gradient
from sharding._traced_types import barrier, varying_alike
from sharding._types import Batch, Tree
from sharding.plan._format import Table, flops, size, text_of
from sharding.plan.audit._program_memory import temporaries_of
from sharding.plan.model._traced_work import Work
from sharding.remat._joint_graph import JointGraph, in_host_memory
from sharding.remat._loss_loops import LoopForm, place_of
from sharding.remat._schedule_search import LossSchedule, ScheduledTask

if TYPE_CHECKING:
    from sharding.remat._loss_search import PlannableLoss

Values: TypeAlias = dict[int, Any]  # of a graph, by their numbers

_LINES = 12  # of the user's code that a plan prints
_LAST = 4  # values of a forward pass that its gradient waits for


class OverBudgetError(ValueError):
    """A program needs more bytes than its plan or its budget allows."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossPlan:
    """A loss that keeps to a budget when it is differentiated: ``found(params, batch)``.

    It returns what the loss returns, and is differentiated as the loss is. Its gradient by
    parameters keeps to the plan; forward mode, and others, take what the loss takes by itself.
    ``print`` shows a table.
    """

    peak: float  #: bytes of activations and temporaries of one device
    saved: float  #: bytes of the device that are stored between the forward and the backward pass
    host: float = 0.0  #: bytes that are stored in host memory
    budget: float  #: bytes that were allowed
    work: Work  #: operations of a step
    plain: Work  #: operations of a step that runs nothing again
    loss_fn: Callable[..., Any]  #: as it was given
    loops: LoopForm  #: what the layers of loops store
    tiles: int = 1  #: in how many its large values exist, as by ``shd.tiled``
    at_least: float  #: the least extra time of any schedule within these bytes, as far as known
    _loss: "PlannableLoss"
    _graph: JointGraph
    _schedule: LossSchedule

    @property
    def batch(self) -> Any:
        """The types of the planned batch; before a model state and a key, if the loss has them."""
        return self._loss.types[1]

    @property
    def num_rows(self) -> int | None:
        """How many rows it is planned for; None if the batch has none."""
        shapes = (x.shape for x in jax.tree.leaves(self.batch))
        return next((shape[0] for shape in shapes if shape), None)

    def computes(self, params: Tree, batch: Batch, *more: Any) -> Any:
        """What the loss returns, as it was given."""
        return self.loss_fn(params, (batch, *more) if more else batch)

    def __call__(self, params: Tree, batch: Batch, *more: Any) -> Any:
        """What the loss returns, for parameters, a batch and others of the planned types."""
        inputs = self._loss.inputs_of(params, (batch, *more) if more else batch)
        plan = self
        is_other = self._schedule.again or self.loops.stored is not None or self.tiles > 1
        if is_other or self._loss.checkpoints:
            inputs = varying_alike(inputs)
            plan = self._traced_with(self._loss.traced_with(inputs))
        return jax.tree.unflatten(plan._loss.out_treedef, plan._run(inputs))

    def _traced_with(self, loss: "PlannableLoss") -> "LossPlan":
        graph = self._graph
        if self._schedule.again:
            if loss.inputs == self._loss.inputs:
                return self
            fn = functools.partial(loss.fn, loops=self.loops)
            graph = graph.traced_with(fn, loss.inputs, loss.first)
        return dataclasses.replace(self, _loss=loss, _graph=graph)

    @functools.cached_property
    def _run(self) -> Callable[[list[Any]], list[Any]]:
        fn = functools.partial(self._loss.fn, loops=self.loops)
        if not self._schedule.again:  # as the compiler orders it
            return fn
        return with_own_gradient(fn, self._forward, self._gradient, self._loss.trained)

    def _forward(self, inputs: list[Any]) -> tuple[list[Any], tuple[Values, Values]]:
        """Results, the values that are stored, and those that are copied to the host."""
        joint = self._graph
        graph = self._graph.graph
        stored = [v for k in self._schedule.stored for v in joint.nodes[k].values]
        copied = {v for k in self._copied for v in joint.nodes[k].values}
        values: Values = graph.constants | dict(enumerate(inputs))
        on_host: Values = {}
        for eqn in graph.needed([*joint.results, *stored], graph.constants)[0]:
            evaluate([eqn], values)
            for v in copied.intersection(eqn.results):  # is copied before anything reads it
                there = jax.device_put(values[v], jax.memory.Space.Host)
                values[v], on_host[v] = barrier((values[v], there))
        return [values[v] for v in joint.results], ({v: values[v] for v in stored}, on_host)

    def _gradient(
        self, inputs: list[Any], kept: tuple[Values, Values], cotangents: list[Any]
    ) -> list[Any]:
        """Runs the steps, and in front of each what it needs again."""
        seed, *others = cotangents
        if any(ct is not None for ct in others):
            raise ValueError(
                "a planned loss is differentiated by its first result alone: return the others "
                "as auxiliary ones (has_aux=True)."
            )
        joint, graph, (stored, on_host) = self._graph, self._graph.graph, kept
        given = dict(enumerate(inputs))
        steps = enumerate(self._schedule.again, joint.forward)
        order = [task for step, again in steps for task in (*again, ScheduledTask(step))]
        on_cpu = self._loss.device.platform == "cpu"
        groups = _groups(joint, _late(joint, order), on_cpu)
        # What is complete before the next operation starts: first the last values that the forward
        # pass stores. Nothing is complete because of a barrier whose result nothing reads.
        read = {v for eqn in joint.equations(order) for v in eqn.operands}
        last = [v for v, x in stored.items() if v in read and jnp.issubdtype(x.dtype, jnp.inexact)]
        after = {v: stored[v] for v in last[-_LAST:]} or {joint.seed: seed}
        # XLA writes a result in the place of what it reads, but not through a barrier.
        places = {v for group in groups for i in group.replaced for v in joint.nodes[i].values}
        values = given | stored | {joint.seed: seed}
        run = _OrderedRun(joint, values, on_host, after, places, on_cpu)
        for group in groups:
            run.fetch([task.value for task in group.tasks if task.fetches])
            run.compute([task for task in group.tasks if not task.fetches], group)
        known = graph.constants | given
        known |= {v: run.values[v] for v in joint.grads if graph.reads[v]}
        evaluate(graph.needed(joint.grads, known)[0], known)  # those that nothing is computed for
        return [known[v] for v in joint.grads]

    @property
    def _tasks(self) -> list[ScheduledTask]:
        """What is computed again, or fetched."""
        return [task for tasks in self._schedule.again for task in tasks]

    @property
    def _copied(self) -> set[int]:
        """Nodes whose values the forward pass copies to the host."""
        return {task.value for task in self._tasks if task.fetches}

    @property
    def extra_flops(self) -> float:
        """Operations in matrix products that run again."""
        return self.work.flops - self.plain.flops

    @property
    def extra_time(self) -> float:
        """Time of what runs again and of waiting for copies, as a fraction of the plain step's."""
        return ratio(self.work.seconds - self.plain.seconds, self.plain.seconds)

    def check(self, compiled: Any, tolerance: float = 0.03) -> int:
        """Returns the temporaries of a compiled step with these blocks, for the plan's device.

        Raises:
          OverBudgetError: if they are above the plan by more than ``tolerance``, a fraction of it,
            or above the budget.
        """
        temporaries = temporaries_of(compiled)
        if temporaries > min(self.peak * (1 + tolerance), self.budget):
            raise OverBudgetError(
                f"the program has {size(temporaries)} of temporaries, above its plan of "
                f"{size(self.peak)} or its budget of {size(self.budget)}."
            )
        return temporaries

    def __str__(self) -> str:
        """Bytes and time, and lines of the loss with what is stored of each or computed again."""
        rows = [
            ("peak", size(self.peak), f"of {size(self.budget)}"),
            ("saved", size(self.saved), "between forward and backward pass"),
            *([("in host memory", size(self.host), "")] if self.host else []),
            ("products again", flops(self.extra_flops), f"of {flops(self.plain.flops)}"),
            ("extra time", f"{100 * self.extra_time:.1f} %", "by the device's figures"),
            ("at least", f"{100 * self.at_least:.1f} %", "of any schedule of these operations"),
        ]
        if self._loss.checkpoints:
            rows.append(
                ("checkpoints", str(self._loss.checkpoints), "of the loss, which this replaces")
            )
        if self.tiles > 1:
            rows.append(("tiles", str(self.tiles), "of large values"))
        if self.loops.stored is not None:
            rows.append(("loops", "again", str(self.loops)))
        nodes = self._graph.nodes
        computed = Counter[str]()
        for what, ks in ("stores", self._schedule.stored), ("copies", self._copied):
            nbytes = Counter[str]()
            for k in ks:
                nbytes[place_of(nodes[k].equations[-1])] += int(nodes[k].nbytes)
            rows += [(what, size(n), line) for line, n in nbytes.most_common(_LINES) if n]
        again = (task.value for task in self._tasks if not task.fetches)
        computed.update(place_of(nodes[k].equations[-1]) for k in again)
        rows += [("again", str(n), line) for line, n in computed.most_common(_LINES)]
        return text_of([Table("Activations of one device", ("", "", ""), rows)])

    @property
    def summary(self) -> str:
        """What is computed again, in a few words."""
        again = sum(not task.fetches for task in self._tasks)
        parts = [f"{again} values"] if again or self._copied else []
        parts += [f"fetches {len(self._copied)}"] if self._copied else []
        parts += [f"{self.tiles} tiles"] if self.tiles > 1 else []
        return ", ".join(parts + [str(self.loops)] * (not parts or self.loops.stored is not None))


class _TaskGroup(NamedTuple):
    """Nodes without a barrier between them, which XLA fuses and runs in an order of its own."""

    tasks: list[ScheduledTask]
    replaced: set[int]  # nodes of the loss in the place of whose values it writes
    later: set[int]  # values that are read behind it


@dataclasses.dataclass
class _OrderedRun:
    """Runs groups of nodes, one after the other."""

    joint: JointGraph
    values: Values  # that are there
    on_host: Values
    after: Values  # what is complete before the next group starts
    places: set[int]  # values in whose place others are written
    on_cpu: bool

    def fetch(self, nodes: list[int]) -> None:
        """Values from the host, no earlier than they are needed."""
        fetched = {v: self.on_host[v] for k in nodes for v in self.joint.nodes[k].values}
        if fetched:
            there, _ = barrier((fetched, self.after))
            self.values |= jax.device_put(there, jax.memory.Space.Device)

    def compute(self, tasks: list[ScheduledTask], group: _TaskGroup) -> None:
        joint = self.joint
        graph = self.joint.graph
        equations = joint.equations(tasks)
        read = set[int]()
        made = set[int]()
        for eqn in equations:  # some values are computed again behind what reads them
            read.update(v for v in eqn.operands if v not in made)
            made.update(eqn.results)
        waits = read.difference(*(joint.nodes[i].values for i in group.replaced))
        waits = {v for v in waits if not in_host_memory(graph.types[v])}
        # Cotangents are fused with what reads them: they do not wait.
        held = {v: x for v, x in self.values.items() if v in waits and not graph.reads[v]}
        # The zeros of a scatter are made when it needs them.
        for eqn in equations:
            if eqn.primitive is lax.broadcast_in_dim_p and eqn.operands[0] in graph.constants:
                (v,) = eqn.operands
                held[v] = jnp.asarray(graph.constants[v], graph.types[v].dtype)
        if not self.on_cpu:
            held, done = barrier((held, self.after))
            for v in done.keys() - read - self.places:
                self.values[v] = done[v]

        def results_of(held: Values) -> Values:
            known = graph.constants | self.values | held
            evaluate(equations, known)
            made = [v for task in tasks for v in joint.nodes[task.value].values]
            return {v: known[v] for v in made if v in group.later}

        if self.on_cpu and tasks[0].value < joint.forward:
            results = _in_branch(results_of, held, [*self.after.values()][-1])
        else:
            results = results_of(held)
        self.after = results or self.after
        self.values |= results


def _late(joint: JointGraph, order: Sequence[ScheduledTask]) -> list[ScheduledTask]:
    """Each value is computed again in front of what reads it, if what it reads is there still."""
    late = [*order]

    def reader(k: int, start: int) -> int:  # 0 if there is none
        behind = enumerate(late[start:], start)
        first = next((n for n, task in behind if task.value == k or _reads(task, k)), 0)
        return 0 if late[first].value == k else first

    def _reads(task: ScheduledTask, k: int) -> bool:
        return not task.fetches and k in joint.nodes[task.value].reads

    for n, task in [*enumerate(order)][::-1]:
        again = task.value < joint.forward and not task.fetches
        first = reader(task.value, n + 1) if again else 0
        if first and all(reader(i, first) for i in joint.nodes[task.value].reads):
            late.insert(first - 1, late.pop(n))
    return late


def _groups(joint: JointGraph, order: Sequence[ScheduledTask], single: bool) -> list[_TaskGroup]:
    """An order in groups.

    One ends in front of a node that is not fused where all that it makes would exceed the peak of
    the order, and in front of values that are fetched.
    """
    nodes = joint.nodes
    live = set[int]()
    rows = list[tuple[ScheduledTask, set[int], float, float]]()
    peak = 0.0
    for task in reversed(order):
        node = nodes[task.value]
        if task.fetches:
            node = node._replace(reads=frozenset(), inside=0.0)
        over = {i for i in node.reads - live if nodes[i].nbytes >= node.nbytes > 0}
        new = 0.0 if node.in_place and over else node.nbytes
        live = live - {task.value} | node.reads
        held = sum(nodes[i].nbytes for i in live)
        peak = max(peak, held + new + node.inside)
        rows.append((task, over, new, held))
    groups: list[tuple[list[ScheduledTask], set[int]]] = []
    made = inside = 0.0
    for task, over, new, held in reversed(rows):
        node = nodes[task.value]
        made, inside = made + new, max(inside, node.inside)
        full = node.heavy and made + inside > peak
        last = groups[-1][0] if groups else []
        fetch = bool(last) and task.fetches and not last[-1].fetches
        if single or not groups or full or fetch or task in last:
            groups.append(([], set()))
            made = held + new
            inside = node.inside
        groups[-1][0].append(task)
        # XLA would not compute again what reads values that are not behind a barrier.
        is_step = task.value >= joint.forward
        if is_step and new < node.nbytes and held + node.nbytes + node.inside > peak:
            groups[-1][1].update(i for i in over if i < joint.forward)
    later = set[int](joint.grads)
    out = list[_TaskGroup]()
    for tasks, replaced in reversed(groups):
        out.append(_TaskGroup(tasks, replaced, later))
        later = later | {v for eqn in joint.equations(tasks) for v in eqn.operands}
    return out[::-1]


def _in_branch(compute: Callable[[Any], Any], held: Any, after: jax.Array) -> Any:
    """Computes in a branch that is always taken, and that the compiler does not know to be."""
    # XLA on CPUs merges equal operations in spite of barriers, but none of two computations.
    sharded = any(entry is not None for entry in jax.typeof(after).sharding.spec)
    one = after if sharded or not after.size else after[(0,) * after.ndim]
    x = jnp.sum(jnp.real(one)).astype(jnp.float32)
    types = jax.eval_shape(compute, held)
    zeros = functools.partial(jax.tree.map, lambda t: jnp.zeros_like(t), types)
    return lax.cond((x == x) | (x != x), compute, lambda _: zeros(), held)


def ratio(again: float, plain: float) -> float:
    """A fraction of operations; 0 where there are none, as in losses without products."""
    return again / plain if plain else 0.0
