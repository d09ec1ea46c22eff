"""From a loss, a state and a batch to the fastest step that fits, proven by compiling it."""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import math
import numbers
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from optax_ext import STATE_FORMATS, __version__
from sharding._jaxprs import all_equations
from sharding._types import Batch, Tree
from sharding._user_line import warn
from sharding._zero import Tx, Zero
from sharding.loss._loss_options import AnyLoss, Loss, take_loss
from sharding.loss._rows import rows_of_loss
from sharding.placement._train_state import model_state_of, params_of, parts
from sharding.plan._format import (
    Printed,
    Table,
    check_choice,
    reason_of,
    seconds,
    size,
    users_code,
)
from sharding.plan.audit._audit import Audit, audit_or_bytes, needed
from sharding.plan.cost._parallel_plan import ParallelPlan, short
from sharding.plan.machine._devices import HEADROOM, DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.search._build import BuiltStep, build, mesh_axes
from sharding.plan.search._fit_machine import FitMachine
from sharding.plan.search._search import ChosenPlan, NoPlanFits, SearchResult, search
from sharding.plan.search._traced_model import TracedModel
from sharding.step._checks import check_batch
from sharding.step._loss import loss_args
from sharding.step._rng import microbatch_key
from sharding.step._train_step import TrainStep
from sharding.step.flax._nnx import is_module

_TRIES = 6  # plans that are compiled to find the fastest
# A faster plan is compiled only if it is predicted to save this share of a step.
_WORTH = 0.02
_RUNS, _TIMED = 5, 0.3  # steps of a plan that are timed: so many, and more for so many seconds
_ROUNDS = 3  # of runs: the slower half is left out of each next one
_MEASURED = 6  # plans that are run
_COMPILED = 5  # that are compiled for each of them
_WIDER = 1.5  # planned bytes of these, beside those that fit
_EVERY = 10**6  # plans of a search
_NOT_COMPARED = "Pipelines are not compared, and tensor axes are those of the mesh of zero=."


@dataclasses.dataclass(frozen=True)
class Proof:
    """One plan that was compiled."""

    plan: ParallelPlan  #: how the step is shared
    planned: float  #: bytes of a device
    memory: float  #: bytes of a device in its program; infinite where the compiler had too few
    predicted: float  #: seconds
    operations: float  #: of these, what computing takes
    measured: float | None = None  #: seconds, where it ran


@dataclasses.dataclass(frozen=True)
class FittedPlan(BuiltStep, Printed):
    """What ``fit`` chose; ``str()`` says what else was compiled, and why it was not taken."""

    machine: FitMachine  #: the machine
    proofs: tuple[Proof, ...]  #: the chosen plan, then others that were compiled
    notes: tuple[str, ...] = ()  #: what else is worth knowing

    @property
    def memory(self) -> float:
        """Bytes of a device that the compiled step needs."""
        return self.proofs[0].memory

    def init(self, *args: Any) -> Any:
        """The train state of the arguments of ``make_state``, such as a key; see ``Zero.init``."""
        self._check_here()
        return super().init(*args)

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
        if not self.machine.runs:
            raise ValueError(
                f"the plan is for {self.machine.target}, for which this machine can only compile. "
                "Call fit without target= on the machine that trains."
            )

    def to_dict(self) -> dict[str, Any]:
        return {"proofs": [*map(dataclasses.asdict, self.proofs)]}

    def tables(self) -> list[Table]:
        rows = [
            (
                short(proof.plan),
                seconds(proof.predicted),
                "-" if proof.measured is None else seconds(proof.measured),
                *(size(proof.planned), needed(proof.memory)),
                "no" if proof.memory > self.machine.usable else "chosen" if not i else "yes",
            )
            for i, proof in enumerate(self.proofs)
        ]
        usable = f"{size(self.machine.usable)} of each device"
        title = f"{self.plan.sequences:,} examples a step on {self.machine.target}, {usable}"
        columns = ("plan", "predicted", "measured", "memory planned", "compiled", "fits")
        return [Table(title, columns, rows)]


@contextlib.contextmanager
def _naming_the_page() -> Iterator[None]:
    """Ends errors with the page that explains them, if they name none."""
    try:
        yield
    except ValueError as error:
        if "(docs" not in str(error):
            error.args = (f"{str(error).rstrip('.')} (docs: how_to/let_it_choose).",)
        raise


