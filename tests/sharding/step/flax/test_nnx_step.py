"""nnx models with their optimizers: a sharded step in place equals ``nnx`` on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sharding as shd

from ....flax_nnx import needs_nnx, nnx
from ... import model

pytestmark = [pytest.mark.usefixtures("x64"), needs_nnx]
STEPS, WIDTH, TOLERANCE = 4, 16, 1e-12
F64 = {"param_dtype": jnp.float64}
TX = optax.adamw(1e-2)

if nnx is not None:

    class Seen(nnx.Variable):
        """Counts examples."""

    class Block(nnx.Module):
        def __init__(self, rngs, rate):
            self.up = nnx.Linear(WIDTH, 32, use_bias=False, rngs=rngs, **F64)
            self.norm = nnx.BatchNorm(32, rngs=rngs, momentum=0.9, **F64)
            self.down = nnx.Linear(32, WIDTH, rngs=rngs, **F64)
            self.dropout = nnx.Dropout(rate, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(self.down(jnp.tanh(self.norm(self.up(x)))))

    class Model(nnx.Module):
        """Its last layer has the weights of the first; it counts what it has seen."""

        def __init__(self, rngs, rate=0.0):
            self.inputs = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)
            self.blocks = nnx.List([Block(rngs, rate) for _ in range(2)])
            self.outputs = self.inputs
            self.seen = Seen(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.seen[...] += x.shape[0]
            x = self.inputs(x)
            for block in self.blocks:
                x = block(x)
            return self.outputs(x)


def make(rate=0.0):
    lm = Model(nnx.Rngs(0), rate)
    stats = nnx.state(lm, nnx.BatchStat)
    nnx.update(lm, jax.tree.map(lambda x: x.astype(jnp.float64), stats))
    return lm, nnx.Optimizer(lm, TX, wrt=nnx.Param)


def loss_fn(lm, batch):
    return jnp.mean((lm(batch["x"]) - batch["y"]) ** 2)


def batch(step):
    rng = np.random.default_rng(step)
    scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), 2)[:, None]
    return {"x": rng.normal(size=(16, WIDTH)) * scale, "y": rng.normal(size=(16, WIDTH))}


def values(lm, optimizer):
    """Everything but random keys."""
    kept = nnx.state(lm, nnx.Not(nnx.RngState)), optimizer.opt_state, optimizer.step
    return [np.asarray(x) for x in jax.tree.leaves(kept)]


@functools.cache
def reference():
    lm, optimizer = make()

    @nnx.jit
    def step(lm, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(lm, batch)
        optimizer.update(lm, grads)
        return loss

    losses = [float(step(lm, optimizer, batch(i))) for i in range(STEPS)]
    return values(lm, optimizer), losses


def zero_of(stage, devices=8, kind=AxisType.Auto, **kwargs):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    return shd.Zero(mesh, stage=stage, min_shard_size=0, **kwargs)


CASES = [
    (0, AxisType.Auto, True, 8),
    (2, AxisType.Explicit, True, 8),
    (2, AxisType.Auto, False, 4),
    (3, AxisType.Auto, True, 8),
    (3, AxisType.Explicit, False, 2),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("stage", "kind", "born_sharded", "devices"), CASES)
def test_in_place(stage, kind, born_sharded, devices):
    zero = zero_of(stage, devices, kind, gathered_blocks=r"^blocks/\d+$")
    lm, optimizer = zero.nnx_init(make) if born_sharded else make()
    step = zero.nnx_train_step(loss_fn, reductions={Seen: "sum"})
    losses = [float(step(lm, optimizer, zero.put(batch(i)))["loss"]) for i in range(STEPS)]
    expected, expected_losses = reference()
    distance, leaf = model.worst_leaf(values(lm, optimizer), expected)
    assert distance < TOLERANCE, leaf
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    assert lm.seen[...] == 16 * STEPS
    assert lm.outputs is lm.inputs
    assert lm.blocks[0].norm.axis_name is None  # only in the step
    assert type(lm.blocks[0]) is Block
    kernel = lm.blocks[0].up.kernel[...]
    assert kernel.sharding.is_fully_replicated == (stage < 3)
    if stage:
        assert not optimizer.opt_state[0].mu["inputs"]["kernel"][...].sharding.is_fully_replicated


def test_evaluation():
    zero = zero_of(3, gathered_blocks="Block")
    lm, _ = zero.nnx_init(make)
    alone, _ = make()
    for one in (lm, alone):
        one.eval()
    found = zero.nnx_eval_step(lambda lm, batch: lm(batch["x"]))(lm, zero.put(batch(0)))
    np.testing.assert_allclose(found, alone(batch(0)["x"]), rtol=1e-10)
    assert lm.seen[...] == 0  # only read


def train_with_dropout(devices, microbatches):
    zero = zero_of(2, devices)
    lm, optimizer = zero.nnx_init(functools.partial(make, 0.5))
    step = zero.nnx_train_step(loss_fn, microbatches=microbatches)
    # Batch statistics are those of a micro-batch: without them, all depends on the masks alone.
    for block in lm.blocks:
        block.norm.use_running_average = True
    losses = [float(step(lm, optimizer, zero.put(batch(i)))["loss"]) for i in range(3)]
    return lm, losses


def test_random_state_of_the_model():
    """Masks differ by step and micro-batch, and do not depend on how many devices there are."""
    lm, expected = train_with_dropout(8, 1)
    assert len(set(expected)) == 3
    start, _ = make(0.5)
    # Keys stay those of the run, counts move on by one a step.
    keys = zip(*(jax.tree.leaves(nnx.state(m, nnx.RngKey)) for m in (lm, start)), strict=True)
    assert all((jax.random.key_data(a) == jax.random.key_data(b)).all() for a, b in keys)
    counts = jax.tree.leaves(nnx.state(lm, nnx.RngCount))
    initial = jax.tree.leaves(nnx.state(start, nnx.RngCount))
    moved = [int(a - b) for a, b in zip(counts, initial, strict=True)]
    assert set(moved) == {3}
    for devices, microbatches in [(4, 2), (1, 8)]:
        _, found = train_with_dropout(devices, microbatches)
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    _, other = train_with_dropout(4, 1)
    assert not np.allclose(other, expected, rtol=1e-3)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_micro_batch_has_masks_of_its_own(microbatches):
    """Of rows that are the same, each micro-batch's are dropped otherwise."""

    def with_outputs(lm, batch):
        y = lm.blocks[0].dropout(batch["x"])
        return jnp.mean(y), y == 0

    zero = zero_of(2, 4)
    lm, optimizer = zero.nnx_init(functools.partial(make, 0.5))
    step = zero.nnx_train_step(with_outputs, has_aux=True, microbatches=microbatches)
    masks = [np.asarray(step(lm, optimizer, {"x": np.ones((8, WIDTH))})["aux"]) for _ in range(2)]
    parts = [tuple(part.ravel()) for mask in masks for part in np.split(mask, 4 * microbatches)]
    assert len(set(parts)) == len(parts)


