"""Checkpoints in the host memory of this machine and of peers."""

import contextlib
import dataclasses
import fcntl
import json
import operator
import os
import pathlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from sharding.recovery._find_snapshot import (
    FoundSnapshot,
    NoCompleteCheckpoint,
    find_snapshot,
    scan,
)
from sharding.recovery._gather import gather_json
from sharding.recovery._load_state import load_state
from sharding.recovery._machines import find_machines, is_compile_only, planned_machines
from sharding.recovery._peer_description import PeerDescription, describe_replicas
from sharding.recovery._peer_placement import place_replicas
from sharding.recovery._replica_program import (
    ReplicaProgram,
    Replicas,
    as_data,
    check_on_mesh,
    data_type,
    leaf_paths,
)
from sharding.recovery._slot import Slot, SlotTable, SnapshotId, make_private, open_own
from sharding.recovery._slot_plan import SlotPlan
from sharding.recovery._step_copies import StepCopies

_SLOW_SECONDS = 0.2  # a shorter wait is not reported
_GIVE_UP_SECONDS = 1800  # until processes that do not save count as lost
_POLL_SECONDS = 0.005
_LOCKED: set[pathlib.Path] = set()  # by stores of this process


class Restored(NamedTuple):
    """What ``PeerCheckpoints.restore`` returns.

    Attributes:
      step: at which the state was saved.
      state: as the abstract state, placed like it.
      extra: the value given to ``save``.
    """

    step: int
    state: Any
    extra: Any


@dataclasses.dataclass
class SaveCounts:
    """What saving took in this process so far.

    Attributes:
      saved: snapshots that were written.
      failed: snapshots that were not, each with a warning.
      waited: seconds for which ``save`` waited until the snapshot before was written.
      slow: snapshots that another one waited for longer than training took.
      written: bytes.
      sent: bytes that other machines sent to this process.
    """

    saved: int = 0
    failed: int = 0
    waited: float = 0.0
    slow: int = 0
    written: int = 0
    sent: int = 0


class _Pending(NamedTuple):
    """A snapshot that is not copied yet.

    Attributes:
      step: of training.
      leaves: paths and arrays.
      extra: the user's value.
    """

    step: int
    leaves: list[tuple[str, Any]]
    extra: Any


