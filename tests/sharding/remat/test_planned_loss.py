"""Plans for any loss: its results and its gradient, less memory, clear errors."""

import contextlib
import dataclasses
import functools
import itertools
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding

import sharding as shd
from sharding.plan.machine._devices import KINDS
from sharding.remat import _loss_search
from sharding.remat._loss_search import LossSearch, PlannableLoss

from ...tiers import slow, tiers
from .. import model

WIDTH, ROWS = 16, 512


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / shape[-2] ** 0.5)


def mlp(w, x):
    return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])


LAYERS = [{"up": draw(WIDTH, 64, seed=i), "down": draw(64, WIDTH, seed=i)} for i in range(6)]
STACKED = jax.tree.map(lambda *ws: jnp.stack(ws), *LAYERS)
X = draw(ROWS, WIDTH)


def skips(params, x):
    """As a U-Net: values with two uses, far from each other."""
    kept = []
    for w in params[:3]:
        kept.append(x)
        x = mlp(w, x)
    for w in params[3:]:
        x = mlp(w, x + kept.pop())
    return jnp.sum(x**2)


def with_dropout(params, batch):
    x, key = batch
    for i, w in enumerate(params):
        x = mlp(w, x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, x.shape))
    return jnp.mean(x)


def with_results(params, batch):
    """The first result is the loss; a value that is also returned, integers, unused parameters."""
    tokens, frozen = batch
    x = params["table"][tokens] @ frozen
    for w in params["layers"][:3]:
        x = jax.jit(mlp)(w, x).astype(jnp.float32).astype(x.dtype)
    return jnp.sum(jnp.sin(x)), {"x": x, "count": jnp.sum(tokens), "steps": params["steps"]}


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def with_rules(params, x):
    """Rules of derivatives, branches, a loop that is not differentiated, a checkpoint, a sort."""
    count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.sum(x > 9))
    for w in params[:2]:
        x = jax.lax.cond(count > 2, mlp, lambda w, x: x, w, doubled(x))
        x = jax.checkpoint(mlp)(w, jax.nn.relu(x) + jnp.sort(x))
    return jnp.sum(jax.nn.softmax(x) * x)


def scanned(params, x):
    def step(x, w):
        return mlp(w, x), jnp.sum(x)

    x, sums = jax.lax.scan(step, x, params, reverse=True)
    return jnp.sum(x**2) + jnp.sum(sums)


LOSSES = {
    "skips": (skips, LAYERS, X),
    "dropout": (with_dropout, LAYERS[:4], (X, jax.random.key(3))),
    "results": (
        with_results,
        {"table": draw(10, WIDTH), "layers": LAYERS, "steps": 3},
        (jnp.arange(ROWS) % 10, draw(WIDTH, WIDTH)),
    ),
    "rules": (with_rules, LAYERS, X),
    "scan": (scanned, STACKED, X),
}


@jax.custom_vjp
def printing(x):
    return x


def print_forward(x):
    jax.debug.print("{}", x[0, 0])
    return x, None


printing.defvjp(print_forward, lambda _, ct: (ct,))


def search_of(loss, params, batch):
    return LossSearch(PlannableLoss(loss, params, batch, jax.devices()[0]), None)


def gradients(loss, has_aux, *args):
    results, grads = jax.jit(jax.value_and_grad(loss, has_aux=has_aux, allow_int=True))(*args)
    return results, [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_loss(name):
    """However much is computed again or copied, in the forms for CPUs and for accelerators."""
    loss, params, batch = LOSSES[name]
    params, batch = jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.result_type(x) == jnp.float32 else x, (params, batch)
    )
    search, has_aux = search_of(loss, params, batch), name == "results"
    want = gradients(loss, has_aux, params, batch)
    most = max(s.most for *_, s in search._searches)
    again = set()
    middle, least = (most + search.least) / 2, search.least
    plans = [(search.plan(middle), "gpu"), (search.plan(least), "cpu")]
    kind = dataclasses.replace(KINDS["h100"], host_link=1e15)  # so fast that copies are worth it
    copying = LossSearch(PlannableLoss(loss, params, batch, jax.devices()[0]), kind, True)
    plans.append((copying.plan(copying.least), "gpu"))
    for found, form in plans:
        found._loss.device = types.SimpleNamespace(platform=form)
        again.add(found.work.seconds)
        jaxpr = jax.make_jaxpr(jax.grad(found, has_aux=has_aux, allow_int=True))(params, batch)
        assert ("<host>" in str(jaxpr)) == (found.host > 0) == (found is plans[-1][0])
        got = gradients(found, has_aux, params, batch)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13), got, want
        )
        jax.tree.map(np.testing.assert_array_equal, found(params, batch), loss(params, batch))
    assert len(again) > 1


