"""The search for the plan of a loss, whose programs are compiled for their bytes."""

import contextlib
import copy
import dataclasses
import functools
import math
import numbers
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from optax_ext.equations import name_of, trace
from optax_ext.traced_graph import Graph, bind
from optax_ext.user_line import line_of
from sharding._jaxprs import all_equations, is_checkpoint, without_checkpoints
from sharding._traced_types import traced_type
from sharding._types import Batch, Tree
from sharding.loss._derivatives import Differentiated
from sharding.loss._loss_options import Rewrite
from sharding.loss._stack import find_stacks
from sharding.placement._specs import path_str
from sharding.plan._format import size
from sharding.plan.audit._program_memory import step_temporaries, types_of
from sharding.plan.machine._devices import DeviceKind, num_bytes
from sharding.plan.model._traced_work import ANY_DEVICE, Work, seconds_one_by_one
from sharding.remat._joint_graph import JointGraph
from sharding.remat._loss_loops import Loop, LoopForm, Offload, forms_of
from sharding.remat._planned_loss import LossPlan, ratio
from sharding.remat._schedule_search import LossSchedule, ScheduleSearch
from sharding.tiles._tiled_loss import tiled

_COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")
_FEW_STATES = 60  # to find the fewest bytes
_AIM, _FITS = 0.97, 0.95  # of a budget: what is looked for, and what suffices
_MOST_PROGRAMS = 4  # that are compiled for a budget
_POINTS = 8  # of a frontier
_HOPELESS = 0.4  # of the bytes that an operation needs by the graph: no search finds a program
_LONG = 10.0  # seconds after which it is reported what planning is at
_COUNTED = 1.5  # bytes that loops store by their graph, of those of a program, at most
_LEAST_FORMS = 3  # of loops, one of which takes the fewest bytes
_COMPILED = 0.6  # of a TPU's memory, for parameters and gradients in a compiled program
_WORTH = 0.02  # of extra time, from which on tiles are tried
_SAVES = 0.9  # of the bytes of storing all: what tiles leave, to be worth a search
_AS_IT_IS = LoopForm()


