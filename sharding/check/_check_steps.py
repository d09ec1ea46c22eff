"""Checks of training: steps on all devices beside plain optax on one CPU."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import optax_ext
from sharding import remat, stored
from sharding._local_steps import LocalSteps
from sharding._zero import Zero
from sharding.check._check_numbers import apart, both, cpu_device
from sharding.check._check_wire import mesh_of_all
from sharding.check._machine_report import MachineCheck, NotHere
from sharding.matmuls._quantized_loss import quantized_matmuls
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline._schedules import one_f_one_b
from sharding.step.owners._by_owner import by_owner
from sharding.tiles._cross_entropy import cross_entropy

_LAYERS, _WIDTH, _STEPS = 4, 64, 3
_STAGES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "stage 2, replicas": {"stage": 2, "split": 2},
    "stage 2, 2 micro-batches": {"stage": 2, "microbatches": 2},
    "update in the backward pass": {"stage": 3, "update": "backward"},
    "optimizer state in host memory": {"stage": 2, "offload": "optimizer"},
    "parameters in host memory, streamed": {"stage": 3, "offload": "all"},
    "update on the host": {"stage": 2, "update_on": "host"},
}
_OF_STEP = ("microbatches", "update")
_HOST = {"offload", "update_on"}


def initial_params() -> dict[str, jax.Array]:
    """Layers that a loss scans over, and a head; constants, whose programs compile fast."""
    rng = np.random.default_rng(1)
    shapes = {"layers": (_LAYERS, _WIDTH, _WIDTH), "head": (_WIDTH, 32)}
    drawn = {name: rng.standard_normal(shape) / _WIDTH**0.5 for name, shape in shapes.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}


def outputs(params: Any, x: jax.Array) -> jax.Array:
    """(rows, 32)."""

    def layer(x: jax.Array, w: jax.Array) -> Any:
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return x @ params["head"]


def mean_loss(params: Any, x: jax.Array) -> jax.Array:
    """A mean over rows: each device runs its own."""
    return jnp.mean((outputs(params, x) - x[:, :32]) ** 2)


def coupled_loss(params: Any, x: jax.Array) -> jax.Array:
    """Rows meet in a variance: the partitioner runs it."""
    y = outputs(params, x)
    return jnp.mean((y - x[:, :32]) ** 2) + jnp.mean(jnp.var(y, axis=0))


_LOSSES = {"mean": mean_loss, "coupled": coupled_loss}
_OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "came": optax_ext.came(1e-2),
    "sgd": optax.sgd(0.1),
    "muon": by_owner(optax.contrib.muon(1e-2)),
}


def batches() -> list[np.ndarray]:
    """Of all devices; rows differ in scale."""
    rows = 4 * jax.device_count()
    scale = 2.0 ** (np.arange(rows) % 4 - 2)[:, None]
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((rows, _WIDTH)) * scale).astype(np.float32) for _ in range(_STEPS)]


@functools.cache
def reference(loss: str, optimizer: str) -> tuple[Any, Any]:
    """What plain optax moves on a CPU, and its parameters."""
    tx = _OPTIMIZERS[optimizer]
    with jax.default_device(cpu_device()), jax.default_matmul_precision("float32"):
        params = initial_params()
        state, start = jax.jit(tx.init)(params), jax.device_get(params)

        @jax.jit
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            grads = jax.grad(_LOSSES[loss])(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for x in batches():
            params, state = step(params, state, x)
        after = jax.device_get(params)
    return jax.tree.map(np.subtract, after, start), start


def step_checks() -> Iterator[MachineCheck]:
    """Of training steps."""
    for loss, runs in (("mean", "each device its rows"), ("coupled", "partitioned")):
        for name, options in _STAGES.items():
            if loss == "coupled" and (not name.startswith("stage") or "micro" in name):
                continue  # partitioned in any case, or refused
            yield MachineCheck(
                f"step: {name}, {runs}",
                functools.partial(_compare_step, loss, "adamw", options),
                f"train_step with {name}",
                "another stage, or the option that is named",
            )
    yield MachineCheck(
        "step: CAME at stage 2",
        functools.partial(_compare_step, "mean", "came", {"stage": 2}),
        "came",
        "adamw",
    )
    yield MachineCheck(
        "step: Muon with an owner for each matrix",
        functools.partial(_compare_step, "mean", "muon", {"stage": 2}),
        "by_owner",
        "the transformation without by_owner",
    )
    yield MachineCheck(
        "step: parameters frozen in NF4, adapters", _compare_stored, "sharding.stored", "16 bits"
    )
    yield MachineCheck(
        "step: two replicas, a local step of each",
        _compare_local_steps,
        "LocalSteps",
        "a step that synchronizes gradients",
    )
    for recipe in ("fp8", "int8"):
        yield MachineCheck(
            f"matmuls: gradients of {recipe} products beside the CPU's",
            functools.partial(_compare_products, recipe),
            f"quantized_matmuls(loss, {recipe!r})",
            "the loss as it is",
        )
    yield MachineCheck(
        "tiles: a head and its gradient", _compare_head, "cross_entropy and tiled", "plain logits"
    )
    yield MachineCheck(
        "remat: a plan's gradient and bytes", _compare_plan, "remat.plan", "jax.checkpoint"
    )
    yield MachineCheck(
        "pipeline: 1F1B over two stages", _compare_pipeline, "Pipeline", "ZeRO alone"
    )


def _compare_step(loss: str, optimizer: str, options: dict[str, Any]) -> float:
    """What parameters moved; updates of different sums may differ by 1e-3."""
    options = dict(options)
    moved, start = reference(loss, optimizer)
    of_step = {name: options.pop(name) for name in _OF_STEP if name in options}
    split = options.pop("split", 1)
    if _HOST & options.keys():
        _need_host_memory()
        options["offload_min_size"] = 0
    alone = jax.device_count() == 1 and split == 1
    mesh = jax.make_mesh((1,), ("data",)) if alone else mesh_of_all(split=split)
    if split > 1:
        options["replica_axis"] = "replica"
    zero, tx = Zero(mesh, min_shard_size=1, **options), _OPTIMIZERS[optimizer]
    with jax.default_matmul_precision("float32"):
        state = zero.init(lambda: (params := initial_params(), tx.init(params)), tx=tx)
        step = zero.train_step(_LOSSES[loss], tx=tx, **of_step)
        for x in batches():
            state, _ = step(state, zero.put(_rows_of_process(zero, x)))
    have = jax.tree.map(np.subtract, zero.full_params(state), start)
    return apart(have, moved) / 1e-3


def _rows_of_process(zero: Zero, x: np.ndarray) -> np.ndarray:
    """Those of a batch that this process gives."""
    index, count = zero.data_shard()
    return np.split(x, count)[index]


def _need_host_memory() -> None:
    kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        raise NotHere(f"its devices have no memory kind pinned_host, only {sorted(kinds)}")


def _compare_stored() -> float:
    """What codes decode to beside the CPU's; a loss of coded layers beside that of the decoded."""
    forms = {"layers": (stored.frozen(4), stored.lora(rank=4))}

    def losses(params: Any, x: jax.Array) -> Any:
        held = stored.store(params, forms, jax.random.key(1))
        seen = stored.merge(held)
        return seen, stored.loss_of(mean_loss)(held, x), mean_loss(seen, x)

    have, want = both(losses, initial_params(), batches()[0])
    return max(apart(have[0], want[0]) / 1e-3, apart(have[1], have[2]) / 1e-4)


