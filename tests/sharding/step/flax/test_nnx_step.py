"""Flax nnx: models updated in place with their optimizers, and classes that gather themselves."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding import sync
from sharding.step.flax import _nnx

from ....flax_nnx import needs_nnx, nnx
from ....tiers import slow
from ..runs import F64, ROWS, STEPS, TOLERANCE, TX, WIDTH, assert_close, batch, draw, zero_of

pytestmark = [pytest.mark.usefixtures("x64"), needs_nnx]
# Below the scale of its updates: their clipping would hide that of the gradients, its state not.
FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=4)

if nnx is not None:

    class Seen(nnx.Variable):
        """Counts examples."""

    def init(key, shape, dtype):
        """Draws nothing, which would compile slowly."""
        return jnp.asarray(draw(np.empty(shape)), dtype)

    class Block(nnx.Module):
        def __init__(self, rngs, partitioned):
            mark = nnx.with_partitioning if partitioned else lambda init, names: init
            up, down = mark(init, (None, "model")), mark(init, ("model", None))
            self.up = nnx.Linear(WIDTH, 32, kernel_init=up, rngs=rngs, **F64)
            self.down = nnx.Linear(32, WIDTH, use_bias=False, kernel_init=down, rngs=rngs, **F64)
            self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs, **F64)

        def __call__(self, x):
            return x + jnp.tanh(self.norm(self.down(jnp.tanh(self.up(x)))))

    class Model(nnx.Module):
        """Its last layer has the weights of the first; it counts what it has seen."""

        def __init__(self, rngs, partitioned=False):
            self.inputs = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs, **F64)
            self.blocks = nnx.List([Block(rngs, partitioned) for _ in range(2)])
            self.outputs = self.inputs
            self.seen = Seen(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.seen[...] += x.shape[0]
            x = self.inputs(x)
            for block in self.blocks:
                x = block(x)
            return self.outputs(x)[:, :8]


def make(tx=TX, partitioned=False):
    lm = Model(nnx.Rngs(0), partitioned)
    nnx.update(lm, jax.tree.map(lambda x: x.astype(float), nnx.state(lm, nnx.BatchStat)))
    return lm, nnx.Optimizer(lm, tx, wrt=nnx.Param)


def loss_fn(lm, batch):
    return jnp.mean((lm(batch["x"]) - batch["y"]) ** 2)


def values(lm, optimizer):
    """Everything but random keys."""
    return nnx.state(lm, nnx.Not(nnx.RngState)), optimizer.opt_state, optimizer.step


@functools.cache
def reference(tx):
    lm, optimizer = make(tx)

    @nnx.jit
    def step(lm, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(lm, batch)
        optimizer.update(lm, grads)
        return loss

    losses = [float(step(lm, optimizer, batch(i))) for i in range(STEPS)]
    return values(lm, optimizer), losses


# stage, mesh, kind of axes, whether nnx_init makes the model, transformation
CASES = [
    (1, "four", AxisType.Explicit, False, TX),
    (2, "tensor", AxisType.Auto, True, FACTORED),
    (3, "replicas", AxisType.Auto, True, TX),
]


@functools.cache
def run(case):
    stage, mesh, kind, born_sharded, tx = case
    zero = zero_of(stage, mesh, kind, gathered_blocks=r"^blocks/\d+$")
    init = functools.partial(make, tx, mesh == "tensor")
    lm, optimizer = zero.nnx_init(init) if born_sharded else init()
    step = zero.nnx_train_step(loss_fn, reductions={Seen: "sum"})
    losses = [float(step(lm, optimizer, zero.put(batch(i)))["loss"]) for i in range(STEPS)]
    return zero, lm, optimizer, losses


@pytest.mark.parametrize(
    "case",
    [*CASES[1:], pytest.param(CASES[0], marks=pytest.mark.slow)],
    ids=lambda case: f"stage {case[0]}, {case[1]}",
)
def test_in_place(case):
    _, lm, optimizer, losses = run(case)
    expected, expected_losses = reference(case[-1])
    assert_close(values(lm, optimizer), expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    assert lm.seen[...] == ROWS * STEPS
    assert lm.outputs is lm.inputs
    # Only in the step does a block gather, and a norm name axes.
    assert lm.blocks[0].norm.axis_name is None
    assert type(lm.blocks[0]) is Block
    specs = lm.blocks[1].up.kernel[...].sharding.spec, lm.blocks[1].down.kernel[...].sharding.spec
    assert specs == {1: (P(), P()), 2: (P(None, "model"), P("model", None))}.get(
        case[0], (P(None, "data"), P("data"))
    )


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: f"stage {case[0]}, {case[1]}")
def test_export_and_placement(case):
    """Of a model, alone or with its optimizer; specs are those of arrays, else of metadata."""
    zero, lm, optimizer, _ = run(case)
    alone, _ = make()
    nnx.update(alone, zero.full_params(lm))
    assert isinstance(zero.full_params((lm, optimizer))["inputs"]["kernel"], np.ndarray)
    assert_close(nnx.state(alone, nnx.Param), nnx.state(lm, nnx.Param))

    found = zero.describe((lm, optimizer))
    for row, x in zip(found.rows, jax.tree.leaves(nnx.state(lm, nnx.Param)), strict=False):
        assert row.bytes_per_device == x.addressable_shards[0].data.nbytes, row
    assert {row.part for row in found.rows} == {"params", "grads", "opt_state"}
    of_params = [row for row in found.rows if row.part != "opt_state"]
    assert list(zero.describe(lm).rows) == of_params
    with nnx.use_eager_sharding(False):
        types = nnx.eval_shape(functools.partial(make, case[-1], case[1] == "tensor"))
    assert zero.describe(types).rows == found.rows


def test_evaluation():
    zero, lm, _, _ = run(CASES[2])
    alone, _ = make()
    nnx.update(alone, jax.tree.map(jnp.array, jax.device_get(nnx.state(lm))))
    seen = int(lm.seen[...])
    for one in (lm, alone):
        one.eval()
    found = zero.nnx_eval_step(lambda lm, batch: lm(batch["x"]))(lm, zero.put(batch(0)))
    lm.train()
    np.testing.assert_allclose(found, alone(batch(0)["x"]), rtol=1e-10)
    assert lm.seen[...] == seen  # only read


def test_attributes_without_a_hash_and_a_rate_set_between_steps():
    """Static attributes are part of what a program is compiled for; a scalar is not."""

    def make():
        lm = nnx.Linear(WIDTH, 8, kernel_init=init, rngs=nnx.Rngs(0), **F64)
        lm.cfg = {"scale": 1.0, "names": ["a"], "plain": types.SimpleNamespace(width=8)}
        return lm, nnx.Optimizer(lm, optax.inject_hyperparams(optax.adam)(0.1), wrt=[nnx.Param])

    def loss_fn(lm, batch):
        y = lm.cfg["scale"] * lm(batch["x"])
        y = y / (1 + jnp.std(y)) if lm.cfg["scale"] > 1 else y  # rows meet
        return jnp.mean((y - batch["y"]) ** 2)

    @nnx.jit
    def alone(lm, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(lm, batch)
        optimizer.update(lm, grads)
        return {"loss": loss}

    zero = zero_of(2)
    sharded = zero.nnx_train_step(loss_fn)
    found = {}
    for step, (lm, optimizer) in {sharded: zero.nnx_init(make), alone: make()}.items():
        losses = found[step] = []
        for i, (scale, rate) in enumerate([(1.0, 0.1), (1.0, 0.02), (2.0, 0.02), (1.0, 0.3)]):
            lm.cfg = {**lm.cfg, "scale": scale}
            optimizer.opt_state.hyperparams["learning_rate"].set_value(rate)
            losses.append(float(step(lm, optimizer, zero.put(batch(i)))["loss"]))
        if step is sharded:
            losses.append(float(zero.nnx_eval_step(loss_fn)(lm, zero.put(batch(0)))))
        else:
            losses.append(float(loss_fn(lm, batch(0))))
    np.testing.assert_allclose(*found.values(), rtol=TOLERANCE)
    # What a loss does with rows may depend on attributes: each is proven, and compiled, once.
    assert [x.run._cache_size() for x in sharded._step._programs.values()] == [1, 1]


def test_specs_of_metadata():
    """Below a pair of ``nnx.State``, too, which is how a step of one's own has them."""
    with nnx.use_eager_sharding(False):
        lm = nnx.eval_shape(lambda: Model(nnx.Rngs(0), partitioned=True))
    params = nnx.state(lm, nnx.Param)
    zero = zero_of(3, "tensor")
    specs, moments = zero.specs((params, jax.eval_shape(TX.init, params)), tx=TX)
    assert specs["blocks"][0]["up"]["kernel"].get_value() == P("data", "model")
    assert moments[0].trace["blocks"][1]["down"]["kernel"].get_value() == P("model", "data")


