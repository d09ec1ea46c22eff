"""A pipelined step of every family, compiled once: exact, and as its schedule says.

Each row is one program. Its run equals one device's; it has the iterations, permutes and
slots of the schedule, and the bytes that were estimated before anything was compiled.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.plan import estimate, pipeline_wire

from . import model
from .families import FAMILIES
from .ticks import scheduled, ticks

pytestmark = pytest.mark.usefixtures("x64", "scopes_in_cache_key")

MESHES = {
    "flat": ("data", "pipe"),
    "replicas": ("replica", "data", "pipe"),
    "tensor": ("data", "pipe", "model"),
}
# On a model axis; of stacked layers dim 0 is the layers.
SPECS = {
    "layers": {
        "up": P(),
        "query": {"kernel": P(None, None, "model"), "bias": P(None, "model")},
        "out": P(None, "model"),
    },
    "embed": P(),
    "norm": P(),
}


class Row(NamedTuple):
    """A configuration; ``options``: tick, sync, offload, microbatches, trainable, has_aux."""

    schedule: str
    size: tuple[int, int]  # stages and micro-batches
    variant: str
    stage: int
    explicit: int
    optimizer: str
    recompute: int
    mesh: str = "flat"
    options: str = ""

    def __str__(self):
        words = [self.schedule, "x".join(map(str, self.size)), self.variant, f"stage {self.stage}"]
        words += ["explicit"] * self.explicit + [self.optimizer] + ["recompute"] * self.recompute
        return ", ".join([*words, self.mesh, self.options])


TABLE = [
    Row("gpipe", (4, 8), "tied", 1, 0, "sgd", 0),
    Row("interleaved-2-aligned", (2, 4), "tied", 3, 0, "sgd", 0, "tensor", "microbatches"),
    Row("zb-h1", (4, 8), "untied", 2, 0, "came", 0),
    Row("chimera", (4, 8), "tied", 3, 1, "sgd", 1, "flat", "tick"),
]
SLOW = [
    Row("1f1b", (3, 8), "dropout", 2, 1, "sgd", 1),  # 8 layers on 3 stages
    Row("1f1b-aligned", (4, 8), "untied", 0, 1, "adamw", 0, "flat", "has_aux offload"),
    Row("zb-v", (2, 4), "tied", 1, 1, "sgd", 1, "replicas", "sync trainable"),
    Row("interleaved-2", (4, 4), "tied", 2, 0, "lamb", 1),
    Row("interleaved-2", (3, 3), "untied", 2, 0, "muon", 1),
    Row("1f1b-aligned", (2, 4), "tied", 3, 0, "came", 1, "tensor", "tick"),
    Row("zb-v", (3, 4), "dropout", 1, 0, "adamw", 0),  # 8 layers on 6 virtual stages
]


def cases(table, slow):
    params = table + [pytest.param(row, marks=pytest.mark.slow) for row in slow]
    return pytest.mark.parametrize("row", params, ids=str)


rows = cases(TABLE, SLOW)


def is_estimated(row):
    """Whether no optimizer, sync, model axis or gather of layers sends more than the estimate."""
    return row.optimizer in ("sgd", "adamw") and row.mesh == "flat" and row.options != "tick"


# By family, for 4 stages and 8 micro-batches: iterations of the loops, permutes, messages of the
# busiest stage. Two directions in each tick of ZB and Chimera, one of the others.
COUNTS = {
    "gpipe": ((10, 12), 22, 16),
    "1f1b-aligned": ((14,), 28, 16),
    "zb-h1": ((27,), 2 * 27, 16),
    "chimera": ((18,), 2 * 18, 16),
}
# By family and recompute: slots of activations and cotangents, and of residuals, one of each for
# what is not stored; those of split backward passes have what crosses to their second half, too.
SLOTS = {("gpipe", 0): (9, 9), ("1f1b-aligned", 0): (3, 8)}
SLOTS |= {("zb-h1", 0): (3, 10), ("chimera", 1): (7, 0)}


def head_with_aux(shared, x, batch):
    out = model.head(shared, x, batch)
    return out, {"mean": batch["mask"].mean(), "first": batch["tokens"][:, 0]}


class Run:
    """A row's compiled step, and what it was given and gave."""

    def __init__(self, row):
        self.row, names, options = row, MESHES[row.mesh], row.options.split()
        stages, microbatches = row.size
        sizes = {"pipe": stages} | dict.fromkeys({"replica", "model"} & {*names}, 2)
        sizes["data"] = 8 // int(np.prod(list(sizes.values())))
        kind = AxisType.Explicit if row.explicit else AxisType.Auto
        self.replicas = sizes["data"] * sizes.get("replica", 1)
        mesh = model.mesh_of(kind, **{name: sizes[name] for name in names})
        self.zero = zero = shd.Zero(
            mesh,
            stage=row.stage,
            min_shard_size=0,
            replica_axis="replica" if "replica" in names else None,
            sync=shd.sync.top_k(1.0, min_size=1) if "sync" in options else None,  # lossless
            offload="optimizer" if "offload" in options else None,
            offload_min_size=0,
        )
        self.has_aux = "has_aux" in options
        self.pipe = pipe = model.pipeline(
            mesh,
            FAMILIES[row.schedule](stages, microbatches),
            row.variant,
            recompute=bool(row.recompute),
            gather="tick" if "tick" in options else "step",
            head=head_with_aux if self.has_aux else model.head,
            has_aux=self.has_aux,
        )
        tx = model.OPTIMIZERS[row.optimizer]()
        make = functools.partial(model.make_state, pipe, row.variant, tx)
        self.params = jax.eval_shape(make)[0]
        specs = pipe.param_specs(self.params, SPECS if row.mesh == "tensor" else None)
        plan = estimate(self.params, tx, zero, param_specs=specs, gathered_once="")
        self.planned_wire = plan.stage(plan.requested).wire
        trainable = None
        if "trainable" in options:
            trainable = jax.tree.map(lambda _: False, self.params)
            trainable["layers"]["query"] = {"kernel": True, "bias": True}
        state = zero.init(make, tx=tx, param_specs=specs)
        step = zero.train_step(
            pipe, tx=tx, microbatches=2 if "microbatches" in options else 1, trainable=trainable
        )
        keys = [(model.step_key(i),) if pipe.rngs else () for i in range(model.STEPS)]
        compiled = step.lower(state, zero.put(model.batch(0)), *keys[0]).compile()
        self.ticks, self.wire_bytes = ticks(compiled, pipe), shd.wire_bytes(compiled)
        self.losses, self.aux = [], []
        for i, key in enumerate(keys):
            state, metrics = step(state, zero.put(model.batch(i)), *key)
            self.losses.append(float(metrics["loss"]))
            self.aux.append(metrics.get("aux"))
        self.state = state
        self.found = pipe.unstack(zero.full_params(state))


