"""A checkpoint saved on some devices resumes, equal, on others; exports are unsharded."""

import gc
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

from .. import model

VOCAB, WIDTH, HIDDEN = 24, 16, 48
OPTIMIZERS = {
    "came": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax_ext.came(1e-3)),
    "adamw": lambda: optax.adamw(1e-3),
}


def init_params(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (VOCAB, WIDTH),
        "gain": (WIDTH,),
        "odd": (WIDTH, 7),  # on 8 devices sharded along the first dim alone
        "prime": (7, WIDTH - 3),  # nothing divides
        "unembed": (WIDTH - 3, VOCAB),
    }
    params = {name: rng.normal(size=shape) * 0.3 for name, shape in shapes.items()}
    params["block"] = {
        "up": rng.normal(size=(WIDTH, HIDDEN)) / 4,
        "down": rng.normal(size=(HIDDEN, WIDTH)) / 7,
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


def make_state(tx, dtype=jnp.float64):
    def make():
        params = init_params(dtype)
        return params, tx.init(params)

    return make


def block(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loss_of(zero):
    layer = zero.gathered(block)

    def loss_fn(params, batch):
        x = layer(params["block"], params["embed"][batch["tokens"]] * params["gain"][None, None])
        y = jnp.tanh(x @ params["odd"]) @ params["prime"] @ params["unembed"]
        losses = optax.softmax_cross_entropy_with_integer_labels(y, batch["tokens"])
        return (losses.mean(-1) * batch["weight"]).mean()

    return loss_fn


def batch(step):
    rng = np.random.default_rng(step)
    weight = np.repeat(10.0 ** rng.uniform(-2, 1, 8), 2)
    return {"tokens": rng.integers(0, VOCAB, (16, 5)), "weight": weight}


def train(zero, state, tx, steps):
    """``(state, losses)``."""
    step = zero.train_step(loss_of(zero), tx=tx)
    losses = []
    for i in steps:
        state, metrics = step(state, zero.put(batch(i)))
        losses.append(float(metrics["loss"]))
    return state, losses


def zero_of(*shape, names=("data",), **kwargs):
    mesh = jax.make_mesh(
        shape,
        names,
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: np.prod(shape)],
    )
    return shd.Zero(mesh, min_shard_size=0, **kwargs)


def on_host(tree):
    return jax.tree.map(lambda x: np.array(jax.device_get(x)), tree)


class Run(NamedTuple):
    """An unbroken run of 6 steps at stage 3 on 8 devices, saved after 3."""

    directory: pathlib.Path
    saved: Any
    exported: Any  # by full_params, when it was saved
    final: Any
    losses: list[float]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By optimizer, made at the first use."""
    made = {}

    def run(name):
        if name not in made:
            directory, tx, zero = (
                tmp_path_factory.mktemp(name),
                OPTIMIZERS[name](),
                zero_of(8, stage=3),
            )
            state, _ = train(zero, zero.init(make_state(tx), tx=tx), tx, range(3))
            saved, exported = on_host(state), zero.full_params(state)
            with ocp.CheckpointManager(directory) as manager:
                # The next step takes the state's memory while this one is being written.
                manager.save(3, args=ocp.args.StandardSave(state))
                final, losses = train(zero, state, tx, range(3, 6))
            made[name] = Run(directory, saved, exported, on_host(final), losses)
        return made[name]

    return run


def restore(directory, target, step=3):
    with ocp.CheckpointManager(directory) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(target))


# --- Restoring ----------------------------------------------------------------------------------

HYBRID = {"names": ("replica", "data"), "replica_axis": "replica"}
MODEL_SPECS = {
    **dict.fromkeys(("embed", "gain", "odd", "prime", "unembed"), P()),
    "block": {"up": P(None, "model"), "down": P("model")},
}
LAYOUTS = {
    "4 devices": lambda: zero_of(4, stage=3),
    "2 devices": lambda: zero_of(2, stage=3),
    "1 device": lambda: zero_of(1, stage=3),
    "stage 2": lambda: zero_of(8, stage=2),
    "stage 1": lambda: zero_of(8, stage=1),
    "stage 0": lambda: zero_of(8, stage=0),
    "hybrid": lambda: zero_of(2, 4, stage=3, **HYBRID),
    "hybrid, state over all": lambda: zero_of(
        2, 4, stage=3, shard_state_over_replicas=True, **HYBRID
    ),
    "model axis": lambda: zero_of(4, 2, names=("data", "model"), stage=3),
}


@pytest.mark.slow(keep=4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("came", layout) for layout in LAYOUTS]
    + [("adamw", layout) for layout in ("2 devices", "stage 1", "hybrid, state over all")],
)
def test_goes_on_elsewhere(runs, name, layout):
    run, tx, zero = runs(name), OPTIMIZERS[name](), LAYOUTS[layout]()
    specs = MODEL_SPECS if layout == "model axis" else None
    target = zero.abstract_state(make_state(tx), tx=tx, param_specs=specs)
    state = restore(run.directory, target)
    chex.assert_trees_all_equal(state, run.saved, strict=True)
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert x.sharding == wanted.sharding
    state, losses = train(zero, state, tx, range(3, 6))
    np.testing.assert_allclose(losses, run.losses, rtol=1e-12)
    distance, leaf = model.worst_leaf(state, run.final)
    assert distance < 1e-12, leaf


def other_shape(params):
    return params | {"gain": jnp.ones((8,))}


def another_rank(params):
    return params | {"gain": jnp.ones((WIDTH, 1))}


def one_more(params):
    return params | {"bias": jnp.ones((8,))}


def one_less(params):
    return {name: x for name, x in params.items() if name != "gain"}


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
# Orbax starts to read all arrays, and drops those after the one that does not fit: some before
# they begin, some while they read.
@pytest.mark.filterwarnings("ignore:coroutine '_read_array_index_and_device_put':RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_shape, r"Requested shape: \(8,\) is not compatible .* stored shape: \(16,\)"),
        (another_rank, r"Requested shape: \(16, 1\) is not compatible .* stored shape: \(16,\)"),
        (one_more, r"tree structures do not match:\s+\[0\]\.bias:\s.*shape=\(8,\)"),
        (one_less, r"tree structures do not match:\s+\[0\]\.gain:\s+- Source: MISSING"),
    ],
)
def test_a_checkpoint_of_another_model(runs, change, message):
    """Raises; nothing is truncated, padded or left as it was initialized."""
    directory, tx, zero = runs("adamw").directory, OPTIMIZERS["adamw"](), zero_of(4, stage=3)

    def make():
        params = change(init_params())
        return params, tx.init(params)

    target = zero.abstract_state(make, tx=tx)
    with pytest.raises(ValueError, match=message):
        restore(directory, target)
    gc.collect()


@pytest.mark.usefixtures("x64")
def test_a_checkpoint_of_another_optimizer(runs):
    tx, zero = OPTIMIZERS["came"](), zero_of(4, stage=3)
    target = zero.abstract_state(make_state(tx), tx=tx)
    with pytest.raises(ValueError, match=r"tree structures do not match:\s+\[1\]"):
        restore(runs("adamw").directory, target)


# --- Exporting ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_full_params_are_those_of_one_device(runs):
    run, tx = runs("adamw"), OPTIMIZERS["adamw"]()
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(run.exported))
    # Steps since have taken the memory of the state; what was exported stays.
    chex.assert_trees_all_equal(run.exported, run.saved[0], strict=True)
    params, opt_state = make_state(tx)()
    loss_fn = loss_of(zero_of(1, stage=0))

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i in range(3):
        params, opt_state = step(params, opt_state, batch(i))
    distance, leaf = model.worst_leaf(run.exported, params)
    assert distance < 1e-12, leaf


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stage", [0, 3])
def test_safetensors(tmp_path, stage, dtype):
    tx, zero = OPTIMIZERS["adamw"](), zero_of(8, stage=stage)
    state = zero.init(make_state(tx, dtype), tx=tx)
    params = zero.full_params(state)
    chex.assert_trees_all_equal(params, init_params(dtype), strict=True)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    assert "block.up" in flat
    safetensors.numpy.save_file(flat, tmp_path / "model.safetensors")
    loaded = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(loaded, flat, strict=True)


# --- A run that is killed while it writes -------------------------------------------------------

SCRIPT = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp, sharding as shd
jax.config.update("jax_num_cpu_devices", 2)
zero = shd.Zero(jax.make_mesh((2,), ("data",)), stage=3, min_shard_size=0)
tx = optax.sgd(1.0)

def make():
    params = {"w": jnp.asarray(np.load(sys.argv[2]))}
    return params, tx.init(params)

state = zero.init(make, tx=tx)
step = zero.train_step(lambda p, b: (zero.gather(p)["w"] * b.mean()).sum(), tx=tx)
manager = ocp.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(max_to_keep=3))
for i in range(1, 100000):
    state, _ = step(state, zero.put(np.ones(2, np.float32)))
    manager.save(i, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    print(i, flush=True)
"""


def unfinished(directory):
    """The steps that are being written, or were when their process ended."""
    names = [re.match(r"(\d+)\.orbax-checkpoint-tmp", name) for name in os.listdir(directory)]
    return [int(name[1]) for name in names if name]


def kill_while_it_writes(process, directory, delay):
    """Once a few steps are there, and ``delay`` seconds after another one has been begun."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        if any(step > 2 for step in unfinished(directory)):
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    else:
        process.kill()
    out, _ = process.communicate(timeout=10)
    return int(out.split()[-1])


def test_killed_while_it_writes(tmp_path):
    """The newest step that was complete is there, and no later one is listed."""
    w = np.random.default_rng(0).integers(-(2**20), 2**20, (4096, 1024)).astype(np.float32)
    np.save(tmp_path / "w.npy", w)
    directories = [tmp_path / "at_once", tmp_path / "later"]
    processes = []
    for directory in directories:
        directory.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(directory), str(tmp_path / "w.npy")]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    tx, zero = optax.sgd(1.0), zero_of(4, stage=3)
    target = zero.abstract_state(lambda: (p := {"w": jnp.asarray(w)}, tx.init(p)), tx=tx)
    left = 0
    try:
        for process, directory, delay in zip(processes, directories, (0, 0.03), strict=True):
            finished = kill_while_it_writes(process, directory, delay)
            broken = unfinished(directory)
            left += len(broken)
            with ocp.CheckpointManager(directory) as manager:
                newest = manager.latest_step()
                assert newest == max(manager.all_steps())
                assert newest in (finished, finished + 1)
                assert not set(broken) & set(manager.all_steps())
                state = manager.restore(newest, args=ocp.args.StandardRestore(target))
                np.testing.assert_array_equal(state[0]["w"], w - newest)
                # And the run goes on from there, over what is left of the step that was not.
                manager.save(newest + 1, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                assert manager.latest_step() == newest + 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert left, "both were killed between two steps: nothing was tested"
