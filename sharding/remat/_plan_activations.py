"""``plan`` and ``frontier``: activations under a budget of bytes."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from sharding._types import Batch, Tree
from sharding.loss._loss_options import AnyLoss, Loss, as_loss
from sharding.plan._format import Printed, Table, check_choice, read_size, size
from sharding.plan.audit._find_batch import largest as largest_size
from sharding.plan.audit._program_memory import is_sharded, types_of
from sharding.plan.cost._estimate import Plan
from sharding.plan.machine import targets
from sharding.plan.machine._devices import DeviceKind, kind_of
from sharding.remat._loss_loops import Offload
from sharding.remat._loss_search import LossSearch, PlannableLoss, check_arrays
from sharding.remat._planned_loss import LossPlan, ratio
from sharding.step._loss import loss_args, microbatch_key
from sharding.tiles._tiled_loss import TILES

Budget = float | str | Plan
Device: TypeAlias = "str | jax.Device | None"


def plan(
    loss_fn: AnyLoss,
    params: Tree,
    batch: Batch,
    budget: Budget,
    *,
    device: Device = None,
    offload: Offload = False,
    largest: bool = False,
    stage: int | None = None,
    model_state: Tree = None,
    tiles: Sequence[int] = TILES,
) -> Any:
    """Finds the fastest way to train a loss within a budget of bytes.

    The operations of a loss and of its gradient are a graph: any function that JAX differentiates
    has one, and a ``jax.checkpoint`` in it is opened. Each of its values is stored from the forward
    pass on, or is computed again in front of steps of the gradient that need it, once or several
    times. The search for the fastest schedule is exact for small graphs; a plan has a bound on what
    any schedule takes. A scan is a stack of layers, of whose values some are stored; it may become
    a scan over scans.

    Bytes are temporaries of the compiled program of one device; not its arguments and results, such
    as gradients.

    Args:
      loss_fn: ``loss_fn(params, batch)``, or a ``Loss``; of several results the first is
        differentiated, by floating parameters.
      params: real or abstract; sharded arrays are planned as they are.
      batch: of one device, real or abstract.
      budget: bytes; a text such as ``"8GiB"`` or ``"500MB"``; or the ``Plan`` of
        ``sharding.plan.estimate`` with a device: what it leaves there.
      device: for which programs are compiled: a target such as ``"h100x1"``, a device, or None for
        the first of this machine.
      offload: whether values may be copied to pinned host memory: on GPUs any, on TPUs those of
        layers of loops, and what these get (``"block_input"``); or names of values of layers.
      largest: whether to plan for the most examples that fit, in powers of two times those
        of ``batch``, or parts of them: dim 0 of all arrays as long as the first. ``found.batch``
        has their types.
      stage: of ZeRO, under which the loss is trained; None for that of a ``Plan``, or 0. Stage 3
        gathers loops layer by layer; other parts of a plan get all parameters. So at stage 3 a loss
        with loops plans these alone.
      model_state: of a ``Loss`` that takes one, real or abstract.
      tiles: in how many large values may exist, as by ``shd.tiled``, where that takes less time
        than to compute others again: as few as fit. The ``largest`` batch has none.

    Returns:
      A ``LossPlan``, which is called as the loss is; of a ``Loss`` a ``Loss`` whose ``fn`` it is.

    Raises:
      ValueError: if no plan fits the budget (the message has the bytes of the smallest program that
        was tried), the arguments contradict each other, a loss has side effects, or offloading
        would not help: on a CPU, or over a link whose speed is not known.

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
    if stage is None and isinstance(budget, Plan):
        stage = 3 if budget.stage(budget.requested).share < 1 else 0
    options: Any = {"offload": offload, "in_loops": _is_3(stage or 0), "model_state": model_state}
    if largest:
        found = _of_most_examples(loss_fn, params, batch, most, device, **options)
    else:
        found = loss_search(loss_fn, params, batch, device, **options, tiles=tiles).fastest(most)
    loss = as_loss(loss_fn)
    return found if loss.fn is loss_fn else dataclasses.replace(loss, fn=found)


def frontier(
    loss_fn: AnyLoss,
    params: Tree,
    batch: Batch,
    *,
    device: Device = None,
    offload: Offload = False,
    stage: int = 0,
    model_state: Tree = None,
    tiles: Sequence[int] = (),
) -> "Frontier":
    """Finds plans that no other one beats in bytes and time, by ascending bytes.

    The arguments are those of ``plan``. Up to eight plans are compiled, and at stage 3
    all of loops; as many in each number of ``tiles``. ``print`` shows a table.

    Raises:
      ValueError: as ``plan``.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
      >>> plans = shd.remat.frontier(loss, jnp.ones((64, 64)), jnp.ones((512, 64)))
      >>> plans[-1].extra_time  # stores all
      0.0
    """
    options: Any = {"offload": offload, "model_state": model_state, "tiles": tiles}
    search = loss_search(loss_fn, params, batch, device, in_loops=_is_3(stage), **options)
    return Frontier(search.frontier())


