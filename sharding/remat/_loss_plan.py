"""A plan for any loss: a schedule of its graph, and the function that keeps to it."""

import dataclasses
import functools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from optax_ext.traced_graph import Equation, Graph, bind, evaluate
from sharding._jaxprs import all_equations
from sharding._types import Batch, Tree
from sharding._user_line import line_of
from sharding.placement._specs import path_str
from sharding.plan._format import size
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._traced_model import Work
from sharding.remat._checkpoint import INPUT
from sharding.remat._joint_graph import JointGraph, in_host_memory
from sharding.remat._loss_loops import Loop, LoopForm, Offload, forms_of
from sharding.remat._program_bytes import step_temporaries, types_of
from sharding.remat._remat_plan import RematPlan, no_plan_fits, unbeaten
from sharding.remat._schedule_search import LossSchedule, ScheduleSearch

_FLOAT0 = jax.dtypes.float0
_COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")
_LINES = 12  # of the user's code that a plan prints
_FEW_STATES = 60  # to find the fewest bytes
_AIM, _FITS = 0.97, 0.93  # of a budget: what is looked for, and what suffices
_MOST_PROGRAMS, _TPU_PROGRAMS = 6, 4  # that are compiled for a budget
_POINTS = 8  # of a frontier
_LAST = 4  # values of a forward pass that its gradient waits for
_AS_IT_IS = LoopForm()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossPlan(RematPlan):
    """A loss that keeps to a budget when it is differentiated: ``found(params, batch)``.

    It returns what the loss returns, and has the same gradient with respect to parameters.
    """

    loss_fn: Callable[..., Any]  #: as it was given
    loops: LoopForm  #: what the layers of loops store
    at_least: float  #: the least extra time of any schedule within these bytes, as far as known
    _loss: "PlannableLoss"
    _graph: JointGraph
    _schedule: LossSchedule

    @property
    def batch(self) -> Any:
        """The types of the planned batch."""
        return self._loss.types[1]

    def __call__(self, params: Tree, batch: Batch) -> Any:
        """What the loss returns, for parameters and a batch of the planned types."""
        inputs = self._loss.inputs_of(params, batch)
        if self._schedule.again or self.loops.stored is not None:
            self._loss.check_as_planned(inputs)
        outs = self._run(inputs)
        return jax.tree.unflatten(self._loss.out_treedef, outs)

    @functools.cached_property
    def _run(self) -> Callable[[list[Any]], list[Any]]:
        graph, loss = self._graph.graph, self._loss
        if not self._schedule.again:  # as the compiler orders it
            return functools.partial(loss.fn, loops=self.loops)
        stored = [v for k in self._schedule.stored for v in self._graph.nodes[k].values]
        copied = {v for k in self._copied for v in self._graph.nodes[k].values}
        forward = graph.needed([*self._graph.results, *stored], graph.constants)[0]

        def fwd(inputs: list[Any]) -> tuple[list[Any], Any]:
            loss.check_differentiated([x.perturbed for x in inputs])
            given = [x.value for x in inputs]
            values = graph.constants | dict(enumerate(given))
            on_host = {}  # ~v for a value v
            for eqn in forward:
                evaluate([eqn], values)
                for v in copied.intersection(eqn.results):  # is copied before anything reads it
                    there = jax.device_put(values[v], jax.memory.Space.Host)
                    values[v], on_host[~v] = lax.optimization_barrier((values[v], there))
            kept = {v: values[v] for v in stored} | on_host
            return [values[v] for v in self._graph.results], (given, kept)

        def bwd(kept: Any, cotangents: list[Any]) -> tuple[list[Any]]:
            seed, *others = cotangents
            if any(not (isinstance(c, SymbolicZero) or c.dtype == _FLOAT0) for c in others):
                raise ValueError(
                    "a planned loss is differentiated by its first result alone: return the others "
                    "as auxiliary ones (has_aux=True)."
                )
            if isinstance(seed, SymbolicZero):
                return ([None] * len(kept[0]),)
            inputs, stored = kept
            grads = iter(self._gradient(inputs, stored, seed))
            return ([next(grads) if t else None for t in loss.trained],)

        run = jax.custom_vjp(lambda inputs: loss.fn(inputs))
        run.defvjp(fwd, bwd, symbolic_zeros=True)
        return run

    def _gradient(self, inputs: list[Any], stored: dict[int, Any], seed: Any) -> list[Any]:
        """Runs the steps, and in front of each what it needs again."""
        joint, graph = self._graph, self._graph.graph
        given = dict(enumerate(inputs))
        values = dict(stored)  # of the loss
        grads = {joint.seed: seed}  # of the gradient
        events = [
            k
            for step, again in enumerate(self._schedule.again)
            for k in (*again, joint.forward + step)
        ]
        order = [k for k in events if k >= 0]
        replaced = joint.replaced(order)
        # XLA writes a result in the place of what it reads, but not through a barrier.
        places = {v for each in replaced for i in each for v in joint.nodes[i].values}
        # What is complete before the next operation starts: first the last values that the forward
        # pass stores. Nothing is complete because of a barrier whose result nothing reads.
        read = {v for eqn in joint.equations(order) for v in eqn.operands}
        last = [v for v, x in stored.items() if v in read and jnp.issubdtype(x.dtype, jnp.inexact)]
        after = {v: stored[v] for v in last[-_LAST:]} or dict(grads)
        on_cpu = self._loss.device.platform == "cpu"

        def run(group: list[int], own: set[int], later: set[int]) -> None:
            nonlocal after
            equations = joint.equations(group)
            made = {v: k for k in group for v in joint.nodes[k].values if v in later}
            read, own_results = set[int](), set[int]()
            for eqn in equations:  # some values are computed again behind what reads them
                read.update(v for v in eqn.operands if v not in own_results)
                own_results.update(eqn.results)
            held = {v: x for v, x in (given | values).items() if v in read}
            # The zeros of a scatter are made when it needs them.
            for eqn in equations:
                if eqn.primitive is lax.broadcast_in_dim_p and eqn.operands[0] in graph.constants:
                    (v,) = eqn.operands
                    held[v] = jnp.asarray(graph.constants[v], graph.types[v].dtype)
            free = {v: held.pop(v) for i in own for v in joint.nodes[i].values if v in held}
            free |= {v: held.pop(v) for v in [*held] if in_host_memory(graph.types[v])}
            if not on_cpu:  # cotangents are fused with what reads them: they do not wait
                held, done = lax.optimization_barrier((held, after))
                for v in done.keys() - read - places:
                    (values if v in values else grads)[v] = done[v]

            def compute(held: dict[int, Any]) -> dict[int, Any]:
                known = graph.constants | grads | free | held
                evaluate(equations, known)
                return {v: known[v] for v in made}

            if on_cpu and group[0] < joint.forward:
                results = _in_branch(compute, held, [*after.values()][-1])
            else:
                results = compute(held)
            after = results or after
            for v, k in made.items():
                (grads if k >= joint.forward else values)[v] = results[v]

        ahead = iter(events)
        for group in _groups(joint, order, replaced, on_cpu):
            for _ in group[0]:
                while (k := next(ahead)) < 0:  # is fetched, no earlier than it is needed
                    there = {v: values[~v] for v in joint.nodes[~k].values}
                    there, _ = lax.optimization_barrier((there, after))
                    values |= jax.device_put(there, jax.memory.Space.Device)
            run(*group)
        known = graph.constants | given | grads
        evaluate(graph.needed(joint.grads, known)[0], known)  # those that nothing is computed for
        return [known[v] for v in joint.grads]

    @property
    def _copied(self) -> set[int]:
        """Nodes whose values the forward pass copies to the host."""
        return {~k for ks in self._schedule.again for k in ks if k < 0}

    @property
    def summary(self) -> str:
        """How many values are stored, and how many are computed again."""
        again = sum(k >= 0 for ks in self._schedule.again for k in ks)
        host = f", {len(self._copied)} on the host" if self._copied else ""
        return f"{len(self._schedule.stored)} values{host}, {again} again"

    def choices(self) -> list[tuple[str, str, str]]:
        """Lines of the loss, with what is stored of each and what is computed again."""
        nodes = self._graph.nodes
        stored, copied, again = Counter[str](), Counter[str](), Counter[str]()
        for into, ks in (stored, self._schedule.stored), (copied, self._copied):
            for k in ks:
                into[_line(nodes[k].equations[-1])] += int(nodes[k].nbytes)
        for ks in self._schedule.again:
            again.update(_line(nodes[k].equations[-1]) for k in ks if k >= 0)
        rows = [("at least", f"{100 * self.at_least:.1f} %", "of any schedule of these operations")]
        if self.loops.stored is not None:
            rows.append(("loops", "again", str(self.loops)))
        rows += [("stores", size(n), line) for line, n in stored.most_common(_LINES) if n]
        rows += [("copies", size(n), line) for line, n in copied.most_common(_LINES)]
        rows += [("again", str(n), line) for line, n in again.most_common(_LINES)]
        return rows