def large(params, x):
    """Values of 128 KiB, and blocks of half a MiB."""
    for w in params:
        x = mlp(w, x)
    return jnp.mean(x)


def test_a_budget_is_kept():
    """By programs for CPUs, too."""
    x = jnp.tile(X, (4, 1))
    plain = jax.jit(jax.grad(large)).lower(LAYERS, x).compile().memory_analysis()
    most, seconds = plain.temp_size_in_bytes, []
    for share in (1.05, 0.8, 0.6):
        found = shd.remat.plan(large, LAYERS, x, most * share, tiles=())
        compiled = jax.jit(jax.grad(found)).lower(LAYERS, x).compile()
        assert found.check(compiled) == pytest.approx(found.peak, rel=0.02)
        assert found.peak <= found.budget == most * share
        assert 0 <= found.at_least <= found.extra_time
        seconds.append(found.extra_time)
    assert seconds[0] == 0 < seconds[1] < seconds[2] < 0.5
    assert "test_planned_loss.py:" in str(found)
    assert re.search(r"products again +[1-9][0-9.]+ MFLOP +of 1\d\d MFLOP", str(found)), str(found)
    with pytest.raises(ValueError, match=r"the smallest takes .*, [\d,]+ bytes") as error:
        shd.remat.plan(large, LAYERS, x, most * 0.35, tiles=())
    least = int(error.value.args[0].split(", ")[-1].split(" bytes")[0].replace(",", ""))
    assert shd.remat.plan(large, LAYERS, x, least, tiles=()).peak <= least < most * 0.6


def with_head(params, batch):
    """Logits are nearly all that it stores."""
    logits = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def test_a_frontier_has_plans_in_tiles_on_request():
    params = {"in": draw(8, 8), "out": draw(8, 512, seed=1)}
    batch = {"x": draw(256, 8, seed=2), "y": jnp.arange(256)}
    plain = shd.remat.frontier(with_head, params, batch)
    both = shd.remat.frontier(with_head, params, batch, tiles=(4,))
    assert {plan.tiles for plan in plain} == {1}
    assert (both[0].tiles, both[0].loss_fn) == (4, with_head)
    assert both[0].peak < plain[0].peak / 2
    assert both[-1].peak == plain[-1].peak
    assert "4 tiles" in str(both)


@pytest.mark.usefixtures("x64")
def test_tiles_are_taken_where_a_budget_needs_them():
    params = {"in": draw(8, 8), "out": draw(8, 512, seed=1)}
    batch = {"x": draw(256, 8, seed=2), "y": jnp.arange(256)}
    params, batch = to_float64((params, batch))
    plain = jax.jit(jax.value_and_grad(with_head)).lower(params, batch).compile()
    budget = plain.memory_analysis().temp_size_in_bytes / 3
    found = shd.remat.plan(with_head, params, batch, budget)
    assert (found.tiles, found.loss_fn) == (4, with_head)
    assert found.peak <= budget
    assert found.extra_time >= 0
    assert "tiles" in str(found)
    assert "4 tiles" in found.summary
    want = gradients(with_head, False, params, batch)
    jax.tree.map(close, gradients(found, False, params, batch), want)
    with pytest.raises(ValueError, match="no plan fits"):
        shd.remat.plan(with_head, params, batch, budget, tiles=())
    few = jax.tree.map(lambda x: x[:64], batch)
    of_device = shd.remat.plan(with_head, params, few, budget / 4)
    have = gradients(over_devices(of_device, batch), False, params, batch)
    jax.tree.map(close, have, want)


