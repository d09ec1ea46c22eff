"""Runs one step of an algorithm for all parameters, in phases that end where their statistics meet.

A step is a generator of one parameter. It yields its phases: functions without arguments that each
return ``(statistics, arrays)``. The statistics of all parameters pass a barrier, so that sums over
several devices become one all-reduce; ``arrays`` do not wait. The generator receives both back.

All array operations are inside the phases. Where no barrier is, the step is traced once for all
parameters of one shape. Between barriers each phase is: the trace starts a generator of its own and
sends it the results of the phases before.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from optax_ext import _matrix_passes
from optax_ext._factoring_rules import Factoring

Result = tuple[Any, Any]  # statistics, arrays
Phase = Callable[[], Result]
# From hyperparameters, the factoring and the arrays of one parameter.
Step = Callable[..., Generator[Phase, Any, Any]]


def run(step: Step, hyper: Any, dims: Sequence[Factoring], *columns: Sequence[Any]) -> list[Any]:
    """Runs the step of every parameter.

    Args:
      step: the generator function, called as ``step(hyper, dims, *arrays)``.
      hyper: a tuple of hyperparameters. If one is traced, traces are not shared.
      dims: the factoring of each parameter.
      *columns: for each array argument of the step, the arrays of all parameters.

    Returns:
      What the generators return.
    """
    arguments = list(zip(*columns, strict=True))
    static = all(h is None or isinstance(h, int | float | np.dtype) for h in hyper)
    if static and not _matrix_passes.has_barriers(columns):
        call = functools.partial(_param_step, _matrix_passes.trace_key(), step, hyper)
        return list(map(call, dims, arguments))
    generators = [step(hyper, d, *arrays) for d, arrays in zip(dims, arguments, strict=True)]
    sent: list[tuple[Any, ...]] = [() for _ in generators]  # the results of all phases so far
    while True:
        phases, returned = _advance(generators, sent)
        if not phases:
            return returned
        name = phases[0].__name__
        with jax.named_scope(name):
            if static:
                call = functools.partial(_replayed(name), _matrix_passes.trace_key(), step, hyper)
                results = list(map(call, dims, arguments, sent))
            else:
                results = [phase() for phase in phases]
            statistics = _matrix_passes.barrier([shared for shared, _ in results])
        sent = [
            (*before, (shared, arrays))
            for before, shared, (_, arrays) in zip(sent, statistics, results, strict=True)
        ]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _param_step(key: Any, step: Step, hyper: Any, dims: Factoring, arrays: Any) -> Any:
    """Runs the step of one parameter."""
    del key  # see _matrix_passes.trace_key
    generator, result = step(hyper, dims, *arrays), None
    while True:
        try:
            phase = generator.send(result)
        except StopIteration as end:
            return end.value
        with jax.named_scope(phase.__name__):
            result = phase()


def _advance(generators: list[Any], sent: list[Any]) -> tuple[list[Phase], list[Any]]:
    """Returns the next phase of every step or, after the last phase, what the steps return."""
    phases, returned = [], []
    for generator, results in zip(generators, sent, strict=True):
        try:
            phases.append(generator.send(results[-1] if results else None))
        except StopIteration as end:
            returned.append(end.value)
    return phases, returned


@functools.cache
def _replayed(name: str) -> Callable[..., Any]:
    """Returns a jitted function, called ``name`` in profiles, that traces one phase of a step.

    It replays the generator: the results of earlier phases are sent, not computed again.
    """

    def phase(key: Any, step: Step, hyper: Any, dims: Factoring, arrays: Any, sent: Any) -> Result:
        del key  # see _matrix_passes.trace_key
        generator = step(hyper, dims, *arrays)
        current = next(generator)
        for result in sent:
            current = generator.send(result)
        return current()

    phase.__name__ = name
    return jax.jit(phase, static_argnums=(0, 1, 2, 3))