def _compare_local_steps() -> float:
    """With one local step and an outer SGD of rate 1 it is the ordinary step."""
    moved, start = reference("mean", "sgd")
    zero, tx = Zero(mesh_of_all(split=2), 2, replica_axis="replica"), _OPTIMIZERS["sgd"]
    local = LocalSteps(zero, optax.sgd(1.0), every=1)
    with jax.default_matmul_precision("float32"):
        state = local.init(lambda: (params := initial_params(), tx.init(params)), tx=tx)
        step = local.train_step(mean_loss, tx=tx)
        for x in batches():
            state, _ = step(state, local.put(_rows_of_process(zero, x)))
    have = jax.tree.map(np.subtract, zero.full_params(local.merged(state)), start)
    return apart(have, moved) / 1e-3


def _compare_products(recipe: str) -> float:
    """Codes are the same but for divisions: of a sum of 64 terms, a step of a code in a few."""
    loss = quantized_matmuls(mean_loss, recipe, min_size=16)
    have, want = both(jax.grad(loss), initial_params(), batches()[0])
    return apart(have, want) / 2e-2


def _compare_head() -> float:
    """Tiles of the vocabulary beside all logits."""
    w, x = initial_params()["head"], batches()[0]
    labels = np.arange(len(x)) % w.shape[1]

    def plain(w: jax.Array, x: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    def in_tiles(w: jax.Array, x: jax.Array) -> jax.Array:
        return cross_entropy(x, w, labels, tiles=3)

    with jax.default_matmul_precision("float32"):
        have, want = (jax.jit(jax.grad(fn, (0, 1)))(w, x) for fn in (in_tiles, plain))
    return apart(have, want) / 1e-4


def _compare_plan() -> float:
    """The plan of fewest bytes: its gradient, and the bytes of its program by the compiler."""
    params, x = initial_params(), jnp.asarray(batches()[0])
    planned = min(remat.frontier(mean_loss, params, x), key=lambda found: found.peak)
    with jax.default_matmul_precision("float32"):
        want = jax.jit(jax.grad(mean_loss))(params, x)
        compiled = jax.jit(jax.grad(planned)).lower(params, x).compile()
    analysis = compiled.memory_analysis()
    held = analysis.temp_size_in_bytes if analysis else 0
    return max(apart(compiled(params, x), want) / 1e-4, held / (1.1 * planned.peak))


def _compare_pipeline() -> float:
    """Loss and gradients of two stages and four micro-batches beside one device's."""
    if jax.device_count() < 2 or jax.process_count() > 1:
        raise NotHere("it needs two devices of one process")
    mesh = jax.make_mesh((2,), ("pipe",), (AxisType.Auto,), devices=jax.devices()[:2])
    pipeline = Pipeline(
        mesh,
        one_f_one_b(stages=2, microbatches=4),
        num_layers=_LAYERS,
        embed=lambda shared, x: x,
        block=lambda w, x, _: x + jnp.tanh(x @ w),
        head=lambda shared, y, x: (jnp.sum((y @ shared["head"] - x[:, :32]) ** 2), 32 * len(x)),
    )
    params, x = initial_params(), batches()[0][:8]

    def mean_of_pipeline(params: Any, x: jax.Array) -> jax.Array:
        total, weight = pipeline.loss(params, x)
        return total / weight

    with jax.default_matmul_precision("float32"):
        grads = jax.jit(jax.grad(mean_of_pipeline))(pipeline.stack(params), x)
        want = jax.jit(jax.grad(mean_loss))(params, x)
    return apart(pipeline.unstack(grads), want) / 1e-4