def test_a_hopeless_budget_is_refused_at_once(monkeypatch, capsys):
    """One operation needs more: two schedules are searched for. What takes long is reported."""
    plan, count = LossSearch.plan, []

    def counted(self, *args):
        count.append(args)
        return plan(self, *args)

    monkeypatch.setattr(LossSearch, "plan", counted)
    for long, budget, hopeless in ((1e9, 1024, True), (0.0, "1.2MiB", False)):
        monkeypatch.setattr(_loss_search, "_LONG", long)
        count.clear()
        with pytest.raises(ValueError, match="no plan fits") as error:
            shd.remat.plan(large, LAYERS, jnp.tile(X, (4, 1)), budget, tiles=())
        assert (len(count) == 2) == hopeless
        assert "_" not in str(error.value).replace("how_to/recompute", "")
        lines = capsys.readouterr().err
        assert ("s: compiling program 2\n" in lines) == (long == 0), lines


def shifted(params, x):
    """The value of the loss needs an array that its gradient does not."""
    for w in params:
        x = x + jnp.tanh(x @ w) @ w.T / 4 + 1e-2 * x.mean(0, keepdims=True)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("shifted", (0.57, 0.72, 1.02)),
        pytest.param("dropout", (0.5,), marks=pytest.mark.slow),
        ("results", (1.02,)),
        ("large", (0.8,)),  # takes more without the value
    ],
)
def test_programs_with_and_without_the_value_keep_the_budget(name, shares):
    """Of steps, which return it, and of ``jax.grad`` alone; shares of what that needs."""
    weights, x = [draw(32, 128, seed=i) for i in range(4)], draw(256, 32)
    others = {"shifted": (shifted, weights, x), "large": (large, LAYERS, jnp.tile(X, (4, 1)))}
    loss, params, batch = (LOSSES | others)[name]
    options = {"has_aux": name == "results", "allow_int": True}

    def program_of(derivative, fn):
        return jax.jit(derivative(fn, **options)).lower(params, batch).compile()

    needed = program_of(jax.grad, loss).memory_analysis().temp_size_in_bytes
    for budget in (share * needed for share in shares):
        found = shd.remat.plan(loss, params, batch, budget)
        for derivative in (jax.value_and_grad, jax.grad):
            assert found.check(program_of(derivative, found)) <= found.peak <= budget


def test_the_largest_batch_is_the_last_that_fits():
    few = LAYERS[:2]
    budget = shd.remat.frontier(large, few, jnp.tile(X, (4, 1)))[0].peak
    found = shd.remat.plan(large, few, X, budget, largest=True)
    assert found.batch.shape == (4 * ROWS, WIDTH)
    assert found.peak <= budget
    twice = jnp.ones((8 * ROWS, WIDTH))
    with pytest.raises(ValueError, match="no plan fits"):
        shd.remat.plan(large, few, twice, budget, tiles=())
    with pytest.raises(ValueError, match="no plan fits"):
        shd.remat.plan(large, few, X, 16, largest=True)
    for pattern, loss, batch in (
        ("bytes grow with its batch", lambda p, x: large(p, jnp.mean(x, 0)[None]), X),
        ("arrays with examples in dim 0", lambda p, x: large(p, X) * x, 2.0),
    ):
        with pytest.raises(ValueError, match=pattern):
            shd.remat.plan(loss, few, batch, budget, largest=True)
    both = X, jnp.eye(WIDTH)  # the second has no examples
    found = shd.remat.plan(lambda p, b: large(p, b[0] @ b[1]), few, both, budget, largest=True)
    assert [x.shape[0] for x in found.batch][1] == WIDTH


@pytest.mark.parametrize(("loss", "params"), [slow((skips, LAYERS)), (scanned, STACKED)])
def test_the_frontier_trades_bytes_for_time(loss, params):
    """Layers of loops are computed again one by one, or in segments."""
    found = shd.remat.frontier(loss, params, jnp.tile(X, (4, 1)))
    for less, more in itertools.pairwise(found):
        assert less.peak < more.peak
        assert less.extra_time > more.extra_time
    assert found[-1].extra_time < 1e-5
    assert found[0].peak < 0.9 * found[-1].peak
    assert (len({each.loops for each in found}) > 1) == (loss is scanned)
    assert ("each layer" if loss is scanned else " values") in str(found)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("devices", "stage"),
    tiers([(n, stage) for n in (4, 1) for stage in range(4)], [(4, 1), (4, 3), (1, 2)]),
)
def test_training_is_that_of_one_device(stage, devices):
    """Planned for the rows of each device, or of all, whose program is the partitioner's."""
    layers = jax.tree.map(lambda x: x.astype(jnp.float64), LAYERS)
    rows, tx = ROWS // devices // 2, optax.adam(1e-2)
    search = search_of(large, layers, draw(rows, WIDTH))
    found = search.plan(search.least)
    assert found.work.seconds > found.plain.seconds
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    make = model.make_of(lambda: layers, tx)

    def data(step):
        return draw(ROWS, WIDTH, seed=step)

    state = model.run(zero, make, tx, found, data, 3, microbatches=2)
    (want, _), _ = model.alone(make, tx, large, data, 3)
    model.assert_close(zero.full_params(state), want, 1e-12)
    step = zero.train_step(found, tx=tx, microbatches=2)
    assert step.loss_program(state, data(0)).per_device == (devices == 4)


