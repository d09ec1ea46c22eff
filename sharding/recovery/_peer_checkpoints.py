"""Checkpoints in the host memory of this machine and of peers."""

import dataclasses
import json
import operator
import os
import pathlib
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from sharding._types import Tree
from sharding.recovery import _load_state
from sharding.recovery._machines import find_machines, gather_json, is_compile_only
from sharding.recovery._peer_placement import PeerDescription, describe_replicas, place_replicas
from sharding.recovery._replica_program import ReplicaProgram, Replicas, StepCopies
from sharding.recovery._snapshot_writer import SaveCounts, SlotLayout, SnapshotWriter
from sharding.recovery._stored_leaf import as_data, check_on_mesh, data_type, leaf_paths

Leaves = list[tuple[str, Any]]  # paths and arrays


class Restored(NamedTuple):
    """What ``PeerCheckpoints.restore`` returns."""

    step: int  # at which the state was saved
    state: Any  # as the abstract state, placed like it
    extra: Any  # the value given to ``save``


class _Pending(NamedTuple):
    step: int
    leaves: Leaves
    extra: Any


class PeerCheckpoints:
    """Keeps the newest snapshots of a state in the host memory of its own and of peer machines.

    Each machine stores the shards of its devices, once, and those of ``replicas - 1`` peers, in two
    files in memory that are written over in turn. A snapshot is copied and sent by one compiled
    program, or by the next training step (``zero.train_step(snapshot=store)``), and written by a
    thread. Every process calls the constructor and the methods in the same order.

    Args:
      mesh: of the state, with devices of all processes. With a compile-only target's there are
        ``describe`` and ``lower`` of a training step.
      folder: in memory, such as ``/dev/shm``; the run's folder in it is for this user alone.
      run_id: names the run; another run's snapshots are not seen.
      replicas: machines that store each shard, those that hold it anyway included.
      interval: ``save`` stores steps that are multiples of it.
      failure_domain: of this process's machine, such as its rack, the machine by default; replicas
        of a shard are stored in different ones.
      machine: the name of this process's machine; by default its kernel's boot id, which all
        containers on a machine share.

    Raises:
      ValueError: if there are fewer machines or failure domains than replicas, or if they have
        different numbers of devices.
      OSError: in all processes, if in one another store uses the folder of this run, or the folder
        cannot be written, is another user's, is writable for others, or has links in it.

    >>> import tempfile
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    >>> state = {"w": jax.device_put(jax.numpy.arange(16.0), sharding)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = PeerCheckpoints(mesh, folder, run_id="doc", replicas=1)
    ...     saved = store.save(10, state, {"epoch": 2})
    ...     step, restored, extra = store.restore(state)
    ...     store.close(delete=True)
    >>> saved, step, extra, bool((restored["w"] == state["w"]).all())
    (True, 10, {'epoch': 2}, True)

    References:
      Wang et al., GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
      Checkpoints, SOSP 2023.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: str | os.PathLike[str],
        *,
        run_id: str,
        replicas: int = 2,
        interval: int = 1,
        failure_domain: str | None = None,
        machine: str | None = None,
    ):
        if run_id in ("", "..") or pathlib.PurePath(run_id).name != run_id:
            raise ValueError(f"run_id must be the name of a folder, got {run_id!r}.")
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval}.")
        self.mesh = mesh
        self.interval = interval
        self.planned = is_compile_only(mesh)
        found = find_machines(mesh, machine, failure_domain)
        holders = place_replicas(found.domains, replicas, spread=found.domains != found.names)
        self.machines = dataclasses.replace(found, holders=holders)
        self.counts = SaveCounts()
        self.folder = pathlib.Path(folder) / run_id
        self._program: tuple[Any, ReplicaProgram, SlotLayout] | None = None
        self._in_steps = False
        self._last_step = -1
        self._pending: _Pending | None = None
        self._restored: _Pending | None = None  # which a training step may copy again
        self._latest: _load_state.FoundSnapshot | None = None
        self._writer: SnapshotWriter | None = None  # None on compile-only targets, and once closed
        if not self.planned:
            self._open()

    def _open(self) -> None:
        """Locks the folder, and finds what earlier attempts left in it; a collective."""
        me = jax.process_index()
        machine_of = self.machines.of_process
        mates = [p for p, machine in enumerate(machine_of) if machine == machine_of[me]]
        writer, problem = None, None
        try:
            writer = SnapshotWriter(self.folder, mates.index(me), len(mates), self.counts)
        except OSError as error:
            problem = error
        for process, text in enumerate(gather_json(problem and str(problem))):
            if text is not None:
                if writer is not None:
                    writer.close()
                raise OSError(
                    f"PeerCheckpoints cannot use its folder in process {process}: {text}"
                ) from problem
        assert writer is not None
        _, files_of = _load_state.scan(self.folder, self.machines)
        newest = max((attempt for files in files_of for _, attempt, _ in files), default=0)
        # Seconds, so that attempts grow even if all earlier snapshots are gone for now.
        writer.attempt = max(newest + 1, gather_json(int(time.time()))[0])
        self._writer = writer

    # --- Saving ---------------------------------------------------------------------------------

    def save(self, step: int, state: Tree, extra: Any = None) -> bool:
        """Starts a snapshot if the step is a multiple of ``interval``; returns whether it did.

        A collective. The state may be donated at once; with ``zero.train_step(snapshot=...)`` only
        by the next step, which copies it beside its own work. A snapshot before that is still being
        written is waited for; one that could not be written is counted, with a warning, and the
        last complete one stays.

        Args:
          step: after which the state was made; greater than that of the snapshot before.
          state: a tree of arrays on the mesh.
          extra: a value that JSON can hold, the same in all processes: the position in the data.

        Raises:
          ValueError: for a step that is negative, no whole number or not greater than the one
            before, or a state without arrays.
          TypeError: for an ``extra`` or a leaf that cannot be stored, or a leaf off the mesh.
          RuntimeError: in a later call, if after 30 minutes not all processes have called this.
        """
        self._open_writer("save")
        try:
            step = operator.index(step)
        except TypeError:
            raise ValueError(f"step must be a whole number, got {step!r}.") from None
        if step % self.interval:
            return False
        self._leave(step, state, extra)
        if not self._in_steps:
            self._flush()
        return True

    def _leave(self, step: int, state: Tree, extra: Any) -> None:
        """Checks a snapshot, and makes it the pending one."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}.")
        if step <= self._last_step:
            raise ValueError(f"step {step} does not come after step {self._last_step}, saved last.")
        json.dumps(extra)
        leaves = leaf_paths(state)
        if not leaves:
            raise ValueError(f"the state of step {step} has no arrays: got {state!r}.")
        for path, x in leaves:
            check_on_mesh(path, x, self.mesh)
        self._flush()
        self._last_step = step
        self._latest = None
        self._pending = _Pending(step, leaves, extra)
        self._restored = None

    def _flush(self) -> None:
        """Copies a snapshot that no training step has copied."""
        if self._pending is None:
            return
        step, leaves, _ = self._pending
        for path, x in leaves:
            if x.is_deleted():
                self._pending = None
                raise RuntimeError(
                    f"the snapshot of step {step} is lost: {path} was donated before it was "
                    "copied. A store that is an argument of train_step(snapshot=...) leaves "
                    "copying to that step: pass it the state that was saved."
                )
        data = [(path, as_data(x)) for path, x in leaves]
        program, _ = self._program_for(data)
        self._started(program([x for _, x in data], self._committed()))

    def _committed(self) -> bool:
        """Waits for the snapshot before; whether this process committed it."""
        assert self._writer is not None
        return self._writer.wait(saving=self._pending is not None)

    def _started(self, replicas: Replicas) -> None:
        assert self._pending is not None
        assert self._program is not None
        assert self._writer is not None
        (step, _, extra), self._pending = self._pending, None
        self._writer.start(self._program[2], replicas, step, extra)

    def wait_until_finished(self) -> None:
        """Returns once all processes have written their part of the last snapshot; a collective."""
        writer = self._open_writer("wait_until_finished")
        self._flush()
        if all(gather_json(self._committed())):
            writer.complete = writer.newest

    # --- In training steps ----------------------------------------------------------------------

    def copy_in_steps(self) -> None:
        """Leaves copying to training steps, which ask for ``copies``."""
        self._in_steps = True

    def copies(self, state: Tree) -> StepCopies | None:
        """Copies of the saved snapshot for a training step that takes this state, if any."""
        leaves = jax.tree.leaves(state)
        pending, self._restored = self._pending or self._restored, None
        if pending is None:
            return None
        taken = {id(x) for x in leaves}
        if not any(id(x) in taken for _, x in pending.leaves):
            self._flush()  # of another state, which the step does not donate
            return None
        self._pending, saved = pending, pending.leaves
        program, _ = self._program_for([(path, data_type(x)) for path, x in saved])
        return StepCopies(program, [x for _, x in saved], leaves, self._committed(), self._started)

    def planned_copies(self, state: Tree) -> StepCopies:
        """As ``copies``, of a state that may be abstract."""
        leaves = [x for _, x in leaf_paths(state)]
        return StepCopies(self._program_of(state), leaves, leaves, False, lambda replicas: None)

    def _program_of(self, state: Tree) -> ReplicaProgram:
        types = [(path, data_type(x)) for path, x in leaf_paths(state)]
        return ReplicaProgram(self.mesh, self.machines, types)

    def _program_for(self, leaves: Leaves) -> tuple[ReplicaProgram, SlotLayout]:
        """Makes the program for such a state once: it stays the same in a run."""
        types = [(path, x.shape, x.dtype, x.sharding) for path, x in leaves]
        if self._program is None or self._program[0] != types:
            program = ReplicaProgram(self.mesh, self.machines, leaves)
            self._program = types, program, SlotLayout(program)
        return self._program[1:]

    # --- Restoring ------------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """Finds the step of the newest complete snapshot, None if there is none; a collective."""
        try:
            return self.latest().step
        except _load_state.NoCompleteCheckpoint:
            return None

    def latest(self) -> Restored:
        """Finds step and extra value of the newest complete snapshot; a collective.

        Raises:
          NoCompleteCheckpoint: if there is none; the message names shards without a replica.
        """
        self._open_writer("latest")
        snapshot = self._find_latest()
        return Restored(snapshot.id.step, None, snapshot.extra)

    def restore(self, abstract_state: Any) -> Restored:
        """Loads the newest complete snapshot on any mesh, stage and processes; a collective.

        ``abstract_state`` has types with shardings, as ``zero.abstract_state`` returns. Blocks are
        verified against the checksums of their source devices, and sent to machines without them.
        Newer, incomplete snapshots are discarded. A snapshot of the restored state is started, as
        ``save`` does: lost replicas are there again once it is complete.

        Raises:
          NoCompleteCheckpoint: if shards have no replica left.
          ValueError: if the snapshot is of another state.
        """
        writer = self._open_writer("restore")
        snapshot = self._find_latest()
        state, num_bytes = _load_state.load_state(self.mesh, snapshot, abstract_state)
        jax.block_until_ready(state)
        self.counts.sent += num_bytes
        self._last_step = snapshot.id.step
        writer.return_to(snapshot.id)
        gather_json(None)  # no process overwrites what another one still reads
        if snapshot.id.attempt != writer.attempt:
            self._last_step -= 1
            self._leave(snapshot.id.step, state, snapshot.extra)
            restored = self._pending
            self._flush()
            # A training step copies it once more: without copies it would be another program, whose
            # results may differ by rounding from those of a run that was not restored.
            self._restored = restored
        return Restored(snapshot.id.step, state, snapshot.extra)

    def _find_latest(self) -> _load_state.FoundSnapshot:
        self._flush()
        self._committed()
        gather_json(None)  # all have written
        if self._latest is None:
            self._latest = _load_state.find_snapshot(self.folder, self.machines)
        return self._latest

    # --- Describing and closing -----------------------------------------------------------------

    def describe(self, state: Tree = None) -> PeerDescription:
        """Describes who stores whose shards, bytes, and how many lost machines cost no shard.

        ``state`` has arrays or types with shardings; None: that of the last ``save``.

        Raises:
          ValueError: before the first ``save``, without a state.
        """
        if state is not None:
            program = self._program_of(state)
        elif self._program is not None:
            program = self._program[1]
        else:
            raise ValueError("describe needs a state before the first save: describe(state).")
        placed = zip(program.leaves, program.placements, strict=True)
        return describe_replicas(placed, self.machines)

    def close(self, *, delete: bool = False) -> None:
        """Waits for the thread and releases the folder; ``delete`` frees the snapshots' memory."""
        if self._writer is None:
            return
        self._flush()
        self._committed()
        self._writer.close(delete=delete)
        self._writer = None

    def _open_writer(self, method: str) -> SnapshotWriter:
        if self.planned:
            raise ValueError(
                f"{method} needs devices of this machine; the mesh is of a compile-only target, "
                "for which there are describe(state) and "
                "train_step(snapshot=...).lower(state, batch)."
            )
        if self._writer is None:
            raise ValueError(f"{method} was called after close: make another PeerCheckpoints.")
        return self._writer
