"""One training step in 26 configurations, of which every pair of options occurs in one.

The rows of ``TABLE`` are every optimizer on every mesh; their other columns were found by simulated
annealing over the number of admissible pairs that no row has, and rows were added for the last, and
for the global view. The rows of ``FIRST`` have most of the pairs by themselves, 427 of 511.
Each step is compiled once; all tests of a row read that step and its run.
"""

import collections
import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan.audit._program_collectives import collectives

from .. import model
from . import runs

STEPS, SAVED = 6, 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration: a column of ``TABLE`` each."""

    optimizer: str
    mesh: str
    stage: int
    sync: str
    microbatches: int
    explicit: int
    spread: int
    offload: int
    weighted: int
    frozen: int
    model_state: int
    view: str | None = None

    def __str__(self):
        words = [self.optimizer, self.mesh, f"stage {self.stage}", self.sync]
        words += [f"{self.microbatches} micro-batches"] * (self.microbatches > 1)
        words += ["global"] * (self.view == "global")
        flags = ("explicit", "spread", "offload", "weighted", "frozen", "model_state")
        return ", ".join(words + [name for name in flags if getattr(self, name)])


FIELDS = [field.name for field in dataclasses.fields(Row)]
# optimizer, mesh, stage, sync, micro-batches, explicit, spread, offload, weighted, frozen, state
FIRST = [
    Row("clip + adamw", "tensor", 2, "zen", 1, 0, 0, 1, 0, 1, 1),
    Row("came", "flat", 3, "none", 2, 0, 0, 1, 0, 0, 1, "global"),
    Row("came", "replicas", 1, "dense", 1, 1, 1, 0, 0, 1, 1),
    Row("came", "torus", 0, "top_k", 2, 1, 0, 1, 0, 0, 0),
    Row("adafactor", "tensor", 3, "dense", 2, 1, 0, 0, 1, 0, 0),
    Row("lamb", "flat", 1, "zen", 1, 1, 0, 1, 1, 0, 0),
    Row("lamb", "replicas", 2, "none", 1, 1, 1, 0, 1, 1, 1, "global"),
    Row("8 bits", "replicas", 3, "zen", 1, 1, 1, 1, 1, 0, 0),
    Row("8 bits", "torus", 0, "none", 1, 0, 0, 0, 1, 1, 1, "global"),
    Row("muon", "flat", 2, "dense", 1, 0, 0, 0, 1, 1, 0),
    Row("muon", "replicas", 1, "top_k", 2, 0, 1, 0, 1, 1, 1),
    Row("muon", "tensor", 3, "none", 1, 1, 0, 0, 1, 1, 0, "global"),
]
# Pairs that are left: those of an optimizer, and 25 others.
MORE = [
    Row("clip + adamw", "flat", 0, "dense", 2, 0, 0, 0, 0, 1, 1),
    Row("clip + adamw", "replicas", 3, "top_k", 1, 1, 1, 1, 0, 1, 0),
    Row("clip + adamw", "torus", 1, "none", 1, 1, 0, 0, 1, 0, 1, "global"),
    Row("came", "tensor", 2, "zen", 2, 1, 0, 0, 1, 1, 0),
    Row("adafactor", "flat", 1, "none", 1, 1, 0, 1, 0, 0, 1, "global"),
    Row("adafactor", "replicas", 0, "zen", 1, 1, 0, 0, 1, 1, 1),
    Row("adafactor", "replicas", 2, "zen", 2, 0, 1, 0, 0, 1, 0),
    Row("adafactor", "torus", 2, "top_k", 1, 0, 0, 0, 1, 1, 1),
    Row("adafactor", "torus", 2, "none", 2, 0, 0, 1, 0, 1, 0),
    Row("lamb", "tensor", 0, "top_k", 2, 1, 0, 0, 0, 0, 0),
    Row("lamb", "torus", 3, "dense", 2, 0, 0, 0, 1, 1, 0),
    Row("8 bits", "flat", 2, "top_k", 2, 0, 0, 1, 0, 0, 1),
    Row("8 bits", "tensor", 1, "dense", 2, 0, 0, 1, 0, 0, 0),
    Row("muon", "torus", 3, "zen", 1, 1, 0, 0, 0, 0, 1),
]
TABLE = FIRST + MORE
pytestmark = pytest.mark.usefixtures("x64")


def admissible(row):
    """Whether ``Zero`` takes it: replicas that share state, a sync's state at stage 3, owners."""
    return not (
        (row.spread and (row.mesh != "replicas" or row.stage == 0))
        or (row.stage == 3 and row.sync == "top_k" and row.mesh != "replicas")
        or (row.optimizer == "muon" and (row.stage == 0 or row.offload))
        or (row.view == "global" and row.sync != "none")
    )