def test_bytes_are_those_with_other_results():
    """A step returns them beside the gradient: they are not dropped from the measured program."""

    def loss(params, x):
        for w in params:
            x = mlp(w, x)
        return jnp.mean(x), jnp.sort(jnp.tile(x, (1, 64)), axis=0)[0]

    search = search_of(loss, LAYERS, jnp.tile(X, (4, 1)))
    for planned in (search.most, search.least):
        found = search.compiled(planned)
        run = jax.jit(jax.grad(found, has_aux=True))
        found.check(run.lower(LAYERS, jnp.tile(X, (4, 1))).compile())


@pytest.mark.parametrize("loss", [lambda p, x: p, lambda p, x: 3.0, lambda p, x: p * p])
def test_a_loss_that_stores_nothing(loss):
    found = shd.remat.plan(loss, 2.0, X, "1GiB")
    assert jax.value_and_grad(found)(2.0, X) == jax.value_and_grad(loss)(2.0, X)
    assert len(shd.remat.frontier(loss, 2.0, X)) == 1


def test_a_large_budget_computes_nothing_again():
    """Of a forward pass that needs most bytes beside values that it does not store."""

    def loss(params, x):
        x = mlp(params[1], mlp(params[0], x))
        largest = jnp.sum(jax.lax.top_k(x, 3)[0])
        return largest + jnp.sum(jnp.sort(x @ params[0]["up"], axis=1)[:, :5])

    assert shd.remat.plan(loss, LAYERS, X, "1TiB").extra_time == 0


