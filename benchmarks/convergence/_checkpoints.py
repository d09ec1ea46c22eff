"""What an interrupted run goes on from: its state, by orbax, and what was measured so far."""

import pathlib
import shutil
from typing import Any

import jax


class Checkpoints:
    """The last checkpoint of one run.

    Args:
      folder: of this run alone.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder.absolute()

    def restore(self, state: Any, log: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What was saved last; ``state`` and ``log``, as they begin, if nothing was."""
        if not self._folder.exists():
            return state, log
        import orbax.checkpoint as ocp

        with self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                return state, log
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            saved = manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(target), log=ocp.args.JsonRestore()
                ),
            )
        return saved["state"], saved["log"]

    def save(self, step: int, state: Any, log: dict[str, Any]) -> None:
        """Writes and waits; what was saved before goes only then."""
        import orbax.checkpoint as ocp

        with self._manager() as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), log=ocp.args.JsonSave(log)
                ),
            )

    def delete(self) -> None:
        """Of a run that is finished."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        return ocp.CheckpointManager(
            self._folder, options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )
