"""From a loss, a state and a batch to the fastest step that fits, compiled; the files of that."""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_ext import STATE_FORMATS, __version__
from sharding._types import Batch, Tree
from sharding._user_line import warn
from sharding._zero import Tx, Zero
from sharding.loss._loss_options import AnyLoss, take_loss
from sharding.plan._format import reason_of, seconds, size
from sharding.plan.audit._find_batch import needed
from sharding.plan.cost._ledger import Difference
from sharding.plan.cost._parallel_plan import ParallelPlan, short
from sharding.plan.machine._devices import HEADROOM, DeviceKind
from sharding.plan.search._chosen_plan import ChosenPlan
from sharding.plan.search._fit_proof import FitProofs, FittedPlan, Proof, fastest_of_those_that_ran
from sharding.plan.search._fit_request import (
    NOT_COMPARED,
    FitMachine,
    FitRequest,
    allowed_plans,
    check_arguments,
    check_step_options,
    of_all,
)
from sharding.plan.search._search import NoPlanFits

_TRIES = 6  # plans that are compiled to find the fastest
# A faster plan is compiled only if it is predicted to save this share of a step.
_WORTH = 0.02


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
        rounding of 16-bit parameters, syncs such as ``"powersgd(4)"``, products of layers in few
        bits, ``"matmuls(fp8)"`` or ``"matmuls(int8)"``.
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
    check_arguments(locals())
    check_step_options(loss_fn, options)
    loss, options = take_loss(loss_fn, options)
    machine = FitMachine.of(target, device, memory, headroom, zero)
    if measure and not machine.runs:
        raise ValueError(f"measure runs steps here, and {machine.target} is another machine.")
    allowed = allowed_plans(keep, lossy)
    of_mesh = {"zero": zero, "param_specs": param_specs}
    request = FitRequest(machine, loss, make_state, batch, tx, options, allowed, **of_mesh)
    proofs = FitProofs(request)
    files = FitFiles.of(request, folder, largest, measure)
    if (fitted := files.read_plan(proofs)) is not None:
        return fitted
    request.slower = files.read_speeds() or request.slower
    best = _fastest_that_fits(request, proofs, largest)
    if measure:
        best = fastest_of_those_that_ran(request, proofs, best, measure)
        files.write_speeds(request.slower)
    found = [best, *(proof for proof in proofs.known.values() if proof.plan != best.plan)]
    files.write_plan(found)
    return proofs.fitted(found)


def _fastest_that_fits(request: FitRequest, proofs: FitProofs, largest: bool) -> Proof:
    """Compiles plans until none that may be faster is left."""
    usable = request.machine.usable
    known = proofs.known
    best = None
    # By planned bytes: the most that are known to fit, the fewest that are known not to.
    low = 0.0
    high = math.inf
    budget = usable
    while len(known) < _TRIES:
        try:
            if largest:
                chosen = request.search_largest(budget)
            else:
                chosen = request.search(request.model.size, budget).best
        except NoPlanFits as error:
            chosen = error.smallest
        least = best.predicted * (1 - _WORTH) if best and not largest else math.inf
        if chosen.plan in known or chosen.seconds.seconds > least:
            break
        if (proof := proofs.prove(chosen)) is None:  # nor is it searched again
            continue
        if proof.memory <= usable:
            best = proof
            low = max(low, proof.planned)
        else:
            high = min(high, proof.planned)
        budget = usable * proof.planned / proof.memory
        if not low < budget < high:
            budget = low + (high - low) / 2 if high < math.inf else 2 * low
    if best is None:
        smallest = min(known.values(), key=lambda proof: proof.memory)
        raise _nothing_fits(request, chosen, smallest)
    return best


