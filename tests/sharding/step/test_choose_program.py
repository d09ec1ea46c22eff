"""A loss is that of all rows, as under jit, by either program; who asks for more says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import sharding as shd
from optax_ext import gradient_noise_scale

from ...tiers import slow, tiers
from .. import model
from . import runs
from .runs import ROWS, WIDTH

pytestmark = pytest.mark.usefixtures("x64")
TX = optax.sgd(0.05, momentum=0.9)


def params():
    shapes = {"layers": (2, WIDTH, WIDTH), "scale": (WIDTH,), "out": (WIDTH, 8)}
    return runs.draw({k: jax.ShapeDtypeStruct(s, jnp.float64) for k, s in shapes.items()})


make = model.make_of(params, TX)


def data(step):
    """Devices have rows of other scale, and others of them masked."""
    rng = np.random.default_rng(100 + step)
    mask = rng.random(ROWS) > np.linspace(0.1, 0.9, ROWS)
    return runs.batch(step) | {"mask": mask, "weight": rng.uniform(0.0, 0.2, ROWS)}


def outputs(p, batch):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    x, _ = lax.scan(layer, batch["x"] * p["scale"][None] * 0.1, p["layers"])
    return x @ p["out"] - batch["y"]


def each(p, batch):
    return jnp.mean(outputs(p, batch) ** 2, -1)


def contrastive(p, batch):
    z = outputs(p, batch)
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    labels = jnp.arange(len(z))[::-1]
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, labels).mean()


def batch_norm(p, batch):
    z = outputs(p, batch)
    mean, var = z.mean(0, keepdims=True), z.var(0, keepdims=True)
    return jnp.mean(((z - mean) / jnp.sqrt(var + 1e-3) * p["scale"][None, :8] - 1) ** 4)


def masked(p, batch):
    return jnp.sum(each(p, batch) * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)


@jax.custom_vjp
def scaled_by_itself(total):
    return total


scaled_by_itself.defvjp(lambda x: (x, x), lambda x, g: (g * x,))


# Each with its program, and whether micro-batches are parts of it.
LOSSES = {
    "mean": (lambda p, b: each(p, b).mean(), True, True),
    "sum": (lambda p, b: each(p, b).sum() / 50, True, True),
    "masked": (masked, True, True),
    "where": (lambda p, b: jnp.mean(each(p, b), where=b["mask"]), True, True),
    # The sum of the weights of a device, and of a micro-batch, is clipped; that of all is not.
    "clipped": (
        lambda p, b: jnp.sum(each(p, b) * b["weight"]) / jnp.maximum(b["weight"].sum(), 1.0),
        True,
        True,
    ),
    "two ratios": (
        lambda p, b: jnp.average(each(p, b), weights=b["weight"]) + masked(p, b),
        True,
        True,
    ),
    "ratio of means": (
        lambda p, b: jnp.mean(each(p, b) * b["mask"]) / jnp.mean(b["mask"]),
        True,
        True,
    ),
    # A divisor that is trained, too, is known after the rows are.
    "gated": (
        lambda p, b: (
            jnp.sum(each(p, b) * jnp.exp(outputs(p, b)[:, 0] * 0.01))
            / jnp.sum(jnp.exp(outputs(p, b)[:, 0] * 0.01))
        ),
        False,
        False,
    ),
    # Python that reads the number of rows, which for a device is another.
    "a length": (lambda p, b: each(p, b).sum() / max(len(b["x"]), 20), False, False),
    "padded rows": (lambda p, b: jnp.pad(each(p, b), (0, -len(b["x"]) % 16)).mean(), False, False),
    "own derivative of a sum": (lambda p, b: scaled_by_itself(each(p, b).mean()), False, False),
    "contrastive": (contrastive, False, False),
    "batch norm": (batch_norm, False, False),
    "variance": (lambda p, b: -jnp.log(each(p, b).std() + 1), False, False),
    "first row": (lambda p, b: each(p, b)[0] + each(p, b).mean(), False, False),
}


PLACES = [(2, "flat", 1), (3, "replicas", 1), (3, "flat", 2), (1, "torus", 2), (2, "replicas", 4)]
CASES = [(name, *place) for name in LOSSES for place in PLACES]
# Each loss on two of them, of which one has micro-batches.
FAST = [(x, *PLACES[k]) for i, x in enumerate(LOSSES) for k in (i % 2, 2 + i % 3)]


@pytest.mark.parametrize(("name", "stage", "mesh", "microbatches"), tiers(CASES, FAST))
def test_a_loss_is_that_of_all_rows(name, stage, mesh, microbatches):
    """Trained for some steps, and evaluated, as on one device, by the program that is proven."""
    loss, per_device, has_parts = LOSSES[name]
    zero = runs.zero_of(stage, mesh)
    step = zero.train_step(loss, tx=TX, microbatches=microbatches)
    state = zero.init(make, tx=TX)
    if microbatches > 1 and not has_parts:
        with pytest.raises(ValueError, match="train another loss than that of the batch"):
            step(state, zero.put(data(0)))
        return
    assert step.loss_program(state, zero.put(data(0))).per_device is per_device
    found = runs.train(zero, make, loss, tx=TX, data=data, microbatches=microbatches)
    expected = model.alone(make, TX, loss, data, runs.STEPS)
    model.assert_close(found[0][0], expected[0][0], 1e-11)
    losses = [[float(m["loss"]) for m in found[1]], [float(x) for x in expected[1]]]
    np.testing.assert_allclose(*losses, rtol=1e-11)
    value = zero.eval_step(loss)(found[0], zero.put(data(9)))
    np.testing.assert_allclose(value, loss(zero.full_params(found[0]), data(9)), rtol=1e-11)


@pytest.mark.parametrize(("mesh", "traces"), [("one", 2), ("four", 4)])
def test_how_often_a_first_call_traces_a_loss(mesh, traces):
    """On one device nothing is proven; a loss and its totals are proven by one pair of traces."""
    calls = []

    def loss(p, batch):
        calls.append(batch)
        return masked(p, batch)

    zero = runs.zero_of(2, mesh)
    state = zero.init(make, tx=TX)
    zero.train_step(loss, tx=TX).lower(state, zero.put(data(0)))
    assert len(calls) == traces


# --- What a loss returns beside its value, draws and prints ---------------------------------------


@pytest.mark.parametrize("rngs", [True, "per_example"])
@pytest.mark.parametrize("mesh", ["one", "four", "torus"])
def test_masks_are_those_of_one_device(mesh, rngs):
    def loss(p, batch, key):
        draw = lambda key, x: x * jax.random.bernoulli(key, 0.7, x.shape)  # noqa: E731
        drop = draw if rngs is True else jax.vmap(draw)
        return jnp.mean(drop(key, outputs(p, batch)) ** 2)

    key, found = jax.random.key(3), []
    for name in ("one", mesh):
        zero = runs.zero_of(3, name)
        run = zero.value_and_grad(loss, rngs=rngs)
        found.append(run(zero.place(params()), zero.put(data(0)), key))
    model.assert_close(found[1], found[0], 1e-12)


AUX = {
    "means and rows": (lambda p, b: {"each": each(p, b), "mean": each(p, b).mean()}, True),
    "a masked mean": (masked, False),
    "an array of all": (lambda p, b: p["scale"] * 2, False),
    "a sum": (lambda p, b: each(p, b).sum(), False),
    "a mean of each column": (lambda p, b: outputs(p, b).mean(0), False),
    "a mean for each row": (lambda p, b: jnp.full(ROWS, each(p, b).mean()), False),
    "a number": (lambda p, b: jnp.asarray(2**60 + 1), False),
    "the index of a row": (
        lambda p, b: jnp.concatenate(
            [jnp.arange(len(b["x"]))[:, None], b["mask"].astype(int)[:, None]], 1
        ),
        False,
    ),
    "rows in another dim": (lambda p, b: outputs(p, b).T, False),
    "the rows reversed": (lambda p, b: each(p, b)[::-1], False),
}


@pytest.mark.parametrize("name", AUX)
def test_aux_and_evaluations_are_those_of_all_rows(name):
    fn, per_device = AUX[name]
    zero = runs.zero_of(2, "flat")
    both = lambda p, b: (each(p, b).mean(), fn(p, b))  # noqa: E731
    state, batch, want = (zero.place(params()), None), data(0), both(params(), data(0))
    run = zero.value_and_grad(both, has_aux=True)
    assert run.loss_program(state[0], batch).per_device is per_device
    model.assert_close(run(state[0], zero.put(batch))[0], want, 1e-12)
    assert zero.eval_step(fn).loss_program(state, batch).per_device is per_device
    model.assert_close(zero.eval_step(fn)(state, zero.put(batch)), want[1], 1e-12)
    found = zero.eval_step(shd.Loss(both, has_aux=True))(state, zero.put(batch))
    model.assert_close(found, want, 1e-12)


def test_a_last_batch_is_padded_and_masked():
    """Of any number of rows, also of a process that has none left."""
    zero, batch = runs.zero_of(2, "flat"), data(0)
    evaluate, state = zero.eval_step(masked), (zero.place(params()), None)
    for count in (ROWS, 11, 1):
        short = jax.tree.map(lambda x, n=count: x[:n], batch)
        padded, mask = shd.pad_rows(short, ROWS)
        found = evaluate(state, zero.put(padded | {"mask": mask}))
        np.testing.assert_allclose(found, each(params(), short).mean(), rtol=1e-12)
    padded, mask = shd.pad_rows(jax.tree.map(lambda x: x[:0], batch), ROWS)
    assert not mask.any()
    assert np.isfinite(zero.eval_step(lambda p, b: each(p, b))(state, zero.put(padded))).all()
    for wrong, rows in ((batch, ROWS - 1), (batch | {"x": batch["x"][1:]}, ROWS)):
        with pytest.raises(ValueError, match="they must agree, and be at most"):
            shd.pad_rows(wrong, rows)


def test_what_is_printed_is_of_all_rows(capfd):
    def loss(p, batch):
        value = each(p, batch).mean()
        jax.debug.print("loss {}", value)
        return value

    zero = runs.zero_of(2, "four")
    step = zero.train_step(loss, tx=TX)
    state = zero.init(make, tx=TX)
    program = step.loss_program(state, data(0))
    assert str(program).startswith("partitioned: what it prints")
    found = shd.audit(step.lower(state, data(0)), loss_program=program)
    assert f"note: the loss runs {program}" in str(found)
    _, metrics = step(state, zero.put(data(0)))
    jax.effects_barrier()
    (word, value), printed = capfd.readouterr().out.split(), float(metrics["loss"])
    assert word == "loss"
    assert float(value) == pytest.approx(printed, rel=1e-6)  # once, perhaps in float32


# --- What asks for more than the loss of all rows -------------------------------------------------


def test_micro_batches_of_a_coupled_loss_are_asked_for():
    """The error names the line where rows meet; by request their mean is trained."""
    zero = runs.zero_of(2, "four")
    state, batch = zero.place(params()), zero.put(data(0))
    line = batch_norm.__code__.co_firstlineno + 3
    with pytest.raises(ValueError, match=rf"rows meet in \w+: .*test_choose_program.py:{line}\)"):
        zero.value_and_grad(batch_norm, microbatches=2)(state, batch)
    loss = shd.Loss(batch_norm, coupled="by_microbatch")
    found = zero.value_and_grad(loss, microbatches=2)(state, batch)
    # Each has a half of the rows of each device.
    halves = jax.tree.map(lambda x: x.reshape(4, 2, 4, *x.shape[1:]).swapaxes(0, 1), data(0))
    halves = jax.tree.map(lambda x: x.reshape(2, 16, *x.shape[3:]), halves)
    parts = [jax.tree.map(lambda x, i=i: x[i], halves) for i in (0, 1)]
    mean = lambda p: sum(batch_norm(p, part) for part in parts) / 2  # noqa: E731
    model.assert_close(found, jax.value_and_grad(mean)(params()), 1e-12)


def test_micro_batches_that_would_draw_the_same():
    zero = runs.zero_of(2, "four")
    state, batch = zero.place(params()), zero.put(data(0))
    noise = lambda key, x: x * jax.random.bernoulli(key, 0.5, x.shape)  # noqa: E731
    drawn = lambda p, b: noise(jax.random.key(0), each(p, b)).mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"all would draw the same \(rngs=True gives each a key\)"):
        zero.value_and_grad(drawn, microbatches=2)(state, batch)
    keyed = lambda p, b, key: noise(key, each(p, b)).mean()  # noqa: E731
    zero.value_and_grad(keyed, rngs=True, microbatches=2)(state, batch, jax.random.key(0))
    with pytest.raises(KeyError, match="absent"):  # of the loss itself
        zero.value_and_grad(lambda p, b: p["absent"], microbatches=2)(state, batch)


def of_devices(loss, n):
    """The mean of the losses of each device's rows."""
    part = lambda x: x.reshape(n, -1, *x.shape[1:])  # noqa: E731
    return lambda p, b: jnp.mean(jax.vmap(lambda b: loss(p, b))(jax.tree.map(part, b)))