def _groups(
    joint: JointGraph, order: Sequence[int], replaced: Sequence[set[int]], single: bool
) -> list[tuple[list[int], set[int], set[int]]]:
    """Nodes without a barrier between them: one that XLA does not fuse, and those behind it.

    With values that they replace, and those that are read behind them.
    """
    groups: list[tuple[list[int], set[int]]] = []
    for k, own in zip(order, replaced, strict=True):
        if single or not groups or joint.nodes[k].heavy or k in groups[-1][0]:
            groups.append(([], set()))
        groups[-1][0].append(k)
        groups[-1][1].update(own)
    later, out = set(joint.grads), []
    for group, own in reversed(groups):
        out.append((group, own, later))
        later = later | {v for eqn in joint.equations(group) for v in eqn.operands}
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


def _line(eqn: Equation) -> str:
    return f"{eqn.primitive.name} {line_of(eqn.source_info).rpartition('/')[2]}"


def check_pure(graph: Graph) -> None:
    """Raises if the operations do more than compute their results."""
    with_refs = (
        eqn
        for eqn in graph.equations
        if any(hasattr(graph.types[v], "inner_aval") for v in eqn.operands + eqn.results)
    )
    words = "callback", "print"
    calls = (e for e in all_equations(graph.jaxpr) if any(w in e.primitive.name for w in words))
    for eqns, what in ((with_refs, "refs"), (calls, "callbacks and prints")):
        for eqn in eqns:
            raise ValueError(
                f"what {eqn.primitive.name} does, at {line_of(eqn.source_info)}, would be done "
                f"again: a loss with {what} is not planned."
            )
    if graph.jaxpr.effects:
        raise ValueError(f"a loss with side effects is not planned: {graph.jaxpr.effects}.")


