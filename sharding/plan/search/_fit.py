"""From a loss, a state and a batch to the fastest step that fits, proven by compiling it."""

import dataclasses
import hashlib
import inspect
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from optax_ext import STATE_FORMATS, __version__
from sharding._jaxprs import all_equations
from sharding._types import Batch, Tree
from sharding._zero import Tx, Zero
from sharding.placement._train_state import model_state_of, parts
from sharding.plan._format import Printed, Table, seconds, size
from sharding.plan.audit._find_batch import audited, needed
from sharding.plan.cost._parallel_plan import ParallelPlan, short
from sharding.plan.cost._plan_costs import transformation_of
from sharding.plan.machine import targets
from sharding.plan.machine._devices import DeviceKind, kind_of
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_model import TracedModel
from sharding.plan.search._plan_file import PlanFile
from sharding.plan.search._search import HEADROOM, ChosenPlan, NoPlanFits, SearchResult, search
from sharding.step._checks import check_batch
from sharding.step._loss import Loss, check_arguments, loss_args
from sharding.step._rng import microbatch_key
from sharding.step._train_step import TrainStep

# A faster plan is compiled only if it is predicted to save this share of a step.
_WORTH = 0.02
_RUNS = 3  # steps of a plan that are timed


@dataclasses.dataclass(frozen=True)
class Proof:
    """One plan that was compiled."""

    plan: ParallelPlan  #: how the step is shared
    planned: float  #: bytes of a device
    memory: float  #: bytes of a device in its program; infinite where the compiler had too few
    predicted: float  #: seconds
    measured: float | None = None  #: seconds, where it ran


@dataclasses.dataclass(frozen=True)
class FittedPlan(Printed):
    """What ``fit`` chose; ``str()`` says what else was compiled, and why it was not taken."""

    zero: Zero  #: how state and step are sharded
    tx: Tx  #: of a state that is a pair, in the plan's format
    make_state: Callable[..., Any]  #: makes the train state
    step: TrainStep  #: the step that was compiled
    target: str  #: the machine
    runs: bool  #: whether it is this one
    usable: float  #: bytes of a device that a step may take
    proofs: tuple[Proof, ...]  #: the chosen plan, then others that were compiled
    notes: tuple[str, ...] = ()  #: what else is worth knowing

    @property
    def plan(self) -> ParallelPlan:
        """How the step is shared."""
        return self.proofs[0].plan

    @property
    def memory(self) -> float:
        """Bytes of a device that the compiled step needs."""
        return self.proofs[0].memory

    def init(self, *args: Any) -> Any:
        """The train state of the arguments of ``make_state``, such as a key; see ``Zero.init``."""
        self._check_here()
        return self.zero.init(self.make_state, *args, tx=self.tx)

    def abstract_state(self, *args: Any) -> Any:
        """Its types and shardings, into which a checkpoint of any plan is restored."""
        return self.zero.abstract_state(self.make_state, *args, tx=self.tx)

    def put(self, batch: Batch) -> Any:
        """Places a batch of all devices, as each process has it; see ``Zero.put``."""
        self._check_here()
        index, count = self.zero.data_shard()
        own = jax.tree.map(lambda x: np.split(x, count)[index] if np.ndim(x) else x, batch)
        return self.zero.put(own if count > 1 else batch)

    def train_step(self) -> TrainStep:
        """The step that was compiled; see ``Zero.train_step``."""
        return self.step

    def _check_here(self) -> None:
        if not self.runs:
            raise ValueError(
                f"the plan is for {self.target}, for which this machine can only compile. Call fit "
                "without target= on the machine that trains."
            )

    def tables(self) -> list[Table]:
        rows = [
            (
                short(proof.plan),
                seconds(proof.predicted),
                "-" if proof.measured is None else seconds(proof.measured),
                *(size(proof.planned), needed(proof.memory)),
                "no" if proof.memory > self.usable else "chosen" if not i else "yes",
            )
            for i, proof in enumerate(self.proofs)
        ]
        title = (
            f"{self.plan.sequences:,} examples a step on {self.target}, "
            f"{size(self.usable)} of each device"
        )
        columns = ("plan", "predicted", "measured", "memory planned", "compiled", "fits")
        return [Table(title, columns, rows)]


