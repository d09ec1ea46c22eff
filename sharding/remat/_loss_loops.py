"""The loops of a loss, as stacks of layers: what each layer stores for its backward pass."""

import functools
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from optax_ext.equations import Name, name_of, record_of
from optax_ext.traced_graph import Equation, Graph, bind
from optax_ext.user_line import line_of
from sharding._traced_types import traced_type
from sharding.loss._stack import Stack
from sharding.plan.machine._devices import DeviceKind, num_bytes
from sharding.plan.model._traced_work import is_light, work_of, work_of_equation

INPUT = "block_input"  # the name that is given to what a layer gets
_FORMS, _SEGMENTED = 18, 3  # choices of all loops, and of those with segments
_CHOICES, _STATES = 50, 200  # of a loop, from which a search goes on

Offload = bool | Collection[str]  # whether values may be copied to host memory, or their names
Names = tuple[str, ...]


def policy_of(saved: Collection[str], offloaded: Collection[str] = ()) -> Callable[..., Any]:
    """What ``jax.checkpoint`` stores: some values on the device, some in host memory."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def wait_of(copy: float, forward: float, backward: float) -> float:
    """Seconds by which copies, one way, outlast the passes that they run beside."""
    return max(0.0, copy - forward) + max(0.0, copy - backward)


class LoopForm(NamedTuple):
    """What the layers of each loop store; what they do not is computed again."""

    stored: tuple[Names, ...] | None = None  # names of values, by loop; None: all
    offloaded: tuple[Names, ...] = ()  # of others, which are copied to host memory
    host: float = 0.0  # bytes that these take
    wait: float = 0.0  # seconds by which copies outlast layers
    nbytes: float = 0.0  # that layers store on the device
    seconds: float = 0.0  # of what runs again, by a model of the device, and of the wait
    segments: bool = False  # of layers, each computed again as a whole

    def __str__(self) -> str:
        """What layers compute again."""
        if self.stored is None:
            return "nothing"
        moved = dict.fromkeys(f"{name} (host)" for names in self.offloaded for name in names)
        kept = dict.fromkeys(name for names in self.stored for name in names)
        names = ", ".join(kept | moved)
        layers = f"all but {names}" if names else "each layer"
        return f"{layers}, and segments of layers" if self.segments else layers


class Loop:
    """A scan whose layers are computed again, as far as their values are not stored.

    Values have the names that the loss gives them, or, if their operations are not fused, the
    operation and the line where it is written; a number follows a name that others have, too.
    """

    def __init__(self, stack: Stack, kind: DeviceKind | None, offload: Offload = False):
        self._kind = kind
        self._stack = stack
        scan = stack.scan
        self.length = n = int(scan.options["length"])
        self.inner = max(i for i in range(1, math.isqrt(n) + 1) if n % i == 0)  # of a segment
        run = jaxpr_as_fun(scan.body)
        types = scan.body.in_avals
        self._types = [*map(traced_type, types)]
        self._offload = offload
        deferred = [False] * len(types)
        self._layer = Graph(lambda args: run(*args), self._types, deferred, exact=True)
        self._names = self._named()

    @functools.cached_property
    def _graph(self) -> Graph:
        def residuals(args: list[Any]) -> list[Any]:
            arrays = jax.tree.leaves(jax.vjp(self._differentiated, args)[1])
            return [x for x in arrays if hasattr(x, "dtype")]

        return Graph(residuals, self._types, [False] * len(self._types))

    @functools.cached_property
    def names(self) -> list[str]:
        return [*filter(None, map(_name_of, self._graph.equations))]

    @functools.cached_property
    def _moved(self) -> set[str]:
        asked = {*self.names} if self._offload is True else {*(self._offload or ())}
        return {n for n in self.names if self._kind and {n, n.partition(" #")[0]} & asked}

    def _named(self) -> dict[int, str]:
        """Names of values of a layer."""
        graph = self._layer
        counts = Counter[str]()
        floating = {v for v, t in enumerate(graph.types) if jnp.issubdtype(t.dtype, jnp.floating)}
        names = dict[int, str].fromkeys(floating.intersection(self._stack.carried), INPUT)
        known = {v for eqn in graph.equations if _name_of(eqn) for v in eqn.operands}
        for eqn in graph.equations:
            name = _name_of(eqn)
            values = floating.intersection(eqn.results) - known
            if name:  # from where it is computed on
                values = {v if v in graph.producer else eqn.results[0] for v in eqn.operands}
            elif is_light(eqn) or eqn.primitive.name == "split":
                continue
            name = name or place_of(eqn)
            for v in sorted(values):
                counts[name] += 1
                names[v] = f"{name} #{counts[name]}" if counts[name] > 1 else name
        return names

    def _run_layer(self, *args: Any) -> list[Any]:
        def named(vs: Iterable[int], xs: Iterable[Any]) -> dict[int, Any]:
            pairs = zip(vs, xs, strict=True)
            own = self._names
            return {v: checkpoint_name(x, own[v]) if v in own else x for v, x in pairs}

        values = self._layer.constants | named(range(len(args)), args)
        for eqn in self._layer.equations:
            operands = [values[v] for v in eqn.operands]
            values |= named(eqn.results, operands if _name_of(eqn) else bind(eqn, operands))
        return [values[v] for v in self._layer.outputs]

    def _differentiated(self, args: Sequence[Any]) -> list[Any]:
        return [x for x in self._run_layer(*args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def _passes(self) -> tuple[float, float]:
        """Seconds of the passes beside which copies run: all layers forward, and backward."""
        # XLA's default for GPUs is no schedule that hides copies: on an H200 all of them were
        # waited for (benchmarks/results/activation_time.md).
        if not self._moved or not self._kind or self._kind.tile is None:
            return 0.0, 0.0

        def step(args: Any, cotangents: Any) -> Any:
            outs, vjp = jax.vjp(self._differentiated, args)
            return outs, [x for x in vjp(cotangents)[0] if x.dtype != jax.dtypes.float0]

        outs = jax.eval_shape(self._differentiated, self._types)
        forward = work_of(self._differentiated, self._types, kind=self._kind)
        backward = work_of(step, self._types, outs, kind=self._kind) - forward
        return self.length * forward.seconds, self.length * backward.seconds

    @functools.cached_property
    def forms(self) -> list[LoopForm]:
        """Those of this loop alone that take the least time for their bytes, by ascending bytes.

        From the last operation to the first: a value that is read is stored, copied to the host, or
        computed again, which reads others. Of equal values that are still read, and about as many
        bytes on the host, the choices go on that no other one beats.
        """
        graph = self._graph
        fixed = 0.0
        always = set[int](graph.outputs)  # are read, whatever is stored
        states: dict[Any, list[Any]] = {(frozenset(), ""): [LoopForm((), ())]}
        for eqn in reversed(graph.equations):
            operands, results = ([graph.types[v] for v in vs] for vs in (eqn.operands, eqn.results))
            seconds = self.length * work_of_equation(eqn, operands, results, self._kind).seconds
            name = _name_of(eqn)
            nbytes = self.length * num_bytes(results)
            reads = graph.producer.keys() & eqn.operands
            needed = name == INPUT or not always.isdisjoint(eqn.results)
            if needed and not name:
                always |= reads
                fixed, seconds = fixed + seconds, 0.0
            again = reads - always
            stored = () if name == INPUT else (name,)
            ways: tuple[tuple[bool, set[int], tuple[Any, ...]], ...] = (
                (name != "", set(), (stored, (), 0, 0, nbytes, 0)),
                (name in self._moved, set(), ((), (name,), nbytes, 0, 0, 0)),
                (name != INPUT, again, ((), (), 0, 0, 0, seconds)),
            )
            after = defaultdict[Any, list[Any]](list)
            for (read, host), forms in states.items():
                rest = read.difference(eqn.results)
                if not needed and rest == read:
                    after[read, host] += forms
                elif not name and not seconds:
                    after[rest | again, host] += forms
                else:
                    for possible, more, change in ways:
                        for form in (_both(change, form) for form in forms if possible):
                            after[rest | more, f"{form.host:.2g}"].append(form)
            best = [(key, _worth_a_try(forms, _CHOICES)) for key, forms in after.items()]
            best.sort(key=lambda pair: -pair[1][0].nbytes)  # names of the loss first
            kept = np.linspace(0, len(best) - 1, min(len(best), _STATES), dtype=int)
            states = dict(best[i] for i in kept)
        link = (self._kind and self._kind.host_link) or math.inf
        (forward, backward), found = self._passes(), []
        for form in itertools.chain(*states.values()):
            spent = fixed + form.seconds
            wait = wait_of(form.host / link, forward, backward and backward + spent)
            times = wait, form.nbytes, spent + wait
            found.append(LoopForm((form.stored,), (form.offloaded,), form.host, *times))
        return _worth_a_try(found, _CHOICES)

    def run(
        self, operands: Sequence[Any], stored: Names, offloaded: Names, segments: bool
    ) -> list[Any]:
        """The scan, whose layers store values of these names."""
        # A loop separates what runs again from its first run without barriers.
        policy = policy_of(stored, offloaded)
        layer = jax.checkpoint(self._run_layer, policy=policy, prevent_cse=False)
        return self._stack.run(operands, layer, self.inner if segments else 1, unroll=1)


def place_of(eqn: Equation) -> str:
    """The operation and the user's line."""
    return f"{name_of(eqn)} {line_of(eqn.source_info).rpartition('/')[2]}"