@pytest.mark.parametrize("name", ["masked", slow("contrastive"), "batch norm"])
def test_per_device_is_the_mean_over_devices(name):
    zero, loss = runs.zero_of(3, "four"), LOSSES[name][0]
    given = zero.place(params()), zero.put(data(0))
    want = jax.value_and_grad(of_devices(loss, 4))(params(), data(0))
    alone = shd.Loss(loss, per_device=True)
    model.assert_close(zero.value_and_grad(alone)(*given), want, 1e-12)
    np.testing.assert_allclose(
        zero.eval_step(alone)((given[0], None), given[1]), want[0], rtol=1e-12
    )
    with pytest.raises(ValueError, match="per_device=True was asked of a loss that"):
        zero.train_step(alone, tx=TX, update="backward")


NEED_DEVICES = {
    "sync=": ({"sync": shd.sync.dense()}, TX),
    r"Precision\(gather=...\)": ({"precision": shd.Precision(gather="int8")}, TX),
    "gradient_noise_scale": ({}, optax.chain(gradient_noise_scale(ROWS), TX)),
}


@pytest.mark.parametrize("name", NEED_DEVICES)
def test_who_needs_gradients_of_devices_says_so(name):
    options, tx = NEED_DEVICES[name]
    zero = runs.zero_of(3 if "precision" in options else 2, "four", **options)
    state = zero.init(model.make_of(params, tx), tx=tx)
    for loss in (masked, shd.Loss(batch_norm, per_device=True)):
        assert zero.train_step(loss, tx=tx, donate=False)(state, zero.put(data(0)))
    for loss in (batch_norm, shd.Loss(masked, per_device=False)):
        with pytest.raises(ValueError, match=rf"^{name} needs gradients of single devices"):
            zero.train_step(loss, tx=tx)(state, zero.put(data(0)))