# Steps by which training is calm.
OPTIMIZERS = {
    "clip + adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.1)
    ),
    "came": lambda: optax_ext.came(3e-5, weight_decay=0.1),
    "adafactor": model.OPTIMIZERS["adafactor"],
    "lamb": lambda: optax_ext.lamb(1e-3, weight_decay=0.1),
    "8 bits": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), 8, min_size=1900),
    "muon": lambda: optax.partition(
        {True: shd.by_owner(optax.contrib.muon(1e-3)), False: optax.adamw(1e-3)},
        lambda params: {k: p.ndim == 2 and min(p.shape) > 7 for k, p in params.items()},
    ),
}
SYNCS = {
    "none": lambda: None,
    "dense": sync.dense,
    "top_k": lambda: sync.top_k(1.0, min_size=1),  # with a state, and lossless
    "zen": lambda: sync.zen(0.5, min_size=512),
}
# Query, key and hidden columns over the tensor axis, which replicas do not have.
MODEL_AXIS = dict.fromkeys(("query", "mlp"), P(None, None, "model"))
MODEL_AXIS["mlp_bias"] = P(None, "model")


def zero_of(row):
    return runs.zero_of(
        *(row.stage, row.mesh, AxisType.Explicit if row.explicit else AxisType.Auto),
        sync=SYNCS[row.sync](),
        offload="optimizer" if row.offload else None,
        shard_state_over_replicas=bool(row.spread),
        min_shard_size=128,
        offload_min_size=128,
        view=row.view,
    )


def new_model_state():
    return {"seen": jnp.zeros(()), "gain": jnp.zeros(()), "count": jnp.zeros((), int)}


def loss_of(row, zero=None):
    """The mean loss, or a sum and its weight; with the next model state, which the loss sees."""

    def loss_fn(params, batch, state=None):
        if row.mesh == "tensor" and zero:
            # XLA:CPU runs independent collectives over different groups in any order, and may wait
            # for ever: all of the tensor axis come before the loss.
            params = lax.with_sharding_constraint(params, P())
        layer = zero.gathered if zero else lambda fn: fn
        losses = model.loss_per_example(params, batch, layer)
        factor = 1 + state["gain"] if row.model_state else 1
        value = losses.mean() * factor
        if row.weighted:
            value = losses.sum() * factor, batch["weight"].sum()
        if not row.model_state:
            return value
        # Each device carries its own through its micro-batches; what the loss reads is the same.
        seen, gain = losses.mean(), lax.stop_gradient(params["gain"])
        new = {"seen": 0.5 * state["seen"] + seen, "gain": 0.5 * state["gain"] + gain}
        return value, new | {"count": state["count"] + 1}

    return loss_fn


def trainable(row):
    return {k: k not in ("value", "prime") for k in model.init_params(np.float32)}


