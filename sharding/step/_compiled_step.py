"""Functions of a train state and a batch, compiled for the first ones they get."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sharding.placement._on_mesh import no_mesh
from sharding.step._checks import check_alive, check_apart, check_compiled


def signature_of(tree: Any) -> Any:
    """What distinguishes compiled functions: structure, shapes and dtypes of the arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


class CompiledStep:
    """A jitted function of (state, batch), compiled for the first state and batch it meets.

    Their placement is known only then. Another structure or other shapes compile again, as in
    ``jax.jit``.
    """

    def __init__(
        self,
        compile_: Callable[[Any, Any], Callable[..., Any]],
        prepare: Callable[[Any], Any],
        select: Callable[[Any], Any] = lambda state: state,
        *,
        replicate_foreign: Callable[[Any], Any] = lambda args: args,
        donates: bool = False,
    ):
        self._compile = compile_
        self._prepare = prepare
        self._select = select
        self._replicate_foreign = replicate_foreign
        self._donates = donates
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, batch: Any, key: Any = None, model_state: Any = None) -> Any:
        """Runs the function."""
        check_compiled()
        selected = self._select(state)
        check_alive(selected, batch=batch, key=key, model_state=model_state)
        with no_mesh():
            batch = self._prepare(batch)
            key, model_state = self._replicate_foreign((key, model_state))
            signature = signature_of((selected, batch))
            if self._donates:
                new = signature not in self._compiled
                others = {"batch": batch, "key": key, "model_state": model_state}
                check_apart(selected, others, buffers=new)
            run = self._jitted(signature, selected, batch)
            try:
                return run(selected, batch, key, model_state)
            except ValueError:
                # The same shapes in another placement: this raises, or compiles for that one.
                run = self._compile(selected, batch)
                result = run(selected, batch, key, model_state)
                self._compiled[signature] = run
                return result

    def lower(
        self, state: Any, batch: Any, key: Any = None, model_state: Any = None
    ) -> jax.stages.Lowered:
        """Lowers the function for real or abstract arguments, as ``jax.jit(f).lower``."""
        selected = self._select(state)
        with no_mesh():
            batch = self._prepare(batch)
            run = self._jitted(signature_of((selected, batch)), selected, batch)
            return run.lower(selected, batch, key, model_state)

    def _jitted(self, signature: Any, selected: Any, batch: Any) -> Any:
        if signature not in self._compiled:
            self._compiled[signature] = self._compile(selected, batch)
        return self._compiled[signature]