def test_options_imply_others():
    zero = runs.zero_of(2, "four", update_on="host")
    assert zero.offload == "optimizer"
    found = []
    of_state = {"offload": "optimizer", "offload_min_size": 16}
    of_layers = of_state | {"offload": "all"}
    for options, update in (
        ({}, "after"),
        ({}, "backward"),
        (of_layers, "after"),
        (of_state, "backward"),
    ):
        zero = runs.zero_of(2, "four", **options)
        state = model.run(zero, make, TX, contrastive, data, 2, update=update)
        found.append(zero.full_params(state))
    for other in found[1:]:
        model.assert_close(other, found[0], 1e-12)


def test_views_are_deprecated():
    mesh = model.mesh_of(data=4)
    with pytest.warns(DeprecationWarning, match=r"Write Zero\(mesh, ...\) without it\.$"):
        zero = shd.Zero(mesh, view="global", min_shard_size=0)
    given = zero.place(params()), zero.put(data(0))
    want = jax.value_and_grad(masked)(params(), data(0))
    model.assert_close(zero.value_and_grad(masked)(*given), want, 1e-12)
    with pytest.warns(DeprecationWarning, match=r"shd\.Loss\(loss_fn, per_device=True\)"):
        zero = shd.Zero(mesh, view="device", min_shard_size=0)
    want = jax.value_and_grad(of_devices(masked, 4))(params(), data(0))
    model.assert_close(zero.value_and_grad(masked)(*given), want, 1e-12)


