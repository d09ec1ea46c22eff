"""``plan`` and ``frontier``: activations under a budget of bytes.

What is stored is chosen in ``_chain_search.py`` for a chain of blocks that are called one by one,
in ``_stack_plan.py`` for a scanned stack of equal blocks.
"""

import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, overload

import jax

from sharding._types import Array, Tree
from sharding._user_line import warn
from sharding.plan import targets
from sharding.plan._format import read_size, size
from sharding.plan.cost._estimate import Plan
from sharding.plan.machine._devices import DeviceKind, kind_of
from sharding.remat._block_costs import (
    MeasuredBlock,
    TracedBlock,
    device_bytes,
    evenly,
    is_sharded,
    measure,
    types_of,
)
from sharding.remat._chain_plan import ChainPlan, MeasuredChain
from sharding.remat._checkpoint import INPUT, Fn
from sharding.remat._choose_saved_names import (
    MAXTEXT_NAMES,
    NamedValues,
    NameRequest,
    Names,
    SavedNames,
    request_of,
)
from sharding.remat._remat_plan import Frontier
from sharding.remat._stack_plan import Candidate, Stack, StackPlan

Budget = float | str | Plan
Device: TypeAlias = "str | jax.Device | None"


@overload
def plan(
    blocks: Fn,
    params: Tree,
    x: Array,
    budget: Budget,
    *,
    length: int,
    device: str | jax.Device | None = ...,
    names: Names = ...,
    offload: bool | Collection[str] = ...,
) -> StackPlan: ...


@overload
def plan(
    blocks: Sequence[Fn] | Fn,
    params: Sequence[Any],
    x: Array,
    budget: Budget,
    *,
    device: str | jax.Device | None = ...,
    names: Names = ...,
    modes: int = ...,
) -> ChainPlan: ...


def plan(
    blocks: Any,
    params: Tree,
    x: Array,
    budget: Budget,
    *,
    device: str | jax.Device | None = None,
    names: Names = None,
    offload: bool | Collection[str] = False,
    length: int | None = None,
    modes: int = 4,
) -> Any:
    """Finds the fastest way to train a chain or a stack of blocks whose activations fit a budget.

    A *chain* runs one block after the other. Its plan is optimal among schedules that store each
    value until it is used: every block saves some of its named values, or belongs to a segment of
    blocks of which the input alone is stored. A *stack* (``length``) is a scan over the parameters
    of equal blocks, or a scan over scans, each of which runs again.

    Bytes are those of the peak of one device: stored activations, and the temporaries of the
    compiled backward pass; not arguments and results of the step, nor what a loss after the blocks
    takes. ``jax.ad_checkpoint.checkpoint_name`` names a value.

    Args:
      blocks: ``block(params, x) -> x``, one after the other; a single function for all. The last
        one of a chain may be the loss.
      params: of each block; of a stack one tree [length, ...]. Real or abstract; sharded arrays are
        planned, and counted, as they are.
      x: the input of the first block, a tree of arrays, real or abstract: one device's micro-batch.
      budget: bytes; a text such as ``"8GiB"`` or ``"500MB"``; or the ``Plan`` of
        ``sharding.plan.estimate`` with a device: what it leaves there.
      device: for which programs are compiled: a target such as ``"h100x1"``, a device, or None for
        the first of this machine. On CPUs the plan of a chain is not compiled, and need not hold.
      names: that may be saved; None for all. A preset of MaxText, such as ``"save_qkv_proj"``, or
        a dict of places (``"device"``, ``"offload"``, ``"remat"``) by name leaves no choice.
      offload: whether a stack may copy named values, and the inputs of its blocks
        (``"block_input"``), to pinned host memory; or the names of those that it may.
      length: the number of blocks of a stack.
      modes: of a chain, how many choices of names are compiled for each distinct block.

    Returns:
      A ``ChainPlan`` or ``StackPlan``.

    Raises:
      ValueError: if no plan fits the budget (the message has the least that does), the arguments
        contradict each other, or offloading would not help: in a chain, on a CPU, or over a link
        whose speed is not known.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def block(w, x):
      ...     return x + jnp.tanh(checkpoint_name(x @ w, "hidden")) @ w.T
      >>> params, x = [jnp.ones((64, 256))] * 6, jnp.ones((512, 64))
      >>> found = shd.remat.plan(block, params, x, "4MiB")
      >>> loss = lambda params, x: jnp.sum(found.apply()(params, x) ** 2)
      >>> found.peak <= 4 * 2**20, jax.jit(jax.grad(loss))(params, x)[0].shape
      (True, (64, 256))

    References:
      Beaumont et al.: Optimal checkpointing for heterogeneous chains: how to train deep neural
      networks with limited memory, ACM TOMS 2024, arXiv 1911.13214.
    """
    most, given = in_bytes(budget), (blocks, params, x, device, request_of(names), offload)
    if length is None:
        return _measured_chain(*given, modes).fastest(most)
    stack, candidates = _measured_stack(*given, length, None)
    fastest = stack.fastest(candidates, most)
    return stack.plan(fastest, stack.peak(fastest), most)


