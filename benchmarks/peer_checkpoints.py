"""What snapshots in the memory of peers cost, and how fast they are restored, beside orbax on disk.

4 processes of 2 CPU devices each (gloo) on this machine stand for 4 machines, each with a folder in
memory. They train under ZeRO stage 3 without checkpoints, with snapshots and with checkpoints; in
each round every way takes 10 timed steps, in an order of its own. Then new processes restore the
last state: from memory, from memory with the folder of one "machine" deleted, and from disk, whose
files are in the page cache. Last, steps with and without a snapshot are compiled for accelerators,
and not run: pip install '.[aot]'.

  python benchmarks/peer_checkpoints.py            # writes benchmarks/results/
  python benchmarks/peer_checkpoints.py --smoke    # a tiny model, one round; prints only
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _network
import _results
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from _steps import zero_on
from _transformer import Config, init, make_loss
from jax.experimental import multihost_utils

import sharding as shd
from sharding.plan import targets

PROCESSES, DEVICES = 4, 2
SPACING = 20  # from the steps of one round to those of the next
ROUNDS, RESTORES = 9, 5
SECONDS = 3_600  # for all rounds
MIB = 2**20
SMALL = Config(layers=4, width=512, heads=8, vocabulary=4096)
TINY = Config(layers=2, width=64, heads=4, vocabulary=256)
LARGE = Config(layers=8, width=2048, heads=16, vocabulary=32768)  # compiled only
TARGETS = "v5e:4x4", "h100x16"
NONE = "none"
# By name: where, steps between, whether the training step copies.
WAYS = {
    NONE: ("", 1, False),
    "peers, a program of its own": ("memory", 1, False),
    "peers, in the training step": ("memory", 1, True),
    "peers, a program of its own, every 10": ("memory", 10, False),
    "orbax, asynchronous": ("disk", 1, False),
    "orbax, asynchronous, every 10": ("disk", 10, False),
}
FROM_MEMORY, FROM_DISK = "peers, a program of its own", "orbax, asynchronous"
RESTORED = "memory, all machines", "memory, one machine lost", "disk"
STEP_HEADER = """\
| checkpoints | every | s a step, median (quartiles) | less those without, s | s in `save` \
| MiB written by a machine | MiB sent to a machine |
|---|---|---|---|---|---|---|"""
RESTORE_HEADER = """\
| from | s to restore, median (quartiles) | s from the start of processes | MiB sent |
|---|---|---|---|"""
PROGRAM_HEADER = """\
| target | state, MiB a device | snapshot | sent in a step, MiB a device | temporaries, MiB \
| to host memory, MiB a device |
|---|---|---|---|---|---|"""


@dataclasses.dataclass
class Job:
    """What the processes do.

    Attributes:
      coordinator: its address.
      started: when they were started, in seconds since the epoch.
      memory: the folder in memory.
      disk: the folder on disk.
      logs: where each process writes its figures.
      restored: what is restored, one after the other; nothing to train.
      smoke: whether the model is tiny.
      rounds: of training.
    """

    coordinator: str
    started: float
    memory: str
    disk: str
    logs: str
    restored: tuple[str, ...] = ()
    smoke: bool = False
    rounds: int = 1

    @property
    def config(self) -> Config:
        """Of the model."""
        return TINY if self.smoke else SMALL

    @property
    def processes(self) -> int:
        """Which stand for machines."""
        return 2 if self.smoke else PROCESSES

    @property
    def steps(self) -> int:
        """Timed ones of a way in a round."""
        return 2 if self.smoke else 10

    @property
    def batch(self) -> tuple[int, int]:
        """Examples, and tokens of one."""
        return (8, 17) if self.smoke else (16, 129)


# --- One of the processes -------------------------------------------------------------------------


class Way:
    """One way to save, with a training step of its own.

    Args:
      name: in ``WAYS``.
      job: with the folders.
      zero: of the step.
      make_step: from a store or None to a training step.
    """

    def __init__(
        self, name: str, job: Job, zero: shd.Zero, make_step: Callable[..., Callable[..., Any]]
    ):
        where, self.interval, in_step = WAYS[name]
        self.store = open_store(name, job, zero) if where == "memory" else None
        self.manager = open_manager(name, job) if where == "disk" else None
        self.seconds, self.saved = 0.0, 0
        self.step = make_step(self.store if in_step else None)

    def save(self, i: int, state: Any) -> None:
        """Saves the state of a step if it is its turn."""
        if i % self.interval or not (self.store or self.manager):
            return
        start = time.perf_counter()
        if self.store is not None:
            self.store.save(i, state, {"position": i})
        elif self.manager is not None:
            self.manager.save(i, args=ocp.args.StandardSave(state))
        self.seconds += time.perf_counter() - start
        self.saved += 1

    def finish(self) -> None:
        """Waits until the last checkpoint is written."""
        if self.store is not None:
            self.store.wait_until_finished()
        elif self.manager is not None:
            self.manager.wait_until_finished()

    def figures(self) -> dict[str, float]:
        """Of one checkpoint: seconds in the call, bytes written by and sent to this machine."""
        if not self.saved:
            return {}
        found = {"save": self.seconds / self.saved}
        if self.store is not None:
            counts = self.store.counts
            found["written"], found["sent"] = (
                total / counts.saved for total in (counts.written, counts.sent)
            )
        return found


def zero_loss(zero: shd.Zero) -> Callable[..., Any]:
    """The loss at stage 3, which gathers all parameters at once."""
    loss_fn = make_loss()
    return lambda params, tokens: loss_fn(zero.gather(params), tokens)


def open_store(name: str, job: Job, zero: shd.Zero) -> shd.PeerCheckpoints:
    """The snapshots of one way; this process is a machine."""
    machine = f"machine-{jax.process_index()}"
    folder = pathlib.Path(job.memory) / machine
    run_id = name.replace(",", "").replace(" ", "-")
    return shd.PeerCheckpoints(
        zero.mesh, folder, run_id=run_id, machine=machine, interval=WAYS[name][1]
    )


def open_manager(name: str, job: Job) -> ocp.CheckpointManager:
    """The checkpoints of one way."""
    folder = pathlib.Path(job.disk) / name.replace(",", "").replace(" ", "-")
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))


def work(rank: int, job: Job) -> None:
    """Trains or restores together with the other processes; writes the figures of this one."""
    if job.smoke:  # which compiles for longer than it runs
        os.environ["XLA_FLAGS"] = (
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(job.coordinator, job.processes, rank)
    mesh = jax.make_mesh((job.processes * DEVICES,), ("data",))
    zero, tx = shd.Zero(mesh, stage=3, min_shard_size=0), optax.adamw(1e-4)

    def make_state() -> Any:
        params = init(job.config)
        return params, tx.init(params)

    if job.restored:
        abstract = zero.abstract_state(make_state, tx=tx)
        found = {name: restore(name, job, zero, abstract) for name in job.restored}
    else:
        found = train(job, zero, tx, zero.init(make_state, tx=tx))
    (pathlib.Path(job.logs) / f"{rank}.json").write_text(json.dumps(found))


def train(job: Job, zero: shd.Zero, tx: Any, state: Any) -> dict[str, Any]:
    """Seconds a step of each way in each round, and its figures."""
    num, length = job.batch
    rng = np.random.default_rng(jax.process_index())
    shape = (num // job.processes, length)
    batch = zero.put(rng.integers(job.config.vocabulary, size=shape, dtype=np.int32))

    @functools.cache
    def make_step(store: shd.PeerCheckpoints | None) -> Callable[..., Any]:
        return zero.train_step(zero_loss(zero), tx=tx, snapshot=store)

    ways = {name: Way(name, job, zero, make_step) for name in WAYS}
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = np.random.default_rng(0)  # the same in all processes
    for number in range(1 + job.rounds):  # one to compile
        first = SPACING * number + 10 - job.steps // 2  # a multiple of 10 is in the middle
        for j in order.permutation(len(ways)):
            name = list(ways)[j]
            way = ways[name]
            # The step before the timed ones leaves a checkpoint that the first of them waits for.
            for i in range(first - 1, first + job.steps):
                if i == first:
                    multihost_utils.sync_global_devices(f"{name} {number}")
                    start = time.perf_counter()
                state, metrics = way.step(state, batch)
                float(metrics["loss"])
                way.save(i, state)
            jax.block_until_ready(state)
            if number:
                times[name].append((time.perf_counter() - start) / job.steps)
            way.finish()
            if not number:
                way.seconds, way.saved = 0.0, 0
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    found = {name: {"times": times[name], **way.figures()} for name, way in ways.items()}
    for way in ways.values():
        if way.store is not None:
            way.store.close()
        if way.manager is not None:
            way.manager.close()
    return {"ways": found, "bytes": num_bytes, "last": i}


def restore(name: str, job: Job, zero: shd.Zero, abstract: Any) -> dict[str, float]:
    """Seconds until the state is on the devices, and the bytes that machines sent for it."""
    sent = 0.0
    if name == "memory, one machine lost" and jax.process_index() == 1:
        shutil.rmtree(pathlib.Path(job.memory) / "machine-1")
    multihost_utils.sync_global_devices(name)
    start = time.perf_counter()
    if name == "disk":
        with open_manager(FROM_DISK, job) as manager:
            step = manager.latest_step()
            state = manager.restore(step, args=ocp.args.StandardRestore(abstract))
            jax.block_until_ready(state)
            seconds, since = time.perf_counter() - start, time.time() - job.started
    else:
        store = open_store(FROM_MEMORY, job, zero)
        step, state, _ = store.restore(abstract)
        seconds, since = time.perf_counter() - start, time.time() - job.started
        store.wait_until_finished()  # all shards have their replicas again
        # Restoring has also saved, for which each machine was sent as much as the others.
        sent = store.counts.sent - max(store.describe().sent)
        store.close()
    return {"step": step, "seconds": seconds, "since": since, "sent": sent}


# --- All of them ----------------------------------------------------------------------------------


def run(job: Job) -> list[dict[str, Any]]:
    """The figures of each process."""
    logs = pathlib.Path(job.logs)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        job = dataclasses.replace(
            job, coordinator=f"localhost:{probe.getsockname()[1]}", started=time.time()
        )
    text = json.dumps(dataclasses.asdict(job))
    commands = [[sys.executable, __file__, "--worker", str(i), text] for i in range(job.processes)]
    _network.run_all(commands, logs, SECONDS)
    return [json.loads((logs / f"{i}.json").read_text()) for i in range(job.processes)]


def quartiles(values: Any) -> str:
    """The median and the quartiles."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def step_rows(found: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each way; the slowest process of each round counts."""
    slowest = {
        name: np.max([each["ways"][name]["times"] for each in found], axis=0) for name in WAYS
    }
    for name, (_, interval, _) in WAYS.items():
        ways = [each["ways"][name] for each in found]
        more = np.median(slowest[name] - slowest[NONE])
        cells = [
            f"{max(way[key] for way in ways) / unit:.{digits}f}" if key in ways[0] else "-"
            for key, unit, digits in (("save", 1, 3), ("written", MIB, 1), ("sent", MIB, 1))
        ]
        if name == NONE:
            yield f"| {name} | - | {quartiles(slowest[name])} | - | - | - | - |"
        else:
            label = name.removesuffix(f", every {interval}")
            yield (
                f"| {label} | {interval} | {quartiles(slowest[name])} | {more:+.3f} "
                f"| {' | '.join(cells)} |"
            )