@functools.cache
def gradients_alone(weighted, model_state):
    """Of plain jax, compiled once for all optimizers: ``loss, grads, state, norm``."""
    fn = loss_of(types.SimpleNamespace(mesh="one", weighted=weighted, model_state=model_state))

    def scalar(params, part, state):
        value, new = fn(params, part, state) if model_state else (fn(params, part), state)
        value, weight = value if weighted else (value, 1.0)
        return value, (weight, new)

    @jax.jit
    def run(params, parts, state, trained):
        total, weight, grads = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
        for part in parts:
            of_part = jax.value_and_grad(scalar, has_aux=True)(params, part, state)
            (value, (w, state)), g = of_part
            total, weight = total + value, weight + w
            grads = jax.tree.map(jnp.add, grads, g)
        grads = {k: jnp.where(trained[k], g / weight, 0 * g) for k, g in grads.items()}
        return total / weight, grads, state, optax.tree.norm(grads)

    return run


@functools.cache
def update_alone(optimizer):
    tx = OPTIMIZERS[optimizer]()

    @jax.jit
    def run(params, opt_state, grads, trained):
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return {k: jnp.where(trained[k], p, params[k]) for k, p in new.items()}, opt_state

    return jax.jit(model.make_state(tx, jnp.float64)), run


def reference(row, num_devices):
    """``(params, opt_state), model_state, losses, norms`` of plain jax and optax."""
    make, update = update_alone(row.optimizer)
    params, opt_state = make()
    trained = {k: t or not row.frozen for k, t in trainable(row).items()}
    state, losses, norms = new_model_state(), [], []
    count = row.microbatches if row.model_state else 1
    for i in range(STEPS):
        parts = model.microbatches_of(model.batch(i), num_devices, count)
        run = gradients_alone(row.weighted, row.model_state)
        loss, grads, state, norm = run(params, parts, state, trained)
        params, opt_state = update(params, opt_state, grads, trained)
        losses.append(float(loss))
        norms.append(float(norm))
    return jax.device_get(((params, opt_state), state, losses, norms))


class Run:
    """A row's compiled step, and what it was given and gave."""

    def __init__(self, row):
        self.row, self.zero, tx = row, zero_of(row), OPTIMIZERS[row.optimizer]()
        self.tx, zero = tx, self.zero
        specs = {k: MODEL_AXIS.get(k, P()) for k in model.init_params(np.float32)}
        self.specs = specs if row.mesh == "tensor" else None
        make = model.make_state(tx, jnp.float64)
        state = zero.init(make, tx=tx, param_specs=self.specs)
        self.placed = zero.shardings(state, tx=tx, param_specs=self.specs)
        self.description = zero.describe(state, tx=tx, param_specs=self.specs)
        step = zero.train_step(
            loss_of(row, zero),
            tx=tx,
            microbatches=row.microbatches,
            weighted=bool(row.weighted),
            model_state=bool(row.model_state),
            trainable=trainable(row) if row.frozen else None,
            grad_norm=True,
        )
        model_state = new_model_state() if row.model_state else None
        lowered = step.lower(state, zero.put(model.batch(0)), model_state=model_state)
        self.compiled = lowered.compile()
        self.losses, self.norms, self.donated = [], [], []
        for i in range(STEPS):
            if i == SAVED:
                resumed = self.through_a_checkpoint(state, make)
                restored = jax.device_get(model_state)
            old = state
            state, metrics = step(state, zero.put(model.batch(i)), model_state=model_state)
            self.donated.append(all(x.is_deleted() for x in jax.tree.leaves(old)))
            model_state = metrics.get("model_state")
            self.losses.append(float(metrics["loss"]))
            self.norms.append(float(metrics["grad_norm"]))
        self.state, self.model_state = state, model_state
        for i in range(SAVED, STEPS):
            resumed, metrics = step(resumed, zero.put(model.batch(i)), model_state=restored)
            restored = metrics.get("model_state")
        self.resumed = resumed

    def through_a_checkpoint(self, state, make):
        """As a checkpoint restores it: whole arrays, placed by the abstract state alone."""
        abstract = self.zero.abstract_state(make, tx=self.tx, param_specs=self.specs)
        placed = jax.tree.map(lambda x: x.sharding, state)
        # A copy: jax 0.11 does not donate what NumPy has read.
        copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed)(state)
        return jax.tree.map(
            lambda x, a: jax.device_put(np.asarray(x), a.sharding), copied, abstract
        )


