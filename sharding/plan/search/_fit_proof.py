"""Plans that ``fit`` proves: their steps are built, compiled, compared with the plan, and run."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sharding._types import Batch
from sharding.placement._train_state import params_of
from sharding.plan._format import Printed, Table, seconds, size
from sharding.plan.audit._audit import Audit
from sharding.plan.audit._find_batch import audit_or_bytes, needed
from sharding.plan.cost._ledger import (
    Difference,
    StepRows,
    differences,
    held_by_part,
    table_of_differences,
)
from sharding.plan.cost._parallel_plan import ParallelPlan, short
from sharding.plan.search._build import BuiltStep, build, mesh_axes
from sharding.plan.search._chosen_plan import ChosenPlan
from sharding.plan.search._fit_request import NOT_COMPARED, FitMachine, FitRequest, as_zeros, of_all
from sharding.plan.search._verify import rows_of_zero
from sharding.step._train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Proof:
    """One plan that was compiled."""

    plan: ParallelPlan  #: how the step is shared
    planned: float  #: bytes of a device
    memory: float  #: bytes of a device in its program; infinite where the compiler had too few
    predicted: float  #: seconds
    operations: float  #: of these, what computing takes
    measured: float | None = None  #: seconds, where it ran
    #: what its program sends and holds otherwise than planned, by more than 3 %
    differences: tuple[Difference, ...] = ()


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
        differ = table_of_differences({"": self.proofs[0].differences})
        return [Table(title, columns, rows), *differ]


def _differences(
    fitted: FittedPlan, request: FitRequest, chosen: ChosenPlan, found: Audit
) -> tuple[Difference, ...]:
    """What a program sends and holds otherwise than its plan."""
    rows = rows_of_zero(fitted, request.model, request.model.abstract(), np.float32)
    sizes = dict(fitted.zero.mesh.shape)
    planned = StepRows(rows, sizes, held_by_part(chosen.held))
    return differences(planned, found.ledger())


class FitProofs:
    """The plans of a request that were compiled."""

    def __init__(self, request: FitRequest):
        self.request = request
        self.known: dict[ParallelPlan, Proof] = {}
        self.programs: dict[ParallelPlan, int] = {}  # of plans that were proven
        self._made: dict[ParallelPlan, FittedPlan] = {}
        self._audits: dict[int, tuple[Audit | None, float]] = {}  # of each; bytes of a device

    def prove(self, chosen: ChosenPlan) -> Proof | None:
        """Compiles the step of a plan, where this machine can.

        None if its loss or its transformation cannot be updated in the backward pass.
        """
        took = chosen.seconds
        operations = took.matmul + took.elementwise + took.overhead
        proof = Proof(chosen.plan, chosen.memory, chosen.memory, took.seconds, operations)
        fitted = self.fitted([proof])
        if isinstance(fitted.zero.mesh, jax.sharding.Mesh):
            compiled = self._compiled(fitted)
            if compiled is None:
                return None
            found, memory = compiled
            differ = _differences(fitted, self.request, chosen, found) if found else ()
            proof = dataclasses.replace(proof, memory=memory, differences=differ)
        self.known[proof.plan] = proof
        return proof

    def _compiled(self, fitted: FittedPlan) -> tuple[Audit | None, float] | None:
        """The program of a step and its bytes of a device; None if it cannot be made."""
        allowed = self.request.allowed
        plan = fitted.plan
        state = fitted.abstract_state(*self.request.args)
        try:
            lowered = fitted.step.lower(state, fitted.batch, self.request.key)
        except ValueError:
            if not plan.update_in_backward or "update_in_backward" in allowed["keep"]:
                raise
            allowed["update_in_backward"] = False
            return None
        # Where no parameter is large enough to be sharded, several stages are one program.
        program = self.programs[plan] = hash(lowered.as_text())
        if program not in self._audits:
            kind = self.request.machine.kind
            self._audits[program] = audit_or_bytes(lambda: lowered, kind, mesh=fitted.zero.mesh)
        return self._audits[program]

    def fitted(self, proofs: Sequence[Proof], *notes: str) -> FittedPlan:
        """The step of the first plan."""
        plan = proofs[0].plan
        if plan not in self._made:
            self._made[plan] = self._make(plan)
        made = self._made[plan]
        model = self.request.model
        notes = (*notes, *model.about_layers(plan.update_in_backward), NOT_COMPARED)
        kind = self.request.machine.kind
        notes = (*notes, f"Times are by {kind.about}.") if kind.reached else notes
        for proof in proofs:
            found, _ = self._audits.get(self.programs.get(proof.plan, 0), (None, 0.0))
            of_compiler = found.of_compiler if found else ()
            notes = (*notes, *(f"warning: {short(proof.plan)}: {text}." for text in of_compiler))
        if not isinstance(made.zero.mesh, jax.sharding.Mesh):
            none = f"warning: nothing can be compiled for {made.machine.target} here: its memory"
            notes = (*notes, f"{none} is planned, not proven.")
        return dataclasses.replace(made, proofs=tuple(proofs), notes=notes)

    def _make(self, plan: ParallelPlan) -> FittedPlan:
        """The step of a plan, of the user's loss and state."""
        request = self.request
        machine = self.request.machine
        axes = mesh_axes(plan, machine.target)

        def make_state(tx: Any, *args: Any) -> Any:
            state = request.make_state(*args)
            if tx is request.tx:
                return state
            opt_state = tx.init(params_of(state))
            if request.is_pair:
                return state[0], opt_state
            return state.replace(tx=tx, opt_state=opt_state)

        built = build(
            *(plan, request.model, request.tx, request.model.zero or machine.mesh(axes)),
            loss=request.loss,
            make_state=make_state,
            tx_in_state=not request.is_pair,
            **request.options,
        )
        return FittedPlan(**vars(built), machine=machine, proofs=())


