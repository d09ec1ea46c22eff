"""Small states, invented machines, and stores of one process for the tests of recovery."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharding as shd
from sharding.recovery import _peer_checkpoints as peers
from sharding.recovery._machines import machines_of
from sharding.recovery._replica_program import as_data, is_key

WIDTH = 16


def invented_machines(layout):
    """Machines of one process: a letter of the layout for each device."""
    by_device = [(name, name) for name in layout]
    return dataclasses.replace(machines_of(by_device, by_device), of_process=(0,))


def invent_machines(monkeypatch, layout):
    """Stores find these machines from now on."""
    monkeypatch.setattr(peers, "find_machines", lambda *_: invented_machines(layout))


def store_of(mesh, folder, **options):
    """A store of one process."""
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
    """A function that makes (params, opt_state)."""

    def make():
        params = init_params(dtype)
        return params, (tx or adamw()).init(params)

    return make


def random_like(abstract, seed=0):
    """A state of these types with random bits, placed as they are."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        dtype = np.dtype(x.dtype)
        if dtype.kind == "b":
            value = rng.integers(0, 2, x.shape).astype(bool)
        elif dtype.name in ("int4", "uint4"):
            value = rng.integers(-8 if dtype.name == "int4" else 0, 8, x.shape).astype(dtype)
        else:
            raw = rng.integers(0, 256, (*x.shape, dtype.itemsize), dtype=np.uint8)
            value = raw.reshape(-1).view(dtype).reshape(x.shape)
        return jax.device_put(value, x.sharding)

    return jax.tree.map(leaf, abstract)


def bits(tree):
    """The bytes of each leaf, with its shape and dtype; not a view, so that it may be donated."""

    def leaf(x):
        data = np.asarray(as_data(x))
        kind = str(jax.random.key_impl(x)) if is_key(x) else str(x.dtype)
        return kind, data.shape, data.tobytes()

    return [leaf(x) for x in jax.tree.leaves(tree)]