def dropped_units(devices, microbatches):
    """``(model before, after, masks of two steps)`` of rows that are the same."""

    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def make():
        lm = Dropping(nnx.Rngs(0))
        return lm, nnx.Optimizer(lm, TX, wrt=nnx.Param)

    def loss_fn(lm, x):
        y = lm.dropout(x)
        return jnp.mean(y) * lm.scale[...], y == 0

    zero = zero_of(2, {8: "flat", 4: "four", 1: "one"}[devices])
    lm, optimizer = zero.nnx_init(make)
    step = zero.nnx_train_step(loss_fn, has_aux=True, microbatches=microbatches)
    masks = [step(lm, optimizer, np.ones((8, WIDTH)))["aux"] for _ in range(2)]
    return make()[0], lm, np.stack(masks)


def test_random_state_of_the_model():
    """Masks differ by step and micro-batch, and do not depend on how many devices there are."""
    start, lm, masks = dropped_units(8, 1)
    for devices in (4, 1):
        np.testing.assert_array_equal(dropped_units(devices, 1)[2], masks)
    for found in (masks, dropped_units(4, 2)[2]):
        assert len({mask.tobytes() for mask in found.reshape(-1, WIDTH)}) == 16
    # Keys stay those of the run, counts move on by one a step.
    keys = zip(*(jax.tree.leaves(nnx.state(m, nnx.RngKey)) for m in (lm, start)), strict=True)
    assert all((jax.random.key_data(a) == jax.random.key_data(b)).all() for a, b in keys)
    counts = [jax.tree.leaves(nnx.state(m, nnx.RngCount)) for m in (lm, start)]
    assert {int(a - b) for a, b in zip(*counts, strict=True)} == {2}


