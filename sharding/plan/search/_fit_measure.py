"""How ``fit`` runs the fastest plans, takes the fastest one, and learns how slow a machine is."""

import dataclasses
import math
import time
from collections.abc import Sequence

import jax
import numpy as np

from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.search._fit_files import of_all
from sharding.plan.search._fit_proof import FitProofs, Proof
from sharding.plan.search._fit_request import FitRequest, as_zeros

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
        best, ran = ran[0], ran[: max(2, len(ran) // 2)]
    every = [proof for proof in proofs.known.values() if proof.measured]
    request.slower = _slower_than_predicted(request.slower, every)
    return best


def _programs_that_fit(
    request: FitRequest, proofs: FitProofs, best: Proof, top: int
) -> list[Proof]:
    """The fastest plans, compiled: one of those that differ in replicas alone, or are one program.

    Programs may need less than planned, those of some forms more than those of others.
    """
    usable, known = request.machine.usable, proofs.known
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
