"""The copies of a snapshot that a training step makes beside its own work."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sharding.offload._host_memory import on_host
from sharding.recovery._replica_program import ReplicaProgram, Replicas, as_data


class StepCopies:
    """Copies of the state that a step takes, which it may donate.

    Args:
      program: of the snapshot.
      saved: the leaves of the snapshot.
      taken: the leaves of the step's state. Those of the snapshot that are none of them are further
        arguments of the step.
      committed: whether this process committed the snapshot before.
      started: is called with what the step copied.

    Attributes:
      key: distinguishes compiled steps.
      arguments: of the step, beside its own.
      started: as given.
    """

    def __init__(
        self,
        program: ReplicaProgram,
        saved: Sequence[Any],
        taken: Sequence[Any],
        committed: bool,
        started: Callable[[Replicas], None],
    ):
        places = {id(x): i for i, x in enumerate(taken)}
        self._program = program
        self._places = [places.get(id(x)) for x in saved]
        others = [x for x, i in zip(saved, self._places, strict=True) if i is None]
        self.key = (id(program), tuple(self._places))
        self.arguments = program.flags(committed), others
        self.started = started

    def beside(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, with ``arguments`` as its last one, which also returns the replicas.

        Args:
          step: its last argument is a scalar that is known once the state is copied.
        """

        def call(state: Any, *args: Any) -> tuple[Any, Replicas]:
            *own, (flags, others) = args
            taken, rest = jax.tree.leaves(state), iter(others)
            leaves = [next(rest) if i is None else taken[i] for i in self._places]
            with jax.named_scope("snapshot"):
                replicas = self._program.trace(flags, *(as_data(x) for x in leaves))
                if self._program.on_cpus:
                    state = _after(replicas.committed, state)
            return step(state, *own, replicas.committed), replicas

        return call


def _after(committed: jax.Array, state: Any) -> Any:
    """The state, known to XLA once the copies are sent.

    CPU programs run the collectives of a loop beside others, each device in an order of its own,
    until all threads wait. They drop barriers, so data must depend on what is sent.
    """
    known = committed >= 0  # always
    return jax.tree.map(
        lambda x: x if on_host(x) else jnp.where(known, x, jnp.zeros_like(x)), state
    )
