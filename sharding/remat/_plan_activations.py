"""``plan`` and ``frontier``: activations under a budget of bytes.

What is stored is chosen in ``_schedule_search.py`` for any loss, in ``_stack_plan.py`` for a
scanned stack of equal blocks.
"""

import contextlib
import numbers
from collections.abc import Collection
from typing import Any, TypeAlias

import jax

from sharding._types import Array, Batch, Tree
from sharding._user_line import warn
from sharding.plan import targets
from sharding.plan._format import read_size, size
from sharding.plan.cost._estimate import Plan
from sharding.plan.machine._devices import DeviceKind, kind_of
from sharding.remat._checkpoint import INPUT
from sharding.remat._choose_saved_names import (
    MAXTEXT_NAMES,
    NameRequest,
    Names,
    TracedBlock,
    request_of,
)
from sharding.remat._loss_plan import LossPlan, LossSearch, PlannableLoss, check_arrays
from sharding.remat._program_bytes import is_sharded, types_of
from sharding.remat._remat_plan import Frontier
from sharding.remat._stack_plan import Candidate, Stack

Budget = float | str | Plan
Device: TypeAlias = "str | jax.Device | None"


def plan(
    loss_fn: Any,
    params: Tree,
    batch: Batch,
    budget: Budget,
    *,
    device: Device = None,
    length: int | None = None,
    names: Names = None,
    offload: bool | Collection[str] = False,
    largest: bool = False,
) -> Any:
    """Finds the fastest way to train a loss, or a stack of blocks, within a budget of bytes.

    The operations of *a loss* and of its gradient are a graph: any function that JAX differentiates
    has one. Each of its values is stored from the forward pass on, or is computed again in front of
    steps of the gradient that need it, once or several times. The search for the fastest schedule
    is exact for small graphs; a plan has a bound on what any schedule takes. With ``length`` the
    function is a block of *a stack*, ``block(params, x) -> x``: a scan over stacked parameters, or
    a scan over scans, whose blocks save some of their named values
    (``jax.ad_checkpoint.checkpoint_name``).

    Bytes are temporaries of the compiled program of one device; not its arguments and results, such
    as gradients.

    Args:
      loss_fn: ``loss_fn(params, batch)``; of several results the first is differentiated, by
        floating parameters.
      params: of the loss; or of a stack [length, ...]. Real or abstract; sharded arrays are planned
        as they are.
      batch: of one device, real or abstract: what the loss, or the first block, gets.
      budget: bytes; a text such as ``"8GiB"`` or ``"500MB"``; or the ``Plan`` of
        ``sharding.plan.estimate`` with a device: what it leaves there.
      device: for which programs are compiled: a target such as ``"h100x1"``, a device, or None for
        the first of this machine.
      length: the number of blocks of a stack.
      names: of a stack, that may be saved; None for all. A preset of MaxText, such as
        ``"save_qkv_proj"``, or a dict of places (``"device"``, ``"offload"``, ``"remat"``) by name
        leaves no choice.
      offload: whether a stack, or the loops of a loss, may copy named values, and the inputs of
        layers (``"block_input"``), to pinned host memory; or the names of those that it may.
      largest: whether to plan a loss for the most examples that fit, in powers of two times those
        of ``batch``, or parts of them: dim 0 of all arrays as long as the first. ``found.batch``
        has their types.

    Returns:
      A ``LossPlan``, which is called as the loss is, or a ``StackPlan``.

    Raises:
      ValueError: if no plan fits the budget (the message has the least that does), the arguments
        contradict each other, a loss has side effects, or offloading would not help: on a CPU, or
        over a link whose speed is not known.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> def loss(params, x):
      ...     for w in params:
      ...         x = x + jnp.tanh(x @ w) @ w.T
      ...     return jnp.mean(x**2)
      >>> params, x = [jnp.ones((64, 256))] * 6, jnp.ones((512, 64))
      >>> found = shd.remat.plan(loss, params, x, "3MiB")
      >>> found.peak <= 3 * 2**20, jax.jit(jax.grad(found))(params, x)[0].shape
      (True, (64, 256))

    References:
      Jain et al.: Checkmate: breaking the memory wall with optimal tensor rematerialization, MLSys
      2020. Beaumont et al.: Optimal checkpointing for heterogeneous chains: how to train deep
      neural networks with limited memory, ACM TOMS 2024, arXiv 1911.13214.
    """
    most = in_bytes(budget)
    if largest:
        if length is not None:
            raise ValueError("largest= is for a loss, not for stacks of blocks with length=.")
        return _of_most_examples(loss_fn, params, batch, most, device, names, offload)
    if length is None:
        return loss_search(loss_fn, params, batch, device, names, offload).fastest(most)
    stack, candidates = _measured_stack(
        loss_fn, params, batch, device, request_of(names), offload, length, None
    )
    fastest = stack.fastest(candidates, most)
    return stack.plan(fastest, stack.peak(fastest), most)


