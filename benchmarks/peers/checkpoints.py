"""What survives lost machines: `PeerCheckpoints` beside orbax's P2P checkpoints, with kills.

4 processes of 2 CPU devices each (gloo) stand for machines, each with a folder in memory. They save
three steps; one is killed while the fourth is written. New processes restore what is left with all
folders, without that of one machine, and without those of each pair. orbax saves what a machine's
devices hold, and restores a lost machine from another replica of the state; so it is tried with
two replicas, and with none. Bytes sent are those of the network interface, in a namespace of their
own, which needs Linux and root.

  python benchmarks/peers/checkpoints.py          # writes results/peers_checkpoints.md
  python benchmarks/peers/checkpoints.py --smoke  # two processes and a small state, prints only
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _measured
import _network
import _results
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import args as orbax_args
from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager, options

import sharding as shd

MIB = 2**20
DEVICES, SAVED, SECONDS = 2, 3, 600
# By name: whether it is ours, and replicas of the state on the mesh.
WAYS = {
    "`PeerCheckpoints`, sharded over all": (True, 1),
    "orbax P2P, sharded over all": (False, 1),
    "orbax P2P, two replicas of the state": (False, 2),
}
HEADER = """
| checkpoints | state of a machine, MiB | its files | sent to save | s in `save` | s until saved \
| restored after the kill, step | s | without one machine | s | sent, MiB | pairs survived |
|---|---|---|---|---|---|---|---|---|---|---|---|
""".strip()


@dataclasses.dataclass
class Job:
    """What the processes of a way do: save, or restore from folders, one after the other."""

    name: str
    processes: int
    arrays: int
    folder: str
    logs: str
    restored: tuple[str, ...] = ()
    coordinator: str = ""


class Ours:
    """`PeerCheckpoints` of a machine."""

    def __init__(self, folder: pathlib.Path, state: Any):
        mesh = jax.tree.leaves(state)[0].sharding.mesh
        self.store = shd.PeerCheckpoints(mesh, folder, run_id="run", machine=folder.name)
        self.save = lambda step, state: self.store.save(step, state)
        self.wait, self.close = self.store.wait_until_finished, self.store.close

    def restore(self, types: Any) -> tuple[int, Any]:
        """The newest step and its state."""
        restored = self.store.restore(types)
        return restored.step, restored.state


class Orbax:
    """The same of orbax, without persistent storage."""

    def __init__(self, folder: pathlib.Path, state: Any):
        mesh = jax.tree.leaves(state)[0].sharding.mesh
        local = options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2)
        folder.mkdir(parents=True, exist_ok=True)
        self.manager = checkpoint_manager.CheckpointManager(
            mesh, state, folder, options=options.CheckpointManagerOptions(local=local)
        )
        self.of_save = lambda state: p2p_args.Composite(state=orbax_args.PyTreeSave(state))
        self.of_restore = lambda types: p2p_args.Composite(state=orbax_args.PyTreeRestore(types))
        self.wait, self.close = self.manager.wait_until_finished, self.manager.close

    def save(self, step: int, state: Any) -> None:
        """Starts to write what this machine's devices hold."""
        self.manager.save(step, self.of_save(state))

    def restore(self, types: Any) -> tuple[int, Any]:
        """The newest step that machines have together, and its state."""
        step = self.manager.latest_step()
        if step is None:
            raise FileNotFoundError("No step is complete.")
        return step, self.manager.restore(step, self.of_restore(types)).state


# --- One of the processes -------------------------------------------------------------------------


def types_of(job: Job) -> Any:
    """Arrays of 4 MiB, on a mesh of replicas and shards."""
    replicas = WAYS[job.name][1]
    sizes = (replicas, job.processes * DEVICES // replicas)
    mesh = jax.make_mesh(sizes, ("replica", "data"))
    place = NamedSharding(mesh, PartitionSpec("data"))
    one = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place)
    return {f"array_{i}": one for i in range(job.arrays)}


def state_at(step: int, types: Any) -> Any:
    """Other numbers in each step, row and column."""

    def make(name: str, t: Any) -> Any:
        rows = np.arange(t.shape[0], dtype=np.float32)[:, None]
        full = rows + np.arange(t.shape[1], dtype=np.float32)[None] / 1024 + step * 2048
        return jax.make_array_from_callback(t.shape, t.sharding, lambda index: full[index])

    return {name: make(name, t) for name, t in types.items()}


