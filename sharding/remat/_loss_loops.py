"""The loops of a loss, as stacks of layers: what each layer stores for its backward pass."""

import functools
import heapq
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from optax_ext.traced_graph import Equation, Graph, bind
from sharding._user_line import line_of
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_work import work_of_equation
from sharding.remat._choose_saved_names import (
    HostCopies,
    SavedNames,
    TracedBlock,
    evenly,
    host_copies,
    policy_of,
    unbeaten_choices,
)
from sharding.remat._joint_graph import is_fused
from sharding.step._layer_hooks import scan_sizes

INPUT = "block_input"  # the name that is given to what a layer gets
_MOST_NAMES = 9  # of a layer's values, whose choices are compared
_FORMS, _SEGMENTED = 12, 3  # choices of all loops, and of those with segments


Offload = bool | Collection[str]  # whether values may be copied to host memory, or their names


class LoopForm(NamedTuple):
    """What the layers of each loop store; what they do not is computed again."""

    stored: tuple[tuple[str, ...], ...] | None = None  # names of values, by loop; None: all
    offloaded: tuple[tuple[str, ...], ...] = ()  # of those that are copied to host memory
    host: float = 0.0  # bytes that these take
    wait: float = 0.0  # seconds by which copies outlast layers
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
    operation and the line where it is written.
    """

    def __init__(self, eqn: Equation, kind: DeviceKind | None, offload: Offload = False):
        self._options, self._body = eqn.params, jaxpr_as_fun(eqn.params["jaxpr"])
        num_consts, num_carry = scan_sizes(eqn.params)
        self._ends = num_consts, num_consts + num_carry
        self.length = int(eqn.params["length"])
        self._inner = _inner_length(self.length)
        own = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in eqn.params["jaxpr"].in_avals]
        self._graph = Graph(lambda args: self._body(*args), own, [False] * len(own), exact=True)
        self._names = self._named(kind)
        consts, carry, x = self._split(own)

        def layer(params: Any, carry: Any) -> Any:
            outs = self._layer(*params[0], *carry, *params[1])
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]

        block = TracedBlock.of(layer, (consts, x), carry, kind)
        spared = {name: block.again([])[0] - block.again([name])[0] for name in block.values}
        self._block = block.only(heapq.nlargest(_MOST_NAMES, spared, key=lambda name: spared[name]))
        self._input = num_bytes([t for t in carry if jnp.issubdtype(t.dtype, jnp.floating)])
        self.choices = self._choices(None)
        if offload and kind:
            names = self._block.values if offload is True else offload
            works = self._block.forward, self._block.step
            for nbytes in (0, self._input) if offload is True or INPUT in names else (0,):
                self.choices += self._choices(host_copies(kind, names, *works, nbytes))

    def _choices(self, host: HostCopies | None) -> list[SavedNames]:
        """Of all layers: bytes and seconds are theirs together, with those of their inputs."""
        moved = host.input_bytes if host else 0
        return [
            SavedNames(
                each.names,
                self.length * (each.nbytes + self._input - moved),
                self.length * each.seconds,
                (*each.offloaded, *([INPUT] if moved else [])),
                self.length * (each.host_bytes + moved),
            )
            for each in self._block.frontier(host)
        ]

    def wait(self, choice: SavedNames) -> float:
        """Seconds by which the copies of a choice outlast the layers."""
        names = (*choice.names, *(name for name in choice.offloaded if name != INPUT))
        return choice.seconds - self.length * self._block.again(names)[0]

    @property
    def names(self) -> list[str]:
        """Of values that layers may store."""
        return list(self._block.values)

    @property
    def has_segments(self) -> bool:
        return self._inner > 1

    def _split(self, values: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Constants of all layers, what the first one gets, and what each gets by itself."""
        first, second = self._ends
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def _named(self, kind: DeviceKind | None) -> dict[int, str]:
        """Names of values, by the operations that make them."""
        graph, seconds = self._graph, dict[int, float]()
        already = {v for e in graph.equations if e.primitive.name == "name" for v in e.operands}
        for i, eqn in enumerate(graph.equations):
            operands, results = ([graph.types[v] for v in vs] for vs in (eqn.operands, eqn.results))
            is_float = jnp.issubdtype(results[0].dtype, jnp.floating) if results else False
            if is_float and already.isdisjoint(eqn.results) and not is_fused(eqn):
                seconds[i] = work_of_equation(eqn, operands, results, kind).seconds
        most = max(0, _MOST_NAMES - len(already))
        names = dict[int, str]()
        for i in sorted(sorted(seconds, key=lambda i: seconds[i], reverse=True)[:most]):
            eqn = graph.equations[i]
            name = f"{eqn.primitive.name} {line_of(eqn.source_info).rpartition('/')[2]}"
            count = sum(known.partition(" #")[0] == name for known in names.values())
            names[i] = f"{name} #{count + 1}" if count else name
        return names

    def _layer(self, *args: Any) -> list[Any]:
        values = self._graph.constants | dict(enumerate(args))
        for i, eqn in enumerate(self._graph.equations):
            outs = bind(eqn, [values[v] for v in eqn.operands])
            if i in self._names:
                outs = [checkpoint_name(out, self._names[i]) for out in outs]
            values |= zip(eqn.results, outs, strict=True)
        return [values[v] for v in self._graph.outputs]

    def run(
        self,
        operands: Sequence[Any],
        stored: Sequence[str],
        offloaded: Sequence[str],
        segments: bool,
    ) -> list[Any]:
        """The scan, whose layers store values of these names."""
        consts, init, xs = self._split(operands)

        def named(*args: Any) -> list[Any]:
            consts, carry, x = self._split(args)
            carry = list(map(_with_name, carry)) if INPUT in offloaded else carry
            return self._layer(*consts, *carry, *x)

        # A loop separates what runs again from its first run without barriers.
        policy = policy_of(stored, offloaded)
        layer = jax.checkpoint(named, policy=policy, prevent_cse=False)

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = layer(*consts, *carry, *x)
            return out[: len(carry)], out[len(carry) :]

        inner = self._inner if segments else 1
        lengths = (self.length // inner, inner)[: min(inner, 2)]
        carry, outs = _scan_in(step, init, xs, lengths, self._options["reverse"])
        return [*carry, *outs]


def _with_name(x: jax.Array) -> jax.Array:
    # Only a name within the loop's body lets its carry be offloaded.
    return checkpoint_name(x, INPUT) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _scan_in(
    step: Callable[..., Any], carry: Any, xs: Any, lengths: Sequence[int], reverse: bool = False
) -> tuple[Any, Any]:
    """A scan; of an outer and an inner length a scan over scans, each of which runs again."""
    scan = functools.partial(lax.scan, reverse=reverse)
    if len(lengths) == 1:
        return scan(step, carry, xs, length=lengths[0])
    outer, inner = lengths
    segment = functools.partial(scan, step, length=inner)
    parts = jax.tree.map(lambda x: x.reshape(outer, inner, *x.shape[1:]), xs)
    carry, outs = scan(jax.checkpoint(segment, prevent_cse=False), carry, parts, length=outer)
    return carry, jax.tree.map(lambda x: x.reshape(outer * inner, *x.shape[2:]), outs)


def _inner_length(length: int) -> int:
    """Of segments; 1 if there are none of equal length."""
    return next(i for i in range(math.isqrt(length), 0, -1) if length % i == 0)


def forms_of(loops: Sequence[Loop]) -> list[LoopForm]:
    """Forms of the loops of a loss that are worth a try: the first stores all."""
    if not loops:
        return [LoopForm()]
    # By loop: names, those that are offloaded, and how long copies are waited for.
    ways = [SavedNames((), 0, 0.0)]
    for loop in loops:
        joined = [
            SavedNames(
                (*way.names, (own.names, own.offloaded, loop.wait(own))),
                *(way.nbytes + own.nbytes, way.seconds + own.seconds),
                host_bytes=way.host_bytes + own.host_bytes,
            )
            for way in ways
            for own in loop.choices
        ]
        ways = evenly(unbeaten_choices(joined), 2 * _FORMS)
    forms = [LoopForm()]
    for way in evenly(ways, _FORMS):
        stored, offloaded, waits = zip(*way.names, strict=True)
        forms.append(LoopForm(stored, offloaded, way.host_bytes, sum(waits)))
    if any(loop.has_segments for loop in loops):
        whole = [form for form in forms[1:] if not form.host]
        forms += [form._replace(segments=True) for form in evenly(whole, _SEGMENTED)]
    return forms