def check_arrays(params: Tree, batch: Batch) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path((params, batch)):
        if not hasattr(x, "dtype") and not isinstance(x, numbers.Number):
            raise ValueError(f"{_name(path)}: expected an array or a number, got {x!r:.80}.")


class PlannableLoss:
    """A loss of inputs in a list, with its loops found."""

    def __init__(self, loss_fn: Callable[..., Any], params: Tree, batch: Batch, device: jax.Device):
        self.loss_fn, self.device = loss_fn, device
        self.types: tuple[Any, Any] = types_of((params, batch))
        self._named = jax.tree_util.tree_leaves_with_path(self.types)
        self.leaves, self._treedef = jax.tree.flatten(self.types)
        own = len(jax.tree.leaves(params))
        self.trained = [
            i < own and jnp.issubdtype(x.dtype, jnp.inexact) for i, x in enumerate(self.leaves)
        ]
        plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.leaves]
        try:
            self.graph = Graph(self._call, plain, [False] * len(plain), exact=True)
        except NameError as error:
            raise ValueError(f"a loss with collectives is not planned: {error}.") from error
        self.out_treedef: Any = self.graph.out_treedef
        self._check()

    def _call(self, inputs: list[Any]) -> Any:
        return self.loss_fn(*jax.tree.unflatten(self._treedef, inputs))

    def _check(self) -> None:
        graph = self.graph
        first = graph.types[graph.outputs[0]] if graph.outputs else None
        if first is None or first.shape or not jnp.issubdtype(first.dtype, jnp.floating):
            raise ValueError(
                f"the loss, the first result, must be a real number, but it is "
                f"{first and first.str_short()}."
            )
        if not any(self.trained):
            raise ValueError("no parameter is of a floating dtype: nothing is differentiated.")
        check_pure(graph)

    def inputs_of(self, params: Tree, batch: Batch) -> list[Any]:
        """The leaves of arguments, which must be of the planned types."""
        treedef: Any
        leaves, treedef = jax.tree.flatten((params, batch))
        if treedef != self._treedef:
            raise ValueError(f"planned for arguments of the form {self._treedef}, got {treedef}.")
        for (path, planned), x in zip(self._named, leaves, strict=True):
            if (planned.shape, planned.dtype) != (jnp.shape(x), jnp.result_type(x)):
                raise ValueError(
                    f"{_name(path)}: planned for {planned.dtype}{list(planned.shape)}, got "
                    f"{jnp.result_type(x)}{list(jnp.shape(x))}: plan for these types."
                )
        return leaves

    def check_differentiated(self, perturbed: Sequence[bool]) -> None:
        for (path, _), wanted, trained in zip(self._named, perturbed, self.trained, strict=True):
            if wanted and not trained:
                raise ValueError(
                    f"a planned loss is differentiated by floating parameters, not by "
                    f"{_name(path)}: give it as one of them."
                )

    def check_as_planned(self, inputs: list[Any]) -> None:
        """A loss that has collectives where it is called computes what has not been planned."""
        planned, now = self.graph.jaxpr, jax.make_jaxpr(self._call)(inputs).jaxpr
        if new := _collectives(now) - _collectives(planned):
            raise ValueError(
                f"the loss has a collective here ({min(new)}), such as that of a BatchNorm with "
                "the statistics of all devices, and had none when it was planned: pass "
                "sync_batch_norm=False, or take view='global' (docs: how_to/batch_norm)."
            )

    def loops_of(self, kind: DeviceKind | None, offload: Offload) -> list[Loop]:
        """Its loops; ``fn`` runs them in one form or another."""
        needed = self.graph.needed(self.graph.outputs, self.graph.constants)[0]
        scans = [eqn for eqn in needed if eqn.primitive.name == "scan"]
        self._loops = {e.results: Loop(e, kind, offload) for e in scans if e.params["length"] > 1}
        return list(self._loops.values())

    def fn(self, inputs: list[Any], loops: LoopForm = _AS_IT_IS) -> list[Any]:
        """The loss, with loops in a form."""
        if loops.stored is None:
            return jax.tree.leaves(self._call(inputs))
        named = zip(loops.stored, loops.offloaded, strict=True)
        choices = dict(zip(self._loops, named, strict=True))
        values = self.graph.constants | dict(enumerate(inputs))
        for eqn in self.graph.equations:
            operands = [values[v] for v in eqn.operands]
            if eqn.results in choices:
                loop = self._loops[eqn.results]
                outs = loop.run(operands, *choices[eqn.results], loops.segments)
            else:
                outs = list(bind(eqn, operands))
            values |= zip(eqn.results, outs, strict=True)
        return [values[v] for v in self.graph.outputs]

    @property
    def shards(self) -> int:
        """Devices that share the batch, and with it each value."""
        batch = [x.sharding for (path, x) in self._named if path[0].idx and x.sharding is not None]
        axes = {a for s in batch for a in jax.tree.leaves(tuple(s.spec)) if a is not None}
        return math.prod(batch[0].mesh.shape[a] for a in axes) if axes else 1


