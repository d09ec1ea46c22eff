"""A plan for a scanned stack of equal blocks: names, lengths of scans, copies to host memory."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from sharding._types import Array, Tree
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._traced_model import Work
from sharding.remat._checkpoint import INPUT, Fn, policy_of, scanned
from sharding.remat._choose_saved_names import (
    HostCopies,
    NameRequest,
    SavedNames,
    TracedBlock,
    evenly,
    host_copies,
)
from sharding.remat._program_bytes import device_bytes, step_temporaries, types_of
from sharding.remat._remat_plan import RematPlan, no_plan_fits, unbeaten

if TYPE_CHECKING:
    from sharding._zero import Zero

# The share of a TPU's memory for parameters, gradients and what is stored in a compiled program.
_COMPILED = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan(RematPlan):
    """What a scan over a stack of blocks stores for its backward pass."""

    block: Fn  #: ``block(params, x) -> x`` with the parameters of one layer
    #: of the scan; or of an outer scan and of an inner one, which runs again as a whole
    lengths: tuple[int, ...]
    names: tuple[str, ...]  #: of the values of a block that are saved on the device
    #: of the values that are copied to host memory; ``"block_input"`` is the input
    offloaded: tuple[str, ...] = ()
    input_names: tuple[str, ...] = ()  #: that the block gives to its input by itself

    @property
    def policy(self) -> Callable[..., bool]:
        """For ``jax.checkpoint``, ``nn.remat`` or ``zero.gathered`` around the block of a scan.

        Where the block's input is offloaded, the block must name it ``"block_input"`` in its first
        line; ``apply`` does so. With two lengths ``jax.checkpoint`` is around the inner scan, too.
        """
        more = self.input_names if INPUT in self.offloaded else ()
        return policy_of(self.names, (*self.offloaded, *more))

    def apply(self, zero: "Zero | None" = None) -> Fn:
        """``fn(params, x)``, the scan; with ``zero`` each layer gathers its own parameters."""
        return scanned(self.block, self.lengths, self.policy, zero, INPUT in self.offloaded)

    @property
    def summary(self) -> str:
        parts = [" x ".join(map(str, self.lengths)), *self.names]
        return " ".join([*parts, *(f"{name} (host)" for name in self.offloaded)])

    def choices(self) -> list[tuple[str, str, str]]:
        again = "the inner one runs again" if len(self.lengths) > 1 else ""
        rows = [("scan", " x ".join(map(str, self.lengths)), again)]
        rows.append(("saves", ", ".join(self.names) or "its input", ""))
        if self.offloaded:
            rows.append(("offloads", ", ".join(self.offloaded), ""))
        return rows


class Candidate(NamedTuple):
    choice: SavedNames  # of names
    lengths: tuple[int, ...]  # of the scans
    input_offloaded: bool  # whether the blocks' inputs are in host memory
    work: Work  # operations of a step, waiting included
    saved: float  # bytes that are stored on the device
    host: float  # bytes that are stored in host memory
    slices: float  # bytes of parameters that an inner scan holds

    @property
    def key(self) -> Any:
        """Equal for candidates that are one program."""
        names = frozenset(self.choice.names), frozenset(self.choice.offloaded)
        return names, self.lengths, self.input_offloaded

    @property
    def closed_form(self) -> float:
        """Bytes that are known without compiling; temporaries of one block come on top."""
        return self.saved + self.slices


class Stack:
    """A scanned stack of equal blocks, whose candidates are compiled when they are asked for.

    A scan of L blocks stores L inputs and what is saved of each. A scan of L / i scans of i blocks
    stores L / i inputs, and in its backward pass i inputs and what is saved, and i layers of
    parameters and gradients. ``params`` are stacked, [length, ...].
    """

    def __init__(
        self,
        fn: Fn,
        params: Tree,
        x: Array,
        length: int,
        device: jax.Device,
        kind: DeviceKind | None,
    ):
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}.")
        self._params, self._length, self._kind = types_of(params), length, kind
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._params):
            if not leaf.shape or leaf.shape[0] != length:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"length={length}: parameters must be stacked, {length} layers in the first "
                    f"dim, but {name} has the shape {tuple(leaf.shape)}."
                )
        self.block = TracedBlock.of(fn, one_of(params), x, kind)
        results = jax.eval_shape(fn, self.block.params, self.block.x)
        before, after = (
            [(tuple(t.shape), str(t.dtype)) for t in jax.tree.leaves(tree)]
            for tree in (self.block.x, results)
        )
        if before != after:
            raise ValueError(
                f"the blocks of a stack must return what they get: got {before}, returned {after}."
            )
        self._device, self._input = device, device_bytes(self.block.x)
        self._again = functools.cache(self.block.recompute)  # by names
        self._peaks: dict[Any, float] = {}
        self._input_names: tuple[str, ...] = ()

    def candidates(
        self, request: NameRequest, offload: bool | Collection[str], modes: int | None = None
    ) -> list[Candidate]:
        """Lists what is worth considering, the fastest first."""
        # ``offload`` has the names that may be offloaded, or is True; ``modes`` limits the choices.
        block = self.block.only(request.allowed)
        inputs = self._input_names = tuple(block.of_input())
        ways: list[tuple[SavedNames, tuple[int, ...], bool]] = []
        if request.saved is not None:
            offloads = set(request.offloaded)
            to_host = bool(offloads & {INPUT, *inputs})
            host = self._host(offloads, to_host) if offloads else None
            choice = block.fixed(request.saved, offloads - set(inputs), host)
            ways += [(choice, lengths, to_host) for lengths in self._lengths(choice, host)]
        else:
            names = block.values if offload is True else offload or ()
            hosts: list[HostCopies | None] = [None]
            if offload:
                hosts.append(self._host(names, False))
            if offload is True or {INPUT, *inputs} & set(names):
                hosts.append(self._host(names, True))
            for host in hosts:
                for choice in evenly(block.frontier(host), modes):
                    to_host = host is not None and host.input_bytes > 0
                    ways += [(choice, lengths, to_host) for lengths in self._lengths(choice, host)]
        distinct = {each.key: each for each in map(self._candidate, *zip(*ways, strict=True))}
        return sorted(distinct.values(), key=lambda c: (c.work.seconds, c.closed_form))

    def _host(self, names: Collection[str], input_too: bool) -> HostCopies:
        assert self._kind is not None
        nbytes = self._input if input_too else 0
        return host_copies(self._kind, names, self.block.forward, self.block.step, nbytes)

    def _lengths(self, choice: SavedNames, host: HostCopies | None) -> list[tuple[int, ...]]:
        """One scan; without offloading also two, of the least bytes, if there are any."""
        inner = [i for i in range(2, self._length) if self._length % i == 0 and host is None]
        pairs = [(self._length // i, i) for i in inner]
        pairs.sort(key=lambda pair: self._candidate(choice, pair, False).closed_form)
        return [(self._length,), *pairs[:1]]

    def _candidate(
        self, choice: SavedNames, lengths: tuple[int, ...], input_offloaded: bool
    ) -> Candidate:
        again = self._again((*choice.names, *choice.offloaded))
        step, slices = self.block.step + again, 0.0
        if len(lengths) == 2:  # the inner scan runs again, and holds its layers
            step = step + self.block.forward
            slices = 2.0 * device_bytes(self._params) / lengths[0]
        host = choice.host_bytes + (self._input if input_offloaded else 0)  # of one block
        if host:
            wait = self._host((), input_offloaded).wait(choice.host_bytes, again.seconds)
            step = step + Work(0.0, wait)
        way = choice, lengths, input_offloaded
        nbytes = self._stored(*way), float(self._length * host), slices
        return Candidate(*way, step.times(self._length), *nbytes)

    def _stored(self, choice: SavedNames, lengths: tuple[int, ...], input_offloaded: bool) -> float:
        block = choice.nbytes + (0 if input_offloaded else self._input)
        if len(lengths) == 1:
            return float(lengths[0] * block)
        return float(lengths[0] * self._input + lengths[1] * block)

    def peak(self, candidate: Candidate) -> float:
        """Bytes of the compiled stack; at least what it stores, though a chip may hold a little."""
        if candidate.key not in self._peaks:
            self._peaks[candidate.key] = max(self.temporaries(candidate), candidate.saved)
        return self._peaks[candidate.key]

    def temporaries(
        self, candidate: Candidate, within: Callable[..., tuple[Any, Any, Any]] | None = None
    ) -> float:
        """Bytes of a compiled program; infinite where the compiler gives up."""
        # ``within(stack, params)`` returns a function, and its parameters and input: a model with
        # this stack. Without it the stack is compiled alone.
        length = self._compiled_length(candidate)
        # The same with fewer blocks, or fewer segments of blocks.
        lengths = (length * candidate.lengths[0] // self._length, *candidate.lengths[1:])
        saved = self._stored(candidate.choice, lengths, candidate.input_offloaded)
        fn = self.plan(candidate._replace(lengths=lengths, saved=saved), 0.0, 0.0).apply()
        params = jax.tree.map(lambda t: t.update(shape=(length, *t.shape[1:])), self._params)
        fn, params, x = within(fn, params) if within else (fn, params, self.block.x)
        nbytes = step_temporaries(fn, params, x, self._device)
        return nbytes + candidate.saved - saved

    def _compiled_length(self, candidate: Candidate) -> int:
        """Blocks to compile: all, or as many as the compiler for TPUs accepts."""
        # It refuses programs in which all parameters and gradients of a stack, that ZeRO shards, do
        # not fit. Bytes grow linearly from three blocks on.
        if self._device.platform != "tpu" or self._kind is None:
            return self._length
        segment = self._length // candidate.lengths[0]
        block = (2 * device_bytes(self._params) + candidate.saved) / self._length
        fit = int(_COMPILED * self._kind.memory / block) // segment * segment
        return min(self._length, max(fit, 3 * segment))

    def fastest(self, candidates: Sequence[Candidate], budget: float) -> Candidate:
        """Finds the fastest candidate whose program fits."""
        # What a candidate stores is a bound: those that store more than the budget are not
        # compiled. No estimate decides, so that a larger budget never has a slower plan.
        for candidate in candidates:
            if candidate.saved <= budget and self.peak(candidate) <= budget:
                return candidate
        least = self.peak(self.least(candidates))
        raise no_plan_fits(budget, "this stack needs", least)

    def least(self, candidates: Sequence[Candidate]) -> Candidate:
        """Finds the candidate whose program takes the fewest bytes; all are compiled."""
        return min(candidates, key=self.peak)

    def frontier(self, candidates: Sequence[Candidate]) -> list[StackPlan]:
        peaks = map(self.peak, candidates)
        return unbeaten(self.plan(c, p, p) for c, p in zip(candidates, peaks, strict=True))

    def plan(self, candidate: Candidate, peak: float, budget: float) -> StackPlan:
        input_names = [INPUT] if candidate.input_offloaded else []
        return StackPlan(
            peak=peak,
            saved=candidate.saved,
            host=candidate.host,
            budget=budget,
            work=candidate.work,
            plain=self.block.step.times(self._length),
            block=self.block.fn,
            lengths=candidate.lengths,
            names=candidate.choice.names,
            offloaded=(*candidate.choice.offloaded, *input_names),
            input_names=self._input_names,
        )


def one_of(stack: Any) -> Any:
    def first(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Any = x.sharding
        if sharding is not None:
            spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
            sharding = NamedSharding(sharding.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(first, types_of(stack))