def test_the_least_bytes_are_those_of_any_program():
    """That which computes nothing again may need the fewest."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

    search = search_of(loss, LAYERS[0]["up"], X)
    with pytest.raises(ValueError, match="smallest") as error:
        search.fastest(1024)
    plain = search.compiled(search.most).peak
    assert search.compiled(search.least).peak >= plain  # jax 0.10: above
    assert f"{plain:,} bytes" in str(error.value)


@pytest.mark.usefixtures("x64")
def test_loops_have_the_same_gradient_in_every_form():
    """Two loops, whose layers store values, copy some to the host, or run again in segments."""

    def loss(params, x):
        def layer(carry, w):
            x, count = carry
            x = x + checkpoint_name(jnp.sin(x @ w["up"]), "sin") @ w["down"]
            return (x * (1 + count % 2), count + 1), jnp.sum(x)

        (y, _), sums = jax.lax.scan(layer, (x, 0), params)
        y = jax.lax.scan(lambda y, w: (mlp(w, y), None), y, params, reverse=True)[0]
        return jnp.sum(y**2) + jnp.sum(sums)

    params, x = jax.tree.map(lambda x: x.astype(jnp.float64), (STACKED, X))
    want = gradients(loss, False, params, x)
    planned = PlannableLoss(loss, params, x, jax.devices()[0])
    kind = dataclasses.replace(KINDS["v5e"], host_link=1e15)  # so fast that copies are worth it
    texts = ""
    for offload in (False, True):
        for form, _, _ in LossSearch(planned, kind, offload)._searches:

            def run(params, x, form=form):
                return planned.fn([*jax.tree.leaves(params), x], form)[0]

            on_host = "<host>" in str(jax.make_jaxpr(jax.grad(run))(params, x))
            assert on_host == bool(form.host)
            have = gradients(run, False, params, x)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11), have, want)
            texts += f"{form}; "
    for text in ("nothing;", "each layer;", "each layer, and segments", "sin,", "sin (host)"):
        assert text in texts


def test_loops_of_complex_values_and_many_names():
    def loss(params, x):
        def layer(x, w):
            for i in range(15):
                x = x + checkpoint_name(jnp.sin(x @ w["up"]), f"name {i}") @ w["down"]
            return jnp.real(jnp.fft.ifft(jnp.fft.fft(x))), None

        return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)

    search = search_of(loss, STACKED, X)
    found = search.plan(search.least)
    assert found.extra_time > 0
    have, want = (gradients(fn, False, STACKED, X)[1] for fn in (found, loss))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), have, want)


def test_gradients_are_complete_before_the_next_operation():
    """XLA puts off what is not read from a barrier, and holds all that it is computed from."""
    search = search_of(skips, LAYERS, X)
    found = search.plan(search.least * 1.01)
    found._loss.device = types.SimpleNamespace(platform="gpu")  # on CPUs nothing waits
    jaxpr = jax.make_jaxpr(jax.grad(found))(LAYERS, X).jaxpr
    made = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    names = [made[v] for v in jaxpr.outvars]
    assert len(names) == 12  # the last group computes those of the first layer
    assert set(names[2:]) == {"optimization_barrier"}, names


def test_statistics_are_of_the_rows_that_are_planned():
    """Of a batch norm no device has those of all rows; by request it has its own."""
    layers = [[nn.Dense(32, use_bias=False), nn.BatchNorm(False), jnp.tanh] for _ in range(3)]
    model_ = nn.Sequential([*itertools.chain(*layers)])
    variables = model_.init(jax.random.key(0), X)
    rest = {"batch_stats": variables["batch_stats"]}

    def loss(params, x):
        y = model_.apply({"params": params, **rest}, x, mutable=["batch_stats"])[0]
        return jnp.mean(jnp.sin(y) ** 3)

    params, tx = variables["params"], optax.sgd(0.1)
    search = search_of(loss, params, X[: ROWS // 4])
    found = search.plan(search.least)
    assert any(found._schedule.again)
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=2)
    args = zero, model.make_of(lambda: params, tx), tx, found, lambda step: X, 1
    with pytest.raises(ValueError, match="those of one of 4 devices, and no device runs it"):
        model.run(*args)
    model.run(*args[:3], shd.Loss(found, per_device=True), *args[4:])


def test_a_loss_may_have_a_mesh_of_its_own():
    """Or that of the context: arrays are where ``jit`` places them."""
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto)

    def over_rows(mesh):
        def mean(params, x):
            return jax.lax.pmean(large(params, x), "data")

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return lambda params, x: jax.shard_map(mean, mesh=mesh, **specs)(params, x)

    def constrained(params, x):
        return large(params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))))

    want = gradients(large, False, LAYERS, X)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for loss, context in ((over_rows(mesh), ()), (constrained, ()), (over_rows(None), (mesh,))):
        with contextlib.ExitStack() as stack:
            for each in context:
                stack.enter_context(jax.set_mesh(each))
            found = shd.remat.plan(loss, LAYERS, X, "1GiB")
            jax.tree.map(check, gradients(found, False, LAYERS, X), want)
            program = jax.jit(jax.value_and_grad(found)).lower(LAYERS, X).compile()
            assert found.check(program) == found.peak


def test_bytes_are_those_with_a_constant_cotangent():
    """As of ``jax.grad``: the compiler copies that of a loop's result."""

    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (mlp(w, x), None), x, params)[0])

    search = search_of(loss, STACKED, X)
    found = search.compiled(search.least)
    compiled = jax.jit(jax.grad(found)).lower(STACKED, X).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= found.peak * 1.01


@pytest.mark.usefixtures("x64")
def test_arrays_of_explicit_sharding_are_planned():
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        x, params = jax.device_put((X, LAYERS), (jax.P("data"), jax.P()))
        search = search_of(large, params, x)
        found = search.plan(search.least)
        assert any(found._schedule.again)
        have, want = gradients(found, False, params, x), gradients(large, False, params, x)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(check, have, want)


