"""Chooses which named values of a block are saved: the least time for their bytes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import Graph, evaluate
from sharding._types import Array, Tree
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._models import PRESETS
from sharding.plan.model._traced_model import Work, work_of, work_of_equation
from sharding.remat._checkpoint import Fn, policy_of
from sharding.remat._program_bytes import device_bytes, is_sharded, types_of

MAXTEXT_NAMES = frozenset((*PRESETS["minimal_with_context"][0], "decoder_layer_input"))
_PLACES = ("device", "offload", "remat")
_MOST_NAMES = 14  # whose choices are compared

_Choice = TypeVar("_Choice")
Names = Collection[str] | Mapping[str, str] | str | None


class NameRequest(NamedTuple):
    allowed: Collection[str] | None = None  # names that may be saved; None for all
    saved: tuple[str, ...] | None = None  # names on the device; None where the planner chooses
    offloaded: tuple[str, ...] = ()  # names that are copied to host memory


def request_of(names: Names) -> NameRequest:
    """Reads the argument ``names``: a preset, a place for each name, or names that are allowed.

    >>> request_of({"mlpwi": "offload", "context": "device", "mlpwo": "remat"})
    NameRequest(allowed=None, saved=('context',), offloaded=('mlpwi',))
    """
    if isinstance(names, str):
        if names not in PRESETS:
            known = ", ".join(map(repr, PRESETS))
            raise ValueError(f"names={names!r} is no preset; known are {known}.")
        return NameRequest(None, *PRESETS[names])
    if isinstance(names, Mapping):
        for name, place in names.items():
            if place not in _PLACES:
                raise ValueError(
                    f"names: {name!r} must be in one of {', '.join(map(repr, _PLACES))}, got "
                    f"{place!r}."
                )
        saved, offloaded = (
            tuple(name for name, place in names.items() if place == wanted)
            for wanted in ("device", "offload")
        )
        return NameRequest(None, saved, offloaded)
    return NameRequest(names if names is None else frozenset(names))


class HostCopies(NamedTuple):
    """Copies of activations to host memory, beside a block's forward and backward pass."""

    names: Collection[str]  # of values that may be copied
    bandwidth: float  # bytes per second to the host; as many come back at the same time
    forward: float  # seconds of the block's forward pass
    backward: float  # seconds of its backward pass without recomputation
    input_bytes: int = 0  # of the block's input, if it is copied too
    hidden: bool = True  # whether they run beside the passes

    def wait(self, nbytes: float, recompute: float) -> float:
        """Seconds by which copies of names outlast the passes that they run beside."""
        copy = (self.input_bytes + nbytes) / self.bandwidth
        if not self.hidden:
            return 2 * copy
        return max(0.0, copy - self.forward) + max(0.0, copy - self.backward - recompute)


class SavedNames(NamedTuple):
    names: tuple[Any, ...]  # of the values that are saved on the device
    nbytes: int  # that they take
    # Of operations that run again, by a model of the device, and of waiting for copies.
    seconds: float
    offloaded: tuple[str, ...] = ()  # names of the values that are copied to host memory
    host_bytes: int = 0  # that they take