def frontier(
    blocks: Any,
    params: Tree,
    x: Array,
    *,
    device: str | jax.Device | None = None,
    names: Names = None,
    offload: bool | Collection[str] = False,
    length: int | None = None,
    modes: int = 4,
) -> Frontier:
    """Finds every plan that no other one beats in bytes and time, by ascending bytes.

    Of a stack all candidates are compiled: seconds each on GPUs, up to a minute on TPUs. Of a chain
    at most 16 plans are. The arguments are those of ``plan``; ``modes`` limits the choices of names
    of stacks, too. ``print`` shows a table.
    """
    given = blocks, params, x, device, request_of(names), offload
    if length is None:
        return Frontier(_measured_chain(*given, modes).frontier())
    stack, candidates = _measured_stack(*given, length, modes)
    return Frontier(stack.frontier(candidates))


def in_bytes(budget: Budget) -> float:
    """Reads a number of bytes, a text such as ``"8GiB"``, or what a plan leaves of its device.

    >>> in_bytes("1.5KiB")
    1536.0
    """
    if isinstance(budget, Plan):
        return _left_by(budget)
    if not isinstance(budget, str | numbers.Real):
        raise ValueError(
            f"a budget is a number of bytes, a text such as '8GiB', or, for what the state "
            f"leaves of a device, estimate(params, tx, zero, device=...); got {budget!r}."
        )
    return read_size(budget)


def _left_by(planned: Plan) -> float:
    if planned.device is None:
        raise ValueError(
            "a budget from a Plan needs the memory of its device: call estimate(..., "
            "device=sharding.plan.kind_of(...))."
        )
    stage, memory = planned.stage(planned.requested), planned.device.memory
    if stage.peak >= memory:
        raise ValueError(
            f"{stage.name} alone needs {size(stage.peak)} of the {size(memory)} of a "
            f"{planned.device.name}: nothing is left for activations."
        )
    return memory - stage.peak


def _measured_chain(
    blocks: Any,
    params: Tree,
    x: Array,
    device: Device,
    request: NameRequest,
    offload: Any,
    modes: int,
) -> MeasuredChain:
    if isinstance(params, Mapping):
        raise ValueError(
            "the parameters of a chain are a list, with those of each block; for stacked ones give "
            "length=."
        )
    fns = tuple([blocks] * len(params) if callable(blocks) else blocks)
    if len(fns) != len(params) or not fns:
        raise ValueError(f"expected parameters for each of {len(fns)} blocks, got {len(params)}.")
    if offload or request.offloaded:
        raise ValueError(
            "offload is for stacks, which scan over their blocks (length=): in an unrolled chain "
            "XLA copies all offloaded values back at once, which takes more memory than saving "
            "them."
        )
    _check_modes(modes)
    kind, target = _device(device, (params, x))
    arguments = types_of(list(params)), types_of(x)
    known: dict[Any, MeasuredBlock] = {}
    measured, sizes, named = [], [float(device_bytes(types_of(x)))], []
    for fn, own in zip(fns, params, strict=True):
        traced = TracedBlock.of(fn, own, x, target)
        if traced.key not in known:
            named.append(traced.named_values(kind, request.allowed))
            known[traced.key] = measure(traced, _choices(named[-1], request, modes), kind)
        measured.append(known[traced.key])
        x = traced.y
        sizes.append(float(device_bytes(x)))
    _warn(named, request)
    return MeasuredChain(fns, *arguments, target, tuple(measured), tuple(sizes))


