"""Files from which ``fit`` restarts, named by a fingerprint of all that plans depend on."""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_ext import __version__
from sharding._user_line import warn
from sharding.plan._format import reason_of
from sharding.plan.cost._ledger import Difference
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.search._fit_proof import FitProofs, FittedPlan, Proof
from sharding.plan.search._fit_request import FitRequest


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
        model, versions = request.model, (jax.__version__, __version__)
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


def of_all(value: float) -> np.ndarray:
    """A value of each process."""
    return np.asarray(multihost_utils.process_allgather(np.array(value)))
