"""A jitted function of a train state and a batch, compiled for the first ones that it gets."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from sharding._types import Batch, Tree
from sharding.placement._on_mesh import no_mesh, step_context, with_remedies
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.recovery._replica_program import StepCopies
from sharding.step import _checks
from sharding.step._choose_program import LossProgram
from sharding.step._loss import Inputs
from sharding.step._step_plan import StepSpec


class KnownState(NamedTuple):
    """What a call compares with the state of the call before it, array by array."""

    treedef: Any
    kinds: set[type]
    types: tuple[list[Any], list[Any]]  # and shardings
    signature: Any


class StepProgram(NamedTuple):
    """A jitted function."""

    run: Any
    required: Tree  # the shardings of what it takes of a state; None for any
    chosen: LossProgram
    spec: StepSpec  # whose layout says how the loss runs


class CompiledStep:
    """A jitted function of (state, batch), whose placement is known when it is first called.

    Another structure or other shapes compile again, as in ``jax.jit``. ``TrainStep``, ``EvalStep``
    and ``ValueAndGrad`` define ``compile``, where a step is jitted, and may define ``select`` and
    ``signature``. Rows must divide by ``microbatches`` times the devices.
    """

    donates = False  # the state
    snapshot: PeerCheckpoints | None = None  # the store whose snapshots the function copies

    def __init__(self, zero: Any, microbatches: int = 1):
        self.zero, self.microbatches = zero, microbatches
        # By signature: the only cache of compiled steps.
        self._programs: dict[Any, StepProgram] = {}
        self._known: KnownState | None = None

    def compile(self, selected: Tree, inputs: Inputs, copies: StepCopies | None) -> StepProgram:
        """The program for these placements, of ``(selected, batch, key, model_state)``."""
        raise NotImplementedError

    def spec_of(self, chosen: LossProgram, *fields: Any, **options: Any) -> StepSpec:
        """Of a loss that runs as chosen."""
        layout = dataclasses.replace(self.zero._layout, per_device=chosen.per_device)
        options |= {"sync": self.zero.sync, "pieces": []}
        return StepSpec(layout, self.zero.precision, *fields, **options)

    def select(self, state: Tree) -> Any:
        """What the function takes of a state."""
        return state

    def signature(self, selected: Tree) -> Any:
        """What distinguishes compiled functions: structure, shapes and dtypes of a state."""
        return _types_of(selected)

    def __call__(self, state: Tree, batch: Batch, key: Any = None, model_state: Tree = None) -> Any:
        """Runs the function."""
        _checks.check_compiled()
        selected, layout = self.select(state), self.zero._layout
        others = {"batch": batch, "key": key, "model_state": model_state}
        # The state that a step returned has passed every check of a state; jit itself walks it too.
        signature = self._signature_if_known(selected, others)
        known = signature is not None
        _checks.check_alive(None if known else selected, **others)
        with no_mesh(), with_remedies(layout):
            batch = self._placed(batch)
            key, model_state = layout.replicate_foreign(key), layout.replicate_new(model_state)
            if not known:
                selected = layout.place_scalars(selected)
                signature = self.signature(selected)
            copies = self.snapshot.copies(selected) if self.snapshot else None
            which = signature, _types_of((batch, model_state)), copies and copies.key
            if self.donates and not (known and which in self._programs):
                others = {"batch": batch, "key": key, "model_state": model_state}
                _checks.check_apart(selected, others, buffers=which not in self._programs)
            inputs = Inputs(batch, key, model_state)
            found = self._programs.get(which)
            if not known and found and not _checks.has_placement(selected, found.required):
                # The same shapes in another placement: this raises, or compiles for that one.
                self._programs[which] = self.compile(selected, inputs, copies)
            program = self._program(which, selected, inputs, copies)
            if not known:
                self._remember(selected, signature)
        args = (selected, *inputs, *([copies.arguments] if copies else []))
        with step_context(program.spec.layout), with_remedies(program.spec.layout):
            try:
                result = program.run(*args)
            except ValueError:
                _checks.check_replicated(model_state)
                raise
            if copies is not None:
                result, replicas = result
                copies.started(replicas)
            return result

    def _signature_if_known(self, selected: Tree, others: Any) -> Any:
        """The signature of a state like that of the call before, of arrays that are all usable."""
        known, (leaves, treedef) = self._known, jax.tree.flatten(selected)
        if known is None or known.treedef != treedef:
            return None
        # Lists compare equal at once where their items are the same objects, as jit returns them.
        if not known.kinds.issuperset(map(type, leaves)) or _placed_types(leaves) != known.types:
            return None
        arrays = [*leaves, *jax.tree.leaves(others)] if self.donates else leaves
        apart = len(set(map(id, arrays))) == len(arrays)
        return known.signature if apart and not any(x.is_deleted() for x in leaves) else None

    def _remember(self, selected: Tree, signature: Any) -> None:
        leaves, treedef = jax.tree.flatten(selected)
        real = all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves)
        kinds = set(map(type, leaves))
        self._known = KnownState(treedef, kinds, _placed_types(leaves), signature) if real else None

    def lower(
        self, state: Tree, batch: Batch, key: Any = None, model_state: Tree = None
    ) -> jax.stages.Lowered:
        """Lowers the function for real or abstract arguments, as ``jax.jit(f).lower``.

        With a store of snapshots, the function copies the state.
        """
        program, args = self._planned(state, Inputs(batch, key, model_state))
        with step_context(program.spec.layout), with_remedies(program.spec.layout):
            lowered: jax.stages.Lowered = program.run.lower(*args)
            return lowered

    def loss_program(
        self, state: Tree, batch: Batch, key: Any = None, model_state: Tree = None
    ) -> LossProgram:
        """How the loss runs for real or abstract arguments: per device or partitioned, and why.

        Of a partitioned one its ``pieces``, which keep rows apart, run per device.
        """
        program, args = self._planned(state, Inputs(batch, key, model_state))
        if not program.spec.pieces:
            with step_context(program.spec.layout), with_remedies(program.spec.layout):
                program.run.eval_shape(*args)
        return program.chosen._replace(pieces=tuple(program.spec.pieces))

    def _planned(self, state: Tree, inputs: Inputs) -> tuple[StepProgram, tuple[Any, ...]]:
        """The program for real or abstract arguments, and its own."""
        selected, layout = self.select(state), self.zero._layout
        with no_mesh(), with_remedies(layout):
            selected = layout.place_scalars(selected)
            model_state = layout.replicate_new(inputs.model_state)
            inputs = Inputs(self._placed(inputs.batch), inputs.key, model_state)
            copies = self.snapshot.planned_copies(selected) if self.snapshot else None
            given = _types_of((inputs.batch, model_state))
            key = self.signature(selected), given, copies and copies.key
            program = self._program(key, selected, inputs, copies)
        return program, (selected, *inputs, *([copies.arguments] if copies else []))

    def _placed(self, batch: Batch) -> Any:
        _checks.check_batch(batch, self.zero.num_devices, self.microbatches)
        return self.zero._layout.place_batch(batch)

    def _program(
        self, key: Any, selected: Tree, inputs: Inputs, copies: StepCopies | None
    ) -> StepProgram:
        if key not in self._programs:
            self._programs[key] = self.compile(selected, inputs, copies)
        return self._programs[key]


def _placed_types(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    return [x.aval for x in leaves], [x.sharding for x in leaves]


def _types_of(tree: Tree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def check_passed(passed: Tree, model_state: Any) -> None:
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
