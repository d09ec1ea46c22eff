"""``plan`` and ``frontier``: activations under a budget of bytes."""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from sharding.plan import targets
from sharding.plan._devices import DeviceKind, kind_of
from sharding.plan._tiles import num_bytes
from sharding.remat._chain import Block, ChainTable, Kept, Tree, peak_bytes, stored_bytes, time_of
from sharding.remat._chain_plan import ChainPlan
from sharding.remat._modes import MeasuredBlock, TracedBlock, measure
from sharding.remat._work import Work

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def plan(
    blocks: Sequence[Callable[[Any, Any], Any]] | Callable[[Any, Any], Any],
    params: Sequence[Any],
    x: Any,
    budget: float | str,
    *,
    device: str | jax.Device | None = None,
    names: Collection[str] | None = None,
    modes: int = 4,
    slots: int = 1000,
) -> ChainPlan:
    """The fastest way to train a chain of blocks whose activations fit a number of bytes.

    Between the forward and the backward pass a chain stores activations, or computes them again.
    The plan is optimal among schedules that store each value until it is used: every block runs
    under ``jax.checkpoint`` and saves some of its named values, or belongs to a segment of blocks
    of which the input alone is stored. Bytes are those of the peak: stored activations, and the
    temporaries of each block's backward pass, which is compiled for the device.

    Arguments and results of the step (parameters, gradients, optimizer state, the batch) are not
    part of it. Values have a name where the block passes them through
    ``jax.ad_checkpoint.checkpoint_name``; without names a block saves its input or nothing.

    Args:
      blocks: ``block(params, x) -> x``, one after the other; a single function for all. The last
        one may be the loss.
      params: of each block; real or abstract.
      x: the input of the first block: an array or a tree of arrays; real or abstract.
      budget: bytes, or a text such as ``"8GiB"`` or ``"500MB"``.
      device: for which blocks are compiled: a target such as ``"h100x1"``, a device, or None for
        the first of this machine. On CPUs XLA orders programs in other ways, and the plan need not
        hold there.
      names: that may be saved; None for all that the blocks have.
      modes: how many choices of names are compiled for each distinct block.
      slots: steps of memory that the planner tells apart.

    Returns:
      A ``ChainPlan``: ``print`` it, train with ``apply()``, compare programs with ``check()``.

    Raises:
      ValueError: if no plan fits the budget; the message has the least that does.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def block(w, x):
      ...     return x + checkpoint_name(jnp.tanh(x @ w), "act") @ w.T
      >>> params, x = [jnp.ones((64, 256))] * 6, jnp.ones((512, 64))
      >>> found = shd.remat.plan(block, params, x, "4MiB")
      >>> found.peak <= 4 * 2**20
      True
      >>> loss = lambda params, x: jnp.sum(found.apply()(params, x) ** 2)
      >>> grads = jax.jit(jax.grad(loss))(params, x)

    References:
      Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous
      chains: how to train deep neural networks with limited memory, ACM TOMS 2024, arXiv
      1911.13214.
    """
    chain = _measured(blocks, params, x, device, names, modes)
    most = in_bytes(budget)
    try:
        tree = ChainTable(chain.blocks, chain.sizes, most, slots).tree()
    except ValueError:
        least = min(peak for peak, _ in chain.trees(slots))
        raise ValueError(
            f"no plan fits {most:,.0f} bytes: {least:,.0f} are the least that these blocks need."
        ) from None
    return chain.plan(tree, most)


def frontier(
    blocks: Sequence[Callable[[Any, Any], Any]] | Callable[[Any, Any], Any],
    params: Sequence[Any],
    x: Any,
    *,
    device: str | jax.Device | None = None,
    names: Collection[str] | None = None,
    modes: int = 4,
    slots: int = 1000,
) -> list[ChainPlan]:
    """Every plan that no other one beats in bytes and time, from the fewest bytes to the most.

    Args:
      blocks: as in ``plan``.
      params: of each block.
      x: the input of the first block.
      device: for which blocks are compiled.
      names: that may be saved.
      modes: how many choices of names are compiled for each distinct block.
      slots: steps of memory that the planner tells apart.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> block = lambda w, x: x + jnp.tanh(x @ w)
      >>> plans = shd.remat.frontier(block, [jnp.ones((64, 64))] * 8, jnp.ones((512, 64)))
      >>> plans[0].peak < plans[-1].peak, plans[0].extra_time > plans[-1].extra_time
      (True, True)
    """
    chain = _measured(blocks, params, x, device, names, modes)
    return [chain.plan(tree, peak) for peak, tree in chain.trees(slots)]


