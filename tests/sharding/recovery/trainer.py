"""A run of several processes that are killed: forked after the imports, started again, compared.

``python -m ...trainer`` reads a list of options, one for each process, from each line of its input,
forks the processes, and answers with their exit codes. It is its own supervisor: once a process has
ended badly it kills the others, as a cluster would.

Option ``kill=[rank, point, step]`` says who is killed, where and when.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
import sharding as shd
from sharding import PeerCheckpoints
from sharding.recovery import _load_state as loading
from sharding.recovery._slot import Slot
from sharding.recovery._snapshot_writer import OWN, SlotLayout, SnapshotWriter

from .states import WIDTH, batch_of, init_params, loss_fn


def make_state():
    """Parameters of several shapes, the largest in bfloat16."""
    params = init_params()
    params["down"] = params["down"].astype(jnp.bfloat16)
    return params, tx().init(params)


def tx():
    """Factored state beside full, with a schedule that depends on the step."""
    return optax_ext.came(optax.cosine_decay_schedule(1e-2, 400), debias_instability=True)


def die(rank, options, point, step):
    """Kills this process if it is its turn."""
    if options.get("kill") == [rank, point, step]:
        os.kill(os.getpid(), signal.SIGKILL)


def plant(rank, options):
    """Where a process can be killed."""
    writing = {}
    start, write, clear = SnapshotWriter._write, SlotLayout._write, Slot.clear
    commit, load, committed = Slot.commit, loading.load_state, PeerCheckpoints._committed

    def planted_start(self, layout, replicas, snapshot, extra):
        writing["step"] = snapshot.step
        start(self, layout, replicas, snapshot, extra)

    def planted_clear(self):
        clear(self)
        die(rank, options, "cleared", writing.get("step"))

    def planted_write(self, data, transfer, device, number, words):
        die(rank, options, "own" if number == OWN else "peer", writing["step"])
        write(self, data, transfer, device, number, words)

    def planted_commit(self, table, num_bytes):
        die(rank, options, "data", table.id.step)
        commit(self, table, num_bytes)
        if options.get("kill") == [rank, "header", table.id.step]:
            self._memory[20:40] = 0  # half of it
        die(rank, options, "header", table.id.step)
        with (pathlib.Path(options["log"]) / f"committed-{rank}.txt").open("a") as file:
            file.write(f"{table.id.step}\n")
        die(rank, options, "between", table.id.step)

    def planted_committed(self):
        own = committed(self)
        if self._pending is not None:
            die(rank, options, "send", self._pending.step)
        return own

    def planted_load(*args):
        die(rank, options, "load", 0)
        return load(*args)

    SnapshotWriter._write, PeerCheckpoints._committed = planted_start, planted_committed
    SlotLayout._write, loading.load_state = planted_write, planted_load
    Slot.clear, Slot.commit = planted_clear, planted_commit


def train(rank, options):
    """One process: restores what there is, and trains to the end."""
    num = len(options["machines"])
    limits = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}
    jax.distributed.initialize(f"localhost:{options['port']}", num, rank, **limits)
    jax.config.update("jax_num_cpu_devices", 8 // num)
    # Auto: on Explicit axes a step is traced twice.
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    zero = shd.Zero(mesh, stage=3, min_shard_size=0)
    plant(rank, options)
    machine = options["machines"][rank]
    folder = pathlib.Path(options["root"]) / machine
    store = PeerCheckpoints(mesh, folder, run_id="run", machine=machine, replicas=2)

    def log(row):
        with (pathlib.Path(options["log"]) / f"rows-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    replicated = jax.sharding.NamedSharding(mesh, jax.P())
    noise_key = jax.jit(lambda: jax.random.key(5), out_shardings=replicated)()
    split_key = jax.jit(lambda key: tuple(jax.random.split(key)), out_shardings=(replicated,) * 2)
    start, position = 0, 0
    abstract = {
        "train": zero.abstract_state(make_state, tx=tx()),
        "key": jax.ShapeDtypeStruct((), noise_key.dtype, sharding=replicated),
    }
    try:
        start, state, extra = store.restore(abstract)
        state, noise_key, position = state["train"], state["key"], extra["position"]
    except shd.NoCompleteCheckpoint as error:
        if options.get("must_restore"):
            raise
        print(error, flush=True)
        state = zero.init(make_state, tx=tx())
    log({"restored": start})
    snapshot = store if options.get("in_step") else None
    step = zero.train_step(lambda p, b: loss_fn(zero.gather(p), b), tx=tx(), snapshot=snapshot)
    for i in range(start + 1, options["steps"] + 1):
        noise_key, use = split_key(noise_key)
        noise = np.asarray(jax.random.normal(use.addressable_data(0), (8, WIDTH))) * 0.1
        position += 1 + i % 3
        batch = batch_of(position, 8) + noise
        state, metrics = step(state, zero.put(np.split(batch, num)[rank]))
        loss = float(metrics["loss"])
        die(rank, options, "training", i)
        store.save(i, {"train": state, "key": noise_key}, {"position": position})
        die(rank, options, "sent", i)
        if rank == 0:
            log({"step": i, "loss": loss.hex()})
    store.wait_until_finished()
    store.close()


def child(rank, options):
    with open(f"{options['log']}/output-{rank}.txt", "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    code = 0
    try:
        train(rank, options)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def supervise(options):
    """Runs all processes once; returns their exit codes."""
    warnings.filterwarnings("ignore", message=".*fork.*")
    pids = []
    for rank in range(len(options["machines"])):
        pid = os.fork()
        if not pid:
            child(rank, options)
        pids.append(pid)
    codes = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            time.sleep(random.random() * 0.2)
            for other in pids:
                if other not in codes:
                    os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(supervise(json.loads(line))), flush=True)