def with_constants(params, batch):
    """Values that depend on no input, in and outside of loops; a loop that counts; dropout."""
    x, key = batch
    mask = jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))
    for i, w in enumerate(params["layers"][:2]):
        x = mlp(w, x * mask) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, x.shape)

    def layer(carry, w):
        x, count = carry
        return (mlp(w, x * mask) + jnp.sin(x) * count, count + 1), jnp.sum(x)

    (x, _), sums = jax.lax.scan(layer, (x, 0), params["stacked"])
    return jnp.sum(x**2) / x.size + jnp.mean(sums)


CONSTANTS = {"layers": LAYERS[:2], "stacked": STACKED}, (X, jax.random.key(3))


def computing_again(loss, params, batch):
    """Plans of the fewest bytes, by schedule for accelerators and by loops for CPUs."""
    search = search_of(loss, params, batch)
    fewest = min(search._forms(), key=lambda plan: plan.saved)
    for found, form in ((search.plan(search.least), "gpu"), (fewest, "cpu")):
        found._loss.device = types.SimpleNamespace(platform=form)
        yield found


def to_float64(tree):
    """With arrays of float64 in place of float32."""
    return jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, tree)


close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_all_derivatives_are_those_of_the_loss():
    """In forward mode, by batch, second ones, of many examples; nothing of a planned gradient."""
    params, (x, key) = to_float64(CONSTANTS)
    two = jnp.stack([x, jnp.sin(x)])
    moves = jax.tree.map(jnp.cos, params)
    plans = [*computing_again(with_constants, params, (x, key))]
    assert any(any(found._schedule.again) for found in plans)

    def derivatives(fn, params, x):
        def loss(params, x):
            return fn(params, (x, key))

        def of_both(params):
            return jnp.mean(jax.vmap(loss, (None, 0))(params, two))

        grad = jax.grad(loss)
        yield "forward mode", jax.jvp(loss, (params, x), (moves, x))
        yield "by parameters", jax.jvp(lambda params: loss(params, x), (params,), (moves,))
        yield "by batch", jax.grad(loss, 1)(params, x)
        yield "by both", jax.value_and_grad(loss, (0, 1))(params, x)
        yield "by some", jax.grad(lambda w: loss(params | {"layers": w}, x))(params["layers"])
        yield "second", jax.jvp(lambda params: grad(params, x), (params,), (moves,))
        yield "of each example", jax.vmap(grad, (None, 0))(params, two)
        yield "of the mean", jax.grad(of_both)(params)
        yield "of the mean, forward", jax.jvp(of_both, (params,), (moves,))

    want = jax.jit(lambda *args: dict(derivatives(with_constants, *args)))(params, x)
    for found in plans:
        have = jax.jit(lambda *args, found=found: dict(derivatives(found, *args)))(params, x)
        jax.tree.map(close, have, want)


