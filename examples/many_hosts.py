"""One training run on many hosts: each process reads and places its own shard of the batch.

The script is the same on a laptop and on a cluster; ``--distributed`` joins the other processes.

  python examples/many_hosts.py                                 # one process
  srun python examples/many_hosts.py --distributed              # SLURM; TPU pods, Kubernetes and
                                                                # Open MPI are found the same way
  for i in 0 1; do                                              # two processes, no cluster
    python examples/many_hosts.py --distributed --coordinator localhost:9876 --processes 2 --id $i &
  done; wait
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import optax_ext
import sharding as shd

BATCH = 64  # examples of all processes together

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("--distributed", action="store_true")
parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0 [as the cluster says]")
parser.add_argument("--processes", type=int, help="how many there are [as the cluster says]")
parser.add_argument("--id", type=int, help="which of them this is [as the cluster says]")
args = parser.parse_args()

if args.distributed:  # before JAX looks for devices
    jax.distributed.initialize(args.coordinator, args.processes, args.id)
jax.config.update("jax_num_cpu_devices", 4)  # of this process, where there are no GPUs or TPUs
mesh = jax.make_mesh((jax.device_count(),), ("data",))  # the devices of all processes
zero = shd.Zero(mesh, stage=2)
tx = optax_ext.came(1e-2, debias_instability=True)


def log(text):
    """Prints in one process. Every process must still call all steps and every collective."""
    if jax.process_index() == 0:
        print(text, flush=True)


def make_state(key):
    """Parameters and optimizer state; the same key in every process."""
    w = jax.random.normal(key, (2, 128, 128)) * 128**-0.5
    params = {"w0": w[0], "w1": w[1]}
    return params, tx.init(params)


def loss_fn(params, batch):
    """The mean loss of the batch."""
    return jnp.mean((jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"] - batch["y"]) ** 2)


def read_batch(step):
    """This process's shard of the batch: a real data loader would read its own files here."""
    index, count = zero.data_shard()
    rows = np.split(np.arange(BATCH), count)[index]
    x = np.stack([np.random.default_rng((step, row)).normal(size=128) for row in rows])
    return {"x": x.astype(np.float32), "y": np.sin(x[:, ::-1]).astype(np.float32)}


log(f"processes: {jax.process_count()}, devices: {jax.device_count()}")
state = zero.init(make_state, jax.random.key(0), tx=tx)
train_step = zero.train_step(loss_fn, tx=tx)
for step in range(1, 51):
    state, metrics = train_step(state, zero.put(read_batch(step)))
    if step % 10 == 0:
        log(f"step {step}: loss {metrics['loss']:.4f}")
params = zero.full_params(state)  # a collective: all processes call it, and one writes the file
log(f"exported {sum(x.size for x in params.values()):,} parameters")