def test_describe_says_how_the_loss_runs():
    zero = runs.zero_of(2, "four")
    state = zero.init(make, tx=TX)
    for loss, said in (
        (masked, "per device: the loss is a ratio of sums over rows"),
        (contrastive, "partitioned: rows meet in dot_general: each row meets the others ("),
    ):
        step = zero.train_step(loss, tx=TX)
        description = str(step.describe(state, data(0)))
        assert f"the loss runs {said}" in description
        assert ("\n  per device: " in description) == (loss is contrastive)  # of its parts
        step.lower(state, data(0))
        assert str(step.describe(state, data(0))) == description
        assert "the loss runs" not in str(step.describe(state))


def test_a_collective_is_of_each_devices_loss():
    zero = runs.zero_of(2, "four")
    given = zero.place(params()), zero.put(data(0))
    loss = lambda p, b: lax.pmean(each(p, b).mean(), "data")  # noqa: E731
    with pytest.raises(ValueError, match=r"leave the collective out .* per_device=True"):
        zero.value_and_grad(loss)(*given)
    found = zero.value_and_grad(shd.Loss(loss, per_device=True))(*given)
    want = jax.value_and_grad(lambda p: each(p, data(0)).mean())(params())
    model.assert_close(found, want, 1e-12)


def test_a_planned_loss_runs_where_it_has_its_rows():
    zero = runs.zero_of(2, "four")
    state = zero.init(make, tx=TX)
    rows = lambda n: jax.tree.map(lambda x: x[:n], data(0))  # noqa: E731
    mean = LOSSES["mean"][0]
    for count, per_device in ((ROWS // 4, True), (ROWS, False)):
        plan = shd.remat.plan(mean, params(), rows(count), "1GiB")
        step = zero.train_step(plan, tx=TX, donate=False)
        assert step.loss_program(state, data(0)).per_device is per_device
        assert step(state, zero.put(data(0)))
    plan = shd.remat.plan(contrastive, params(), rows(ROWS // 4), "1GiB")
    with pytest.raises(ValueError, match="planned for 8 rows, those of one of 4 devices"):
        zero.train_step(plan, tx=TX)(state, zero.put(data(0)))