_RUNS, _TIMED = 5, 0.3  # steps of a plan that are timed: so many, and more for so many seconds
_ROUNDS = 3  # of runs: the slower half is left out of each next one
_MEASURED = 6  # plans that are run
_COMPILED = 5  # that are compiled for each of them
_WIDER = 1.5  # planned bytes of these, beside those that fit
_EVERY = 10**6  # plans of a search


def fastest_of_those_that_ran(
    request: FitRequest, proofs: FitProofs, best: Proof, measure: bool | int
) -> Proof:
    """Runs so many of the fastest plans; their seconds correct those of the next search."""
    top = _MEASURED if measure is True else measure
    ran = _programs_that_fit(request, proofs, best, top)
    for _ in range(_ROUNDS):  # in turns: what else the machine does slows all of them
        measured = [measured_step(request, proofs, proof) for proof in ran]
        ran = sorted(measured, key=lambda proof: proof.measured or 0.0)
        proofs.known |= {proof.plan: proof for proof in ran}
        best = ran[0]
        ran = ran[: max(2, len(ran) // 2)]
    every = [proof for proof in proofs.known.values() if proof.measured]
    request.slower = _slower_than_predicted(request.slower, every)
    return best


def _programs_that_fit(
    request: FitRequest, proofs: FitProofs, best: Proof, top: int
) -> list[Proof]:
    """The fastest plans, compiled: one of those that differ in replicas alone, or are one program.

    Programs may need less than planned, those of some forms more than those of others.
    """
    usable = request.machine.usable
    known = proofs.known
    budget = _WIDER * usable * max(x.planned / x.memory for x in known.values())
    fits = [proof for proof in known.values() if proof.memory <= usable]
    programs = {proofs.programs[proof.plan]: proof for proof in fits[-top:]}
    for chosen in request.search(best.plan.sequences, budget, top=_EVERY).plans:
        if len(programs) == top or len(known) > _COMPILED * top:
            break
        plan = _unreplicated(chosen.plan)
        alike = [x for x in known.values() if _unreplicated(x.plan) == plan]
        if any(x.memory <= usable or x.planned <= chosen.memory for x in alike):
            continue
        proof = proofs.prove(chosen)
        if proof and proof.memory <= usable:
            programs.setdefault(proofs.programs[proof.plan], proof)
    return [*programs.values()]


def measured_step(request: FitRequest, proofs: FitProofs, proof: Proof) -> Proof:
    """Runs the step of a plan on a state of its own."""
    fitted = proofs.fitted([proof])
    batch = fitted.put(as_zeros(fitted.batch))
    state = fitted.init(*request.args)

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(fitted.step(state, batch, request.key))
        return time.perf_counter() - start

    run()  # compiles
    took = min(run() for _ in range(_RUNS))
    more = int(_TIMED / of_all(took).max())  # all processes run as many, and choose alike
    took = float(of_all(min([took, *(run() for _ in range(more))])).max())
    return dataclasses.replace(proof, measured=min(took, proof.measured or math.inf))


def _slower_than_predicted(
    before: tuple[float, float], proofs: Sequence[Proof]
) -> tuple[float, float]:
    """How much slower a machine is than by its figures: in operations, and in all else."""
    parts = [(x.operations, x.predicted - x.operations, x.measured) for x in proofs]
    # Relative errors; where plans do not tell them apart, both are as much slower.
    rows = [(a / took, b / took, 1.0) for a, b, took in parts if took] + [(0.1, -0.1, 0.0)]
    matrix = np.array(rows)
    both = np.linalg.lstsq(matrix[:, :2], matrix[:, 2])[0]
    both = np.maximum(both, both.max() / 10)
    return before[0] * float(both[0]), before[1] * float(both[1])


def _unreplicated(plan: ParallelPlan) -> ParallelPlan:
    return dataclasses.replace(plan, replicas=1, spread=False)