@_naming_the_page()
def fit(
    loss_fn: AnyLoss,
    make_state: Callable[..., Any],
    batch: Batch,
    *,
    tx: Tx = None,
    largest: bool = False,
    target: str | None = None,
    memory: float | str | None = None,
    device: DeviceKind | None = None,
    keep: Mapping[str, Any] | None = None,
    zero: Zero | None = None,
    param_specs: Tree = None,
    lossy: Sequence[str] = (),
    headroom: float = HEADROOM,
    measure: bool | int = False,
    folder: str | pathlib.Path | None = None,
    **options: Any,
) -> FittedPlan:
    """The fastest step of any loss that fits its machine, proven by compiling it.

    What the loss computes and stores is traced; plans are compared as by ``search``. The fastest is
    compiled, then others, until none that may be faster is left or fits. All are exact, unless
    ``lossy`` names something. Pipelines are not compared; ``search`` does, for a ``Decoder``.

    Args:
      loss_fn: ``loss_fn(params, batch) -> loss``, as under ``jit``, of any number of examples; or a
        ``Loss``.
      make_state: makes the train state, as for ``Zero.init``, of nothing or of a random key.
      batch: a batch of all devices, real or abstract.
      tx: the transformation, where the state is a pair.
      largest: whether a step has the most examples, in powers of two times the devices, that fit
        without micro-batches, instead of those of ``batch``.
      target: a machine by name, to plan and compile for; None: the devices of this process group.
      memory: bytes of a device, or a text such as ``"8GiB"``, where they are not known or others
        share it.
      device: figures of a device that is not known.
      keep: values that plans must have, such as ``{"offload": False}``, as for ``search``. A loss
        in which rows meet, or with a ``model_state``, has one micro-batch: more would train another
        loss.
      zero: a ``Zero`` on a mesh of one's own, which plans keep with its axes, dtypes and whatever
        else they do not choose: they do stage, offload, sync and whether replicas share state.
      param_specs: of the parameters on other axes of that mesh; None takes their metadata.
      lossy: what may approximate the step: formats of ``optax_ext.STATE_FORMATS``, ``"stochastic"``
        rounding of 16-bit parameters, syncs such as ``"powersgd(4)"``.
      headroom: the share of a device's memory that stays free.
      measure: how many of the fastest plans to run, each for some steps on a state of its own; True
        for 6. The one measured fastest is taken.
      folder: where plans are saved, by a fingerprint of loss, shapes, machine and versions; those
        that are there are not searched and compiled again.
      **options: of ``Zero.train_step``, such as ``trainable``, and ``rngs`` beside a function.

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
    is_real = zero is None or isinstance(getattr(zero, "mesh", None), jax.sharding.Mesh)
    is_loss = callable(loss_fn) or hasattr(loss_fn, "as_loss")
    share = isinstance(headroom, numbers.Real) and 0 <= headroom < 1
    for value, valid, words in (
        (loss_fn, is_loss, "loss_fn must be a function of parameters and a batch"),
        (make_state, callable(make_state), "make_state must be a function"),
        (tx, tx is None or hasattr(tx, "update"), "tx must be a transformation"),
        (target, isinstance(target, str | None), "target must be a name such as 'h100x8'"),
        (device, isinstance(device, DeviceKind | None), "device must be a DeviceKind"),
        (zero, is_real, "zero must be a Zero on a mesh of devices"),
        (param_specs, zero or param_specs is None, "param_specs needs zero, whose axes they name"),
        (keep, isinstance(keep, Mapping | None), "keep must be a dict such as {'stage': 3}"),
        (lossy, isinstance(lossy, Sequence), "lossy must be names such as '8bit'"),
        (headroom, share, "headroom must be from 0 to below 1"),
        (measure, isinstance(measure, int) and measure >= 0, "measure must be True, or a number"),
        (folder, isinstance(folder, str | os.PathLike | None), "folder must be a path"),
    ):
        if not valid:
            raise ValueError(f"{words}, got {value!r}.")
    if zero and (target is not None or zero.sync):
        raise ValueError(
            "zero has devices in its mesh, and fit chooses: leave out target and sync."
        )
    for name, value in options.items():
        check_choice("an option", name, [*inspect.signature(Zero.train_step).parameters][3:])
        if name in ("microbatches", "update"):
            fixed = {name: value} if name != "update" else {"update_in_backward": True}
            raise ValueError(f"fit chooses {name}. To fix what it chooses, give keep={fixed}.")
    named = isinstance(loss_fn, Loss) and loss_fn.model_state
    if options.get("model_state", named) is True:
        raise ValueError(
            "fit needs the model state in the train state: model_state names its field."
        )
    loss, options = take_loss(loss_fn, options)
    kept = dict(keep or {})
    offload = "update" if "update" in _values(kept.get("offload")) else True
    asked = {"keep": kept, "offload": offload, "update_in_backward": True} | _lossy(lossy)
    machine = FitMachine.of(target, device, memory, headroom, zero)
    if measure and not machine.runs:
        raise ValueError(f"measure runs steps here, and {machine.target} is another machine.")
    request = _FitRequest(machine, loss, make_state, batch, tx, options, asked, zero, param_specs)
    path, speeds = request.files(folder, largest, measure)

    def of_file(rows: Any) -> FittedPlan:
        proofs = [Proof(ParallelPlan(**row.pop("plan")), **row) for row in rows]
        return request.fitted(proofs, f"The plan was read from {path}.")

    if (fitted := _read_saved(path, of_file)) is not None:
        return fitted
    if (slower := _read_saved(speeds, lambda x: np.array(x, float).reshape(2))) is not None:
        request.slower = tuple(_of_all(slower).max(0))

    # By planned bytes: the most that are known to fit, the fewest that are known not to.
    known, best = dict[ParallelPlan, Proof](), None
    low, high, budget = 0.0, math.inf, machine.usable
    count = machine.devices if largest else request.model.size
    while len(known) < _TRIES:
        try:
            chosen = request.search(count, budget, largest=largest).best
        except NoPlanFits as error:
            chosen = error.smallest
        least = best.predicted * (1 - _WORTH) if best and not largest else math.inf
        if chosen.plan in known or chosen.seconds.seconds > least:
            break
        if (proof := request.prove(chosen)) is None:  # nor is it searched again
            continue
        known[proof.plan] = proof
        if proof.memory <= machine.usable:
            best, low = proof, max(low, proof.planned)
        else:
            high = min(high, proof.planned)
        budget = machine.usable * proof.planned / proof.memory
        if not low < budget < high:
            budget = low + (high - low) / 2 if high < math.inf else 2 * low
    if best is None:
        raise request.nothing_fits(chosen, min(known.values(), key=lambda proof: proof.memory))
    if measure:
        # Programs may need less than planned, those of some forms more than those of others. One is
        # run of plans that differ in replicas alone, or are one program.
        budget = _WIDER * machine.usable * max(x.planned / x.memory for x in known.values())
        top = _MEASURED if measure is True else measure
        fits = [proof for proof in known.values() if proof.memory <= machine.usable]
        programs = {request.programs[proof.plan]: proof for proof in fits[-top:]}
        for chosen in request.search(best.plan.sequences, budget, top=_EVERY).plans:
            if len(programs) == top or len(known) > _COMPILED * top:
                break
            plan = _unreplicated(chosen.plan)
            alike = [x for x in known.values() if _unreplicated(x.plan) == plan]
            if any(x.memory <= machine.usable or x.planned <= chosen.memory for x in alike):
                continue
            if proof := request.prove(chosen):
                known[proof.plan] = proof
                if proof.memory <= machine.usable:
                    programs.setdefault(request.programs[proof.plan], proof)
        ran = [*programs.values()]
        for _ in range(_ROUNDS):  # in turns: what else the machine does slows all of them
            ran = sorted(map(request.measured, ran), key=lambda proof: proof.measured or 0.0)
            known |= {proof.plan: proof for proof in ran}
            best, ran = ran[0], ran[: max(2, len(ran) // 2)]
        request.compare([proof for proof in known.values() if proof.measured])
    proofs = [best, *(proof for proof in known.values() if proof.plan != best.plan)]
    _write(path, [dataclasses.asdict(proof) for proof in proofs])
    if measure:
        _write(speeds, request.slower)
    return request.fitted(proofs)


class _FitRequest:
    """What was asked of ``fit``: the machine, the model, and what plans may do."""

    def __init__(
        self,
        machine: FitMachine,
        loss: Loss,
        make_state: Callable[..., Any],
        batch: Batch,
        tx: Tx,
        options: dict[str, Any],
        asked: dict[str, Any],
        zero: Zero | None = None,
        param_specs: Tree = None,
    ):
        self.machine, self.options, self.asked = machine, options, asked
        self.loss = loss
        self._made: dict[ParallelPlan, FittedPlan] = {}
        self.programs: dict[ParallelPlan, int] = {}  # of plans that were proven
        self._audits: dict[int, tuple[Audit | None, float]] = {}  # of each; bytes of a device
        self.slower = 1.0, 1.0  # than by the figures: operations, and all else
        check_batch(batch, zero.num_devices if zero else machine.devices, 1)
        if not any(map(np.ndim, jax.tree.leaves(batch))):
            raise ValueError("no array of the batch has rows, which devices would share.")
        every = inspect.signature(make_state).parameters.values()
        takes = any(x.default is x.empty and x.kind.name[:3] != "VAR" for x in every)
        self.args = (jax.random.key(0),) * takes
        # Metadata of parameters is of a mesh of one's own.
        linen = None if zero else sys.modules.get("flax.linen")
        self.make_state = (lambda *args: linen.unbox(make_state(*args))) if linen else make_state
        must = "make_state must make a train state of nothing or a random key"
        with users_code(f"{must}, and failed where it was traced"):
            self.state = jax.eval_shape(self.make_state, *self.args)
        params, _, self.tx = parts(self.state, tx)
        if is_module(params):
            raise ValueError(
                "fit takes the arrays of an nnx model: use nnx.split, and nnx.merge in the loss."
            )
        if not isinstance(self.tx, optax.GradientTransformation):  # such as optax.MultiSteps
            self.tx = optax.with_extra_args_support(self.tx)
        self.pair = tx is not None
        if not num_bytes(params):
            raise ValueError("the train state has no parameters: there is nothing to plan.")
        # The loss of parameters and a batch alone.
        self.key = jax.random.key(0) if loss.rngs else None
        stateful = model_state_of(self.state, loss.model_state)

        def mean_loss(params: Tree, batch: Batch) -> jax.Array:
            keys = microbatch_key(loss.rngs, self.key, 0, batch)
            args = loss_args(loss, batch, _as_zeros(stateful), keys)
            total, weight, _, _ = loss.split(loss(params, *args))
            return total / weight

        init, own = lambda dtype: _as_zeros(params), {"zero": zero, "param_specs": param_specs}
        self.model = TracedModel(mean_loss, init, batch, **own)
        self.fixed: dict[str, Any] = {"pipe": 1, "tensor": self.model.tensor}
        self.fixed |= {"replicas": zero.num_devices // zero.num_shards} if zero else {}
        kept = asked["keep"]
        wrong = {k: x for k, x in self.fixed.items() if x not in _values(kept.get(k, x))}
        if wrong:
            raise ValueError(f"keep must have {wrong}, as all plans here. {_NOT_COMPARED}")
        # Where rows meet, the loss of a batch is not that of its micro-batches.
        if loss.model_state or (loss.coupled is None and self._rows_meet()):
            self.fixed["microbatches"] = 1
        self.asked["keep"] = self.fixed | kept
        _check_trace(self.model, machine.devices)

    def _rows_meet(self) -> bool:
        """Whether the loss is not known to keep rows apart."""
        try:
            args = self.model.abstract(), self.model.example
            return rows_of_loss(self.model.loss_fn, args, (False, True)).word == "coupled"
        except Exception:  # of the user's function: its trace says what it is
            return True

    def files(self, folder: Any, *more: Any) -> tuple[pathlib.Path | None, pathlib.Path | None]:
        """Where a plan is saved, by all that it depends on; how slow its machine is."""
        if folder is None:
            return None, None
        home = pathlib.Path(folder)
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one that plans can be saved in: {error}.") from error
        model, versions = self.model, (jax.__version__, __version__)
        step = str(model.trace.graph.jaxpr), self.state, model.zero, model.param_specs
        options = vars(self.loss) | {"fn": None}, sorted(self.options)
        text = repr((step, self.machine, self.asked, options, more, versions))
        fingerprint = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]
        machine = re.sub("[^a-z0-9]+", "-", self.machine.target)
        return home / f"{fingerprint}.json", home / f"speeds-{machine}.json"

    def search(
        self, count: int, budget: float, *, largest: bool = False, top: int = 1, **more: Any
    ) -> SearchResult:
        """The fastest plans of so many planned bytes."""
        asked = self.asked | more
        if largest:
            asked["keep"] = {"microbatches": 1} | asked["keep"]
        device, (computing, others) = self.machine.kind, self.slower
        slower = {"flops": computing, "bandwidth": computing, "link": others, "network": others}
        speeds = {x: getattr(device, x) and getattr(device, x) / slower[x] for x in slower}
        device = dataclasses.replace(device, memory=budget, **speeds)
        options = {"device": device, "headroom": 0.0, "top": top, **asked}
        found = search(self.model, self.tx, self.machine.target, sequences=count, **options)
        if largest:
            with contextlib.suppress(NoPlanFits):
                return self.search(2 * count, budget, largest=True)
        return found

    def prove(self, chosen: ChosenPlan) -> Proof | None:
        """Compiles the step of a plan, where this machine can.

        None if its loss or its transformation cannot be updated in the backward pass.
        """
        took = chosen.seconds
        operations = took.matmul + took.elementwise + took.overhead
        proof = Proof(chosen.plan, chosen.memory, chosen.memory, took.seconds, operations)
        fitted = self.fitted([proof])
        if not isinstance(fitted.zero.mesh, jax.sharding.Mesh):
            return proof
        state = fitted.abstract_state(*self.args)
        try:
            lowered = fitted.step.lower(state, fitted.batch, self.key)
        except ValueError:
            if not chosen.plan.update_in_backward or "update_in_backward" in self.asked["keep"]:
                raise
            self.asked["update_in_backward"] = False
            return None
        # Where no parameter is large enough to be sharded, several stages are one program.
        program = self.programs[chosen.plan] = hash(lowered.as_text())
        if program not in self._audits:
            self._audits[program] = audit_or_bytes(lambda: lowered, self.machine.kind)
        return dataclasses.replace(proof, memory=self._audits[program][1])

    def fitted(self, proofs: Sequence[Proof], *notes: str) -> FittedPlan:
        """The step of the first plan."""
        plan = proofs[0].plan
        made = self._made.get(plan) or self._made.setdefault(plan, self._make(plan))
        notes = (*notes, *self.model.about_layers(plan.update_in_backward), _NOT_COMPARED)
        for proof in proofs:
            found, _ = self._audits.get(self.programs.get(proof.plan, 0), (None, 0.0))
            of_compiler = found.of_compiler if found else ()
            notes = (*notes, *(f"warning: {short(proof.plan)}: {text}." for text in of_compiler))
        if not isinstance(made.zero.mesh, jax.sharding.Mesh):
            none = f"warning: nothing can be compiled for {made.machine.target} here: its memory"
            notes = (*notes, f"{none} is planned, not proven.")
        return dataclasses.replace(made, proofs=tuple(proofs), notes=notes)

    def _make(self, plan: ParallelPlan) -> FittedPlan:
        axes = mesh_axes(plan, self.machine.target)

        def make_state(tx: Any, *args: Any) -> Any:
            state = self.make_state(*args)
            if tx is self.tx:
                return state
            opt_state = tx.init(params_of(state))
            return (state[0], opt_state) if self.pair else state.replace(tx=tx, opt_state=opt_state)

        built = build(
            *(plan, self.model, self.tx, self.model.zero or self.machine.mesh(axes)),
            loss=self.loss,
            make_state=make_state,
            tx_in_state=not self.pair,
            **self.options,
        )
        return FittedPlan(**vars(built), machine=self.machine, proofs=())

    def measured(self, proof: Proof) -> Proof:
        """Runs the step of a plan on a state of its own."""
        fitted = self.fitted([proof])
        batch = fitted.put(_as_zeros(fitted.batch))
        state = fitted.init(*self.args)

        def run() -> float:
            nonlocal state
            start = time.perf_counter()
            state, _ = jax.block_until_ready(fitted.step(state, batch, self.key))
            return time.perf_counter() - start

        run()  # compiles
        took = min(run() for _ in range(_RUNS))
        more = int(_TIMED / _of_all(took).max())  # all processes run as many, and choose alike
        took = float(_of_all(min([took, *(run() for _ in range(more))])).max())
        return dataclasses.replace(proof, measured=min(took, proof.measured or math.inf))

    def compare(self, proofs: Sequence[Proof]) -> None:
        """Takes from steps that ran how much slower the machine is than by its figures."""
        parts = [(x.operations, x.predicted - x.operations, x.measured) for x in proofs]
        # Relative errors; where plans do not tell them apart, both are as much slower.
        rows = [(a / took, b / took, 1.0) for a, b, took in parts if took] + [(0.1, -0.1, 0.0)]
        matrix = np.array(rows)
        both = np.linalg.lstsq(matrix[:, :2], matrix[:, 2])[0]
        both = np.maximum(both, both.max() / 10)
        self.slower = self.slower[0] * float(both[0]), self.slower[1] * float(both[1])

    def nothing_fits(self, chosen: ChosenPlan, proof: Proof) -> NoPlanFits:
        """What is too much, by how much, and what would fit."""
        usable, count = self.machine.usable, proof.plan.sequences
        held = sorted((n, x) for x, n in chosen.held.items() if x != "total")[::-1]
        message = (
            f"nothing fits {self.machine.target}: a step may take {size(usable)} of a device, and "
            f"{short(proof.plan)} needs {needed(proof.memory)}, {needed(proof.memory - usable)} "
            f"too much; planned are {', '.join(f'{name} {size(n)}' for n, name in held)}."
        )
        # Slower choices, then lossy ones; the first of each that fits.
        slower: list[Any] = [("keep={}", count, {"keep": self.fixed})]
        slower *= self.asked["keep"] != self.fixed
        fewer = [count // 2**i for i in range(1, 64) if count % (self.machine.devices * 2**i) == 0]
        slower += [(f"a batch of {n} examples", n, {}) for n in fewer]
        names = (name for name in STATE_FORMATS if name not in self.asked["state_formats"])
        rough = [(f"lossy={name!r}", count, {"state_formats": (None, name)}) for name in names]
        budget = usable / min(proof.memory / proof.planned, 4.0)
        for choices in (slower, rough):
            for words, examples, change in choices:
                with contextlib.suppress(ValueError):
                    best = self.search(examples, budget, **change).best
                    takes = f"{best.summary}, {seconds(best.seconds.seconds)}"
                    message += f" With {words} a step is predicted to fit: {takes}."
                    break
        return NoPlanFits(f"{message} {_NOT_COMPARED}", chosen)


def _unreplicated(plan: ParallelPlan) -> ParallelPlan:
    return dataclasses.replace(plan, replicas=1, spread=False)


def _as_zeros(tree: Tree) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _values(kept: Any) -> tuple[Any, ...]:
    """What plans may have of a value that is kept, as for ``search``."""
    return kept if isinstance(kept, tuple) else (kept,)


def _lossy(names: Sequence[str]) -> dict[str, Any]:
    """The arguments of ``search`` that allow these."""
    names = (names,) if isinstance(names, str) else names
    syncs = [name for name in names if "(" in str(name)]  # which search checks
    others = [name for name in names if name not in syncs]
    for name in others:
        known = (*STATE_FORMATS, "stochastic", "powersgd(RANK)", "qsgd(8)", "qsgd(4)")
        check_choice("lossy", name, known)
    formats = [name for name in others if name != "stochastic"]
    weights = ("plain", "stochastic") if "stochastic" in others else ("plain",)
    return {"state_formats": (None, *formats), "weights": weights, "syncs": (None, *syncs)}


def _check_trace(model: TracedModel, devices: int) -> None:
    """Raises unless a loss can be traced, and compiled for several devices."""
    with users_code(
        "loss_fn must take parameters and a batch of any number of examples, in shapes that depend "
        "on no value, and sum over no mesh axis itself; its gradient was traced for "
        f"{model.size} and for {devices} examples, and failed"
    ):
        every = [*all_equations(model.trace.graph.jaxpr)]
        model.traced(devices, jnp.dtype(jnp.bfloat16), "none")
    own = dict(model.zero.mesh.shape) if model.zero else None
    for eqn in every:
        name = eqn.primitive.name
        if "callback" in name and not name.startswith("debug"):
            raise ValueError(f"the loss calls functions of the host ({name}): leave them out.")
        if name == "shard_map" and (mesh := dict(eqn.params["mesh"].shape)) != own:
            raise ValueError(
                f"the loss has a shard_map over a mesh {mesh}, and fit chooses the mesh: give "
                "zero=, a Zero on the mesh of the loss, or leave out shard_map."
            )


def _read_saved(path: pathlib.Path | None, make: Callable[[Any], Any]) -> Any:
    """What is made of a file; None unless all processes have one that is whole."""
    found = None
    if path and path.exists():
        try:
            found = make(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = reason_of(error)
            warn(f"{path} is not used, since fit did not write it, or not to its end ({reason}).")
    return found if path and _of_all(found is not None).all() else None


def _write(path: pathlib.Path | None, value: Any) -> None:
    """Writes a file that is whole, whenever this process ends."""
    if path and jax.process_index() == 0:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value, indent=2))
        part.replace(path)


def _of_all(value: float) -> np.ndarray:
    """A value of each process."""
    return np.asarray(multihost_utils.process_allgather(np.array(value)))
