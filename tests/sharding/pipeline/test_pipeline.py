"""A pipelined step equals one device's, for every schedule, stage of ZeRO and kind of mesh."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import sharding as shd
from sharding.pipeline import chimera, interleaved, one_f_one_b

from . import model
from .families import FAMILIES

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# Three chunks run no other code than two.
SCHEDULES = {name: make for name, make in FAMILIES.items() if name != "interleaved-3-aligned"}


def mesh_of(data, pipe, kind=AUTO):
    devices = jax.devices()[: data * pipe]
    return jax.make_mesh((data, pipe), ("data", "pipe"), axis_types=(kind,) * 2, devices=devices)


def check(pipe, zero, name, variant, **options):
    shards = zero.num_shards, pipe.schedule.num_microbatches
    shards = shards if variant == "dropout" else ()
    want, expected = model.train_alone(name, variant, *shards, **options)
    params, losses, _ = model.train(pipe, zero, name, variant)
    distance, leaf = model.worst_leaf(params, want)
    assert distance < 1e-12, leaf
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


# schedule, stages, micro-batches, model, stage of ZeRO, mesh, optimizer, recompute
ROWS = [
    ("gpipe", 4, 8, "tied", 0, AUTO, "came", True),
    ("gpipe", 2, 4, "masked", 1, EXPLICIT, "adamw", False),
    ("gpipe", 8, 6, "untied", 2, AUTO, "came", True),  # fewer micro-batches than stages
    ("gpipe", 3, 6, "dropout", 3, EXPLICIT, "adamw", True),  # 8 layers on 3 stages
    ("1f1b", 4, 6, "untied", 1, AUTO, "adamw", False),  # no multiple of the stages
    ("1f1b", 2, 2, "dropout", 0, EXPLICIT, "came", True),
    ("1f1b", 8, 8, "masked", 3, AUTO, "came", True),
    ("1f1b", 3, 4, "tied", 2, EXPLICIT, "came", False),
    ("1f1b-aligned", 4, 8, "masked", 2, EXPLICIT, "came", True),
    ("1f1b-aligned", 2, 6, "tied", 3, AUTO, "adamw", False),
    ("1f1b-aligned", 8, 4, "dropout", 1, AUTO, "came", True),
    ("1f1b-aligned", 3, 8, "untied", 0, AUTO, "came", True),
    ("interleaved-2", 4, 4, "dropout", 2, AUTO, "adamw", True),
    ("interleaved-2", 2, 4, "untied", 3, EXPLICIT, "came", False),
    ("interleaved-2", 4, 8, "masked", 0, AUTO, "came", True),
    ("interleaved-2", 3, 3, "tied", 1, AUTO, "came", True),  # 8 layers in 6 groups
    ("interleaved-2-aligned", 4, 8, "tied", 3, EXPLICIT, "came", True),
    ("interleaved-2-aligned", 2, 4, "dropout", 2, EXPLICIT, "came", False),
    ("interleaved-2-aligned", 4, 4, "untied", 0, AUTO, "adamw", True),
    ("interleaved-2-aligned", 2, 2, "masked", 1, AUTO, "came", True),
    ("zb-h1", 4, 8, "untied", 3, AUTO, "came", True),
    ("zb-h1", 2, 2, "masked", 2, AUTO, "adamw", True),
    ("zb-h1", 8, 8, "tied", 1, EXPLICIT, "came", False),
    ("zb-h1", 3, 4, "dropout", 0, AUTO, "came", False),
    ("chimera", 4, 8, "dropout", 3, AUTO, "came", True),
    ("chimera", 2, 4, "tied", 2, EXPLICIT, "came", True),
    ("chimera", 4, 4, "masked", 0, AUTO, "adamw", False),
    ("chimera", 8, 8, "untied", 1, EXPLICIT, "came", True),
    ("zb-v", 4, 8, "tied", 2, AUTO, "came", True),
    ("zb-v", 2, 2, "masked", 3, EXPLICIT, "adamw", False),
    ("zb-v", 3, 4, "dropout", 0, AUTO, "came", False),
    ("zb-v", 4, 6, "untied", 1, EXPLICIT, "adamw", True),
]


def test_rows_pair_everything():
    """Each schedule meets each model, stage of ZeRO, kind of mesh and way to the residuals."""
    others = {
        3: model.VARIANTS,
        4: range(4),
        5: (AUTO, EXPLICIT),
        6: ("came", "adamw"),
        7: (True, False),
    }
    for column, values in others.items():
        pairs = {(row[0], row[column]) for row in ROWS}
        assert pairs == set(itertools.product(SCHEDULES, values)), column


@pytest.mark.slow(keep=4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "variant", "zero", "kind", "name", "recompute"),
    ROWS,
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_float64(schedule, stages, microbatches, variant, zero, kind, name, recompute):
    mesh = mesh_of(8 // stages, stages, kind)
    table = SCHEDULES[schedule](stages, microbatches)
    pipe = model.pipeline(mesh, table, variant, recompute=recompute)
    check(pipe, shd.Zero(mesh, stage=zero, min_shard_size=0), name, variant)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", model.OPTIMIZERS)
def test_optimizers_see_the_unstacked_model(name):
    mesh = mesh_of(2, 4)
    pipe = model.pipeline(mesh, interleaved(4, 4))
    check(pipe, shd.Zero(mesh, stage=2, min_shard_size=0), name, "tied", unstacked=True)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("schedule", "kind"), [(one_f_one_b, AUTO), (interleaved, EXPLICIT), (chimera, AUTO)]
)
def test_layers_gathered_in_each_tick(schedule, kind):
    mesh = mesh_of(2, 4, kind)
    pipe = model.pipeline(mesh, schedule(4, 4), gather="tick")
    check(pipe, shd.Zero(mesh, stage=3, min_shard_size=0), "came", "tied")