def work(rank: int, job: Job) -> None:
    """Saves and is killed, or restores; writes what was found as soon as it is."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(job.coordinator, job.processes, rank)
    types = types_of(job)
    make = Ours if WAYS[job.name][0] else Orbax
    log = pathlib.Path(job.logs) / f"{rank}.json"
    if not job.restored:
        save(rank, job, types, make, log)
    found: dict[str, Any] = {}
    for name in job.restored:
        found[name] = restore(pathlib.Path(job.folder) / name / f"machine-{rank}", types, make)
        log.write_text(json.dumps(found))


def save(rank: int, job: Job, types: Any, make: Any, log: pathlib.Path) -> None:
    """Three steps, then one that a kill interrupts."""
    store = make(pathlib.Path(job.folder) / "saved" / f"machine-{rank}", state_at(0, types))
    calls, whole, sent = [], [], []
    for step in range(1, SAVED + 1):
        state = jax.block_until_ready(state_at(step, types))
        sync_global_devices(f"before {step}")
        before, start = _measured.sent(), time.perf_counter()
        store.save(step, state)
        calls.append(time.perf_counter() - start)
        store.wait()
        whole.append(time.perf_counter() - start)
        sync_global_devices(f"after {step}")
        sent.append(_measured.sent() - before)
    held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards)
    found = {"save": calls[1:], "whole": whole[1:], "sent": min(sent[1:]), "held": held}
    log.write_text(json.dumps(found))
    state = jax.block_until_ready(state_at(SAVED + 1, types))
    sync_global_devices("last")
    store.save(SAVED + 1, state)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)


def restore(folder: pathlib.Path, types: Any, make: Callable[..., Any]) -> dict[str, Any]:
    """The step, seconds, and bytes that all machines sent; or the error."""
    sync_global_devices(str(folder.parent))
    before, start = _measured.sent(), time.perf_counter()
    store = None
    try:
        store = make(folder, state_at(0, types))
        step, state = store.restore(types)
        seconds = time.perf_counter() - start
        exact = state_at(step, types)
        equal = all(
            bool((a.data == b.data).all())
            for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(exact), strict=True)
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
        )
        found = {"step": step, "seconds": seconds, "equal": equal}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    sync_global_devices(f"after {folder.parent}")
    found["sent"] = _measured.sent() - before
    if store is not None:
        store.wait()
        store.close()
    return found


# --- All of them ----------------------------------------------------------------------------------


def run(job: Job) -> list[dict[str, Any]]:
    """What each process found; those that save are killed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        job = dataclasses.replace(job, coordinator=f"localhost:{probe.getsockname()[1]}")
    text, logs = json.dumps(dataclasses.asdict(job)), pathlib.Path(job.logs)
    commands = [[sys.executable, __file__, "--worker", str(i), text] for i in range(job.processes)]
    killed = contextlib.nullcontext() if job.restored else contextlib.suppress(SystemExit)
    with killed:
        _network.run_all(commands, logs, SECONDS)
    return [json.loads((logs / f"{i}.json").read_text()) for i in range(job.processes)]


def row(name: str, processes: int, arrays: int) -> str:
    """Of a way."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        tempfile.TemporaryDirectory() as logs,
    ):
        job = Job(name, processes, arrays, folder, logs)
        saved = run(job)
        whole = pathlib.Path(folder) / "saved"
        written = disk_use(whole / "machine-0")
        pairs = list(itertools.combinations(range(processes), 2)) if processes > 2 else []
        for lost in [(), (1,), *pairs]:
            left = pathlib.Path(folder) / named(lost)
            shutil.copytree(whole, left)
            for i in lost:
                shutil.rmtree(left / f"machine-{i}")
        names = tuple(named(lost) for lost in [(), (1,), *pairs])
        restored = run(dataclasses.replace(job, restored=names))
    cells = [f"{saved[0]['held'] / MIB:.0f}", f"{written / MIB:.0f}"]
    cells += [f"{saved[0]['sent'] / processes / MIB:.0f}"]
    for key in ("save", "whole"):
        cells.append(f"{max(statistics.median(each[key]) for each in saved):.2f}")
    cells += cells_of([each[named(())] for each in restored])
    cells += cells_of([each[named((1,))] for each in restored])
    sent = max(each[named((1,))]["sent"] for each in restored)
    survived = [all(each[named(p)].get("equal") for each in restored) for p in pairs]
    cells += [f"{sent / MIB:.0f}", f"{sum(survived)} of {len(survived)}"]
    return f"| {name} | {' | '.join(cells)} |"


def named(lost: tuple[int, ...]) -> str:
    """The name of a folder without those of some machines."""
    return "-".join(map(str, ("without", *lost)))


def cells_of(found: list[dict[str, Any]]) -> list[str]:
    """The step and seconds, or why there are none."""
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        print(errors[0], file=sys.stderr)
        return [f"lost ({errors[0].split(':')[0]})", ""]
    if not all(each["equal"] for each in found):
        return ["other values", ""]
    return [str(found[0]["step"]), f"{max(each['seconds'] for each in found):.2f}"]


def disk_use(folder: pathlib.Path) -> int:
    """Bytes of the files below a folder, as they are allocated."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def rows(smoke: bool) -> Iterator[str]:
    """Of all ways."""
    for name in list(WAYS)[:1] if smoke else WAYS:
        yield row(name, 2 if smoke else 4, 2 if smoke else 42)


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        rank, text = args.worker
        given = json.loads(text)
        work(int(rank), Job(**given | {"restored": tuple(given["restored"])}))
        return
    can_be_alone = subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
    if can_be_alone and not args.alone:
        again = 'ip link set lo up; exec "$0" "$@"'
        command = [sys.executable, __file__, "--alone", *(["--smoke"] if args.smoke else [])]
        sys.exit(subprocess.run(["unshare", "-n", "sh", "-c", again, *command]).returncode)
    table = _results.table(HEADER, rows(args.smoke))
    if not args.smoke:
        title = "Lost machines, beside orbax"
        _results.write("peers_checkpoints", title, ABOUT, table, script="peers/checkpoints")


ABOUT = """4 processes of 2 CPU devices each (gloo) stand for machines; a state of 168 MiB, sharded.
One is killed (SIGKILL) while the fourth step is written. Restored values are compared, all of them.
Sent bytes are of the network interface, of all processes, with TCP's own; ours has those of the
snapshot that a restore starts. `pairs`: whose loss a run survives. Seconds are those of the slowest
process, beside other work on the cores."""

if __name__ == "__main__":
    main()
