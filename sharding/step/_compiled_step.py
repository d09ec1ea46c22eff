"""A jitted function of a train state and a batch, compiled for the first ones that it gets."""

from typing import Any

import jax
import numpy as np

from sharding.placement._on_mesh import no_mesh, with_remedies
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.recovery._replica_program import StepCopies
from sharding.step._checks import (
    check_alive,
    check_apart,
    check_batch,
    check_compiled,
    check_replicated,
)


class CompiledStep:
    """A jitted function of (state, batch), whose placement is known when it is first called.

    Another structure or other shapes compile again, as in ``jax.jit``. ``TrainStep``, ``EvalStep``
    and ``ValueAndGrad`` define ``compile``, where a step is jitted, and may define ``select`` and
    ``signature``.

    Attributes:
      zero: the mesh and the stage.
      microbatches: by which rows must divide, beside the devices.
      donates: whether the function donates the state.
      snapshot: the store whose snapshots of the state the function copies.
    """

    donates = False
    snapshot: PeerCheckpoints | None = None

    def __init__(self, zero: Any, microbatches: int = 1):
        self.zero, self.microbatches = zero, microbatches
        self._programs: dict[Any, Any] = {}  # by signature: the only cache of compiled steps

    def compile(self, selected: Any, batch: Any, copies: StepCopies | None) -> Any:
        """A jitted function of ``(selected, batch, key, model_state)`` for these placements."""
        raise NotImplementedError

    def select(self, state: Any) -> Any:
        """What the function takes of a state."""
        return state

    def signature(self, selected: Any, batch: Any) -> Any:
        """What distinguishes compiled functions: structure, shapes and dtypes."""
        leaves, treedef = jax.tree.flatten((selected, batch))
        return treedef, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)

    def __call__(self, state: Any, batch: Any, key: Any = None, model_state: Any = None) -> Any:
        """Runs the function."""
        check_compiled()
        selected, layout = self.select(state), self.zero._layout
        check_alive(selected, batch=batch, key=key, model_state=model_state)
        with no_mesh(), with_remedies(layout):
            batch = self._placed(batch)
            key, model_state = layout.replicate_foreign((key, model_state))
            selected = layout.place_scalars(selected)
            copies = self.snapshot.copies(selected) if self.snapshot else None
            signature = self.signature(selected, batch), copies and copies.key
            if self.donates:
                others = {"batch": batch, "key": key, "model_state": model_state}
                check_apart(selected, others, buffers=signature not in self._programs)
            args = (selected, batch, key, model_state, *([copies.arguments] if copies else []))
            run = self._program(signature, selected, batch, copies)
            try:
                result = run(*args)
            except ValueError:
                check_replicated(model_state)
                # The same shapes in another placement: this raises, or compiles for that one.
                run = self.compile(selected, batch, copies)
                result = run(*args)
                self._programs[signature] = run
            if copies is not None:
                result, replicas = result
                copies.started(replicas)
            return result

    def lower(
        self, state: Any, batch: Any, key: Any = None, model_state: Any = None
    ) -> jax.stages.Lowered:
        """Lowers the function for real or abstract arguments, as ``jax.jit(f).lower``.

        With a store of snapshots, the function copies the state.
        """
        selected, layout = self.select(state), self.zero._layout
        with no_mesh(), with_remedies(layout):
            batch = self._placed(batch)
            selected = layout.place_scalars(selected)
            copies = self.snapshot.planned_copies(selected) if self.snapshot else None
            signature = self.signature(selected, batch), copies and copies.key
            run = self._program(signature, selected, batch, copies)
            extra = [copies.arguments] if copies else []
            return run.lower(selected, batch, key, model_state, *extra)

    def _placed(self, batch: Any) -> Any:
        check_batch(batch, self.zero.num_devices, self.microbatches)
        return self.zero._layout.place_batch(batch)

    def _program(self, signature: Any, selected: Any, batch: Any, copies: StepCopies | None) -> Any:
        if signature not in self._programs:
            self._programs[signature] = self.compile(selected, batch, copies)
        return self._programs[signature]


def check_passed(passed: Any, model_state: Any) -> None:
    """Raises unless a call passes a model state exactly if the step takes it from there."""
    if model_state is True and passed is None:
        raise ValueError(
            "the step was made with model_state=True, and the call passes none. Call it as "
            "step(..., model_state=...)."
        )
    if model_state is not True and passed is not None:
        raise ValueError(
            "the call passes a model state, but the step was made with "
            f"model_state={model_state!r}. Make it with model_state=True."
        )