run_of = functools.cache(Run)


@rows
def test_equals_one_device(row):
    run = run_of(row)
    shards = (run.zero.num_shards, row.size[1]) if row.variant == "dropout" else ()
    trainable = "query" if "trainable" in row.options else None
    want, losses = model.train_alone(row.optimizer, row.variant, *shards, trainable=trainable)
    model.assert_close(run.found, want, 1e-12)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-12)
    if run.has_aux:  # scalars are averaged over micro-batches, arrays of examples concatenated
        for i, aux in enumerate(run.aux):
            batch = model.batch(i)
            np.testing.assert_allclose(aux["mean"], batch["mask"].mean(), rtol=1e-12)
            np.testing.assert_array_equal(aux["first"], batch["tokens"][:, 0])
    kernel = run.state[0]["layers"]["query"]["kernel"]
    assert kernel.sharding.spec[len({*run.pipe.layer_counts}) - 1] == "pipe"  # dim 1 if uneven
    assert row.mesh != "tensor" or kernel.sharding.spec[2] == "model"
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(run.state[1]) if x.ndim}
    assert ("pinned_host" in kinds) == ("offload" in row.options)


@rows
def test_the_program_runs_and_keeps_what_the_schedule_says(row):
    run = run_of(row)
    found, schedule, options = run.ticks, run.pipe.schedule, row.options
    iterations, permutes = scheduled(run.pipe)
    assert found.runs == (2 if "microbatches" in options else 1)
    assert found.iterations == iterations
    assert found.permutes == found.runs * permutes
    activations, residuals = found.activations, found.residuals
    assert (activations.found, residuals.found) == (activations.scheduled, residuals.scheduled)
    assert (residuals.nbytes > 0) == (schedule.splits_backward or not row.recompute)
    if not run.has_aux:
        assert (found.others, found.excess, found.copied) == (0, 0, 0)
    examples = model.BATCH // run.replicas // row.size[1] // found.runs
    message = 8 * examples * (model.LENGTH - 1) * model.WIDTH
    assert found.message == message
    assert activations.nbytes == activations.found * message
    if row.size == (4, 8) and row.schedule in COUNTS:
        busiest = max(schedule.check().messages)
        assert (found.iterations, found.permutes, busiest) == COUNTS[row.schedule]
        slots = SLOTS.get((row.schedule, row.recompute))
        assert slots in (None, (activations.found, residuals.found))


@cases([*filter(is_estimated, TABLE)], [*filter(is_estimated, SLOW)])
def test_wire_bytes_are_those_that_were_estimated(row):
    run = run_of(row)
    batch = jax.tree.map(lambda x: x[: model.BATCH // run.replicas], model.batch(0))
    expected = run.planned_wire + pipeline_wire(run.pipe, run.params, batch)
    # Beside the loss, its weight, aux and a norm.
    assert 0 <= run.wire_bytes - expected <= 512
