"""Runs the phases of an optimizer's step on all parameters, in their order.

A phase ``phase(hyper, kind, leaf) -> leaf`` adds what it computes to a NamedTuple of arrays of one
parameter; ``kind`` is what is known while tracing, such as the factoring.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from optax_ext import _matrix_passes, _validate

Leaf = Any  # a NamedTuple of arrays with a property ``dtype``, in which the step is computed
Phase = Callable[[Any, Any, Leaf], Leaf]
# Each phase, and the field with the statistics that it adds, if any: sums over the full array.
Phases = tuple[tuple[Phase, str | None], ...]


def run(phases: Phases, hyper: Any, kinds: Sequence[Hashable], leaves: list[Leaf]) -> list[Leaf]:
    """Returns the leaves after all phases, which receive hyperparameters in the leaf's dtype."""
    hypers = [_validate.cast(hyper, leaf.dtype) for leaf in leaves]
    shared = all(h is None or isinstance(h, int | float | str) for own in hypers for h in own)
    # Parameters of one shape and kind share a trace. On several devices the statistics of all pass
    # a barrier after each phase, which makes their sums one all-reduce.
    if shared and not _matrix_passes.is_partitioned(leaves):
        return list(map(functools.partial(_param_step, phases), hypers, kinds, leaves))
    for phase, field in phases:
        with jax.named_scope(phase.__name__):
            leaves = list(map(_jitted(phase) if shared else phase, hypers, kinds, leaves))
            if field is not None:
                # Available in no leaf before it is computed in all.
                held = _matrix_passes.barrier([getattr(leaf, field) for leaf in leaves])
                leaves = [leaf._replace(**{field: x}) for leaf, x in zip(leaves, held, strict=True)]
    return leaves


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _param_step(phases: Phases, hyper: Any, kind: Hashable, leaf: Leaf) -> Leaf:
    for phase, _ in phases:
        with jax.named_scope(phase.__name__):
            leaf = phase(hyper, kind, leaf)
    return leaf


@functools.cache
def _jitted(phase: Phase) -> Phase:
    """Returns the phase as a jitted function, of which only what it adds to a leaf is a result."""

    @functools.wraps(phase)
    def added(hyper: Any, kind: Hashable, leaf: Leaf) -> dict[str, Any]:
        fields = phase(hyper, kind, leaf)._asdict()
        return {name: x for name, x in fields.items() if x is not getattr(leaf, name)}

    call = jax.jit(added, static_argnums=(0, 1))
    return lambda hyper, kind, leaf: leaf._replace(**call(hyper, kind, leaf))