def check_pure(graph: Graph) -> None:
    """Raises if the operations do more than compute their results."""
    with_refs = (
        eqn
        for eqn in graph.equations
        if any(hasattr(graph.types[v], "inner_aval") for v in eqn.operands + eqn.results)
    )
    words = "callback", "print"
    calls = (e for e in all_equations(graph.jaxpr) if any(w in name_of(e) for w in words))
    for eqns, what in ((with_refs, "refs"), (calls, "callbacks and prints")):
        for eqn in eqns:
            raise ValueError(
                f"what {name_of(eqn)} does, at {line_of(eqn.source_info)}, would be done "
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
        self.loss_fn = loss_fn
        self.device = device
        self.types: tuple[Any, Any] = types_of((params, batch))
        self._named = jax.tree_util.tree_leaves_with_path(self.types)
        self.leaves, self._treedef = jax.tree.flatten(self.types)
        own = len(jax.tree.leaves(params))
        self.trained = [
            i < own and jnp.issubdtype(x.dtype, jnp.inexact) for i, x in enumerate(self.leaves)
        ]
        try:
            self._trace(self.leaves)
        except NameError as error:
            raise ValueError(f"a loss with collectives is not planned: {error}.") from error
        if not any(self.trained):
            raise ValueError("no parameter is of a floating dtype: nothing is differentiated.")
        check_pure(self.graph)

    def _trace(self, arrays: Sequence[Any]) -> None:
        self.inputs = [traced_type(jax.typeof(x)) for x in arrays]

        def call(inputs: list[Any]) -> Any:
            return self.loss_fn(*jax.tree.unflatten(self._treedef, inputs))

        closed, results = trace(call, self.inputs)
        self.out_treedef: Any = jax.tree.structure(results)
        self.checkpoints = sum(map(is_checkpoint, all_equations(closed.jaxpr)))
        # What these would store is up to the plan.
        run = jaxpr_as_fun(without_checkpoints(closed)) if self.checkpoints else None
        self._call = (lambda inputs: run(*inputs)) if run else call
        self.graph = Graph(self._call, self.inputs, [False] * len(self.inputs), exact=True)
        first = self.graph.types[self.graph.outputs[0]] if self.graph.outputs else None
        if first is None or first.shape or not jnp.issubdtype(first.dtype, jnp.floating):
            raise ValueError(
                f"the loss, the first result, must be a real number, but it is "
                f"{first and first.str_short()}."
            )
        self.first = traced_type(first)

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

    def traced_with(self, inputs: list[Any]) -> "PlannableLoss":
        """The loss as it is where it is called, such as inside a ``shard_map``."""
        here = copy.copy(self)
        here._trace(inputs)
        here.loops_of(None, False)
        # One that has collectives here computes what has not been planned.
        if new := _collectives(here.graph.jaxpr) - _collectives(self.graph.jaxpr):
            raise ValueError(
                f"the loss has a collective here ({min(new)}), such as that of a BatchNorm with "
                "the statistics of all devices, and had none when it was planned: leave "
                "the collective out (docs: understand/meaning)."
            )
        return here

    def in_tiles(self, tiles: int) -> "PlannableLoss":
        """The same loss, with large values in tiles; a ``ValueError`` if it has none."""
        return PlannableLoss(tiled(self.loss_fn, tiles).fn, *self.types, self.device)

    def loops_of(self, kind: DeviceKind | None, offload: Offload) -> list[Loop]:
        """Its loops; ``fn`` runs them in one form or another."""
        found = find_stacks(self.graph, 0, Differentiated.of(self.graph, 0))
        self._loops = {
            stack.eqn.results: Loop(stack, kind, offload)
            for stack in found
            if stack.scan.options["length"] > 1
        }
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
    names = {name_of(eqn) for eqn in all_equations(jaxpr)}
    return {name for name in names if name.startswith(_COLLECTIVES)}


class LossSearch:
    """Plans of a loss, each compiled for its bytes."""

    def __init__(
        self,
        loss: PlannableLoss,
        kind: DeviceKind | None,
        offload: Offload = False,
        in_loops: bool = False,
        tiles: Sequence[int] = (),  # in how many large values may exist
        plain: Work | None = None,  # of a step that runs nothing again; None: the least of its own
    ):
        self._loss = loss
        self._kind = kind
        self._options = offload, in_loops
        self._tiles = tiles
        self._searches: list[tuple[LoopForm, JointGraph, ScheduleSearch]] = []
        loops = loss.loops_of(kind, offload)
        known = {name for loop in loops for name in loop.names}
        # XLA fetches what is not in loops one by one on GPUs, on TPUs all at once.
        link = kind.host_link if kind and not kind.tile and offload is True else None
        named = offload is True or not known.isdisjoint(offload or ())
        if offload and not link and not (loops and named):
            found = f"with values {', '.join(sorted(known))}" if loops else "of which this has none"
            raise ValueError(f"offload= on TPUs or by name copies what loops store, {found}.")
        forms = forms_of(loops)
        self._lengths = {loop.length for loop in loops}
        self._in_loops = in_loops and bool(loops)  # and nowhere else something is computed again
        graphs = [(form, False) for form in forms]
        for form, fine in graphs if self._in_loops else [(forms[0], True), *graphs]:
            fn = functools.partial(loss.fn, loops=form)
            joint = JointGraph(fn, loss.inputs, loss.first, loss.trained, kind, loss.shards, fine)
            check_pure(joint.graph)  # rules of derivatives, too
            # Two searches: none of the states without copies is left out for one with them.
            for own in (None, link) if link and form is forms[0] else (None,):
                self._searches.append((form, joint, joint.search(own)))
        works = (joint.work for _, joint, _ in self._searches)
        self._plain = plain or min(works, key=lambda work: work.seconds)
        self._known: dict[Any, LossPlan] = {}  # whose programs are compiled
        self._exact = set[Any]()  # of which without the value of the loss, too
        self._start = time.monotonic()

    def plan(self, planned: float, states: int | None = None) -> LossPlan | None:
        """The fastest plan within ``planned`` bytes by its graph; its program may need more."""
        self._report(f"searching for a schedule within {size(planned)}")
        best = None
        for form, joint, search in self._searches:
            bound = best.work.seconds - joint.work.seconds - form.wait if best else math.inf
            if bound > 0 and (found := search.find(planned, states, bound)):
                best = self._plan_of(form, joint, found, planned)
        return best

    def within(self, share: float) -> LossPlan:
        """The fastest plan by its graph within a share of the bytes of storing all, if there is."""
        if self._in_loops:
            plans = [plan for plan in self._forms() if not plan.loops.segments]
            plans.sort(key=lambda plan: plan.saved)
            fit = [plan for plan in plans if plan.saved <= share * plans[-1].saved]
            return min(fit or plans[:1], key=lambda plan: plan.work.seconds)
        plan = self.plan(share * self.most) or self.plan(self.least, _FEW_STATES)
        assert plan is not None
        return plan

    def _plan_of(
        self, form: LoopForm, joint: JointGraph, found: LossSchedule, planned: float
    ) -> LossPlan:
        tasks = [task for tasks in found.again for task in tasks]
        flops = sum(joint.nodes[task.value].work.flops for task in tasks if not task.fetches)
        copied = sum(joint.nodes[k].nbytes for k in {task.value for task in tasks if task.fetches})
        least = joint.work.seconds + form.wait + found.at_least - self._plain.seconds
        return LossPlan(
            peak=planned,
            saved=sum(joint.nodes[k].nbytes for k in found.stored),
            host=form.host + copied,
            budget=planned,
            work=joint.work + Work(flops, found.seconds + form.wait),
            plain=self._plain,
            loss_fn=self._loss.loss_fn,
            loops=form,
            at_least=max(0.0, ratio(least, self._plain.seconds)),
            _loss=self._loss,
            _graph=joint,
            _schedule=found,
        )

    def _forms(self) -> list[LossPlan]:
        """Each form of the loops as the compiler orders it, the fastest first."""
        plans = {  # the last graph of each
            form: self._plan_of(form, joint, search.in_any_order, math.inf)
            for form, joint, search in self._searches
        }
        return sorted(plans.values(), key=lambda plan: plan.work.seconds)

    def compiled(
        self,
        planned: float,
        budget: float | None = None,
        states: int | None = None,
        exact: bool = True,
    ) -> LossPlan | None:
        """The same with the bytes of its program; infinite where the compiler gives up.

        If not ``exact``, of that which returns the value of the loss.
        """
        exact_within = budget if exact else 0.0
        plan = self.plan(planned, states)
        if plan is None:
            return None
        if not any(plan._schedule.again):  # perhaps nothing has to be ordered, either
            schedule = plan._schedule._replace(again=())
            plain = self._measured(dataclasses.replace(plan, _schedule=schedule), exact_within)
            if plain.peak <= (budget or planned) or self._loss.device.platform == "cpu":
                return plain
        return self._measured(plan, exact_within)

    def _measured(self, plan: LossPlan, exact_within: float | None = None) -> LossPlan:
        stored, again, *_ = plan._schedule
        key = (plan.loops, plan._graph, stored, again) if again else plan.loops
        bytes_of = functools.partial(step_temporaries, plan, *self._loss.types, self._loss.device)
        if key not in self._known:
            self._report(f"compiling program {len(self._known) + 1}")
            nbytes = bytes_of()
            if not again and nbytes == math.inf and len(self._lengths) == 1:
                nbytes = self._by_few_layers(plan.loops)
                self._exact.add(key)
            self._known[key] = dataclasses.replace(plan, peak=nbytes)
        nbytes = self._known[key].peak
        # Steps return the loss. Programs without it keep to a budget, too.
        limit = nbytes if exact_within is None else exact_within
        if key not in self._exact and nbytes <= limit < math.inf:
            self._exact.add(key)
            nbytes = max(nbytes, bytes_of(value=False))
            self._known[key] = dataclasses.replace(plan, peak=nbytes)
        return dataclasses.replace(plan, peak=nbytes, budget=nbytes)

    def _report(self, what: str) -> None:
        if (spent := time.monotonic() - self._start) > _LONG:
            print(f"sharding.remat after {spent:.0f} s: {what}", file=sys.stderr, flush=True)

    def _by_few_layers(self, form: LoopForm) -> float:
        """Bytes of the program of a form, where the compiler refuses its parameters."""
        # That of TPUs does, though ZeRO shards them. Bytes grow linearly from three layers on.
        loss, (length,) = self._loss, self._lengths
        stacked = num_bytes([t for t in loss.leaves if t.shape[:1] == (length,)])
        fit = int(_COMPILED * self._kind.memory * length / (2 * stacked)) if self._kind else 0
        more = min(length - 1, max(fit, 4))
        if form.segments or more <= 3:
            return math.inf

        def nbytes(count: int) -> float:
            def shortened(t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
                return t.update(shape=(count, *t.shape[1:])) if t.shape[:1] == (length,) else t

            params, batch = loss.types
            types = jax.tree.map(shortened, params), batch
            short = PlannableLoss(loss.loss_fn, *types, loss.device)
            short.loops_of(self._kind, bool(form.host))
            run = functools.partial(short.fn, loops=form)
            return step_temporaries(lambda *args: run(short.inputs_of(*args)), *types, loss.device)

        try:
            while (high := nbytes(more)) == math.inf and more > 4:  # what layers store, too
                more = max(4, more // 2)
            low = nbytes(few := max(3, more // 2))
        except (TypeError, ValueError):  # not of other lengths
            return math.inf
        linear = low <= high < math.inf  # as are not those of a TPU's fast memory
        return low + (high - low) * (length - few) / (more - few) if linear else math.inf

    def fastest(self, budget: float) -> LossPlan:
        """The fastest plan whose program keeps to the budget; large values are in tiles if so.

        Tiles are as few as fit.
        """
        best = self._fastest_of(budget)
        if best and best.extra_time <= _WORTH:
            return best
        searches = [self]
        for tiles in self._tiles:
            if (search := self._in_tiles(tiles)) is None:
                break
            if best and search.at_once.seconds >= best.work.seconds:
                break
            searches.append(search)
            if found := search._fastest_of(budget):
                found = self._of_tiles(found, tiles)
                return min(filter(None, (best, found)), key=lambda plan: plan.work.seconds)
        if best:
            return best
        raise min(searches, key=lambda search: search.smallest)._no_plan_fits(budget)

    def _in_tiles(self, tiles: int) -> "LossSearch | None":
        """The search of the loss in tiles; None if that saves nothing, or it is in some already."""
        if self._loss.shards > 1 or Rewrite.of(self._loss.loss_fn):
            return None
        with contextlib.suppress(ValueError):
            loss = self._loss.in_tiles(tiles)
            search = LossSearch(loss, self._kind, *self._options, plain=self._plain)
            search._takes_longer_than(self)
            return search if search.most < _SAVES * self.most else None
        return None

    def _of_tiles(self, plan: LossPlan, tiles: int) -> LossPlan:
        """A plan of the loss in tiles, as one of the loss."""
        return dataclasses.replace(plan, loss_fn=self._loss.loss_fn, tiles=tiles)

    def _takes_longer_than(self, plain: "LossSearch") -> None:
        """Adds what tiles take more than all rows at once, as both are counted one by one.

        Of operations that run together in a loop, less is known than of others.
        """
        (_, joint, _), (_, of_plain, _) = self._searches[0], plain._searches[0]
        kind = self._kind or ANY_DEVICE
        one, other = (seconds_one_by_one(x.graph.jaxpr, kind) for x in (of_plain, joint))
        least = of_plain.work.seconds + max(0.0, other - one)
        more = Work(0.0, max(0.0, least - joint.work.seconds))
        for _, joint, _ in self._searches:
            joint.work += more

    @property
    def at_once(self) -> Work:
        """Of all operations, none of which runs again."""
        return min((joint.work for _, joint, _ in self._searches), key=lambda work: work.seconds)

    @property
    def smallest(self) -> float:
        """Bytes of the smallest program that was compiled."""
        return min((plan.peak for plan in self._known.values()), default=math.inf)

    def _fastest_of(self, budget: float) -> LossPlan | None:
        """The same of the loss as it is; None if none fits."""
        floor = 0.0 if self._in_loops else min(search.floor for *_, search in self._searches)
        hopeless = budget < _HOPELESS * floor  # whatever is searched for
        best = None if self._in_loops or hopeless else self._in_order(budget)
        on_tpu = self._loss.device.platform == "tpu"
        # Graphs count more bytes of loops than programs need. TPUs compile for a minute each.
        forms = [] if hopeless or (on_tpu and best) else self._forms()
        most = (_COUNTED if self._lengths else 1.0) * budget
        for plan in forms:
            if best is not None and plan.work.seconds >= best.work.seconds:
                break
            if plan.saved <= most and self._measured(plan, budget).peak <= budget:
                best = self._measured(plan)
        if best is None:
            if self._in_loops:
                small = sorted(forms, key=lambda plan: plan.saved)[:_LEAST_FORMS]
                found: Iterable[LossPlan | None] = map(self._measured, small)
            else:
                # A search of few states finds another schedule, whose program may need fewer bytes.
                ends = ((self.least, None), (self.least, _FEW_STATES), (self.most, None))
                found = (self.compiled(at, budget, states) for at, states in ends[hopeless:])
            best = min(filter(None, found), key=lambda plan: plan.peak, default=None)
            if best is None or best.peak > budget:
                return None
        return dataclasses.replace(best, budget=budget)

    def _no_plan_fits(self, budget: float) -> ValueError:
        """An error with the bytes of the smallest program, all digits: a budget that fits."""
        smallest = functools.partial(min, key=lambda plan: plan.peak)
        while (least := smallest(self._known.values())).peak < self._measured(least).peak:
            pass  # without the value of the loss it takes more
        found = ", nor the memory of the device"
        if least.peak < math.inf:
            tried = f"of {len(self._known)} programs that were tried the smallest takes"
            found = f": {tried} {size(least.peak)}, {math.ceil(least.peak):,} bytes"
        return ValueError(f"no plan fits {size(budget)}{found} (docs: how_to/recompute).")

    def _in_order(self, budget: float) -> LossPlan | None:
        fitting = list[LossPlan]()
        # Bytes that are planned are not those of programs: from above and below.
        low, fails, before = 0.0, self.most * 1.01, len(self._known)
        planned = min(budget, self.most)
        for _ in range(4 * _MOST_PROGRAMS):  # most guesses are programs that are known
            if len(self._known) - before >= _MOST_PROGRAMS:
                break
            plan = self.compiled(planned, budget, exact=False)
            if plan is None:  # fewer than the graph needs
                planned = low = max(low, self.least)
                plan = self.compiled(planned, budget, exact=False)
                plan = plan or self.compiled(planned, budget, _FEW_STATES, exact=False)
            assert plan is not None
            is_last = _FITS * budget <= plan.peak <= budget or plan.extra_time <= 0
            if is_last:
                plan = self._measured(plan, budget)
            if plan.peak > budget:
                fails = min(fails, planned)
            else:
                low = max(low, planned)
                fitting.append(plan)
                if is_last:
                    break
            planned += _AIM * budget - plan.peak
            if not low < planned < fails:
                planned = (low + fails) / 2
            if fails - low < 0.01 * budget:
                break
        for plan in sorted(fitting, key=lambda plan: plan.work.seconds):
            if (exact := self._measured(plan, budget)).peak <= budget:
                return exact
        return None

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
        """Plans that no other one beats, by ascending bytes."""
        plans = self._several()
        for number in self._tiles:
            if search := self._in_tiles(number):
                plans += [self._of_tiles(plan, number) for plan in search._several()]
        kept: list[LossPlan] = []
        for plan in sorted(plans, key=lambda plan: plan.work.seconds):
            if plan.peak < (kept[-1].peak if kept else math.inf):
                kept.append(plan)
        return kept[::-1]

    def _several(self) -> list[LossPlan]:
        """Plans of the loss as it is, from the most bytes to the fewest."""
        if self._in_loops:
            return [*map(self._measured, self._forms())]
        planned = np.geomspace(max(self.most, 1.0), max(self.least, 1.0), _POINTS)
        return [*filter(None, map(self.compiled, map(float, planned)))]