class PeerCheckpoints:
    """Keeps the newest snapshots of a state in the host memory of its own and of peer machines.

    Each machine stores the shards of its devices, once, and those of ``replicas - 1`` peers, in two
    files in memory that are written over in turn. A snapshot is copied and sent by one compiled
    program, or by the next training step (``zero.train_step(snapshot=store)``), and written by a
    thread. The program also counts who has committed the snapshot before, so that no one overwrites
    the last complete one.

    Every process calls the constructor and the methods in the same order.

    Args:
      mesh: of the state, with devices of all processes. On a mesh of a compile-only target,
        ``describe`` and ``lower`` of a training step show what snapshots cost there.
      folder: in memory, such as ``/dev/shm``: it survives a killed process and no lost machine. The
        run's folder in it is made for this user alone.
      run_id: names the run; another run's snapshots are not seen.
      replicas: machines that store each shard. What several failure domains hold on their devices
        anyway is not sent.
      interval: ``save`` stores steps that are multiples of it.
      placement: ``"group"``, in which machines store each other's shards, or ``"ring"``.
      failure_domain: of this process's machine, such as its rack; replicas of a shard are stored in
        different ones. Each machine is one of its own by default.
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
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = PeerCheckpoints(mesh, folder.name, run_id="doc", replicas=1)
    >>> store.save(10, state, {"epoch": 2})
    True
    >>> step, restored, extra = store.restore(state)
    >>> step, extra, bool((restored["w"] == state["w"]).all())
    (10, {'epoch': 2}, True)
    >>> store.close(delete=True)
    >>> folder.cleanup()

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
        placement: str = "group",
        failure_domain: str | None = None,
        machine: str | None = None,
    ):
        if run_id in ("", "..") or pathlib.PurePath(run_id).name != run_id:
            raise ValueError(f"run_id must be the name of a folder, got {run_id!r}.")
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval}.")
        self.mesh, self.interval = mesh, interval
        self.planned = is_compile_only(mesh)
        if self.planned:
            self.machines = planned_machines(mesh)
        else:
            self.machines = find_machines(mesh, machine, failure_domain)
        spread = self.machines.domains != self.machines.names
        self.holders = place_replicas(self.machines.domains, replicas, placement, spread=spread)
        self.counts = SaveCounts()
        self.folder = pathlib.Path(folder) / run_id
        self._program: tuple[Any, ReplicaProgram, SlotPlan] | None = None
        self._in_steps = False
        self._pending: _Pending | None = None
        self._restored: _Pending | None = None  # which a training step may copy again
        if not self.planned:
            self._open()

    def _open(self) -> None:
        """Locks the folder, and finds what earlier attempts left in it; a collective."""
        me = jax.process_index()
        mates = [p for p, m in enumerate(self.machines.of_process) if m == self._machine]
        self._rank, self._num_mates = mates.index(me), len(mates)
        self._lock: int | None = None
        problem: OSError | None = None
        try:
            make_private(self.folder)
            self._lock, self._unlock = _lock(self, self.folder / f"{self._rank}.lock")
            self._note_step(-1)
        except OSError as error:
            problem = error
        for process, text in enumerate(gather_json(problem and str(problem))):
            if text is not None:
                if self._lock is not None:
                    self._unlock()
                raise OSError(
                    f"PeerCheckpoints cannot use its folder in process {process}: {text}"
                ) from problem
        self._slots = [Slot(self.folder / f"{self._rank}-{i}.slot") for i in range(2)]
        _, seen = scan(self.folder, self.machines)
        newest = max((attempt for files in seen for _, attempt, _ in files), default=0)
        # Seconds, so that attempts grow even if all earlier snapshots are gone for now.
        self._attempt = max(newest + 1, gather_json(int(time.time()))[0])
        self._complete: SnapshotId | None = None  # of all processes, as far as known here
        self._newest: SnapshotId | None = None  # committed by this process
        self._found: FoundSnapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._last_step = -1
        self._started_at = self._copied_at = 0.0  # when a snapshot was dispatched, and was copied
        self._written: SnapshotId | None = None  # the last one that this process began to write

    @property
    def _machine(self) -> int:
        return self.machines.of_process[jax.process_index()]

    # --- Saving ---------------------------------------------------------------------------------

    def save(self, step: int, state: Any, extra: Any = None) -> bool:
        """Starts a snapshot and returns while it is under way; a collective.

        The state may be donated at once. If the snapshot before is still being written, this waits
        for it. If it could not be written, a warning is issued, it is counted, and the last
        complete snapshot stays.

        With ``zero.train_step(snapshot=...)`` the next step copies the state beside its own work;
        until then only that step may donate it.

        Args:
          step: after which the state was made; greater than that of the snapshot before.
          state: a tree of arrays on the mesh.
          extra: a value that JSON can hold, the same in all processes: the position in the data,
            counters.

        Returns:
          Whether a snapshot was started: False for a step that is no multiple of ``interval``.

        Raises:
          ValueError: if the step is negative, no whole number or not greater than that of the
            snapshot before, or if the state has no arrays.
          TypeError: if JSON cannot hold ``extra``, or if a leaf is not an array on the mesh or has
            a dtype that cannot be stored.
          RuntimeError: in a later call, if after 30 minutes not all processes have called this.
        """
        self._check_real("save")
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

    def _leave(self, step: int, state: Any, extra: Any) -> None:
        """Makes a snapshot the pending one."""
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
        self._last_step, self._found = step, None
        self._pending, self._restored = _Pending(step, leaves, extra), None

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
        """Whether this process committed the snapshot before, which it waits for."""
        self._join()
        return self._newest is not None and self._newest == self._written

    def _started(self, replicas: Replicas) -> None:
        """Writes the pending snapshot, whose copies are under way."""
        assert self._pending is not None
        assert self._program is not None
        (step, _, extra), plan = self._pending, self._program[2]
        self._pending = None
        self._note_step(step)
        self._written = SnapshotId(self._attempt, step)
        self._started_at = time.perf_counter()
        self._thread = threading.Thread(
            target=self._write, args=(plan, replicas, self._written, extra), name="peer-checkpoints"
        )
        self._thread.start()

    def wait_until_finished(self) -> None:
        """Returns once all processes have written their part of the last snapshot; a collective."""
        self._check_real("wait_until_finished")
        self._flush()
        if all(gather_json(self._committed())):
            self._complete = self._newest

    # --- In training steps ----------------------------------------------------------------------

    def copy_in_steps(self) -> None:
        """Leaves copying to training steps, which ask for ``copies``."""
        self._in_steps = True

    def copies(self, state: Any) -> StepCopies | None:
        """What a training step of this state copies: the snapshot of it that was saved, if any."""
        leaves = jax.tree.leaves(state)
        pending, self._restored = self._pending or self._restored, None
        if pending is None:
            return None
        known = {id(x) for x in leaves}
        if not any(id(x) in known for _, x in pending.leaves):
            self._flush()  # of another state, which the step does not donate
            return None
        self._pending, saved = pending, pending.leaves
        program, _ = self._program_for([(path, data_type(x)) for path, x in saved])
        return StepCopies(program, [x for _, x in saved], leaves, self._committed(), self._started)

    def planned_copies(self, state: Any) -> StepCopies:
        """What a training step copies of a state, which may be abstract."""
        saved = leaf_paths(state)
        types = [(path, data_type(x)) for path, x in saved]
        program = ReplicaProgram(self.mesh, self.machines, self.holders, types)
        leaves = [x for _, x in saved]
        return StepCopies(program, leaves, leaves, False, lambda replicas: None)

    def _program_for(self, leaves: list[tuple[str, jax.Array]]) -> tuple[ReplicaProgram, SlotPlan]:
        """The program for such a state, which stays the same in a run."""
        types = [(path, x.shape, x.dtype, x.sharding) for path, x in leaves]
        if self._program is None or self._program[0] != types:
            program = ReplicaProgram(self.mesh, self.machines, self.holders, leaves)
            self._program = types, program, SlotPlan(program)
        return self._program[1:]

    def _write(self, plan: SlotPlan, replicas: Replicas, number: SnapshotId, extra: Any) -> None:
        """Writes a snapshot; in a thread."""
        try:
            # Waits for the program. If all had committed the snapshot before, it is complete, and
            # the slot with the one before it is free; else that one may be the last complete one.
            on_devices = int(self._awaited(number.step, replicas.committed.addressable_data(0)))
            self._copied_at = time.perf_counter()
            if on_devices == self.mesh.size:
                self._complete = self._newest
                self._remove_stale()
            slot = min(self._slots, key=lambda s: (s.snapshot == self._complete, s.snapshot or ()))
            slot.clear()
            data = slot.reserve(plan.num_bytes + plan.table_bytes(extra))
            blocks = plan.fill(data, replicas)
            slot.commit(SlotTable(number, plan.leaves, blocks, extra), plan.num_bytes)
            self._newest = number
            self.counts.saved += 1
            self.counts.written += plan.num_bytes
            self.counts.sent += plan.received_bytes
        except Exception as error:  # reported by the next call in the main thread
            self._error = error

    def _note_step(self, step: int) -> None:
        """Shows the other processes of this machine which step this one saves."""
        assert self._lock is not None
        os.pwrite(self._lock, f"{jax.process_index():10} {step:20}".encode(), 0)

    def _awaited(self, step: int, token: Any) -> Any:
        """The token, once all processes have run the program; in a thread."""
        end = time.monotonic() + _GIVE_UP_SECONDS
        while not token.is_ready():
            if time.monotonic() > end:
                raise self._alone(step)
            time.sleep(_POLL_SECONDS)
        return token

    def _alone(self, step: int) -> RuntimeError:
        behind = []
        for rank in range(self._num_mates):
            with contextlib.suppress(OSError, ValueError):
                process, last = (self.folder / f"{rank}.lock").read_text().split()
                behind += [process] if int(last) < step else []
        text = (
            f"process {jax.process_index()} called save({step}), and for {_GIVE_UP_SECONDS:g} s "
            "other processes have not, or have not finished the step before. Of this machine "
            f"{'process ' + ', '.join(behind) if behind else 'no process'} is behind. All "
            "processes must call save with the same steps."
        )
        self._copied_at = time.perf_counter()
        warnings.warn(text, stacklevel=2)  # the main thread may wait for the devices forever
        return RuntimeError(text)

    def _remove_stale(self) -> None:
        """Once a snapshot of this attempt is complete, deletes slots of processes that are gone."""
        if self._rank or self._complete is None or self._complete.attempt != self._attempt:
            return
        for path in self.folder.glob("*-*.slot"):
            if int(path.name.partition("-")[0]) >= self._num_mates:
                path.unlink(missing_ok=True)

    def _join(self) -> None:
        """Waits for the thread, and reports its error."""
        if self._thread is None:
            return
        start = time.perf_counter()
        self._thread.join()
        self._thread = None
        self._count_waiting(start, time.perf_counter())
        error, self._error = self._error, None
        if isinstance(error, OSError | MemoryError):
            self.counts.failed += 1
            kept = "none" if self._complete is None else f"that of step {self._complete.step}"
            warnings.warn(
                f"the snapshot of step {self._written and self._written.step} was not written to "
                f"{self.folder}: "
                f"{error}. The last complete one that is known here is {kept}.",
                stacklevel=3,
            )
        elif error is not None:
            raise error

    def _count_waiting(self, start: float, end: float) -> None:
        """Counts how long writing, not the device, was waited for; warns once if that is long."""
        waited = max(0.0, end - max(start, self._copied_at))
        self.counts.waited += waited
        if self._pending is None or waited < max(_SLOW_SECONDS, (end - self._started_at) / 2):
            return
        self.counts.slow += 1
        if self.counts.slow == 1:
            warnings.warn(
                f"save waited {waited:.1f} s until the snapshot before was written to "
                f"{self.folder}, longer than training took. A larger interval saves time. "
                "This is reported once, and counted in counts.slow.",
                stacklevel=4,
            )

    # --- Restoring ------------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """The step of the newest complete snapshot, None if there is none; a collective."""
        try:
            return self.latest().step
        except NoCompleteCheckpoint:
            return None

    def latest(self) -> Restored:
        """Step and extra value of the newest complete snapshot, without its state; a collective.

        Raises:
          NoCompleteCheckpoint: if there is none; the message names shards without a replica.
        """
        self._check_real("latest")
        found = self._find()
        return Restored(found.id.step, None, found.extra)

    def restore(self, abstract_state: Any) -> Restored:
        """The newest complete snapshot, on any mesh, stage and number of processes; a collective.

        Blocks are verified against the checksums that their source device computed. Those that a
        machine does not have are sent by one that does. Newer snapshots, which are incomplete, are
        discarded. What lost machines stored has replicas again once a snapshot of the restored
        state, which this starts as ``save`` does, is complete.

        Args:
          abstract_state: types with shardings, such as ``zero.abstract_state(...)``, or a state.

        Raises:
          NoCompleteCheckpoint: if shards have no replica left.
          ValueError: if the snapshot is of another state.
        """
        self._check_real("restore")
        found = self._find()
        state, num_bytes = load_state(self.mesh, found, abstract_state)
        jax.block_until_ready(state)
        self.counts.sent += num_bytes
        self._complete, self._last_step = found.id, found.id.step
        self._newest = self._written = None  # may be of a newer snapshot, which is discarded
        if found.id.attempt != self._attempt:
            self._last_step = found.id.step - 1
        own = {slot.path: slot for slot in self._slots}
        for path in self.folder.glob("*.slot"):
            slot = own.get(path) or Slot(path)
            if slot.snapshot is not None and slot.snapshot > found.id:
                slot.clear()
        gather_json(None)  # no process overwrites what another one still reads
        if found.id.attempt != self._attempt:
            self._leave(found.id.step, state, found.extra)
            restored = self._pending
            self._flush()
            # A training step copies it once more: without copies it would be another program, whose
            # results may differ by rounding from those of a run that was not restored.
            self._restored = restored
        return Restored(found.id.step, state, found.extra)

    def _find(self) -> FoundSnapshot:
        self._flush()
        self._join()
        gather_json(None)  # all have written
        if self._found is None:
            self._found = find_snapshot(self.folder, self.machines)
        return self._found

    # --- The rest -------------------------------------------------------------------------------

    def describe(self, state: Any = None) -> PeerDescription:
        """Who stores whose shards, bytes, and the probability of recovery.

        Args:
          state: arrays or types with shardings; that of the last ``save`` if None.

        Raises:
          ValueError: before the first ``save``, without a state.
        """
        if state is not None:
            leaves = [(path, data_type(x)) for path, x in leaf_paths(state)]
            program = ReplicaProgram(self.mesh, self.machines, self.holders, leaves)
        elif self._program is not None:
            program = self._program[1]
        else:
            raise ValueError("describe needs a state before the first save: describe(state).")
        return describe_replicas(program, self.machines, self.holders)

    def close(self, *, delete: bool = False) -> None:
        """Waits for the thread and releases the folder.

        Args:
          delete: whether this machine's snapshots are deleted, and their memory freed.
        """
        if self.planned or self._lock is None:
            return
        self._flush()
        self._join()
        if delete:
            for slot in self._slots:
                slot.path.unlink(missing_ok=True)
        self._unlock()
        self._lock = None

    def _check_real(self, what: str) -> None:
        if self.planned:
            raise ValueError(
                f"{what} needs devices of this machine; the mesh is of a compile-only target, for "
                "which there are describe(state) and train_step(snapshot=...).lower(state, batch)."
            )
        if self._lock is None:
            raise ValueError(f"{what} was called after close: make another PeerCheckpoints.")


def _lock(store: PeerCheckpoints, path: pathlib.Path) -> tuple[int, Callable[[], Any]]:
    """A lock on a file and what releases it: a call, the end of the store or of the process."""
    path = path.parent.resolve() / path.name
    if path in _LOCKED:
        raise OSError(
            f"an earlier PeerCheckpoints of this process uses {path.parent}: call its close() "
            "before you make another one."
        )
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise OSError(
            f"another process uses {path.parent}: machines, and runs of the same run_id, need "
            "folders of their own."
        ) from error
    _LOCKED.add(path)
    return file, weakref.finalize(store, _release, file, path)


def _release(file: int, path: pathlib.Path) -> None:
    os.close(file)
    _LOCKED.discard(path)
