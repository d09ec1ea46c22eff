"""Functions of a train state and a batch, compiled for the first ones they get."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sharding.placement._layout import Layout
from sharding.placement._on_mesh import no_mesh, with_remedies
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.recovery._replica_program import StepCopies
from sharding.step._checks import check_alive, check_apart, check_compiled, check_replicated


def signature_of(tree: Any) -> Any:
    """What distinguishes compiled functions: structure, shapes and dtypes of the arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


class CompiledStep:
    """A jitted function of (state, batch), compiled for the first state and batch it meets.

    Their placement is known only then. Another structure or other shapes compile again, as in
    ``jax.jit``.

    Args:
      compile_: from a state, a batch, and the copies of a snapshot or None to a jitted function.
      prepare: places a batch.
      select: what the function takes of a state.
      layout: places the other arguments.
      donates: whether the function donates the state.
      snapshot: the store whose snapshots of the state the function copies.
    """

    def __init__(
        self,
        compile_: Callable[[Any, Any, StepCopies | None], Callable[..., Any]],
        prepare: Callable[[Any], Any],
        select: Callable[[Any], Any] = lambda state: state,
        *,
        layout: Layout,
        donates: bool = False,
        snapshot: PeerCheckpoints | None = None,
    ):
        self._compile = compile_
        self._prepare = prepare
        self._select = select
        self._layout = layout
        self._donates = donates
        self._snapshot = snapshot
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, batch: Any, key: Any = None, model_state: Any = None) -> Any:
        """Runs the function."""
        check_compiled()
        selected = self._select(state)
        check_alive(selected, batch=batch, key=key, model_state=model_state)
        with no_mesh(), with_remedies(self._layout):
            batch = self._prepare(batch)
            key, model_state = self._layout.replicate_foreign((key, model_state))
            selected = self._layout.place_scalars(selected)
            copies = self._snapshot.copies(selected) if self._snapshot else None
            signature = signature_of((selected, batch)), copies and copies.key
            if self._donates:
                new = signature not in self._compiled
                others = {"batch": batch, "key": key, "model_state": model_state}
                check_apart(selected, others, buffers=new)
            args = (selected, batch, key, model_state, *([copies.arguments] if copies else []))
            run = self._jitted(signature, selected, batch, copies)
            try:
                result = run(*args)
            except ValueError:
                check_replicated(model_state)
                # The same shapes in another placement: this raises, or compiles for that one.
                run = self._compile(selected, batch, copies)
                result = run(*args)
                self._compiled[signature] = run
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
        selected = self._select(state)
        with no_mesh(), with_remedies(self._layout):
            batch = self._prepare(batch)
            copies = self._snapshot.planned_copies(selected) if self._snapshot else None
            signature = signature_of((selected, batch)), copies and copies.key
            run = self._jitted(signature, selected, batch, copies)
            extra = [copies.arguments] if copies else []
            return run.lower(selected, batch, key, model_state, *extra)

    def _jitted(self, signature: Any, selected: Any, batch: Any, copies: StepCopies | None) -> Any:
        if signature not in self._compiled:
            self._compiled[signature] = self._compile(selected, batch, copies)
        return self._compiled[signature]