def _choices(values: NamedValues, request: NameRequest, modes: int) -> list[SavedNames]:
    """Names for each mode; the last one saves nothing."""
    if request.saved is None:
        return evenly(values.frontier(), modes)
    demanded, nothing = (values.fixed(saved, ()) for saved in (request.saved, ()))
    return [demanded, nothing] if demanded.names else [nothing]


def _measured_stack(
    block: Any,
    params: Tree,
    x: Array,
    device: Device,
    request: NameRequest,
    offload: bool | Collection[str],
    length: int,
    modes: int | None,
) -> tuple[Stack, list[Candidate]]:
    if not callable(block):
        raise ValueError("length= is for a stack of equal blocks: give one function, not several.")
    if isinstance(offload, str):
        raise ValueError(f"offload is True, or a list of names, got {offload!r}.")
    if offload and request.saved is not None:
        raise ValueError(
            "offload= leaves to the planner what names= has decided: give the names to offload the "
            "place 'offload', or names= as a list."
        )
    _check_modes(modes)
    kind, target = _device(device, (params, x))
    if offload or request.offloaded:
        if target.platform == "cpu":
            raise ValueError(
                "offload is ignored by XLA on CPUs: values stay where they are. Give a device."
            )
        if kind is None or kind.host_link is None:
            raise ValueError(
                f"offload needs the speed of the link to the host, and none is known of "
                f"{target.device_kind}."
            )
    stack = Stack(block, params, x, length, target, kind)
    wanted = () if isinstance(offload, bool) else offload
    _warn([stack.named_values(request)], request, wanted)
    return stack, stack.candidates(request, offload, modes)


def _check_modes(modes: int | None) -> None:
    if modes is not None and modes < 2:
        raise ValueError(f"modes must be at least 2, to save all or nothing, got {modes}.")


def _warn(
    named: Sequence[NamedValues], request: NameRequest, offload: Collection[str] = ()
) -> None:
    known = {name for values in named for name in values.values}
    if not known:
        what = "no name that may be saved" if request.allowed is not None else "no named values"
        warn(
            f"the blocks have {what}: each stores its input, or nothing. Name values that are "
            "worth storing with jax.ad_checkpoint.checkpoint_name."
        )
    # MaxText's models name what only some of its presets save.
    useless = sorted({name for values in named for name in values.useless()} - MAXTEXT_NAMES)
    if useless:
        warn(
            f"{', '.join(useless)}: saving this spares no operation. A name must be on the value "
            "that is read later: x = checkpoint_name(x, ...), before the operation whose "
            "derivative needs it, as in tanh(checkpoint_name(x @ w, ...))."
        )
    demanded = {*(request.saved or ()), *request.offloaded, *offload}
    if known and demanded and not demanded & {*known, INPUT}:
        names = ", ".join(sorted(known))
        warn(f"none of the requested names is in the blocks, which have {names}.")


def _device(device: Device, args: Any) -> tuple[DeviceKind | None, jax.Device]:
    if isinstance(device, str):
        return device_of_target(device)
    if device is None:
        meshes = [x.sharding.mesh for x in jax.tree.leaves(types_of(args)) if is_sharded(x)]
        device = meshes[0].devices.flat[0] if meshes else jax.devices()[0]
        assert isinstance(device, jax.Device)
    return kind_of(device.device_kind), device


def device_of_target(name: str) -> tuple[DeviceKind | None, jax.Device]:
    return kind_of(name), targets.topology(name)[0]
