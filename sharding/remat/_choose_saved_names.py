"""Which named values of a loop's layer are saved: the least time for their bytes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import Graph
from sharding._types import Array, Tree
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_work import Work, work_of, work_of_equation
from sharding.remat._program_bytes import types_of

Fn = Callable[[Any, Any], Any]
_Choice = TypeVar("_Choice")


def policy_of(saved: Collection[str], offloaded: Collection[str] = ()) -> Callable[..., Any]:
    """What ``jax.checkpoint`` stores: some values on the device, some in host memory."""
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


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
    nbytes: dict[int, int]  # of these

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
        nbytes = {v: num_bytes(graph.types[v]) for each in values.values() for v in each}
        return TracedBlock(fn, params, x, kind, graph, tuple(seconds), values, nbytes)

    @functools.cached_property
    def forward(self) -> Work:
        return work_of(self.fn, self.params, self.x, kind=self.kind)

    @functools.cached_property
    def step(self) -> Work:
        """Of the forward and the backward pass."""
        return self.step_of(self.fn)

    def step_of(self, fn: Fn) -> Work:
        def step(params: Tree, x: Array, cotangent: Tree) -> Any:
            y, vjp = jax.vjp(fn, params, x)
            grads = jax.tree.leaves(vjp(cotangent))
            return y, [g for g in grads if jnp.issubdtype(g.dtype, jnp.inexact)]

        y: Any = jax.eval_shape(fn, self.params, self.x)
        return work_of(step, self.params, self.x, y, kind=self.kind)

    def only(self, names: Collection[str]) -> "TracedBlock":
        """With these names alone."""
        values = {name: vs for name, vs in self.values.items() if name in names}
        return dataclasses.replace(self, values=values)

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

    def frontier(self, host: HostCopies | None = None) -> list[SavedNames]:
        """Every choice that no other one beats in bytes and time, from the most bytes to none."""
        # With ``host``, values may be copied to host memory as well.
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


def evenly(frontier: Sequence[_Choice], most: int) -> list[_Choice]:
    """At most ``most`` choices of a frontier, its ends included."""
    if len(frontier) <= most:
        return list(frontier)
    step = (len(frontier) - 1) / (most - 1)
    return [frontier[round(i * step)] for i in range(most)]


def _least(choice: SavedNames | None) -> float:
    """Seconds below which another choice is faster."""
    return choice.seconds * (1 - 1e-9) if choice else math.inf


def _subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)
