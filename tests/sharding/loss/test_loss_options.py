"""``shd.Loss``: what takes a loss takes it as it takes a function and keywords."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import sharding as shd
from sharding.step._loss import microbatch_key

from ...flax_nnx import needs_nnx, nnx
from ..model import mesh_of, zero_on

TX, KEY = optax.sgd(0.1), jax.random.key(0)
PARAMS = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)}
BATCH = {"x": np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)}
STATS = {"seen": np.zeros(3, np.float32)}


class WithStats(TrainState):
    stats: dict


def loss_of(has_aux=False, weighted=False, rngs=False, model_state=False, **_):
    """A loss that takes and returns what its options say."""

    def loss_fn(params, batch, *more):
        y = batch["x"] @ params["w"]
        if rngs:
            draw = lambda key: jax.random.normal(key, y.shape[1:])  # noqa: E731
            y = y * (jax.vmap(draw)(more[-1]) if rngs == "per_example" else draw(more[-1])[None])
        out = (jnp.sum(y**2), jnp.sum(batch["x"])) if weighted else jnp.mean(y**2)
        if model_state:
            new = {"seen": more[0]["seen"] + y.sum(0)}
            return out, (new, y) if has_aux else new
        return (out, y) if has_aux else out

    return loss_fn


OPTIONS = {
    "none": {},
    "aux": {"has_aux": True},
    "weighted": {"weighted": True},
    "keys": {"rngs": "per_example"},
    "state": {"model_state": "stats"},
    "all": {"has_aux": True, "weighted": True, "rngs": True, "model_state": True},
}


def both_forms(options, fn=None):
    """What is given for one loss: a function and keywords, or a ``Loss`` and none."""
    fn = fn or loss_of(**options)
    return (fn, options), (shd.Loss(fn, **options), {})


def make_state():
    return WithStats.create(apply_fn=None, params=PARAMS, tx=TX, stats=STATS)


def key_of(options):
    return KEY if options.get("rngs") else None


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_take_a_loss_and_keywords_alike(name):
    options, zero = OPTIONS[name], zero_on(2, min_shard_size=1)
    state, batch = zero.abstract_state(make_state), zero.put(BATCH)
    passed = STATS if options.get("model_state") is True else None
    texts, keys = [], key_of(options)
    for fn, keywords in both_forms(options):
        step = zero.train_step(fn, **keywords, microbatches=2)
        texts.append(step.lower(state, batch, keys, passed).as_text())
    assert texts[0] == texts[1]
    texts = []
    for fn, keywords in both_forms(options):
        # A gradient gets any model state by the call; a Loss may name that of a train state.
        given = keywords | ({"model_state": True} if "model_state" in keywords else {})
        run = zero.value_and_grad(fn, **given)
        more = keys, STATS if options.get("model_state") else None
        texts.append(run.lower(state.params, batch, *more).as_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["weighted", "state"])
def test_check_loss_takes_a_loss_and_keywords_alike(name):
    zero, options = zero_on(2), OPTIONS[name]
    state = zero.init(make_state)
    said = [
        zero.check_loss(fn, state, zero.put(BATCH), key_of(options), **keywords)
        for fn, keywords in both_forms(options)
    ]
    assert said[0] == said[1] == ("sum" if name == "weighted" else "mean")


def test_check_loss_takes_a_model_state_for_a_loss():
    zero = zero_on(2)
    state, batch = zero.init(make_state), zero.put(BATCH)
    loss = shd.Loss(loss_of(model_state=True), model_state=True, reduction="sum")
    assert zero.check_loss(loss, state, batch, model_state=STATS) == "mean"
    with pytest.raises(ValueError, match=r"got model_state=True, .* pass it here, too"):
        zero.check_loss(loss, state, batch)
    with pytest.raises(ValueError, match=r"a Loss has its options in it, and model_state=True"):
        zero.check_loss(shd.Loss(loss_of()), state, batch, model_state=STATS)


@pytest.mark.parametrize("name", ["aux", "keys"])
def test_fit_takes_a_loss_and_keywords_alike(name, tmp_path):
    options, found = OPTIONS[name], []
    keep = {"stage": 2, "microbatches": 1, "recompute": "none", "offload": False}
    asked = {"memory": 2**30, "keep": keep, "folder": tmp_path}
    for fn, keywords in both_forms(options):
        found.append(shd.plan.fit(fn, make_state, BATCH, **asked, **keywords))
    assert "The plan was read from" in found[1].notes[0]  # as the same plan
    texts = [
        plan.step.lower(plan.abstract_state(), BATCH, key_of(options)).as_text() for plan in found
    ]
    assert texts[0] == texts[1]
    stateful = shd.Loss(loss_of(model_state=True), model_state=True)
    with pytest.raises(ValueError, match="model_state names its field"):
        shd.plan.fit(stateful, make_state, BATCH, **asked)
    if name == "aux":  # another loss has a plan of its own
        assert "was read from" not in shd.plan.fit(loss_of(), make_state, BATCH, **asked).notes[0]


@needs_nnx
@pytest.mark.parametrize("options", [OPTIONS["aux"], OPTIONS["weighted"], {"rngs": True}], ids=str)
def test_nnx_steps_take_a_loss_and_keywords_alike(options):
    zero = zero_on(2)
    own = loss_of(**options)

    def loss_fn(model, batch, *key):
        return own({"w": model.kernel[...]}, batch, *key)

    def make():
        model = nnx.Linear(8, 3, use_bias=False, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    model, optimizer = zero.nnx_init(make)
    args, texts = (model, optimizer, zero.put(BATCH), key_of(options)), []
    for fn, keywords in both_forms(options, loss_fn):
        texts.append(zero.nnx_train_step(fn, **keywords).lower(*args).as_text())
    assert texts[0] == texts[1]
    loss = shd.Loss(loss_fn, **options)
    if not options.get("rngs"):
        found = zero.nnx_eval_step(loss)(model, zero.put(BATCH))
        value = zero.nnx_train_step(loss)(*args)["loss"]
        np.testing.assert_allclose(jax.tree.leaves(found)[0], value, rtol=1e-6)
        zero.check_loss(loss, model, zero.put(BATCH))
    loss = shd.Loss(lambda model, batch, state: (0.0, state), model_state=True)
    for run in (zero.nnx_train_step, zero.nnx_eval_step):
        with pytest.raises(ValueError, match=r"has its state in the model, and model_state=True"):
            run(loss)
    with pytest.raises(ValueError, match=r"a Loss has its options in it, and weighted=True was"):
        zero.nnx_train_step(shd.Loss(loss_fn), weighted=True)
    with pytest.raises(ValueError, match=r"^nnx_train_step has one key .*: pass rngs=True\."):
        zero.nnx_train_step(loss_fn, rngs="per_example")


# --- What runs a loss, and what makes another of it -----------------------------------------------


@pytest.mark.parametrize("view", ["device", "global"])
@pytest.mark.parametrize("name", ["aux", "weighted", "state"])
def test_evaluation_of_a_loss_is_its_mean(name, view):
    """As a step computes it: sums and weights are added, then divided once; no new model state."""
    options, zero = OPTIONS[name], zero_on(2, view=view)
    state, batch = zero.init(make_state), zero.put(BATCH)
    loss = shd.Loss(loss_of(**options), **options)
    found = zero.eval_step(loss)(state, batch)
    _, metrics = zero.train_step(loss)(state, batch)
    expected = (metrics["loss"], metrics["aux"]) if loss.has_aux else metrics["loss"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


@pytest.mark.parametrize("rngs", [True, "per_example"])
def test_evaluation_takes_keys(rngs):
    zero, loss = zero_on(2), shd.Loss(loss_of(rngs=rngs), rngs=rngs)
    state, batch = zero.init(make_state), zero.put(BATCH)
    found = zero.eval_step(loss)(state, batch, KEY)
    keys = microbatch_key(rngs, KEY, 0, BATCH)
    np.testing.assert_allclose(found, loss(PARAMS, BATCH, keys), rtol=1e-5)


def test_weights_of_zero_count_nothing():
    zero = zero_on(2)
    state, batch = zero.init(make_state), zero.put({"x": np.zeros((16, 8), np.float32)})
    found = zero.eval_step(shd.Loss(loss_of(weighted=True), weighted=True))(state, batch)
    assert found == 0
    # A function is that of all rows, whatever it returns.
    totals = zero.eval_step(loss_of(weighted=True))(state, zero.put(BATCH))
    np.testing.assert_allclose(totals, loss_of(weighted=True)(PARAMS, BATCH), rtol=1e-6)


@pytest.mark.parametrize("name", ["weighted", "all"])
def test_the_plan_of_a_loss_is_a_loss(name):
    options = OPTIONS[name]
    loss = shd.Loss(loss_of(**options), **options)
    state = {"model_state": STATS} if loss.model_state else {}
    found = shd.remat.plan(loss, PARAMS, BATCH, "1GiB", **state)
    assert isinstance(found, shd.Loss)
    assert isinstance(found.fn, shd.remat.LossPlan)
    assert dataclasses.replace(found, fn=loss.fn) == loss
    zero = zero_on(1)
    args = zero.abstract_state(make_state).params, BATCH, key_of(options), *state.values()
    planned, own = (zero.value_and_grad(x).lower(*args).as_text() for x in (found, loss))
    assert planned.count("dot_general") == own.count("dot_general") > 0
    assert shd.remat.frontier(loss, PARAMS, BATCH, **state)[-1].extra_time == 0
    if loss.model_state:
        with pytest.raises(ValueError, match=r"takes a model state: pass one as model_state="):
            shd.remat.plan(loss, PARAMS, BATCH, "1GiB")


def pipeline_of(**options):
    def head(shared, x, batch, *key):
        sums = jnp.sum(x**2), x.shape[0]
        return (sums, jnp.sum(x)) if options else sums

    return shd.Pipeline(
        mesh_of(data=2, pipe=2),
        shd.pipeline.gpipe(2, 2),
        num_layers=2,
        embed=lambda shared, x, *key: x,
        block=lambda w, x, *_: jnp.tanh(x @ w),
        head=head,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"has_aux": True, "rngs": True}], ids=str)
def test_a_pipeline_is_a_weighted_loss(options):
    """Given itself, in place of its loss and keywords that say what it returns."""
    pipeline = pipeline_of(**options)
    loss = shd.Loss(pipeline.loss, weighted=True, per_device=True, **options)
    assert pipeline.as_loss() == loss
    zero = shd.Zero(pipeline.mesh)
    params = pipeline.stack({"layers": jnp.ones((2, 4, 4))})
    specs = pipeline.param_specs(params)
    state = zero.abstract_state(lambda: (params, TX.init(params)), tx=TX, param_specs=specs)
    given = [(pipeline, {}), (pipeline, {"weighted": True}), (loss, {})]
    given += [(pipeline.loss, {"weighted": True} | options)]  # its function runs as it does
    texts = {
        zero.train_step(loss, tx=TX, **keywords)
        .lower(state, np.ones((8, 4), np.float32), key_of(options))
        .as_text()
        for loss, keywords in given
    }
    assert len(texts) == 1
    with pytest.raises(ValueError, match=r"^a Pipeline has its options in it, and model_state="):
        zero.train_step(pipeline, tx=TX, model_state=True)


def test_a_function_around_a_pipeline_is_the_loss_of_all_rows():
    """So is an evaluation of its own function, which returns two sums."""
    pipeline, x = pipeline_of(), np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    around = shd.Loss(lambda params, batch: pipeline.loss(params, batch), weighted=True)
    given = [shd.Loss(fn, weighted=True) for fn in (pipeline.loss, pipeline.sequential_loss)]
    assert [loss.per_device for loss in (*given, around)] == [True, None, None]
    assert shd.Loss(pipeline.loss, weighted=True, per_device=False).per_device is False
    zero, weights = shd.Zero(pipeline.mesh), np.linspace(-1, 1, 32, dtype=np.float32)
    params = pipeline.stack({"layers": weights.reshape(2, 4, 4)})
    specs = pipeline.param_specs(params)
    placed = zero.place(params, param_specs=specs)
    run = zero.value_and_grad(around, param_specs=specs)
    assert re.match("partitioned: .* writes to references", str(run.loss_program(placed, x)))
    mean = lambda params: jnp.divide(*pipeline.sequential_loss(params, x))  # noqa: E731
    want = jax.value_and_grad(mean)(params)
    found = [zero.value_and_grad(fn, param_specs=specs)(placed, x) for fn in (pipeline, around)]
    found.append((zero.eval_step(pipeline)((placed, None), x), want[1]))
    for each in found:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), each, want)
    sums = zero.eval_step(pipeline.loss)((placed, None), x)
    np.testing.assert_allclose(sums, pipeline.sequential_loss(params, x), rtol=1e-6)


# --- The value ------------------------------------------------------------------------------------


def mean_square(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def test_a_loss_is_called_as_its_function_and_is_a_value():
    loss = shd.Loss(mean_square, reduction={"seen": "sum"})
    expected = jax.value_and_grad(mean_square)(PARAMS, BATCH)
    for run in (jax.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))):
        found = run(PARAMS, batch=BATCH)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)
    assert jax.jit(loss)(PARAMS, BATCH) == pytest.approx(float(expected[0]), rel=1e-6)
    same, other = dataclasses.replace(loss), dataclasses.replace(loss, weighted=True)
    assert same == loss != other
    assert len({loss, same, other}) == 2
    assert pickle.loads(pickle.dumps(other)) == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.weighted = True


@pytest.mark.parametrize(
    ("keyword", "field"),
    [
        ("has_aux=True", "has_aux=True"),
        ("weighted=True", "weighted=True"),
        ("rngs='per_example'", "rngs='per_example'"),
        ("model_state='stats'", "model_state='stats'"),
    ],
)
def test_options_are_said_once(keyword, field):
    """Also those that a ``Loss`` has: one place says them."""
    zero, options = zero_on(2), eval(f"dict({keyword})")
    message = f"a Loss has its options in it, and {keyword} was given beside it. Leave that out, or"
    message += f" make a Loss with {field}"
    calls = [zero.train_step, zero.value_and_grad]
    calls += [lambda loss, **options: shd.plan.fit(loss, make_state, BATCH, **options)]
    calls += [lambda loss, **options: zero.check_loss(loss, make_state(), BATCH, **options)]
    for loss in (shd.Loss(loss_of()), shd.Loss(loss_of(), **eval(f"dict({field})"))):
        for call in calls[:3] if "model_state=" in keyword else calls:
            with pytest.raises(ValueError, match=re.escape(message)):
                call(loss, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rngs": "example"}, "rngs must be a bool or 'per_example', got 'example'."),
        ({"reduction": {"a": "max"}}, "reduction must be one of 'mean', 'sum', 'same'"),
        ({"fn": shd.Loss(mean_square)}, "fn is a Loss already: use that"),
    ],
)
def test_bad_losses_raise_where_they_are_made(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        shd.Loss(**{"fn": mean_square} | options)


def test_functions_that_do_not_take_what_the_options_say_raise_where_they_are_used():
    loss, zero = shd.Loss(mean_square, rngs=True), zero_on(2)
    calls = [zero.train_step, zero.value_and_grad, zero.eval_step]
    calls += [lambda loss: shd.plan.fit(loss, make_state, BATCH)]
    calls += [lambda loss: zero.check_loss(loss, make_state(), BATCH)]
    calls += [lambda loss: shd.remat.plan(loss, PARAMS, BATCH, "1GiB")]
    for call in calls:
        with pytest.raises(ValueError, match=r"calls mean_square\(params, batch, key\), and it"):
            call(loss)