if nnx is not None:

    class Average(nnx.Variable):
        """Of the weights."""

    class Averaging(nnx.Module):
        """Its average begins as its weights; a teacher has its own weights."""

        def __init__(self):
            self.student = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=nnx.Rngs(0))
            self.teacher = nnx.clone(self.student)
            self.average = Average(self.student.kernel[...])
            self.last = nnx.Linear(WIDTH, 8, kernel_init=init, rngs=nnx.Rngs(1))

        def __call__(self, x):
            self.average[...] = 0.5 * self.average[...] + 0.5 * self.student.kernel[...]
            y = self.student(x)
            self.last.hidden = nnx.Intermediate(y)
            return self.last(y + self.teacher(x))


def averaging():
    lm = Averaging()
    filters = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("teacher")))
    return lm, nnx.Optimizer(lm, TX, wrt=filters)


def test_arrays_that_modules_share():
    """A donated array must not be given twice: on CPUs that ends the process."""
    lm, optimizer = averaging()
    alone = np.asarray(lm.student.kernel[...])
    step = zero_of(2, "one").nnx_train_step(lambda lm, x: jnp.mean(lm(x) ** 2))
    for _ in range(2):
        step(lm, optimizer, np.ones((8, WIDTH), np.float32))
        lm(jnp.ones((2, WIDTH)))  # leaves an intermediate value, which a step does not carry
    np.testing.assert_array_equal(lm.teacher.kernel[...], alone)
    assert not np.array_equal(lm.student.kernel[...], alone)
    assert lm.average[...].shape == (WIDTH, WIDTH)


def test_options_of_train_step():
    def with_aux(lm, batch, key):
        losses = jnp.mean((lm(batch["x"]) - batch["y"]) ** 2, axis=1)
        aux = {"losses": losses, "key": jax.random.key_data(key)[None]}
        return (losses.sum(), losses.size), aux

    zero = zero_of(2)
    lm, optimizer = averaging()
    options = {"has_aux": True, "weighted": True, "rngs": True, "grad_norm": True}
    step = zero.nnx_train_step(with_aux, donate=False, **options)
    # A step places the model; so does lowering it.
    assert "stablehlo" in step.lower(lm, optimizer, batch(0), jax.random.key(1)).as_text()
    clone = nnx.clone(lm)
    before = jax.tree.structure(nnx.state(lm))
    found = step(lm, optimizer, batch(0), jax.random.key(1))
    np.testing.assert_allclose(found["loss"], found["aux"]["losses"].mean(), rtol=1e-6)
    assert found["weight"] == ROWS
    assert found["grad_norm"] > 0
    assert len(found["aux"]["key"]) == 1  # that of one device
    assert jax.tree.structure(nnx.state(lm)) == before  # what the loss creates is dropped
    assert not clone.student.kernel[...].is_deleted()  # as it was not donated
    for key in (jax.random.key(1), None):  # folded by the step
        args = [batch(0)] if key is None else [batch(0), key]
        again, then = (step(lm, optimizer, *args)["aux"]["key"] for _ in range(2))
        of_step = jax.random.key(0) if key is None else key
        of_step = jax.random.fold_in(of_step, optimizer.step[...] - 1)
        of_microbatch = jax.random.fold_in(of_step, 0)
        np.testing.assert_array_equal(then[0], jax.random.key_data(of_microbatch))
        assert not np.array_equal(again, then)


