"""Scanned stacks: the names, lengths and copies to host memory that make a step fastest."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._traced_model import Work
from sharding.remat._checkpoint import INPUT
from sharding.remat._modes import (
    TracedBlock,
    device_bytes,
    evenly,
    host_copies,
    one_of,
    step_temporaries,
    types_of,
)
from sharding.remat._names import SavedNames
from sharding.remat._planned import no_plan_fits
from sharding.remat._presets import NameRequest
from sharding.remat._stack_plan import StackPlan

# The share of a TPU's memory for parameters, gradients and what is stored in a compiled program.
_COMPILED = 0.6


@dataclasses.dataclass
class _Candidate:
    """A way to run the stack.

    Attributes:
      choice: of names.
      lengths: of the scans.
      input_offloaded: whether the blocks' inputs are in host memory.
      work: operations of a step, waiting included.
      saved: bytes that are stored on the device.
      host: bytes that are stored in host memory.
      slices: bytes of parameters that an inner scan holds.
    """

    choice: SavedNames
    lengths: tuple[int, ...]
    input_offloaded: bool
    work: Work
    saved: float
    host: float
    slices: float

    @property
    def closed_form(self) -> float:
        """Bytes that are known without compiling; temporaries of one block come on top."""
        return self.saved + self.slices


class Stack:
    """A scanned stack of equal blocks, whose candidates are compiled when they are asked for.

    A scan of L blocks stores L inputs and what is saved of each. A scan of L / i scans of i blocks
    stores L / i inputs, and in its backward pass i inputs and what is saved, and i layers of
    parameters and gradients.

    Args:
      fn: the block.
      params: stacked: the first dim of every array is the number of blocks.
      x: the input of the first block.
      length: the number of blocks.
      device: for which it is compiled.
      kind: its figures.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        params: Any,
        x: Any,
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
        self._traced = TracedBlock.of(fn, one_of(params), x, device)
        before, after = (_types_as_text(tree) for tree in (self._traced.x, self._traced.y))
        if before != after:
            raise ValueError(
                f"the blocks of a stack must return what they get: got {before}, returned {after}."
            )
        self._works = self._traced.work(kind)
        self._input = device_bytes(self._traced.x)
        # By names: what runs again, what is saved.
        self._again: dict[tuple[str, ...], Work] = {}
        self._saved: dict[tuple[str, ...], int] = {}
        self._peaks: dict[Any, float] = {}
        self._input_names: tuple[str, ...] = ()

    def named_values(self, request: NameRequest) -> Any:
        """The block's names."""
        return self._traced.named_values(self._kind, request.allowed)

    def candidates(
        self, request: NameRequest, offload: Any, modes: int | None = None
    ) -> list[_Candidate]:
        """All that are worth considering, the fastest first.

        Args:
          request: names that are allowed or demanded.
          offload: names that may be offloaded; True for all, False for none.
          modes: choices of names; None for all that are worth their bytes.
        """
        values = self.named_values(request)
        found = []
        inputs = self._input_names = tuple(values.of_input())
        if request.saved is not None:
            to_host = INPUT in request.offloaded or bool(set(inputs) & set(request.offloaded))
            host = self._host(request.offloaded, to_host) if request.offloaded else None
            choice = values.fixed(request.saved, set(request.offloaded) - set(inputs), host)
            found += [self._candidate(choice, (self._length,), to_host)]
            if not request.offloaded:
                found += self._in_two_levels(choice)
        else:
            for choice in _some(values.frontier(), modes):
                found += [self._candidate(choice, (self._length,), False)]
                found += self._in_two_levels(choice)
            if offload:
                names = values.values if offload is True else offload
                allowed = offload is True or INPUT in offload or bool(set(inputs) & set(offload))
                for to_host in (False, True) if allowed else (False,):
                    host = self._host(names, to_host)
                    choices = _some(values.frontier(host), modes)
                    found += [self._candidate(each, (self._length,), to_host) for each in choices]
        by_key = {self._key(each): each for each in found}
        return sorted(by_key.values(), key=lambda each: (each.work.seconds, each.closed_form))

    def _host(self, names: Any, input_too: bool) -> Any:
        return host_copies(names, self._kind, self._works, self._input if input_too else 0)

    def _key(self, each: _Candidate) -> Any:
        names = frozenset(each.choice.names), frozenset(each.choice.offloaded)
        return names, each.lengths, each.input_offloaded

    def _in_two_levels(self, choice: SavedNames) -> list[_Candidate]:
        """The lengths of least bytes; none where the number of blocks is prime."""
        pairs = [(self._length // i, i) for i in range(2, self._length) if self._length % i == 0]
        each = [self._candidate(choice, pair, False) for pair in pairs]
        return [min(each, key=lambda found: found.closed_form)] if each else []

    def _candidate(
        self, choice: SavedNames, lengths: tuple[int, ...], input_offloaded: bool
    ) -> _Candidate:
        forward, backward = self._works
        names = (*choice.names, *choice.offloaded)
        if names not in self._again:
            self._again[names] = self._traced.recompute(names, forward + backward, self._kind)
        again = self._again[names]
        step = forward + backward + again
        slices = 0.0
        if len(lengths) == 2:
            step = step + forward
            slices = 2.0 * device_bytes(self._params) / lengths[0]
        host_block = choice.host_bytes + (self._input if input_offloaded else 0)
        if host_block:
            host = self._host((), input_offloaded)
            wait = host.wait(choice.host_bytes, again.seconds)
            step = step + Work(0.0, wait)
        host_bytes = float(self._length * host_block)
        return _Candidate(
            choice,
            lengths,
            input_offloaded,
            step.times(self._length),
            self._stored(choice, lengths, input_offloaded),
            host_bytes,
            slices,
        )

    def _stored(self, choice: SavedNames, lengths: tuple[int, ...], input_offloaded: bool) -> float:
        """Bytes that scans store on the device."""
        if choice.names not in self._saved:
            self._saved[choice.names] = self._traced.saved(choice.names)
        block = self._saved[choice.names] + (0 if input_offloaded else self._input)
        if len(lengths) == 1:
            return float(lengths[0] * block)
        return float(lengths[0] * self._input + lengths[1] * block)

    def peak(self, each: _Candidate) -> float:
        """Bytes of the compiled stack; at least what it stores, though a chip may hold a little."""
        key = self._key(each)
        if key not in self._peaks:
            self._peaks[key] = max(self.temporaries(each), each.saved)
        return self._peaks[key]

    def temporaries(
        self, each: _Candidate, within: Callable[..., tuple[Any, Any, Any]] | None = None
    ) -> float:
        """Bytes of a compiled program; infinite where the compiler gives up.

        Args:
          each: how its stack runs.
          within: ``within(stack, params)`` returns a function, and its parameters and input: a
            model with this stack. None for the stack alone.
        """
        length = self._compiled_length(each)
        short = self._shortened(each, length)
        fn = self.plan(short, 0.0, 0.0).apply()
        params = jax.tree.map(lambda t: t.update(shape=(length, *t.shape[1:])), self._params)
        fn, params, x = within(fn, params) if within else (fn, params, self._traced.x)
        found = step_temporaries(fn, params, x, self._traced.device)
        return found + each.saved - short.saved

    def _compiled_length(self, each: _Candidate) -> int:
        """The number of blocks to compile: all, or as many as the compiler for TPUs accepts.

        It refuses programs beyond the device's memory, in which all parameters and gradients of a
        stack, that ZeRO shards, do not fit. Bytes grow linearly from three blocks on.
        """
        if self._traced.device.platform != "tpu" or self._kind is None:
            return self._length
        segment = self._length // each.lengths[0]
        one = (2 * device_bytes(self._params) + each.saved) / self._length
        fit = int(_COMPILED * self._kind.memory / one) // segment * segment
        return min(self._length, max(fit, 3 * segment))

    def _shortened(self, each: _Candidate, length: int) -> _Candidate:
        """The candidate with fewer blocks, or fewer segments of blocks."""
        lengths = (length * each.lengths[0] // self._length, *each.lengths[1:])
        saved = self._stored(each.choice, lengths, each.input_offloaded)
        return dataclasses.replace(each, lengths=lengths, saved=saved)

    def fastest(self, candidates: Sequence[_Candidate], budget: float) -> _Candidate:
        """The fastest candidate whose program fits.

        What a candidate stores is a bound: those that store more than the budget are not compiled.
        No estimate decides, so that a larger budget never has a slower plan.

        Raises:
          ValueError: if none fits.
        """
        for each in candidates:
            if each.saved <= budget and self.peak(each) <= budget:
                return each
        least = self.peak(self.least(candidates))
        raise no_plan_fits(budget, "this stack needs", least)

    def least(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """The candidate whose program takes the fewest bytes; all are compiled."""
        return min(candidates, key=self.peak)

    def frontier(self, candidates: Sequence[_Candidate]) -> list[StackPlan]:
        """Plans that no other candidate beats in bytes and time; all are compiled."""
        found: list[StackPlan] = []
        for each in candidates:  # the fastest first
            peak = self.peak(each)
            if peak < (found[-1].peak if found else math.inf):
                found.append(self.plan(each, peak, peak))
        return found[::-1]

    def plan(self, each: _Candidate, peak: float, budget: float) -> StackPlan:
        """The plan of a candidate."""
        forward, backward = self._works
        offloaded = (*each.choice.offloaded, *([INPUT] if each.input_offloaded else []))
        return StackPlan(
            peak=peak,
            saved=each.saved,
            host=each.host,
            budget=budget,
            work=each.work,
            plain=(forward + backward).times(self._length),
            block=self._traced.fn,
            lengths=each.lengths,
            names=each.choice.names,
            offloaded=offloaded,
            input_names=self._input_names,
        )


def _some(choices: list[SavedNames], modes: int | None) -> list[SavedNames]:
    return choices if modes is None else evenly(choices, modes)


def _types_as_text(tree: Any) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), str(x.dtype)) for x in jax.tree.leaves(tree)]