def test_options_of_train_step():
    def with_aux(lm, batch, key):
        lm.made_here = nnx.Intermediate(batch["x"])
        y = nnx.Dropout(0.5)(lm(batch["x"]), rngs=nnx.Rngs(key))
        losses = jnp.mean((y - batch["y"]) ** 2, axis=1)
        return (losses.sum(), losses.size), {"losses": losses}

    zero = zero_of(2)
    lm, optimizer = zero.nnx_init(make)
    step = zero.nnx_train_step(with_aux, has_aux=True, weighted=True, rngs=True, grad_norm=True)
    before = jax.tree.structure(nnx.state(lm))
    first = step(lm, optimizer, zero.put(batch(0)), jax.random.key(1))
    np.testing.assert_allclose(first["loss"], first["aux"]["losses"].mean(), rtol=TOLERANCE)
    assert first["weight"] == 16
    assert first["grad_norm"] > 0
    assert jax.tree.structure(nnx.state(lm)) == before  # what the loss creates is dropped
    assert "stablehlo" in step.lower(lm, optimizer, zero.put(batch(0))).as_text()
    assert step._steps.__len__() == 1
    # A changed model is another program.
    lm.eval()
    step(lm, optimizer, zero.put(batch(0)))
    assert len(step._steps) == 2