def _nothing_fits(request: FitRequest, chosen: ChosenPlan, proof: Proof) -> NoPlanFits:
    """What is too much, by how much, and what would fit."""
    usable = request.machine.usable
    held = sorted((n, x) for x, n in chosen.held.items() if x != "total")[::-1]
    message = (
        f"nothing fits {request.machine.target}: a step may take {size(usable)} of a device, and "
        f"{short(proof.plan)} needs {needed(proof.memory)}, {needed(proof.memory - usable)} "
        f"too much; planned are {', '.join(f'{name} {size(n)}' for n, name in held)}."
    )
    budget = usable / min(proof.memory / proof.planned, 4.0)
    for choices in _remedies(request, proof.plan):
        for words, examples, change in choices:
            with contextlib.suppress(ValueError):
                best = request.search(examples, budget, **change).best
                takes = f"{best.summary}, {seconds(best.seconds.seconds)}"
                message += f" With {words} a step is predicted to fit: {takes}."
                break
    return NoPlanFits(f"{message} {NOT_COMPARED}", chosen)


def _remedies(request: FitRequest, plan: ParallelPlan) -> list[list[Any]]:
    """Slower choices, then lossy ones; the first of each that fits is named."""
    count = plan.sequences
    devices = request.machine.devices
    slower: list[Any] = []
    if request.allowed["keep"] != request.fixed:
        slower.append(("keep={}", count, {"keep": request.fixed}))
    fewer = [count // 2**i for i in range(1, 64) if count % (devices * 2**i) == 0]
    slower += [(f"a batch of {n} examples", n, {}) for n in fewer]
    names = (name for name in STATE_FORMATS if name not in request.allowed["state_formats"])
    rough = [(f"lossy={name!r}", count, {"state_formats": (None, name)}) for name in names]
    return [slower, rough]


class FitFiles(NamedTuple):
    """The files of a request; None without a folder."""

    path: pathlib.Path | None = None  # of its plans
    speeds: pathlib.Path | None = None  # of its machine: how slow that is

    @classmethod
    def of(cls, request: FitRequest, folder: Any, *more: Any) -> "FitFiles":
        """Those in a folder, by all that plans depend on."""
        if folder is None:
            return cls()
        home = pathlib.Path(folder)
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one that plans can be saved in: {error}.") from error
        model = request.model
        versions = (jax.__version__, __version__)
        step = str(model.trace.graph.jaxpr), request.state, model.zero, model.param_specs
        options = vars(request.loss) | {"fn": None}, sorted(request.options)
        text = repr((step, request.machine, request.allowed, options, more, versions))
        fingerprint = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]
        machine = re.sub("[^a-z0-9]+", "-", request.machine.target)
        return cls(home / f"{fingerprint}.json", home / f"speeds-{machine}.json")

    def read_plan(self, proofs: FitProofs) -> FittedPlan | None:
        """The plan that was found before."""

        def of_rows(rows: Any) -> FittedPlan:
            found = []
            for row in rows:
                plan = ParallelPlan(**row.pop("plan"))
                differ = tuple(Difference(*each) for each in row.pop("differences"))
                found.append(Proof(plan, **row, differences=differ))
            return proofs.fitted(found, f"The plan was read from {self.path}.")

        fitted: FittedPlan | None = _read_whole(self.path, of_rows)
        return fitted

    def write_plan(self, proofs: Sequence[Proof]) -> None:
        _write(self.path, [dataclasses.asdict(proof) for proof in proofs])

    def read_speeds(self) -> tuple[float, float] | None:
        """How much slower the machine was than by its figures: the slowest of its processes."""
        slower = _read_whole(self.speeds, lambda x: np.array(x, float).reshape(2))
        if slower is None:
            return None
        computing, others = of_all(slower).max(0)
        return computing, others

    def write_speeds(self, slower: tuple[float, float]) -> None:
        _write(self.speeds, slower)


def _read_whole(path: pathlib.Path | None, make: Callable[[Any], Any]) -> Any:
    """What is made of a file; None unless all processes have one that is whole."""
    found = None
    if path and path.exists():
        try:
            found = make(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = reason_of(error)
            warn(f"{path} is not used, since fit did not write it, or not to its end ({reason}).")
    return found if path and of_all(found is not None).all() else None


def _write(path: pathlib.Path | None, value: Any) -> None:
    """Writes a file that is whole, whenever this process ends."""
    if path and jax.process_index() == 0:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value, indent=2))
        part.replace(path)