def frontier(
    loss_fn: Any,
    params: Tree,
    batch: Batch,
    *,
    device: Device = None,
    length: int | None = None,
    names: Names = None,
    offload: bool | Collection[str] = False,
    modes: int = 4,
) -> Frontier:
    """Finds plans that no other one beats in bytes and time, by ascending bytes.

    The arguments are those of ``plan``. Of a loss eight plans are compiled. Of a stack all
    candidates are, seconds each on GPUs, up to a minute on TPUs, with at most ``modes`` choices of
    names. ``print`` shows a table.

    Raises:
      ValueError: as ``plan``.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
      >>> plans = shd.remat.frontier(loss, jnp.ones((64, 64)), jnp.ones((512, 64)))
      >>> shd.remat.plot({"loss": plans}).axes[0].get_xlabel()
      'peak of activations and temporaries, GiB'
    """
    if length is None:
        return Frontier(loss_search(loss_fn, params, batch, device, names, offload).frontier())
    given = loss_fn, params, batch, device, request_of(names), offload
    stack, candidates = _measured_stack(*given, length, modes)
    return Frontier(stack.frontier(candidates))


def _of_most_examples(
    loss_fn: Any, params: Tree, batch: Batch, most: float, device: Device, *options: Any
) -> LossPlan:
    types = types_of(batch)
    given = next((t.shape[0] for t in jax.tree.leaves(types) if t.shape), 0)
    if not given:
        raise ValueError("largest= needs a batch of arrays with examples in dim 0.")

    def search_of(count: int) -> LossSearch:
        def resized(t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return t.update(shape=(count, *t.shape[1:])) if t.shape[:1] == (given,) else t

        return loss_search(loss_fn, params, jax.tree.map(resized, types), device, *options)

    # By the graph first: programs are compiled on the way down.
    search, count = search_of(given), given
    while search.least <= most:
        before, count = search.least, 2 * count
        search = search_of(count)
        if search.least <= before:
            raise ValueError("largest= needs a loss whose bytes grow with its batch.")
    while count > 1:
        try:
            search, count = search_of(count // 2), count // 2
        except (TypeError, ValueError):  # not of so few
            break
        if search.least <= most:
            with contextlib.suppress(ValueError):
                return search.fastest(most)
    return search.fastest(most)


def loss_search(
    loss_fn: Any,
    params: Tree,
    batch: Batch,
    device: Device,
    names: Names = None,
    offload: Any = False,
) -> LossSearch:
    if not callable(loss_fn):
        raise ValueError(
            "expected one function of parameters and a batch; of blocks in a row, give the loss "
            "that calls them."
        )
    if names is not None:
        raise ValueError("names= is for stacks of blocks, with length=.")
    check_arrays(params, batch)
    kind, target = _device(device, (params, batch), offload)
    return LossSearch(PlannableLoss(loss_fn, params, batch, target), kind, offload)


def in_bytes(budget: Budget) -> float:
    """Reads a number of bytes, a text such as ``"8GiB"``, or what a ``Plan`` leaves of its device.

    Raises:
      ValueError: if a ``budget`` is none of these, or the plan knows no device or leaves nothing.

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
    if offload and request.saved is not None:
        raise ValueError(
            "offload= leaves to the planner what names= has decided: give the names to offload the "
            "place 'offload', or names= as a list."
        )
    if modes is not None and modes < 2:
        raise ValueError(f"modes must be at least 2, to save all or nothing, got {modes}.")
    kind, target = _device(device, (params, x), offload or request.offloaded)
    stack = Stack(block, params, x, length, target, kind)
    wanted = () if isinstance(offload, bool) else offload
    _warn(stack.block.only(request.allowed), request, wanted)
    return stack, stack.candidates(request, offload, modes)


def _warn(block: TracedBlock, request: NameRequest, offload: Collection[str]) -> None:
    known = set(block.values)
    if not known:
        what = "no name that may be saved" if request.allowed is not None else "no named values"
        warn(
            f"the blocks have {what}: each stores its input, or nothing. Name values that are "
            "worth storing with jax.ad_checkpoint.checkpoint_name."
        )
    # MaxText's models name what only some of its presets save.
    useless = sorted(set(block.useless()) - MAXTEXT_NAMES)
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


def _device(
    device: Device, args: Any, offload: bool | Collection[str]
) -> tuple[DeviceKind | None, jax.Device]:
    kind = None
    if isinstance(device, str):
        kind, device = device_of_target(device)
    elif device is None:
        meshes = [x.sharding.mesh for x in jax.tree.leaves(types_of(args)) if is_sharded(x)]
        device = meshes[0].devices.flat[0] if meshes else jax.devices()[0]
    if not isinstance(device, jax.Device):
        raise ValueError(f"device is a target such as 'h100x1', or a device, got {device!r}.")
    kind = kind or kind_of(device.device_kind)
    if isinstance(offload, str):
        raise ValueError(f"offload is True, or a list of names, got {offload!r}.")
    if offload and device.platform == "cpu":
        raise ValueError(
            "offload is ignored by XLA on CPUs: values stay where they are. Give a device."
        )
    if offload and (kind is None or kind.host_link is None):
        raise ValueError(
            f"offload needs the speed of the link to the host, and none is known of "
            f"{device.device_kind}."
        )
    return kind, device


def device_of_target(name: str) -> tuple[DeviceKind | None, jax.Device]:
    return kind_of(name), targets.topology(name)[0]