def restore_rows(job: Job, times: int, last: int) -> Iterator[str]:
    """A line for each thing that is restored, each by processes of its own if not small."""
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in RESTORED}
    for _ in range(times):
        for names in [RESTORED] if job.smoke else [(name,) for name in RESTORED]:
            processes = run(dataclasses.replace(job, restored=names))
            for name in names:
                found[name].append([each[name] for each in processes])
    for name, rounds in found.items():
        steps = {int(each["step"]) for one in rounds for each in one}
        if steps != {last}:
            raise SystemExit(f"{name}: restored steps {sorted(steps)}, saved last was {last}.")
        seconds = [max(each["seconds"] for each in one) for one in rounds]
        since = np.median([max(each["since"] for each in one) for one in rounds])
        sent = rounds[0][0]["sent"] / MIB
        start = "-" if job.smoke else f"{since:.1f}"
        yield f"| {name} | {quartiles(seconds)} | {start} | {sent:.1f} |"


def program_rows(config: Config, names: tuple[str, ...]) -> Iterator[str]:
    """Lines for each target: the compiled step without and with a snapshot."""
    tx = optax.adamw(1e-4)
    for name in names:
        zero = zero_on(name, stage=3)

        def make_state() -> Any:
            params = init(config)
            return params, tx.init(params)

        state = zero.abstract_state(make_state, tx=tx)
        batch = jax.ShapeDtypeStruct((zero.mesh.size, 513), np.int32)
        held = sum(shard_bytes(x) for x in jax.tree.leaves(state))
        store = shd.PeerCheckpoints(zero.mesh, "unused", run_id="compiled")
        for snapshot in (None, store):
            step = zero.train_step(zero_loss(zero), tx=tx, snapshot=snapshot)
            compiled = step.lower(state, batch).compile()
            memory = compiled.memory_analysis()
            yield (
                f"| {name} | {held / MIB:,.1f} | {'no' if snapshot is None else 'yes'} "
                f"| {shd.wire_bytes(compiled) / MIB:,.1f} "
                f"| {memory.temp_size_in_bytes / MIB:,.1f} "
                f"| {memory.host_output_size_in_bytes / MIB:,.1f} |"
            )