def test_blocks_that_are_not_there_raise():
    zero = zero_of(3, gathered_blocks="Blok")
    lm, optimizer = zero.nnx_init(make)
    with pytest.raises(ValueError, match=r"'Blok' is neither .* blocks/0"):
        zero.nnx_train_step(loss_fn)(lm, optimizer, zero.put(batch(0)))


if nnx is not None:

    class Average(nnx.Variable):
        """Of the weights."""

    class Averaging(nnx.Module):
        """Its average begins as its weights; a teacher has its own weights."""

        def __init__(self):
            self.student = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.teacher = nnx.clone(self.student)
            self.average = Average(self.student.kernel[...])
            self.last = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

        def __call__(self, x):
            self.average[...] = 0.5 * self.average[...] + 0.5 * self.student.kernel[...]
            y = self.student(x)
            self.last.hidden = nnx.Intermediate(y)
            return self.last(y) + self.teacher(x)


@pytest.mark.parametrize("devices", [1, 8])
def test_arrays_that_modules_share(devices):
    """A donated array must not be given twice: on CPUs that ends the process."""
    lm = Averaging()
    filters = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("teacher")))
    optimizer = nnx.Optimizer(lm, optax.sgd(0.1), wrt=filters)
    alone = np.asarray(lm.student.kernel[...])
    zero = zero_of(2, devices)
    step = zero.nnx_train_step(lambda lm, x: jnp.mean(lm(x) ** 2))
    for _ in range(2):
        step(lm, optimizer, zero.put(np.ones((8, WIDTH), np.float32)))
        lm(jnp.ones((2, WIDTH)))  # leaves an intermediate value, which a step does not carry
    np.testing.assert_array_equal(lm.teacher.kernel[...], alone)
    assert lm.average[...].shape == (WIDTH, WIDTH)


def test_a_clone_outlives_a_step_that_does_not_donate():
    zero = zero_of(2)
    lm, optimizer = zero.nnx_init(make)
    clone = nnx.clone(lm)
    zero.nnx_train_step(loss_fn, donate=False)(lm, optimizer, zero.put(batch(0)))
    assert not clone.inputs.kernel[...].is_deleted()


def test_what_a_step_of_nnx_cannot_do_raises():
    zero = zero_of(2, sync=shd.sync.powersgd(2))
    with pytest.raises(ValueError, match="this gradient sync has a state"):
        zero.nnx_init(make)
    lm, optimizer = make()
    with pytest.raises(ValueError, match="this gradient sync has a state"):
        zero.nnx_train_step(loss_fn)(lm, optimizer, zero.put(batch(0)))
    plain = zero_of(2)
    with pytest.raises(ValueError, match="the model is not on the mesh"):
        plain.nnx_eval_step(loss_fn)(lm, plain.put(batch(0)))

    def removing(lm, batch):
        del lm.seen
        return lm.inputs(batch["x"]).sum()

    with pytest.raises(ValueError, match="removed the variable 'seen'"):
        plain.nnx_train_step(removing)(lm, optimizer, plain.put(batch(0)))


def test_lowering_places_the_model():
    lm, optimizer = make()
    zero = zero_of(2)
    assert "stablehlo" in zero.nnx_train_step(loss_fn).lower(lm, optimizer, batch(0)).as_text()
