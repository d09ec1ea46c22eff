"""Trains a model as one of many processes: python -m ... FOLDER NAME-STAGE-DTYPE ...

Each process writes its losses to FOLDER, and how often it compiled after the first step; the first
process writes the unsharded state, too. The model is the small one of other tests; in cases that
contain ``-tiny`` it has two matrices, which compile quickly. In those that end in ``-spanned`` each
replica is two devices, of different processes.
"""

import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sharding as shd

from ..sharding import model

DEVICES, STEPS = 4, 5


def tiny_state(tx, dtype):
    shapes = {"in": (6, 12), "out": (12, 3)}
    return model.make_of(lambda: {k: jnp.ones(s, dtype) / s[0] for k, s in shapes.items()}, tx)


def tiny_loss(params, batch):
    hidden = jnp.tanh(batch["tokens"][:, :6] @ params["in"] / 9)
    return jnp.mean((hidden @ params["out"] - 1) ** 2)


def masked_loss(params, batch):
    each = jax.vmap(tiny_loss, (None, 0))(params, {"tokens": batch["tokens"][:, None]})
    return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])


def check_that_all_raise(zero):
    """Rows that are no batch together raise in every process, also where its own are good."""
    rank, shard, rows = jax.process_index(), zero.data_shard(), {"x": np.ones((8, 3))}
    wrong = {
        "process 0 gives 16, process 1 8": {"x": np.ones((8 if rank else 16, 3))},
        "processes 0 and 1 differ in names": rows | ({"y": np.ones(8)} if rank else {}),
        "scalars .* of processes 0 and 1 differ": rows | {"temperature": np.float32(rank)},
        "is empty" if rank == 1 else "raised in process 1": {} if rank == 1 else rows,
    }
    if shard[1] < jax.process_count():
        wrong["processes 0 and . have the same rows"] = {"x": rows["x"] + rank}
    for message, batch in wrong.items():
        with pytest.raises(ValueError, match=message):
            zero.put(batch)


def train(case):
    """Losses, the number of compilations after the first step, and the state in host memory."""
    name, stage, dtype, *kind = case.split("-")
    tiny, spanned = "tiny" in kind, "spanned" in kind
    make_state, loss_fn = (tiny_state, tiny_loss) if tiny else (model.make_state, model.loss_fn)
    devices = np.array(jax.devices()[:DEVICES])
    grid = devices.reshape(2, 2).T if spanned else devices[:, None]
    zero = shd.Zero(Mesh(grid, ("data", "model")), stage=int(stage), min_shard_size=0)
    index, count = zero.data_shard()
    if jax.process_count() > 1:
        check_that_all_raise(zero)
    tx = model.OPTIMIZERS[name]()
    compiled = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(len(losses))

    with jax.enable_x64(dtype == "float64"):
        state = zero.init(make_state(tx, jnp.dtype(dtype)), tx=tx)
        if jax.process_count() > 1:
            given = f"process {jax.process_index()} gives shard {index} of {count}"
            assert given in str(zero.describe(state, tx=tx))
        step = zero.train_step(lambda p, b: loss_fn(zero.gather(p), b), tx=tx)
        losses = []
        jax.monitoring.register_event_duration_secs_listener(listen)
        for i in range(STEPS):
            mine = {k: np.split(x, count)[index] for k, x in model.batch(i).items()}
            with pytest.raises(ValueError, match="differ in their first dim"):
                zero.put(mine | {"class_weights": np.ones(1)})
            state, metrics = step(state, zero.put(mine, check=i == 0))
            losses.append(float(metrics["loss"]))
        jax.monitoring.unregister_event_duration_listener(listen)
        if tiny:  # of a last batch of three rows, of which only the first process has any
            padded, mask = shd.pad_rows(
                {"tokens": mine["tokens"][: 0 if index else 3]}, len(mine["tokens"])
            )
            value = zero.eval_step(masked_loss)(state, zero.put(padded | {"mask": mask}))
            losses.append(float(value))
        if jax.process_count() > 1:
            with pytest.raises(ValueError, match=r"zero\.put"):
                step(state, jax.tree.map(jnp.asarray, mine))
        params = jax.tree.leaves(zero.full_params(state))
        gather = jax.jit(lambda x: x, out_shardings=NamedSharding(zero.mesh, PartitionSpec()))
        opt_state = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(gather(state[1]))]
        chosen = chosen_plan(tx, jnp.dtype(dtype)) if tiny and not spanned else ""
    return losses, sum(done > 0 for done in compiled), params + opt_state, chosen


def chosen_plan(tx, dtype):
    """What ``fit`` chose by running steps, on all processes; its step runs."""
    options = {"tx": tx, "memory": "1GiB", "measure": 2}
    batch = model.batch(0)
    plan = shd.plan.fit(tiny_loss, tiny_state(tx, dtype), batch, **options)
    _, metrics = plan.train_step()(plan.init(), plan.put(batch))
    assert metrics["loss"] > 0
    return str(plan)


def main(folder, *cases):
    processes = int(os.environ["SLURM_NTASKS"])
    jax.distributed.initialize(heartbeat_timeout_seconds=30, shutdown_timeout_seconds=60)
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    assert jax.process_count() == processes
    assert shd.check_machine(match="in memory of peers").ok
    for case in cases:
        losses, compiled, state, plan = train(case)
        result = {"losses": losses, "compiled": compiled, "plan": plan}
        path = folder / f"{case}-{jax.process_index()}.json"
        path.write_text(json.dumps(result))
        if jax.process_index() == 0:
            np.savez(folder / f"{case}.npz", *state)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