def shard_bytes(x: Any) -> int:
    """Bytes of one device's shard."""
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def installed(name: str) -> bool:
    """Whether the compiler of a target is here."""
    try:
        targets.topology(name)
    except ValueError as error:
        print(f"{name} is left out: {error}")
        return False
    return True


def main() -> None:
    """Measures and compiles; writes the tables of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round; no file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory", default="/dev/shm", help="where the folders in memory are made")
    parser.add_argument("--disk", default=None, help="where checkpoints are written")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rank, text = options.worker
        given = json.loads(text)
        work(int(rank), Job(**given | {"restored": tuple(given["restored"])}))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated."))
    rounds = 1 if options.smoke else options.rounds
    make = functools.partial(tempfile.TemporaryDirectory, prefix="peer-checkpoints-")
    with make(dir=options.memory) as memory, make(dir=options.disk) as disk, make() as logs:
        job = Job("", 0.0, memory, disk, logs, smoke=options.smoke, rounds=rounds)
        trained = run(job)
        steps = _results.table(STEP_HEADER, step_rows(trained))
        restores = 1 if options.smoke else RESTORES
        restored = _results.table(RESTORE_HEADER, restore_rows(job, restores, trained[0]["last"]))
    names = tuple(name for name in TARGETS[: 1 if options.smoke else None] if installed(name))
    programs = _results.table(PROGRAM_HEADER, program_rows(TINY if options.smoke else LARGE, names))
    if options.smoke:
        return
    num, length = job.batch
    about = (
        f"{_results.machine('cpu')}. {PROCESSES} processes of {DEVICES} CPU devices each (gloo) on "
        f"these cores; ZeRO stage 3, AdamW, {job.config.num_params / 1e6:.1f}M float32 parameters, "
        f"a state of {trained[0]['bytes'] / MIB:.1f} MiB; {num} sequences of {length - 1} tokens a "
        f'step. It does not show a cluster: the "machines" are processes on one, which share its '
        "cores and its memory; what they send goes through the loopback device, not a network; "
        "devices are CPUs, without a link to host memory, and copies run on the cores that train; "
        "files of orbax are read from the page cache, not from storage."
    )
    _results.write(
        "peer_checkpoints",
        "Checkpoints in the memory of peers",
        about,
        "## Steps\n\n"
        f"{rounds} rounds of {job.steps} steps of each way, in another order each; the slowest "
        "process counts. `Less those without` is the median over rounds of the difference to steps "
        "without checkpoints in the same round. `save` is the call, with what it waits for the "
        "checkpoint before; a training step that copies waits itself. Written and sent are "
        "counted, for one snapshot, on the machine that has most.",
        steps,
        "## Restore\n\n"
        f"{restores} times, each by new processes; the slowest one counts, from opening the "
        "checkpoints to a state on the devices, with the compilation of programs. The time from "
        "the start of processes includes imports. Sent are bytes between machines.",
        restored,
        "## Compiled steps\n\n"
        "Not run. A model of "
        f"{LARGE.num_params / 1e6:.0f}M float32 parameters, AdamW, stage 3; one sequence of 512 "
        "tokens a device. The snapshot has two replicas of each shard.",
        programs,
    )


if __name__ == "__main__":
    main()