SLOW = [pytest.param(row, marks=pytest.mark.slow) for row in MORE]


@pytest.fixture(scope="module", params=FIRST + SLOW, ids=str)
def run(request):
    with jax.enable_x64(True):
        yield Run(request.param)


def without_sync(state):
    params, opt_state = state
    return params, opt_state.inner_state if isinstance(opt_state, sync.SyncedState) else opt_state


def test_every_admissible_pair_of_options_is_in_a_row():
    assert all(map(admissible, TABLE))
    values = [(name, getattr(row, name)) for name in FIELDS for row in TABLE]
    for (a, x), (b, y) in itertools.combinations(dict.fromkeys(values), 2):
        if a != b and not any(getattr(r, a) == x and getattr(r, b) == y for r in TABLE):
            changed = (dataclasses.replace(r, **{a: x, b: y}) for r in TABLE)
            assert not any(map(admissible, changed)), (a, x, b, y)


def test_equals_one_device(run):
    want, model_state, losses, norms = reference(run.row, run.zero.num_devices)
    state = without_sync(run.state)
    for have, expected, tolerance in zip(state, want, (1e-12, 1e-11), strict=True):
        model.assert_close(have, expected, tolerance)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-12)
    np.testing.assert_allclose(run.norms, norms, rtol=1e-12)
    if run.row.model_state:
        model.assert_close(run.model_state, model_state, 1e-12)


def test_goes_on_from_a_checkpoint(run):
    """Bit for bit, with the same program."""
    for a, b in zip(*map(jax.tree.leaves, jax.device_get((run.state, run.resumed))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_state_is_donated_and_stays_where_it_is(run):
    assert all(run.donated)
    for x, sharding in zip(jax.tree.leaves(run.state), jax.tree.leaves(run.placed), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    held = collections.Counter()
    params, opt_state = without_sync(run.state)
    of_sync = run.state[1].sync_state if run.description.bytes_per_device.get("sync") else None
    for part, tree in {"params": params, "opt_state": opt_state, "sync": of_sync}.items():
        for x in jax.tree.leaves(tree):
            host = x.sharding.memory_kind == "pinned_host"
            # The step counter of a sync is not described.
            if part != "sync" or x.ndim:
                held["host" if host else part] += x.addressable_shards[0].data.nbytes
    assert run.compiled.memory_analysis().alias_size_in_bytes == held.total()
    assert (held.pop("host", 0) > 0) == bool(run.row.offload)
    described = run.description.bytes_per_device
    assert held == {part: size for part, size in described.items() if part != "grads"}


def test_collectives_are_those_of_the_stage(run):
    """Elements by kind: gradients are reduced once, parameters gathered once, frozen ones never."""
    row = run.row
    if row.sync not in ("none", "dense") or row.mesh == "tensor" or row.optimizer == "muon":
        return  # they have tests of their own
    if row.view == "global":
        return  # what the partitioner of CPUs makes of it
    sent = collections.Counter()
    for c in collectives(run.compiled):
        sent[c.op] += c.elements * c.runs
    trained = {k: x.size for k, x in run.state[0].items() if not row.frozen or trainable(row)[k]}
    shards = run.zero.num_devices if row.mesh != "replicas" else run.zero.num_shards
    sharded = {k: n for k, n in trained.items() if n >= 128 and k not in ("prime", "unembed")}
    total = sum(sharded.values())
    if row.stage == 0:
        assert sum(trained.values()) <= sent.pop("all-reduce") <= sum(trained.values()) + 8
        assert not sent
        return
    again = sharded["mlp"] + sharded["down"]  # the layer that is called twice
    reduced = (total + (row.stage == 3) * again) * (row.microbatches if row.stage > 1 else 1)
    assert sent["reduce-scatter"] == reduced + (total // shards if row.spread else 0)
    assert sent["all-gather"] == total if row.stage < 3 else sent["all-gather"] > total
    assert sent["all-reduce"] < sum(trained.values()) / 4
