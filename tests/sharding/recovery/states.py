"""Small states, invented machines, and stores of one process for the tests of recovery."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import sharding as shd
from sharding.recovery import _peer_checkpoints as peers
from sharding.recovery._machines import machines_of
from sharding.recovery._stored_leaf import as_data, is_key

from .. import model

WIDTH = 16


def invented_machines(layout):
    """Machines of one process: a letter of the layout for each device."""
    by_device = [(name, name) for name in layout]
    return dataclasses.replace(machines_of(by_device, by_device), of_process=(0,))


def invent_machines(monkeypatch, layout):
    """Stores find these machines from now on."""
    monkeypatch.setattr(peers, "find_machines", lambda *_: invented_machines(layout))


def store_of(mesh, folder, **options):
    return shd.PeerCheckpoints(mesh, folder, **{"run_id": "run", "replicas": 1} | options)


def init_params(dtype=jnp.float32):
    """Each shape is here for a reason. NumPy draws: random bits of jax compile slowly."""
    rng = np.random.default_rng(0)
    shapes = {
        "up": (2, WIDTH, 3 * WIDTH),  # stacked
        "down": (2, 3 * WIDTH, WIDTH),
        "odd": (WIDTH, 7),  # one dim divides
        "prime": (7, 13),  # nothing divides
        "bias": (WIDTH,),
        "gain": (),
    }
    return {k: jnp.asarray(0.3 * rng.normal(size=shape), dtype) for k, shape in shapes.items()}


def loss_fn(params, batch):
    """Full-rank gradients of every parameter."""
    x = batch
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jnp.tanh(x @ up) @ down + params["bias"][None]
    y = jnp.tanh(x @ params["odd"]) @ params["prime"]
    return jnp.mean((y * params["gain"] - 1) ** 2)


def batch_of(step, size=16):
    """Shards of different scale."""
    scale = 10.0 ** np.repeat(np.arange(8) / 4, size // 8)[:, None]
    rng = np.random.default_rng(step)
    return np.asarray(rng.normal(size=(size, WIDTH)) * scale, np.float32)


@functools.cache
def adamw():
    """The same transformation for all tests, so that their programs are the same."""
    return optax.adamw(1e-2)


def make_state(tx=None, dtype=jnp.float32):
    return model.make_of(lambda: init_params(dtype), tx or adamw())


def box_of(leaf, block):
    """Where a block of a stored leaf is in the leaf."""
    place = np.unravel_index(block, leaf.grid) if leaf.grid else ()
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, leaf.block_shape, strict=True))


def damage(path):
    """Flips a bit of the first block of a file."""
    raw = bytearray(path.read_bytes())
    raw[4096] ^= 1
    path.write_bytes(raw)


def random_bits(dtype, shape, seed=0):
    """Every bit that a dtype has: NaNs, negative zeros, subnormal numbers."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int2", "int4", "uint2", "uint4"):
        info = ml_dtypes.iinfo(dtype)
        return rng.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape)


def random_like(abstract):
    """A state of these types with random bits, placed as they are."""
    rng = np.random.default_rng(0)
    place = lambda x: jax.device_put(random_bits(x.dtype, x.shape, rng), x.sharding)  # noqa: E731
    return jax.tree.map(place, abstract)


def bits(tree):
    """The bytes of each leaf, with its shape and dtype; not a view, so that it may be donated."""

    def leaf(x):
        data = np.asarray(as_data(x))
        kind = str(jax.random.key_impl(x)) if is_key(x) else str(x.dtype)
        return kind, data.shape, data.tobytes()

    return [leaf(x) for x in jax.tree.leaves(tree)]