def over_devices(loss, batch):
    """The mean over four devices, of rows of each, inside a ``shard_map`` with JAX's defaults."""
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), batch)

    def mean(params, batch):
        return jax.lax.pmean(loss(params, batch), "data")

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(mean, mesh=mesh, in_specs=(P(), specs), out_specs=P())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("checkpoint", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inside_of_a_shard_map(checkpoint):
    """Parameters vary over no axis, rows over one: gradients are sums over devices."""

    def loss(params, batch):
        return jax.checkpoint(with_constants)(params, batch)

    loss = loss if checkpoint else with_constants
    params, (x, key) = to_float64(CONSTANTS)
    want = gradients(over_devices(loss, (x, key)), False, params, (x, key))
    for found in computing_again(loss, params, (x[: ROWS // 4], key)):
        have = gradients(over_devices(found, (x, key)), False, params, (x, key))
        jax.tree.map(close, have, want)


@pytest.mark.usefixtures("x64")
def test_explicit_arrays_without_a_mesh_in_the_context():
    """Planned with them or without; gradients are sharded as those of the loss."""
    params, (x, key) = to_float64(CONSTANTS)
    mesh = jax.make_mesh((4,), ("data",))
    sharded = jax.device_put(params, NamedSharding(mesh, P()))
    rows = jax.device_put(x, NamedSharding(mesh, P("data"))), key
    want = gradients(with_constants, False, sharded, rows)
    of_sharded, _ = computing_again(with_constants, sharded, rows)
    _, of_others = computing_again(with_constants, params, (x, key))
    for found in (of_sharded, of_others):
        have = gradients(found, False, sharded, rows)
        jax.tree.map(close, have, want)
        assert [g.sharding for g in have[1]] == [g.sharding for g in want[1]]
    everywhere = jax.device_put((LAYERS, X), NamedSharding(mesh, P()))
    assert shd.remat.plan(skips, *everywhere, "1GiB").extra_time == 0


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(WIDTH)(jnp.tanh(nn.Dense(64)(x))))


def of_modules(remat):
    """A loss of layers of linen."""
    module = nn.remat(OfLinen)() if remat else OfLinen()
    params = [module.init(jax.random.key(i), X) for i in range(4)]

    def loss(params, x):
        for p in params:
            x = module.apply(p, x)
        return jnp.mean(x**2)

    return loss, params


def of_nnx(remat):
    from flax import nnx  # not for every version of jax

    class Layer(nnx.Module):
        def __init__(self):
            self.up, self.down = nnx.Param(LAYERS[0]["up"]), nnx.Param(LAYERS[0]["down"])

        def __call__(self, x):
            return mlp({"up": self.up[...], "down": self.down[...]}, x)

    graphdef, state = nnx.split(Layer())
    run = nnx.remat(Layer.__call__) if remat else Layer.__call__

    def loss(params, x):
        for p in params:
            x = run(nnx.merge(graphdef, p), x)
        return jnp.mean(x**2)

    return loss, [jax.tree.map(lambda x, i=i: x * (1 + i / 9), state) for i in range(4)]


def numbered(checkpoint):
    def loss(params, x):
        for w in params:
            x = checkpoint(mlp)(w, x)
        return jnp.mean(x**2)

    return loss, LAYERS


def in_loop(checkpoint):
    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (checkpoint(mlp)(w, x), None), x, params)[0] ** 2)

    return loss, STACKED


def nested(fn):
    return jax.jit(jax.checkpoint(jax.jit(jax.checkpoint(fn))))


saving = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)


@pytest.mark.parametrize(
    ("form", "checkpoint"),
    [
        pytest.param(numbered, jax.checkpoint, marks=pytest.mark.slow),
        (numbered, nested),
        (in_loop, jax.checkpoint),
        (in_loop, saving),
        pytest.param(of_modules, True, marks=pytest.mark.slow),
        (of_nnx, True),
    ],
    ids=["numbered", "nested", "loop", "policy", "linen", "nnx"],
)
def test_checkpoints_of_a_loss_are_opened(form, checkpoint):
    """The plans are those of a loss without them; the table says how many there are."""
    bare = form(False if checkpoint is True else lambda fn: fn)
    checked = form(checkpoint)
    figures, found = [], []
    for loss, params in (bare, checked):
        search = search_of(loss, params, X)
        found = [search.plan(search.least), *search._forms()]
        figures.append([(each.saved, each.work, each.summary) for each in found])
        text = "of the loss, which this replaces"
        assert (text in str(found[0])) == (loss is checked[0])
    assert figures[0] == figures[1]
    assert found[0].extra_time > 0
    (loss, params), want = checked, gradients(checked[0], False, checked[1], X)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for plan in (found[0], next(plan for plan in found if plan.loops.stored is None)):
        jaxpr = str(jax.make_jaxpr(jax.grad(plan))(params, X))
        assert ("policy=" in jaxpr) == (plan.loops.stored is not None)
        jax.tree.map(check, gradients(plan, False, params, X), want)


def program(temporaries, tiled):
    allocated = 2 * temporaries if tiled else temporaries
    sizes = {"argument": 500, "output": 300, "alias": 100, "temp": allocated}
    sizes |= {"host_argument": 0, "host_temp": 0}
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})
    memory.peak_memory_in_bytes = temporaries + 500 + 300 - 100
    text = "f32[8,128]{1,0:T(8,128)}" if tiled else "HloModule of a CPU"
    return types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: text)


@pytest.mark.parametrize("tiled", [False, True])
def test_check_compares_a_program(tiled):
    """Of TPUs what is live at once, not the sum of what is allocated."""
    found = dataclasses.replace(search_of(large, LAYERS, X).plan(1e9), budget=2**30, peak=1000)
    assert found.check(program(1000, tiled)) == 1000
    with pytest.raises(shd.remat.OverBudgetError, match="above its plan of"):
        found.check(program(1100, tiled))
    with pytest.raises(shd.remat.OverBudgetError, match="or its budget of"):
        found.check(program(2**31, tiled), tolerance=1e9)


