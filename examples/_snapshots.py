"""train_lm.py --peer-checkpoints: snapshots in the memory of this machine and of a peer."""

import pathlib
from collections.abc import Callable
from typing import Any

from _report import console
from jax.sharding import Mesh

import sharding as shd


class Snapshots:
    """The snapshots of one run; without a folder, none.

    Args:
      folder: in memory.
      mesh: of the state.
      run_id: names the run.
      interval: steps between snapshots.
      extra: what the form of the saved state depends on; a snapshot of another form, such as that
        of other pipeline stages, is not restored.

    Attributes:
      store: for ``zero.train_step(snapshot=...)``; None on CPUs, where nothing runs beside a step.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        mesh: Mesh,
        run_id: str,
        interval: int,
        extra: dict[str, Any],
    ):
        self._store = _open(folder, mesh, run_id, interval) if folder else None
        self._extra = extra
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.store = None if on_cpu else self._store

    def restore(
        self, disk: int | None, target: Callable[[int], Any]
    ) -> tuple[int, Any, int] | None:
        """The newest snapshot: step, state, devices; None, which is reported, to take that on disk.

        Args:
          disk: the step of the newest checkpoint on disk, None if there is none.
          target: the abstract state for a number of devices that synchronized gradients.

        Raises:
          OSError: if the only snapshot is of another form.
        """
        if self._store is None:
            return None
        try:
            found = self._store.latest()
        except shd.NoCompleteCheckpoint as error:
            console.print(f"Peer checkpoints: {error}", soft_wrap=True)
            return None
        if disk is not None and disk > found.step:
            console.print(f"Peer checkpoints: step {found.step} in memory is older than on disk.")
            return None
        if found.extra["form"] != self._extra["form"]:
            reason = (
                f"step {found.step} in memory is that of {found.extra['form']}; this run has "
                f"{self._extra['form']}."
            )
            if disk is None:
                raise OSError(f"{reason} Resume as it was, or give another --name.")
            console.print(f"Peer checkpoints: {reason}", soft_wrap=True)
            return None
        devices = found.extra["devices"]
        step, state, _ = self._store.restore(target(devices))
        console.print(f"Resuming from the memory of machines at step {step}.")
        return step, state, devices

    def save(self, step: int, state: Any) -> None:
        """Starts a snapshot if it is due; the first one says what it takes."""
        if self._store is None:
            return
        if not self._store.counts.saved:
            console.print(f"Peer checkpoints: {self._store.describe(state)}", soft_wrap=True)
        self._store.save(step, state, self._extra)

    def close(self, *, finished: bool) -> None:
        """Ends saving; of a finished run the snapshots are deleted."""
        if self._store is not None:
            self._store.close(delete=finished)


def _open(folder: pathlib.Path, mesh: Mesh, run_id: str, interval: int) -> shd.PeerCheckpoints:
    """A store with two replicas, or with one where there is one machine."""
    try:
        return shd.PeerCheckpoints(mesh, folder, run_id=run_id, interval=interval)
    except ValueError as error:
        store = shd.PeerCheckpoints(mesh, folder, run_id=run_id, interval=interval, replicas=1)
        console.print(f"Peer checkpoints: {error}", soft_wrap=True)
        return store