def fit(
    loss_fn: Callable[..., Any],
    make_state: Callable[..., Any],
    batch: Batch,
    *,
    tx: Tx = None,
    examples: int | str | None = None,
    target: str | None = None,
    memory: float | None = None,
    device: DeviceKind | None = None,
    keep: Mapping[str, Any] | None = None,
    lossy: Sequence[str] = (),
    offload: bool = True,
    headroom: float = HEADROOM,
    measure: bool | int = False,
    folder: str | pathlib.Path | None = None,
    tries: int = 6,
    **options: Any,
) -> FittedPlan:
    """The fastest step of a loss that fits its machine, whatever the loss is made of.

    What the loss computes and stores is traced; ZeRO stages, replicas, micro-batches, what layers
    compute again, and offload are compared as by ``search``. The step of the fastest plan is
    compiled; if it needs more memory than a device has, the next one is, with figures corrected by
    what was compiled. No example's loss changes: plans are exact unless ``lossy`` names something.

    Args:
      loss_fn: ``loss_fn(params, batch) -> loss``, the mean over a batch of any number of examples,
        as under ``jit`` on one device (``Zero(view="global")``).
      make_state: makes the train state, as for ``Zero.init``, of nothing or of a random key.
      batch: a batch of all devices, real or abstract.
      tx: the transformation, where the state is a pair.
      examples: of all devices in a step; None: those of ``batch``. ``"largest"``: the most, in
        powers of two times the devices, that fit without micro-batches.
      target: a machine by name, to plan and compile for; None: the devices of this process group.
      memory: bytes of a device, where they are not known or others share it.
      device: figures of a device that is not known.
      keep: values that the plan must have, as for ``search``: ``{"stage": 3}``. Of a loss that
        couples examples, such as a contrastive one, keep ``{"microbatches": 1}``, which is so with
        a ``model_state``: else the loss of a micro-batch is not a part of that of the batch.
      lossy: what may approximate the step: formats of ``optax_ext.STATE_FORMATS``, ``"stochastic"``
        rounding of 16-bit parameters, syncs such as ``"powersgd(4)"``.
      offload: whether optimizer state may be in host memory.
      headroom: the share of a device's memory that stays free.
      measure: how many of the fastest plans to run for some steps; True: 3. The one measured
        fastest is taken. Each makes a state of its own, and frees it.
      folder: where plans are saved, by a fingerprint of loss, shapes, machine and versions: a
        restart reads the plan and compiles nothing beside the step.
      tries: how many plans to compile at most.
      **options: of ``Zero.train_step``, such as ``has_aux``, ``rngs`` or ``model_state``.

    Raises:
      ValueError: the loss cannot be traced, the batch cannot be shared, or nothing is known of the
        devices; or nothing fits (``NoPlanFits``), with the smallest change that would fit.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> tx = optax.adamw(1e-3)
      >>> def make_state(key):
      ...     params = {"w": jax.random.normal(key, (64, 64))}
      ...     return params, tx.init(params)
      >>> loss_fn = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
      >>> batch = jnp.ones((8 * jax.device_count(), 64))
      >>> plan = shd.plan.fit(loss_fn, make_state, batch, tx=tx, memory=2**30)
      >>> state, step = plan.init(jax.random.key(0)), plan.train_step()
      >>> state, metrics = step(state, plan.put(batch))
      >>> metrics["loss"].shape
      ()
    """
    if measure and target is not None:
        raise ValueError("measure runs steps on the devices of this process: leave target out.")
    asked = {"keep": dict(keep or {}), "offload": offload, **_lossy(lossy)}
    request = _Request(
        *(loss_fn, make_state, batch, tx, options),
        *(target, device, memory, headroom, asked),
    )
    largest = examples == "largest"
    count = request.devices if largest else examples or request.model.size
    if not isinstance(count, int):
        raise ValueError(f"examples must be a number, or 'largest', got {examples!r}.")
    path = folder and pathlib.Path(folder) / f"{request.fingerprint(examples, measure)}.json"
    if path and _everywhere(path.exists()):
        proofs = [Proof(ParallelPlan(**x.pop("plan")), **x) for x in json.loads(path.read_text())]
        return request.fitted(proofs, (f"The plan was read from {path}.",))

    # By planned bytes: the most that are known to fit, the fewest that are known not to.
    proofs, best = [], None
    low, high, budget = 0.0, math.inf, request.usable
    while len(proofs) < max(1, tries):
        try:
            chosen = request.search(count, budget, largest=largest).best
        except NoPlanFits as error:
            chosen = error.smallest
        slower = best and chosen.seconds.seconds > (1 - _WORTH) * best.predicted
        if slower or any(chosen.plan == proof.plan for proof in proofs):
            break
        proofs.append(proof := request.prove(chosen))
        if proof.memory <= request.usable:
            best, low = proof, max(low, proof.planned)
        else:
            high = min(high, proof.planned)
        budget = request.usable * proof.planned / proof.memory
        if not low < budget < high:
            budget = low + (high - low) / 2 if high < math.inf else 2 * low
    if best is None:
        raise request.nothing_fits(chosen, min(proofs, key=lambda proof: proof.memory))
    if measure:
        most = 3 if measure is True else measure
        budget = request.usable * best.planned / best.memory
        found = request.search(best.plan.sequences, budget, top=most)
        known = {proof.plan: proof for proof in proofs}
        several = [known.get(chosen.plan) or request.prove(chosen) for chosen in found.plans]
        known |= {proof.plan: proof for proof in several}
        known |= {
            x.plan: request.measured(x) for x in [best, *several] if x.memory <= request.usable
        }
        proofs = [*known.values()]
        best = min(proofs, key=lambda proof: proof.measured or math.inf)
    proofs = [best, *(proof for proof in proofs if proof.plan != best.plan)]
    if path and jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([dataclasses.asdict(proof) for proof in proofs], indent=2))
    return request.fitted(proofs)


class _Request:
    """What was asked of ``fit``: the model, the machine, and what plans may do."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        make_state: Callable[..., Any],
        batch: Batch,
        tx: Tx,
        options: dict[str, Any],
        target: str | None,
        device: DeviceKind | None,
        memory: float | None,
        headroom: float,
        asked: dict[str, Any],
    ):
        self.make_state, self.batch, self.options, self.asked = make_state, batch, options, asked
        self.loss_fn = loss_fn
        self._made: dict[ParallelPlan, FittedPlan] = {}
        # The machine.
        self.runs = target is None or target.startswith("cpu")
        self.target = target or _target_of(jax.devices())
        self.devices = targets.parse(self.target, other_gpus=True).num_devices
        self.kind = _device_of(self.target, device, memory)
        self.usable = (1 - headroom) * self.kind.memory
        check_batch(batch, self.devices, 1)
        # The state, and the loss of parameters and a batch alone.
        self.keys = _keys(make_state)
        state = jax.eval_shape(make_state, *self.keys)
        params, _, self.tx = parts(state, tx)
        self.pair = tx is not None
        if not num_bytes(params):
            raise ValueError("the train state has no parameters: there is nothing to plan.")
        model_state = options.get("model_state")
        if model_state:  # statistics of a batch are not those of its micro-batches
            asked["keep"].setdefault("microbatches", 1)
        if model_state is True:
            raise ValueError(
                "fit needs the model state in the train state: model_state names its field."
            )
        named = {name: options.get(name, False) for name in ("has_aux", "weighted", "rngs")}
        loss = Loss(loss_fn, **named, model_state=bool(model_state)).check()
        check_arguments(loss_fn, "params", "batch", model_state=model_state, key=loss.rngs)
        stateful = model_state_of(state, model_state or False)

        def mean_loss(params: Tree, batch: Batch) -> jax.Array:
            keys = microbatch_key(loss.rngs, jax.random.key(0), 0, batch)
            args = loss_args(loss, batch, _as_zeros(stateful), keys)
            total, weight, _, _ = loss.split(loss_fn(params, *args))
            return total / weight

        self.model = TracedModel(mean_loss, lambda dtype: _as_zeros(params), batch)
        _check_trace(self.model)

    def fingerprint(self, *more: Any) -> str:
        """Of all that a plan depends on."""
        trace = re.sub(r"0x[0-9a-f]+", "", str(self.model.trace.graph.jaxpr))
        state = jax.eval_shape(self.make_state, *self.keys)
        versions = jax.__version__, __version__
        known = trace, state, self.model.batch(self.model.size), self.target, self.kind, self.usable
        text = repr((known, self.asked, sorted(self.options), more, versions))
        return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]

    def search(
        self, count: int, budget: float, *, largest: bool = False, top: int = 1, **more: Any
    ) -> SearchResult:
        """The fastest plans of so many planned bytes."""
        asked = self.asked | more
        if largest:
            asked["keep"] = asked["keep"] | {"microbatches": 1}
        device = dataclasses.replace(self.kind, memory=budget)
        options = {"device": device, "headroom": 0.0, "top": top, **asked}
        found = search(self.model, self.tx, self.target, sequences=count, **options)
        while largest:
            try:
                count *= 2
                found = search(self.model, self.tx, self.target, sequences=count, **options)
            except NoPlanFits:
                break
        return found

    def prove(self, chosen: ChosenPlan) -> Proof:
        """Compiles the step of a plan."""
        proof = Proof(chosen.plan, chosen.memory, math.inf, chosen.seconds.seconds)
        fitted = self.fitted([proof])
        state = fitted.abstract_state(*self.keys)
        batch = self.model.batch(chosen.plan.sequences)
        key = jax.random.key(0) if self.options.get("rngs") else None
        lower = lambda _: fitted.step.lower(state, batch, key)  # noqa: E731
        _, memory = audited(lower, 0, self.kind, {})
        return dataclasses.replace(proof, memory=memory)

    def fitted(self, proofs: Sequence[Proof], notes: tuple[str, ...] = ()) -> FittedPlan:
        """The step of the first plan."""
        plan = proofs[0].plan
        if plan not in self._made:
            self._made[plan] = self._make(plan)
        return dataclasses.replace(self._made[plan], proofs=tuple(proofs), notes=notes)

    def _make(self, plan: ParallelPlan) -> FittedPlan:
        file = PlanFile("", "", self.target, 1, "", (), plan, {})
        axes = file.mesh_axes
        if self.runs:
            auto = (AxisType.Auto,) * len(axes)
            devices = jax.devices()[: self.devices]
            mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=devices)
        else:
            mesh = targets.mesh(self.target, tuple(axes.values()), tuple(axes))
        zero, tx = file.zero(mesh), transformation_of(plan, self.tx)

        def make_state(*args: Any) -> Any:
            state = self.make_state(*args)
            if tx is self.tx:
                return state
            params, _, _ = parts(state, self.tx if self.pair else None)
            opt_state = tx.init(params)
            return (params, opt_state) if self.pair else state.replace(tx=tx, opt_state=opt_state)

        loss, given = self.model.loss(plan.recompute, self.loss_fn), tx if self.pair else None
        step = zero.train_step(loss, tx=given, microbatches=plan.microbatches, **self.options)
        return FittedPlan(zero, given, make_state, step, self.target, self.runs, self.usable, ())

    def measured(self, proof: Proof) -> Proof:
        """Runs the step of a plan on a state of its own."""
        fitted = self.fitted([proof])
        state, batch = fitted.init(*self.keys), fitted.put(_as_zeros(self.batch, abstract=True))
        key, start = jax.random.key(0) if self.options.get("rngs") else None, 0.0
        for i in range(_RUNS + 1):
            start = start if i > 1 else time.perf_counter()  # the first one compiles
            state, _ = jax.block_until_ready(fitted.step(state, batch, key))
        took = np.array((time.perf_counter() - start) / _RUNS)
        if jax.process_count() > 1:  # all processes choose alike
            took = np.max(multihost_utils.process_allgather(took))
        return dataclasses.replace(proof, measured=float(took))

    def nothing_fits(self, chosen: ChosenPlan, proof: Proof) -> NoPlanFits:
        """What is too much, by how much, and what would fit."""
        count, ratio = proof.plan.sequences, min(proof.memory / proof.planned, 4.0)
        parts = sorted((x for x in chosen.held if x != "total"), key=lambda x: -chosen.held[x])
        message = (
            f"nothing fits {self.target}: a step may take {size(self.usable)} of a device, and "
            f"{short(proof.plan)} needs {needed(proof.memory)}, "
            f"{needed(proof.memory - self.usable)} too much; planned are "
            f"{', '.join(f'{name} {size(chosen.held[name])}' for name in parts)}."
        )
        # Slower choices, then lossy ones; the first of each that fits.
        slower: list[Any] = [("keep={}", count, {"keep": {}})] * bool(self.asked["keep"])
        slower += [("offload=True", count, {"offload": True})] * (not self.asked["offload"])
        fewer = [count // 2**i for i in range(1, 64) if count % 2**i == 0]
        slower += [(f"examples={n}", n, {}) for n in fewer if n % self.devices == 0]
        names = (name for name in STATE_FORMATS if name not in self.asked["state_formats"])
        rough = [(f"lossy={name!r}", count, {"state_formats": (None, name)}) for name in names]
        for choices in (slower, rough):
            for words, examples, change in choices:
                try:
                    best = self.search(examples, self.usable / ratio, **change).best
                except ValueError:
                    continue
                taken = seconds(best.seconds.seconds)
                message += f" With {words} a step is predicted to fit: {best.summary}, {taken}."
                break
        return NoPlanFits(message, chosen)


def _as_zeros(tree: Tree, *, abstract: bool = False) -> Any:
    """Zeros in the place of arrays; if ``abstract``, of abstract ones alone."""

    def zeros(x: Any) -> Any:
        real = abstract and not isinstance(x, jax.ShapeDtypeStruct)
        return x if real else jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(zeros, tree)


def _keys(make_state: Callable[..., Any]) -> tuple[Any, ...]:
    """The arguments of a function that makes a state: none, or a random key."""
    every = inspect.signature(make_state).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [x.name for x in every if x.default is x.empty and x.kind in positional]
    if len(needed) > 1:
        raise ValueError(
            f"make_state must take nothing or a random key, and it takes {', '.join(needed)}."
        )
    return (jax.random.key(0),) * len(needed)


def _lossy(names: Sequence[str]) -> dict[str, Any]:
    """The arguments of ``search`` that allow these."""
    names = (names,) if isinstance(names, str) else names
    formats = [name for name in names if name in STATE_FORMATS]
    syncs = [name for name in names if name not in (*STATE_FORMATS, "stochastic")]
    weights = ("plain", "stochastic") if "stochastic" in names else ("plain",)
    return {"state_formats": (None, *formats), "weights": weights, "syncs": (None, *syncs)}


def _target_of(devices: Sequence[jax.Device]) -> str:
    """The name of the machine that devices are."""
    first = devices[0]
    kind = kind_of(first.device_kind)
    name = kind.name if kind else re.sub(r"[^a-z0-9]+", "-", first.device_kind.lower()).strip("-")
    if first.platform == "cpu":
        return f"cpu:{len(devices)}"
    if first.platform != "tpu":
        return f"{name}x{len(devices)}"
    columns: Any = zip(*(device.coords for device in devices), strict=True)
    sizes = [len({*column}) for column in columns]
    sizes = sorted(sizes[:2]) if name in ("v5e", "v6e") else sizes
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return f"{name}:{'x'.join(map(str, sizes))}" + (f"*{slices}" if slices > 1 else "")


def _device_of(target: str, device: DeviceKind | None, memory: float | None) -> DeviceKind:
    """The figures of a device, with the memory that a process has of it."""
    kind = device or kind_of(target)
    if kind is None and targets.parse(target, other_gpus=True).kind == "cpu":
        # Figures of a core: what is compared is relative.
        kind = DeviceKind("cpu", memory or 0.0, 2e10, 1e11, 1e10, None, "none: any CPU")
    if kind is None:
        raise ValueError(f"fit needs the figures of {target}: give device=, a DeviceKind.")
    if memory is None and device is None and target == _target_of(jax.devices()):
        stats = jax.local_devices()[0].memory_stats() or {}
        memory = stats.get("bytes_limit", kind.memory)
    kind = dataclasses.replace(kind, memory=memory or kind.memory)
    if not kind.memory > 0:
        raise ValueError(f"fit needs the memory of a device of {target}: give memory= in bytes.")
    return kind


def _check_trace(model: TracedModel) -> None:
    """Raises unless a loss can be traced, and compiled for several devices."""
    try:
        trace = model.trace
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        raise ValueError(
            f"fit traces the loss for {model.size} examples, which failed: "
            f"{type(error).__name__}: {reason}. A loss is a function of parameters and a batch of "
            "any number of examples, whose shapes do not depend on their values, and which sums "
            "over no mesh axis itself."
        ) from error
    names = {eqn.primitive.name for eqn in all_equations(trace.graph.jaxpr)}
    calls = [name for name in names if "callback" in name or name.startswith("debug")]
    if calls:
        raise ValueError(
            f"the loss calls functions of the host ({', '.join(calls)}): leave them out."
        )


def _everywhere(flag: bool) -> bool:
    """Whether all processes say so."""
    if jax.process_count() == 1:
        return flag
    return bool(np.all(multihost_utils.process_allgather(np.array(flag))))