def test_bad_input():
    ref = jax.new_ref(jnp.zeros(()))

    def with_callback(params, x):
        io_callback(lambda x: None, None, x[0, 0])
        return large(params, x)

    def with_print(params, x):
        jax.debug.print("{}", x[0, 0])
        return large(params, x)

    def with_ref(params, x):
        ref[...] = x[0, 0]
        return large(params, x)

    def with_loop(params, x):
        return jnp.sum(jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: mlp(params[0], x), x))

    def with_printing_rule(params, x):
        return large(params, printing(mlp(params[0], x)))

    def with_scan(params, x):
        def step(x, w):
            jax.debug.print("{}", x[0, 0])
            return mlp(w, x), None

        return jnp.sum(jax.lax.scan(step, x, params)[0])

    for pattern, loss, args in (
        (r"debug_print does, at .*test_planned_loss.py:[0-9]+", with_printing_rule, ()),
        (r"debug_print does, at .*test_planned_loss.py:[0-9]+", with_scan, (STACKED, X)),
        ("params/1: expected an array or a number, got 'relu'", large, ([X, "relu"], X)),
        ("callbacks and prints is not planned", with_callback, ()),
        ("test_planned_loss.py:[0-9]+, would be done again", with_print, ()),
        ("refs is not planned", with_ref, ()),
        ("with collectives is not planned", lambda p, x: jax.lax.pmean(large(p, x), "data"), ()),
        ("Reverse-mode differentiation does not work", with_loop, ()),
        ("must be a real number, but it is int32", lambda p, x: jnp.sum(x > 0), ()),
        (r"must be a real number, but it is float32\[512,16\]", lambda p, x: x, ()),
        ("give the loss that calls them", [large], ()),
        ("no parameter is of a floating dtype", lambda p, x: jnp.sum(x), ([1], X)),
        ("a text such as '8GiB', got '8 apples'", large, (LAYERS, X, "8 apples")),
        ("must be above 0", large, (LAYERS, X, 0)),
        (r"budget .*expected bytes, or a text .* got \[1\]", large, (LAYERS, X, [1])),
    ):
        params, x, budget = (*args, *(LAYERS, X, 1e9)[len(args) :])
        with pytest.raises(ValueError, match=pattern):
            shd.remat.plan(loss, params, x, budget)

    search = search_of(lambda p, x: (large(p, x), x @ p[0]["up"]), LAYERS, X)
    found = search.plan(search.least)
    for pattern, fn in (
        (r"batch: planned for float32\[512, 16\], got float32\[2, 16\]", lambda p: found(p, X[:2])),
        ("planned for arguments of the form", lambda p: found(p[1:], X)),
        ("by its first result alone", lambda p: jax.grad(lambda p: jnp.sum(found(p, X)[1]))(p)),
    ):
        with pytest.raises(ValueError, match=pattern):
            fn(LAYERS)
    device = jax.devices()[0]
    for loss, params, kind, offload, pattern in (
        (large, LAYERS, "h100", ["nope"], "of which this has none"),
        (large, LAYERS, "v5e", True, "on TPUs or by name copies what loops store"),
        (
            scanned,
            STACKED,
            "h100",
            ["nope"],
            "with values block_input, dot_general test_planned_loss",
        ),
    ):
        with pytest.raises(ValueError, match=pattern):
            LossSearch(PlannableLoss(loss, params, X, device), KINDS[kind], offload)
    for pattern, options in (
        ("or a device, got 5", {"device": 5}),
        ("stage", {"stage": 4}),
        ("ignored by XLA on CPUs", {"offload": True}),
        ("or a list of names, got 'sin'", {"offload": "sin"}),
    ):
        with pytest.raises(ValueError, match=pattern):
            shd.remat.plan(scanned, STACKED, X, 1e9, **options)
    texts = {"2KB": 2000, "2 TiB": 2**41, "3 MiB": 3 * 2**20, "1.5GiB": 1.5 * 2**30, "7": 7}
    assert {text: shd.remat.in_bytes(text) for text in texts} == texts
