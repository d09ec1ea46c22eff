"""ZeRO with orbax: trains a Flax model, saves its sharded state, and resumes from it.

Each device writes and reads its own shards. A checkpoint restores at any stage of ZeRO and on any
number of devices, so these three commands are one run of 60 steps:

  python examples/zero_checkpoint.py --steps 20
  python examples/zero_checkpoint.py --steps 40
  python examples/zero_checkpoint.py --steps 60 --stage 3 --devices 4
"""

import argparse
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import optax_ext
import sharding as shd

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/zero_checkpoint"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--devices", type=int, help="[all; without GPU or TPU 8 virtual ones]")
args = parser.parse_args()

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
devices = jax.devices()[: args.devices]
mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
# At stage 3 each nn.Dense gathers its own parameters; at the other stages this changes nothing.
zero = shd.Zero(mesh, stage=args.stage, gathered_blocks="Dense")

model = nn.Sequential([nn.Dense(512), nn.gelu, nn.Dense(64)])
tx = optax_ext.came(3e-3, debias_instability=True)


def make_state(key):
    """The initial state. ``zero.init`` compiles this, so that every array is created sharded."""
    params = model.init(key, jnp.zeros((1, 64)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss_fn(params, batch):
    """The mean loss of the batch."""
    return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def make_batch(step):
    """The batch of a step, the same in a resumed run as in an uninterrupted one."""
    x = np.random.default_rng(step).normal(size=(64, 64)).astype(np.float32)
    return {"x": x, "y": np.roll(np.abs(x), 1, axis=1)}


train_step = zero.train_step(loss_fn)
with ocp.CheckpointManager(args.folder.absolute()) as manager:
    start = manager.latest_step() or 0
    if start:  # restore the shapes and shardings of this mesh and stage, not those of the writer
        target = zero.abstract_state(make_state, jax.random.key(0))
        state = manager.restore(start, args=ocp.args.StandardRestore(target))
        print(f"Resumed at step {start}, at stage {zero.stage} on {zero.num_devices} devices.")
    else:
        state = zero.init(make_state, jax.random.key(0))
        print(zero.describe(state))
    for step in range(start + 1, args.steps + 1):
        state, metrics = train_step(state, zero.put(make_batch(step)))
        if step % 10 == 0:
            print(f"step {step}: loss {metrics['loss']:.4f}")
            manager.save(step, args=ocp.args.StandardSave(state))  # written in the background