def _is_3(stage: int) -> bool:
    check_choice("stage", stage, (0, 1, 2, 3))
    return stage == 3


def _of_most_examples(
    loss_fn: AnyLoss, params: Tree, batch: Batch, most: float, device: Device, **options: Any
) -> LossPlan:
    types = types_of(batch)
    given = next((t.shape[0] for t in jax.tree.leaves(types) if t.shape), 0)
    if not given:
        raise ValueError("largest= needs a batch of arrays with examples in dim 0.")

    def search_of(count: int) -> LossSearch:
        def resized(t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return t.update(shape=(count, *t.shape[1:])) if t.shape[:1] == (given,) else t

        of_count = jax.tree.map(resized, types)
        return loss_search(loss_fn, params, of_count, device, **options, tiles=())

    searches = dict[int, LossSearch]()

    def least_bytes(count: int) -> float:
        searches[count] = search_of(count)
        least = searches[count].least
        if count > given and least <= searches[count // 2].least:
            raise ValueError("largest= needs a loss whose bytes grow with its batch.")
        return least

    # By the graph first: programs are compiled on the way down.
    count = largest_size(least_bytes, most, start=given, doubled=True) or given
    search = searches[count]
    while True:
        if search.least <= most:
            with contextlib.suppress(ValueError):
                return search.fastest(most)
        count //= 2
        if not count:
            break
        try:
            search = search_of(count)
        except (TypeError, ValueError):  # not of so few
            break
    return search.fastest(most)


def loss_search(
    loss_fn: AnyLoss,
    params: Tree,
    batch: Batch,
    device: Device,
    offload: Offload = False,
    in_loops: bool = False,
    model_state: Tree = None,
    tiles: Sequence[int] = TILES,
) -> LossSearch:
    if not (callable(loss_fn) or hasattr(loss_fn, "as_loss")):
        raise ValueError(
            "expected one function of parameters and a batch; of blocks in a row, give the loss "
            "that calls them."
        )
    loss = as_loss(loss_fn)
    check_arrays(params, batch)
    kind, target = _device(device, (params, batch), offload)
    fn, batch = _of_two_arguments(loss, batch, model_state)
    return LossSearch(PlannableLoss(fn, params, batch, target), kind, offload, in_loops, tiles)


def _of_two_arguments(loss: Loss, batch: Batch, model_state: Tree) -> tuple[Any, Any]:
    """A loss of parameters and of a batch, or of a tuple of all else that it takes; and that."""
    if not (loss.model_state or loss.rngs):
        return loss.fn, batch
    if loss.model_state and model_state is None:
        raise ValueError("the loss takes a model state: pass one as model_state=, or its types.")
    keys = jax.eval_shape(lambda x: microbatch_key(loss.rngs, jax.random.key(0), 0, x), batch)
    return lambda params, args: loss(params, *args), loss_args(loss, batch, model_state, keys)


def in_bytes(budget: Budget) -> float:
    """Reads a number of bytes, a text such as ``"8GiB"``, or what a ``Plan`` leaves of its device.

    Raises:
      ValueError: if a ``budget`` is none of these, or the plan knows no device or leaves nothing.

    >>> in_bytes("1.5KiB")
    1536.0
    """
    if not isinstance(budget, Plan):
        return read_size(budget, "budget (or a Plan of the state): ")
    stage, device = budget.stage(budget.requested), budget.device
    if device is None:
        raise ValueError(
            "a budget from a Plan needs the memory of its device: call estimate(..., "
            "device=sharding.plan.kind_of(...))."
        )
    if stage.peak >= device.memory:
        raise ValueError(
            f"{stage.name} alone needs {size(stage.peak)} of the {size(device.memory)} of a "
            f"{device.name}: nothing is left for activations."
        )
    return device.memory - stage.peak


def _device(device: Device, args: Any, offload: Offload) -> tuple[DeviceKind | None, jax.Device]:
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


class Frontier(list[LossPlan], Printed):
    """Plans that no other one beats in bytes and time, from the fewest bytes to the most."""

    def tables(self) -> list[Table]:
        """The table to print."""
        columns = ("computes again", "peak", "in host memory", "products again", "extra time")
        rows = []
        for plan in self:
            nbytes = size(plan.peak), size(plan.host) if plan.host else ""
            again = ratio(plan.extra_flops, plan.plain.flops), plan.extra_time
            rows.append((plan.summary, *nbytes, *(f"{fraction:.1%}" for fraction in again)))
        return [Table("Activations of one device", columns, rows)]