def test_what_a_step_of_nnx_cannot_do_raises():
    lm, optimizer = averaging()
    for call in (
        lambda zero: zero.nnx_init(averaging),
        lambda zero: zero.nnx_train_step(loss_fn)(lm, optimizer, batch(0)),
    ):
        with pytest.raises(ValueError, match="this gradient sync has a state"):
            call(zero_of(2, sync=sync.powersgd(2)))
    for stage in (2, 3):
        missing = zero_of(stage, gathered_blocks="Decoder")
        message = r"'Decoder' is neither .* It has .*Block \(blocks/0\)"
        with pytest.raises(ValueError, match=message):
            _nnx.prepare(missing, Model(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"calls <lambda>\(model, batch, key\), .* \(model, x\)"):
        zero_of(2).nnx_train_step(lambda model, x: 0.0, rngs=True)
    with pytest.raises(ValueError, match="the model is not on the mesh"):
        zero_of(2).nnx_eval_step(loss_fn)(lm, batch(0))

    def removing(lm, batch):
        del lm.average
        return lm.student(batch["x"]).sum()

    with pytest.raises(ValueError, match="removed the variable 'average'"):
        zero_of(2).nnx_train_step(removing).lower(lm, optimizer, batch(0))


@pytest.mark.parametrize("scanned", [True, slow(False)])
def test_update_in_the_backward_pass(scanned):
    """Of layers in ``nnx.scan`` or a list, with dropout, and batch norms there and outside."""
    norm = functools.partial(nnx.BatchNorm, WIDTH, momentum=0.9, **F64)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            options = {"use_bias": False, "kernel_init": init, "rngs": rngs}
            self.linear = nnx.Linear(WIDTH, WIDTH, **options, **F64)
            self.norm, self.dropout = norm(rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            stack = nnx.split_rngs(splits=4)(nnx.vmap(Layer, in_axes=0, out_axes=0))
            self.layers = stack(rngs) if scanned else nnx.List([Layer(rngs) for _ in range(4)])
            self.first = norm(rngs=rngs)

        def __call__(self, x):
            x = self.first(x)
            if scanned:
                run = nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
                return run(x, self.layers)
            for layer in self.layers:
                x = layer(x)
            return x

    def make(tx):
        lm = Stack(nnx.Rngs(0))
        nnx.update(lm, jax.tree.map(lambda x: x.astype(float), nnx.state(lm, nnx.BatchStat)))
        return lm, nnx.Optimizer(lm, tx, wrt=nnx.Param)

    def loss_fn(lm, batch):
        return jnp.mean((lm(batch["x"])[:, :8] - batch["y"]) ** 2)

    found = []
    for update in ("after", "backward"):
        zero = zero_of(2, "one")
        lm, optimizer = make(TX)
        step = zero.nnx_train_step(loss_fn, update=update)
        losses = [step(lm, optimizer, zero.put(batch(i)))["loss"] for i in range(STEPS)]
        found.append((values(lm, optimizer), losses))
    assert_close(*found)


@pytest.mark.parametrize(
    ("kind", "partitioned"), [(AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_a_step_of_types_is_that_of_arrays(kind, partitioned):
    """To audit it for compile-only targets; parameters have metadata, or modules share arrays."""
    make_types = functools.partial(make, partitioned=True) if partitioned else averaging
    zero = zero_of(2, "tensor", kind)
    loss_fn = lambda lm, batch, key: jnp.mean(lm(batch["x"]) ** 2)  # noqa: E731
    step = zero.nnx_train_step(loss_fn, rngs=True)
    with nnx.use_eager_sharding(False):
        real, types = make_types(), nnx.eval_shape(make_types)
    programs = [step.lower(*pair, zero.put(batch(0))).as_text() for pair in (real, types)]
    assert step.describe(*types).rows == step.describe(*real).rows
    assert programs[0] == programs[1]
    evaluate = zero.nnx_eval_step(lambda lm, batch: lm(batch["x"]))
    programs = [evaluate.lower(lm, zero.put(batch(0))).as_text() for lm, _ in (real, types)]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("view", ["device", "global"])
def test_a_model_that_names_axes_of_another_mesh(view):
    """They shard nothing, which ``describe`` says; ``param_specs`` go before names."""

    def make():
        lm = nnx.Linear(
            WIDTH, 8, kernel_metadata={"out_sharding": ("fsdp", "model")}, rngs=nnx.Rngs(0)
        )
        return lm, nnx.Optimizer(lm, TX, wrt=nnx.Param)

    zero, found = zero_of(2, "tensor", view=view), []
    for specs, kept in ((None, P(None, "model")), (P(), P())):
        with nnx.use_eager_sharding(False):
            placed = make()
        step = zero.nnx_train_step(loss_fn, param_specs=specs)
        for lm, optimizer in (placed, zero.nnx_init(make, param_specs=specs)):
            found.append(float(step(lm, optimizer, zero.put(batch(0)))["loss"]))
            assert lm.kernel[...].sharding.spec == kept
        assert "names 'fsdp', which the mesh lacks" in str(zero.describe(placed))
    np.testing.assert_allclose(found, found[0], rtol=1e-6)