def _name_of(eqn: Equation) -> str:
    """What ``checkpoint_name`` gives; empty for other operations."""
    record = record_of(eqn)
    return record.name if isinstance(record, Name) else ""


def _both(one: Sequence[Any], other: Sequence[Any]) -> LoopForm:
    return LoopForm(*map(operator.add, one[:6], other[:6]))


def _worth_a_try(forms: Iterable[LoopForm], most: int) -> list[LoopForm]:
    """Forms that no other one beats, by ascending bytes; of many, those that matter most."""
    kept = list[LoopForm]()
    for form in sorted(forms, key=lambda form: (form.nbytes, np.float32(form.seconds))):
        if not kept or form.seconds < (1 - 1e-6) * kept[-1].seconds:
            kept.append(form)
    while len(kept) > most:  # how much slower the budgets get that lose one
        lost = [
            (fewer.seconds - form.seconds) * (1 - form.nbytes / more.nbytes)
            for fewer, form, more in zip(kept, kept[1:], kept[2:], strict=False)
        ]
        del kept[1 + lost.index(min(lost))]
    return kept


def forms_of(loops: Sequence[Loop]) -> list[LoopForm]:
    """Forms of the loops of a loss that are worth a try: the first stores all."""
    ways = [LoopForm((), ())]
    for loop in loops:
        ways = _worth_a_try((_both(w, own) for w in ways for own in loop.forms), 2 * _FORMS)
    forms = _worth_a_try(ways, _FORMS) if loops else []
    if any(loop.inner > 1 for loop in loops):
        whole = _worth_a_try((form for form in forms if not form.host), _SEGMENTED)
        forms += [form._replace(segments=True) for form in whole]
    return [LoopForm(), *forms]
