"""ZeRO for a Flax nnx model: batch statistics and dropout, updated in place.

The model and its ``nnx.Optimizer`` are created sharded. A step updates both in place, as under
``nnx.jit``; ``BatchNorm`` takes its statistics over the batch of all devices.

  python examples/nnx_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_ext
import sharding as shd

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
mesh = jax.make_mesh((jax.device_count(),), ("data",))
zero = shd.Zero(mesh, stage=3, gathered_blocks="Block")  # a Block gathers its own parameters


class Block(nnx.Module):
    """A residual MLP with batch normalization and dropout."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        """Features (batch, 64) to features of the same shape."""
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


def make(key):
    """The model and its optimizer. ``zero.nnx_init`` compiles this: arrays are created sharded."""
    rngs = nnx.Rngs(key)
    model = nnx.Sequential(*[Block(rngs) for _ in range(3)], nnx.Linear(64, 8, rngs=rngs))
    schedule = optax.cosine_decay_schedule(3e-3, decay_steps=60)
    tx = optax_ext.came(schedule, debias_instability=True)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model, batch):
    """The mean loss of the batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def accuracy(model, batch):
    """The fraction of examples that the model classifies correctly."""
    return jnp.mean(jnp.argmax(model(batch["x"]), axis=-1) == batch["y"])


def make_batch(seed, size):
    """Random features; the class is the largest of eight of them."""
    x = np.random.default_rng(seed).normal(size=(size, 64)).astype(np.float32)
    return zero.put({"x": x, "y": x[:, :8].argmax(axis=1)})


model, optimizer = zero.nnx_init(make, jax.random.key(0))
train_step = zero.nnx_train_step(loss_fn)
for step in range(1, 61):
    metrics = train_step(model, optimizer, make_batch(step, 512))
    if step % 10 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}")
model.eval()  # no dropout, and the running statistics of BatchNorm
print(f"held-out accuracy: {zero.nnx_eval_step(accuracy)(model, make_batch(0, 1024)):.2f}")