def in_bytes(budget: float | str) -> float:
    """A number of bytes, or a text such as ``"8GiB"``.

    >>> in_bytes("1.5KiB")
    1536.0
    """
    if not isinstance(budget, str):
        found = float(budget)
    else:
        match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]I?)?B?\s*", budget.upper())
        if match is None:
            raise ValueError(f"expected bytes, or a text such as '8GiB', got {budget!r}.")
        found = float(match[1]) * _UNITS[match[2] or ""]
    if not found > 0:
        raise ValueError(f"a budget must be above 0, got {budget!r}.")
    return found


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Blocks that were measured.

    Attributes:
      fns: the blocks.
      measured: what each costs.
      sizes: bytes of each block's input, and of the last one's output.
    """

    fns: tuple[Callable[[Any, Any], Any], ...]
    measured: tuple[MeasuredBlock, ...]
    sizes: tuple[float, ...]

    @property
    def blocks(self) -> list[Block]:
        return [each.block for each in self.measured]

    def trees(self, slots: int) -> list[tuple[float, Tree]]:
        """The frontier: peaks and trees, from the fewest bytes to the most."""
        everything = tuple(Kept(i, 0) for i in range(len(self.fns)))
        most = peak_bytes(everything, self.blocks, self.sizes) * (1 + len(self.fns) / slots)
        table = ChainTable(self.blocks, self.sizes, most, slots)
        changes = np.flatnonzero(table.times < np.concatenate([[np.inf], table.times[:-1]]))
        found = [table.tree(int(m)) for m in changes]
        return [(peak_bytes(tree, self.blocks, self.sizes), tree) for tree in found]

    def plan(self, tree: Tree, budget: float) -> ChainPlan:
        def in_flops(each: MeasuredBlock) -> Block:
            modes = [
                mode._replace(recompute=work.flops)
                for mode, work in zip(each.block.modes, each.recompute, strict=True)
            ]
            return Block(each.forward.flops, each.backward.flops, tuple(modes))

        flops = time_of(tree, [in_flops(each) for each in self.measured])
        plain = sum((each.forward + each.backward for each in self.measured), Work(0.0, 0.0))
        return ChainPlan(
            blocks=self.fns,
            tree=tree,
            names=tuple(tuple(mode.names for mode in block.modes) for block in self.blocks),
            peak=peak_bytes(tree, self.blocks, self.sizes),
            saved=stored_bytes(tree, self.blocks, self.sizes),
            budget=budget,
            work=Work(flops, time_of(tree, self.blocks)),
            plain=plain,
        )


def _measured(
    blocks: Sequence[Callable[[Any, Any], Any]] | Callable[[Any, Any], Any],
    params: Sequence[Any],
    x: Any,
    device: str | jax.Device | None,
    names: Collection[str] | None,
    modes: int,
) -> _Chain:
    """Traces all blocks, and compiles the distinct ones."""
    fns = tuple([blocks] * len(params) if callable(blocks) else blocks)
    if len(fns) != len(params) or not fns:
        raise ValueError(f"expected parameters for each of {len(fns)} blocks, got {len(params)}.")
    kind, target = _device(device)
    done: dict[Any, MeasuredBlock] = {}
    measured, sizes = [], [float(num_bytes(x))]
    for fn, own in zip(fns, params, strict=True):
        traced = TracedBlock.of(fn, own, x)
        if traced.key not in done:
            done[traced.key] = measure(traced, names, kind, target, modes)
        measured.append(done[traced.key])
        x = traced.y
        sizes.append(float(num_bytes(x)))
    return _Chain(fns, tuple(measured), tuple(sizes))


def _device(device: str | jax.Device | None) -> tuple[DeviceKind | None, jax.Device]:
    """The figures of a device, where they are known, and the device to compile for."""
    if isinstance(device, str):
        return kind_of(device), targets.topology(device)[0]
    found: Any = jax.devices()[0] if device is None else device
    return kind_of(found.device_kind), found