def host_copies(
    kind: DeviceKind, names: Collection[str], forward: Work, step: Work, input_bytes: int
) -> HostCopies:
    assert kind.host_link is not None
    # XLA's default for GPUs is no schedule that hides copies: on an H200 all of them were waited
    # for (benchmarks/results/activation_time.md).
    hidden, backward = kind.tile is not None, step.seconds - forward.seconds
    return HostCopies(names, kind.host_link, forward.seconds, backward, input_bytes, hidden)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedBlock:
    """A block, and what its backward pass reads.

    A value that the backward pass reads is saved, if it has a name that is chosen, or is computed
    again from what is saved, the parameters and the block's input.
    """

    fn: Fn  # ``fn(params, x) -> y``
    params: Any  # abstract
    x: Any  # abstract
    kind: DeviceKind | None
    graph: Graph  # from parameters and input to what the backward pass reads
    seconds: tuple[float, ...]  # of each operation
    values: dict[str, tuple[int, ...]]  # for each name, the values that have it
    nbytes: dict[int, int]  # of one device, of these
    inputs: frozenset[int]  # the block's input, beside its parameters

    @staticmethod
    def of(fn: Fn, params: Tree, x: Array, kind: DeviceKind | None) -> "TracedBlock":
        params, x = types_of(params), types_of(x)
        treedef: Any
        leaves, treedef = jax.tree.flatten((params, x))

        def residuals(inputs: list[Any]) -> list[Any]:
            arrays = jax.tree.leaves(jax.vjp(fn, *treedef.unflatten(inputs))[1])
            return [x for x in arrays if hasattr(x, "dtype")]

        graph = Graph(residuals, leaves, [False] * len(leaves))
        seconds: list[float] = []
        values: dict[str, tuple[int, ...]] = {}
        for eqn in graph.equations:
            operands, results = ([graph.types[v] for v in vs] for vs in (eqn.operands, eqn.results))
            seconds.append(work_of_equation(eqn, operands, results, kind).seconds)
            if eqn.primitive.name == "name":
                name = eqn.params["name"]
                values[name] = (*values.get(name, ()), *eqn.results)
        named = [v for each in values.values() for v in each]

        def compute(inputs: list[Any]) -> list[Any]:
            known = graph.constants | dict(enumerate(inputs))
            evaluate(graph.needed(named, known)[0], known)
            return [known[v] for v in named]

        types = jax.eval_shape(compute, leaves)
        if is_sharded(leaves):  # as the compiler has it
            shardings = jax.jit(compute).lower(leaves).compile().output_shardings
            types = jax.tree.map(lambda t, s: t.update(sharding=s), types, shardings)
        nbytes = dict(zip(named, map(device_bytes, types), strict=True))
        inputs = frozenset(range(len(jax.tree.leaves(params)), len(leaves)))
        return TracedBlock(fn, params, x, kind, graph, tuple(seconds), values, nbytes, inputs)

    @functools.cached_property
    def forward(self) -> Work:
        return work_of(self.fn, self.params, self.x, kind=self.kind)

    @functools.cached_property
    def step(self) -> Work:
        """Of the forward and the backward pass, without what runs again."""
        return self._step(self.fn)

    def recompute(self, names: Collection[str]) -> Work:
        """Operations that run again if the named values alone are stored."""
        return self._step(jax.checkpoint(self.fn, policy=policy_of(names))) - self.step

    def _step(self, fn: Fn) -> Work:
        def step(params: Tree, x: Array, cotangent: Tree) -> Any:
            y, vjp = jax.vjp(fn, params, x)
            grads = jax.tree.leaves(vjp(cotangent))
            return y, [g for g in grads if jnp.issubdtype(g.dtype, jnp.inexact)]

        y = jax.eval_shape(fn, self.params, self.x)
        return work_of(step, self.params, self.x, y, kind=self.kind)

    def only(self, names: Collection[str] | None) -> "TracedBlock":
        """With these names alone; None for all."""
        known = self.values.items()
        values = {name: vs for name, vs in known if names is None or name in names}
        return dataclasses.replace(self, values=values)

    def of_input(self) -> list[str]:
        graph = self.graph

        def operands(name: str) -> set[int]:
            equations = (graph.equations[graph.producer[value]] for value in self.values[name])
            return {operand for eqn in equations for operand in eqn.operands}

        return [name for name in self.values if operands(name) <= self.inputs]

    def useless(self) -> list[str]:
        """Names that spare no operation, alone or beside all others; that of the input aside."""
        every = set(self.values)

        def seconds(names: Collection[str]) -> float:
            return self.again(names)[0]

        return [
            name
            for name in self.values
            if name not in self.of_input()
            and seconds({name}) >= seconds(())
            and seconds(every - {name}) <= seconds(every)
        ]

    def again(self, names: Iterable[str]) -> tuple[float, dict[str, int]]:
        """Time of what runs again if these names are stored, and bytes of each that is read."""
        stored = {v: name for name in names for v in self.values[name]}
        run, _ = self.graph.needed(self.graph.outputs, stored)
        seconds = sum(self.seconds[self.graph.producer[eqn.results[0]]] for eqn in run)
        read = {*self.graph.outputs, *(v for eqn in run for v in eqn.operands)}
        nbytes = dict.fromkeys(stored.values(), 0)
        for v in stored.keys() & read:
            nbytes[stored[v]] += self.nbytes[v]
        return seconds, nbytes

    def choices(
        self, stored: Collection[str], moves: Iterable[Collection[str]], host: HostCopies | None
    ) -> Iterator[SavedNames]:
        """Stores values, of which some are on the host."""
        seconds, nbytes = self.again(stored)
        for moved in moves:
            kept = tuple(name for name in stored if name not in moved)
            on_host = sum(nbytes[name] for name in moved)
            wait = host.wait(on_host, seconds) if host else 0.0
            on_device = sum(nbytes[name] for name in kept)
            yield SavedNames(kept, on_device, seconds + wait, tuple(moved), on_host)

    def fixed(
        self, saved: Collection[str], offloaded: Collection[str], host: HostCopies | None = None
    ) -> SavedNames:
        """Takes the choice of others, as far as this block has their names."""
        moved = [name for name in self.values if name in offloaded]
        stored = [name for name in self.values if name in saved or name in moved]
        return next(self.choices(stored, [moved], host))

    def frontier(self, host: HostCopies | None = None) -> list[SavedNames]:
        """Every choice that no other one beats in bytes and time, from the most bytes to none."""
        # With ``host``, values may be copied to host memory as well.
        if len(self.values) > _MOST_NAMES:
            raise ValueError(
                f"the blocks have {len(self.values)} names: give at most {_MOST_NAMES} of them as "
                "names= (docs: how_to/recompute)."
            )
        choices = (
            choice
            for stored in _subsets(self.values)
            for choice in self.choices(
                stored, _subsets([name for name in stored if host and name in host.names]), host
            )
        )
        return unbeaten_choices(choices)


def unbeaten_choices(choices: Iterable[SavedNames]) -> list[SavedNames]:
    """Those that no other one beats in bytes and time, from the most bytes to the fewest."""
    best: dict[int, SavedNames] = {}  # by bytes
    for choice in choices:
        # Of equal ones the first stays, which has the fewest names.
        if choice.seconds < _least(best.get(choice.nbytes)):
            best[choice.nbytes] = choice
    kept: list[SavedNames] = []
    for _, choice in sorted(best.items()):
        if choice.seconds < _least(kept[-1] if kept else None):
            kept.append(choice)
    return kept[::-1]


def evenly(frontier: Sequence[_Choice], most: int | None) -> list[_Choice]:
    """At most ``most`` choices of a frontier, its ends included; None for all."""
    if most is None or len(frontier) <= most:
        return list(frontier)
    step = (len(frontier) - 1) / (most - 1)
    return [frontier[round(i * step)] for i in range(most)]


def _least(choice: SavedNames | None) -> float:
    """Seconds below which another choice is faster."""
    return choice.seconds * (1 - 1e-9) if choice else math.inf


def _subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)
