"""Stages of unequal numbers of layers: no optimizer sees rows of padding, in no step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from sharding.pipeline import one_f_one_b, pipedream_2bw

from ...tiers import tiers
from . import model
from .model import linear_embed, mesh_of, squared_head

pytestmark = pytest.mark.usefixtures("x64")

WIDTH, UPDATES = 8, 4
# Rates that clip; means over stacked arrays.
OPTIMIZERS = {
    "clip": optax.chain(optax.clip_by_block_rms(1e-2), optax.trace(0.9), optax.scale(-0.1)),
    "came": optax_ext.came(1e-3),
    "adafactor": optax_ext.adafactor(1e-2),
    "lamb": optax_ext.lamb(1e-2),
}


def init(num_layers):
    """Layers of unequal scale; ``odd`` has no dim that stages divide."""
    rng = np.random.default_rng(0)
    scale = np.logspace(-1, 0, num_layers)[:, None, None]
    layers = {"w": scale * rng.normal(size=(num_layers, WIDTH, WIDTH)) / 2}
    layers["odd"] = rng.normal(size=(num_layers, 33)) / 8
    ends = {"in": rng.normal(size=(3, WIDTH)), "out": rng.normal(size=(WIDTH, 2))}
    return ends | {"layers": layers}


def block(layer, h, batch):
    del batch
    return h + 0.3 * jnp.tanh(h @ layer["w"] + jnp.sum(layer["odd"] ** 2))


def batch(step):
    rng = np.random.default_rng(step + 1)
    weight = 10 ** rng.uniform(-1, 0.5, 16)
    return {"x": rng.normal(size=(16, 3)), "y": rng.normal(size=(16, 2)), "weight": weight}


def loss(params, batch):
    """The mean, on one device."""
    body = functools.partial(jax.lax.scan, lambda h, layer: (block(layer, h, batch), None))
    x, _ = body(linear_embed(params, batch), params["layers"])
    total, weight = squared_head(params, x, batch)
    return total / weight


def pipeline(counts, mesh):
    schedule = one_f_one_b(mesh.shape["pipe"], 4)
    ends = {"embed": linear_embed, "head": squared_head}
    return shd.Pipeline(mesh, schedule, num_layers=counts, block=block, **ends)


CASES = [(name, counts) for name in OPTIMIZERS for counts in ((1, 2, 1, 2), (4, 1, 1, 2))]
FAST = [("clip", (4, 1, 1, 2)), ("came", (1, 2, 1, 2)), ("lamb", (4, 1, 1, 2))]


@pytest.mark.parametrize(("name", "counts"), tiers(CASES, FAST))
def test_equals_one_device(name, counts):
    """Stages divide eight layers, and not six; over two data shards."""
    tx, params = OPTIMIZERS[name], init(sum(counts))
    pipe = pipeline(counts, mesh_of(data=2, pipe=4))
    zero = shd.Zero(pipe.mesh, stage=2, min_shard_size=0)
    make = model.make_of(lambda: pipe.stack(params), tx)
    specs = pipe.param_specs(jax.eval_shape(make)[0])
    of_layers = specs["layers"]["w"], specs["layers"]["odd"]
    assert of_layers == ((P(None, "pipe"), P()) if sum(counts) == 6 else (P("pipe"), P("pipe")))
    state = model.run(zero, make, tx, pipe, batch, UPDATES, specs)
    want, _ = model.alone(model.make_of(lambda: params, tx), tx, loss, batch, UPDATES)
    model.assert_close(pipe.unstack(zero.full_params(state)), want[0], 1e-12)
    if name == "clip":  # sums a few norms alone
        planned = shd.plan.estimate(params, tx, zero, param_specs=specs, gathered_once="")
        one = jax.tree.map(lambda x: x[:8], batch(0))
        wire = planned.stage(planned.requested).wire + shd.plan.pipeline_wire(pipe, params, one)
        step = model.lowered(zero, make, tx, pipe, batch(0), specs)
        assert 0 <= shd.audit(step.compile()).wire_bytes - wire <= 512


def test_stages_without_flushes_have_as_many_layers_each():
    pipe = pipeline((2, 1), mesh_of(pipe=2))
    message = r"as many layers on each stage, got \(2, 1\) on 2\. Give a number"
    with pytest.raises(ValueError, match=message):
        shd.AsyncPipeline(pipe, pipedream_2bw(2, 4, UPDATES), optax.sgd(0.1))