def _name(path: Any) -> str:
    return "/".join([("params", "batch")[path[0].idx], *filter(None, [path_str(path[1:])])])


def _collectives(jaxpr: Any) -> set[str]:
    names = {eqn.primitive.name for eqn in all_equations(jaxpr)}
    return {name for name in names if name.startswith(_COLLECTIVES)}


class LossSearch:
    """Plans of a loss, each compiled for its bytes."""

    def __init__(self, loss: PlannableLoss, kind: DeviceKind | None, offload: Offload = False):
        self._loss = loss
        inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in loss.leaves]
        self._searches: list[tuple[LoopForm, JointGraph, ScheduleSearch]] = []
        loops = loss.loops_of(kind, offload)
        known = {INPUT, *(name for loop in loops for name in loop.names)}
        # XLA fetches what is not in loops one by one on GPUs, on TPUs all at once.
        link = kind.host_link if kind and not kind.tile and offload is True else None
        known_named = offload is True or not known.isdisjoint(offload or ())
        if offload and not link and not (loops and known_named):
            found = f"with values {', '.join(sorted(known))}" if loops else "of which this has none"
            raise ValueError(
                f"offload= with names, or on TPUs, copies what layers of loops store, {found}."
            )
        forms = forms_of(loops)
        for form, fine in [(forms[0], True), *((form, False) for form in forms)]:
            fn = functools.partial(loss.fn, loops=form)
            joint = JointGraph(fn, inputs, loss.trained, kind, loss.shards, fine)
            check_pure(joint.graph)  # rules of derivatives, too
            results = [k for k in range(joint.forward) if joint.returns(k)]
            # Two searches: none of the states without copies is left out for one with them.
            for own in (None, link) if link and form is forms[0] else (None,):
                search = ScheduleSearch(joint.values(own), joint.steps(), results)
                self._searches.append((form, joint, search))
        works = (joint.work for _, joint, _ in self._searches)
        self._plain = min(works, key=lambda work: work.seconds)
        self._known: dict[Any, float] = {}  # bytes of programs

    def plan(self, planned: float, states: int | None = None) -> LossPlan | None:
        """The fastest plan within ``planned`` bytes by its graph; its program may need more."""
        plans = []
        for form, joint, search in self._searches:
            if found := search.find(planned, states):
                plans.append(self._plan_of(form, joint, found, planned))
        return min(plans, key=lambda plan: plan.work.seconds, default=None)

    def _plan_of(
        self, form: LoopForm, joint: JointGraph, found: LossSchedule, planned: float
    ) -> LossPlan:
        again = [k for ks in found.again for k in ks]
        flops = sum(joint.nodes[k].work.flops for k in again if k >= 0)
        copied = sum(joint.nodes[~k].nbytes for k in set(again) if k < 0)
        least = joint.work.seconds + form.wait + found.at_least - self._plain.seconds
        seconds = self._plain.seconds or 1.0  # 0 of a loss that computes nothing
        return LossPlan(
            peak=planned,
            saved=sum(joint.nodes[k].nbytes for k in found.stored),
            host=form.host + copied,
            budget=planned,
            work=joint.work + Work(flops, found.seconds + form.wait),
            plain=self._plain,
            loss_fn=self._loss.loss_fn,
            loops=form,
            at_least=max(0.0, least / seconds),
            _loss=self._loss,
            _graph=joint,
            _schedule=found,
        )

    def _forms(self) -> Iterator[LossPlan]:
        """Each form of the loops as the compiler orders it, the fastest first."""
        plans = []
        for form, joint, search in self._searches:
            if form.stored is not None and (found := search.find(math.inf)):
                plans.append(self._plan_of(form, joint, found._replace(again=()), math.inf))
        yield from sorted(plans, key=lambda plan: plan.work.seconds)

    def compiled(
        self, planned: float, budget: float | None = None, states: int | None = None
    ) -> LossPlan | None:
        """The same with the bytes of its program; infinite where the compiler gives up."""
        plan = self.plan(planned, states)
        if plan is None:
            return None
        if not any(plan._schedule.again):  # perhaps nothing has to be ordered, either
            schedule = plan._schedule._replace(again=())
            plain = self._measured(dataclasses.replace(plan, _schedule=schedule))
            if plain.peak <= (budget or planned) or self._loss.device.platform == "cpu":
                return plain
        return self._measured(plan)

    def _measured(self, plan: LossPlan) -> LossPlan:
        stored, again, *_ = plan._schedule
        key = (plan.loops, plan._graph, stored, again) if again else plan.loops
        if key not in self._known:
            first = functools.partial(_first, plan)
            params, batch = self._loss.types
            self._known[key] = step_temporaries(first, params, batch, self._loss.device)
        return dataclasses.replace(plan, peak=self._known[key], budget=self._known[key])

    def fastest(self, budget: float) -> LossPlan:
        """The fastest plan whose program keeps to the budget."""
        best: LossPlan | None = None
        # Bytes that are planned are not those of programs: from above and below.
        fits, fails, before = 0.0, self.most * 1.01, len(self._known)
        planned = min(budget, self.most)
        on_tpu = self._loss.device.platform == "tpu"
        programs = _TPU_PROGRAMS if on_tpu else _MOST_PROGRAMS
        for _ in range(4 * programs):  # most guesses are programs that are known
            if len(self._known) - before >= programs:
                break
            plan = self.compiled(planned, budget)
            if plan is None:  # fewer than the graph needs
                planned = max(self.least, fits)
                plan = self.compiled(planned, budget)
            assert plan is not None
            if plan.peak > budget:
                fails = min(fails, planned)
            else:
                fits = max(fits, planned)
                if best is None or plan.work.seconds < best.work.seconds:
                    best = plan
                if plan.peak >= _FITS * budget or plan.extra_time <= 0:
                    break
            planned += _AIM * budget - plan.peak
            if not fits < planned < fails:
                planned = (max(fits, self.least) + fails) / 2
            if fails - fits < 0.01 * budget or fails <= self.least:
                break
        # Graphs count more bytes of loops than programs need. TPUs compile for a minute each.
        for plan in () if on_tpu and best else self._forms():
            if best is not None and plan.work.seconds >= best.work.seconds:
                break
            if plan.saved <= budget and self._measured(plan).peak <= budget:
                best = self._measured(plan)
        if best is None:
            # A search of few states finds another schedule, whose program may need fewer bytes.
            ends = ((self.least, None), (self.least, _FEW_STATES), (self.most, None))
            plans = filter(None, (self.compiled(at, states=states) for at, states in ends))
            best = min(plans, key=lambda plan: plan.peak, default=None)
            if best is None or best.peak > budget:
                least = min(self._known.values(), default=math.inf)
                raise no_plan_fits(budget, "this loss needs", least)
        return dataclasses.replace(best, budget=budget)

    @property
    def most(self) -> float:
        """Bytes with which nothing is computed again."""
        return self._searches[0][2].most

    @functools.cached_property
    def least(self) -> float:
        """About the fewest bytes for which there is a plan."""
        low, high = 0.0, max(search.most for *_, search in self._searches)
        while high - low > 0.02 * high:
            middle = (low + high) / 2
            if any(search.find(middle, _FEW_STATES) for *_, search in self._searches):
                high = middle
            else:
                low = middle
        return high

    def frontier(self) -> list[LossPlan]:
        planned = np.geomspace(max(self.most, 1.0), max(self.least, 1.0), _POINTS)
        plans = [self.compiled(each) for each in map(float, planned)]
        fastest_first = sorted((p for p in plans if p), key=lambda p: p.work.seconds)
        return unbeaten(fastest_first)


def _first(plan: LossPlan, params: Tree, batch: Batch) -> Any:
    return jnp.asarray(jax.tree.leaves(plan(params, batch))[0])
