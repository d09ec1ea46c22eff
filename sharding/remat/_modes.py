"""What a block costs by each choice of saved names: traced, and compiled for its temporaries."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from sharding.plan._devices import DeviceKind
from sharding.plan._tiles import num_bytes
from sharding.remat._chain import Block, Mode
from sharding.remat._names import NamedValues
from sharding.remat._work import Work, work_of


@dataclasses.dataclass(frozen=True)
class TracedBlock:
    """A block, with types of its parameters, its input and its output.

    Attributes:
      fn: ``fn(params, x) -> y``.
      params: abstract.
      x: abstract.
      y: abstract.
    """

    fn: Callable[[Any, Any], Any]
    params: Any
    x: Any
    y: Any

    @staticmethod
    def of(fn: Callable[[Any, Any], Any], params: Any, x: Any) -> "TracedBlock":
        """Traces the block on real or abstract arrays."""
        params, x = (jax.tree.map(_array_type, tree) for tree in (params, x))
        return TracedBlock(fn, params, x, jax.eval_shape(fn, params, x))

    @property
    def key(self) -> Any:
        """Equal for blocks that are one program."""
        leaves, treedef = jax.tree.flatten((self.params, self.x))
        return id(self.fn), treedef, tuple((x.shape, x.dtype) for x in leaves)

    def with_policy(self, names: Sequence[str]) -> Callable[[Any, Any], Any]:
        """The block under ``jax.checkpoint``, which saves the named values."""
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.checkpoint(self.fn, policy=policy)

    def vjp(self, fn: Callable[[Any, Any], Any], params: Any, x: Any) -> tuple[Any, Any]:
        """``jax.vjp`` with respect to parameters and input, as far as they are floating."""
        treedef: Any
        leaves, treedef = jax.tree.flatten((params, x))
        floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

        def of_floating(own: Sequence[Any]) -> Any:
            values = iter(own)
            full = [next(values) if f else x for f, x in zip(floating, leaves, strict=True)]
            return fn(*treedef.unflatten(full))

        return jax.vjp(of_floating, [x for f, x in zip(floating, leaves, strict=True) if f])

    def backward(self, fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        """``(params, x, cotangent) -> gradients``, and nothing else."""
        return lambda params, x, cotangent: self.vjp(fn, params, x)[1](cotangent)

    def work(self, kind: DeviceKind | None) -> tuple[Work, Work]:
        """Of the forward pass, and of the backward pass without recomputation."""
        forward = work_of(self.fn, self.params, self.x, kind=kind)
        return forward, self._step_work(self.fn, kind) - forward

    def recompute(self, names: Sequence[str], plain: Work, kind: DeviceKind | None) -> Work:
        """What is beyond ``plain``, forward and backward, where named values alone are saved."""
        return self._step_work(self.with_policy(names), kind) - plain

    def _step_work(self, fn: Callable[[Any, Any], Any], kind: DeviceKind | None) -> Work:
        def step(params: Any, x: Any, cotangent: Any) -> Any:
            y, vjp = self.vjp(fn, params, x)
            return y, vjp(cotangent)

        return work_of(step, self.params, self.x, self.y, kind=kind)

    def named_values(self, kind: DeviceKind | None, names: Collection[str] | None) -> NamedValues:
        """What its backward pass reads, and what has a name."""
        return NamedValues.of(
            lambda params, x: self.vjp(self.fn, params, x)[1], (self.params, self.x), kind, names
        )

    def temporaries(self, names: Sequence[str], device: jax.Device) -> int:
        """Bytes of the compiled backward pass, what it saves included."""
        placed = SingleDeviceSharding(device)
        args = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=placed),
            (self.params, self.x, self.y),
        )
        backward = jax.jit(self.backward(self.with_policy(names)), out_shardings=placed)
        memory: Any = backward.lower(*args).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class MeasuredBlock:
    """A block for the planner, and the operations behind its times.

    Attributes:
      block: times in seconds, and bytes.
      forward: operations of the forward pass.
      backward: of the backward pass without recomputation.
      recompute: of each mode.
    """

    block: Block
    forward: Work
    backward: Work
    recompute: tuple[Work, ...]


def measure(
    traced: TracedBlock,
    names: Collection[str] | None,
    kind: DeviceKind | None,
    device: jax.Device,
    most_modes: int,
) -> MeasuredBlock:
    """Traces a block's choices of names, and compiles ``most_modes`` of them."""
    forward, backward = traced.work(kind)
    frontier = traced.named_values(kind, names).frontier()
    chosen = [each.names for each in _evenly(frontier, most_modes)]
    works = tuple(traced.recompute(each, forward + backward, kind) for each in chosen)
    modes = tuple(
        Mode(each, _saved(traced, each), traced.temporaries(each, device), work.seconds)
        for each, work in zip(chosen, works, strict=True)
    )
    return MeasuredBlock(Block(forward.seconds, backward.seconds, modes), forward, backward, works)


def _saved(traced: TracedBlock, names: Sequence[str]) -> int:
    """Bytes that the block under its policy saves, without parameters and input."""
    fn = traced.with_policy(names)
    _, vjp = jax.eval_shape(lambda p, x: traced.vjp(fn, p, x), traced.params, traced.x)
    return max(0, num_bytes(vjp) - num_bytes((traced.params, traced.x)))


def _evenly(frontier: list[Any], most: int) -> list[Any]:
    """At most ``most`` choices of a frontier, its ends included."""
    if len(frontier) <= most:
        return frontier
    step = (len(frontier) - 1) / (most - 1)
    return [frontier[round(i * step)] for i in range(most)]


def _array_type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
