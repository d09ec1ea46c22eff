"""``fit``: losses of eight kinds as they are, under a limit of memory, beside one device."""

import functools
import inspect
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from sharding import Loss, Zero, stored
from sharding.plan import NoPlanFits, fit
from sharding.plan.machine import targets
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._loss_layers import LossTrace
from sharding.plan.model._models import Decoder
from sharding.plan.search import _fit, _fit_proof
from sharding.plan.search._fit_proof import FitProofs
from sharding.plan.search._fit_request import FitRequest

from ...flax_nnx import needs_nnx
from ...tiers import slow
from .test_traced_model import skips

KEY, ROWS, WIDTH = jax.random.key(0), 16, 32
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 64, (ROWS, 17)).astype(np.int32)
IMAGES = {
    "x": RNG.normal(size=(ROWS, 8, 8, 3)).astype(np.float32),
    "y": RNG.integers(0, 10, ROWS).astype(np.int32),
}
TX = optax.adam(1e-3)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)


def state_of(params):
    return lambda key: (params, TX.init(params))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# --- Losses ---------------------------------------------------------------------------------------


def decoder(**fields):
    model = Decoder(3, WIDTH, 4, 4, 64, 64, 16, **fields)
    return model.make_loss(), state_of(model.init()), TOKENS, {}


def scale():
    """No layers, and no products of matrices."""

    def loss_fn(params, images):
        # Gradients far from 0, of which Adam takes the signs.
        return jnp.mean(jnp.square(images["x"][:, 0, 0] * (params["scale"] - 3)))

    return loss_fn, state_of({"scale": draw(1, 3)}), IMAGES, {}


def encoder_decoder():
    """Two loops, one of which reads what the other makes."""
    matrices = lambda n: {"in": draw(n, WIDTH, 64), "out": draw(n, 64, WIDTH)}  # noqa: E731
    params = {"embed": draw(64, WIDTH), "encoder": matrices(2), "decoder": matrices(3)}

    def loss_fn(params, tokens):
        mix = lambda x, y, w: x + jnp.tanh((x + y.mean(1, keepdims=True)) @ w["in"]) @ w["out"]  # noqa: E731
        x, _ = jax.lax.scan(
            lambda x, w: (mix(x, x, w), None), params["embed"][tokens[:, :8]], params["encoder"]
        )
        y, _ = jax.lax.scan(
            lambda y, w: (mix(y, x, w), None), params["embed"][tokens[:, 8:-1]], params["decoder"]
        )
        return cross_entropy(y @ params["embed"].T, tokens[:, 9:])

    return loss_fn, state_of(params), TOKENS, {}


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (4, 4), (4, 4), name="patches")(x).reshape(x.shape[0], -1, WIDTH)
        for _ in range(3):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        # Names of axes that no mesh has here.
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "class"))
        return nn.Dense(10, name="head", kernel_init=init)(x.mean(1))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (16, 32):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10, name="head")(x.mean((1, 2)))


def vit():
    model = ViT()
    params = model.init(KEY, IMAGES["x"])["params"]

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"])

    state = lambda: TrainState.create(apply_fn=None, params=params, tx=TX)  # noqa: E731
    return loss_fn, state, IMAGES, {}


class StatsState(TrainState):
    batch_stats: dict


def cnn():
    model = CNN()
    variables = model.init(KEY, IMAGES["x"])

    def loss_fn(params, batch, stats):
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, batch["x"], mutable="batch_stats")
        return cross_entropy(logits, batch["y"]), new["batch_stats"]

    def make_state():
        stats, params = variables["batch_stats"], variables["params"]
        return StatsState.create(apply_fn=None, params=params, tx=TX, batch_stats=stats)

    return loss_fn, make_state, IMAGES, {"model_state": "batch_stats"}


def mixer():
    """An Equinox model: its blocks are a list in a module."""

    class Mixer(eqx.Module):
        blocks: list
        head: eqx.nn.Linear

        def __call__(self, x):
            x = x.reshape(16, 12)
            for across, within in self.blocks:
                x = x + jax.vmap(across)(x.T).T
                x = x + jax.vmap(within)(x)
            return self.head(x.reshape(-1))

    keys = iter(jax.random.split(KEY, 8))
    mlp = lambda size: eqx.nn.MLP(size, size, 64, 1, key=next(keys))  # noqa: E731
    model = Mixer([(mlp(16), mlp(12)) for _ in range(3)], eqx.nn.Linear(192, 10, key=next(keys)))
    params, static = eqx.partition(model, eqx.is_array)

    def loss_fn(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        return cross_entropy(logits, batch["y"]), {"most": logits.max()}

    return loss_fn, state_of(params), IMAGES, {"has_aux": True}


def experts():
    layers = {"gate": draw(3, WIDTH, 4), "in": draw(3, 4, WIDTH, 64), "out": draw(3, 4, 64, WIDTH)}
    params = {"embed": draw(64, WIDTH), "layers": layers}

    def layer(x, w):
        gates = jax.nn.softmax(x @ w["gate"])
        y = jnp.einsum(
            "btef,efd->bted", jnp.tanh(jnp.einsum("btd,edf->btef", x, w["in"])), w["out"]
        )
        return x + jnp.einsum("bte,bted->btd", gates, y), None

    def loss_fn(params, tokens):
        x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["embed"].T, tokens[:, 1:]
        )
        weight = (tokens[:, 1:] > 3).astype(jnp.float32)
        return (losses * weight).sum(), weight.sum()

    return loss_fn, state_of(params), TOKENS, {"weighted": True}


def unet():
    """Skips, and no layers that are found: only a plan of the graph fits."""
    params = {name: draw(WIDTH, 4 * WIDTH) for name in "abcdefgh"}

    x = RNG.normal(size=(4096, WIDTH)).astype(np.float32)
    return skips, state_of(params), x, {"keep": {"microbatches": 1}}


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, WIDTH, name="embed")(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
        return nn.Dense(64, name="head")(x)


def lstm():
    model = LSTM()
    params = model.init(KEY, TOKENS)

    def loss_fn(params, tokens):
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    return loss_fn, state_of(params), TOKENS, {}


def perceptron():
    """An nnx model."""
    from flax import nnx

    class Perceptron(nnx.Module):
        def __init__(self, rngs):
            sizes = [(192, 64), *[(64, 64)] * 3, (64, 10)]
            self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(nnx.gelu(x))
            return x

    graph, params = nnx.split(Perceptron(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, batch):
        logits = nnx.merge(graph, params)(batch["x"].reshape(-1, 192))
        return cross_entropy(logits, batch["y"])

    return loss_fn, state_of(nnx.as_pure(params)), IMAGES, {}


# The loss, the number of its layers, and bytes of a device in which not every plan fits.
LOSSES = {
    "GPT": (functools.partial(decoder, gated=False, biased=True, tied=True, scan=False), 3, 660e3),
    "Llama": (decoder, 3, 560e3),
    "T5": (encoder_decoder, 5, 200e3),
    "ViT": (vit, 15, 570e3),
    "CNN": (cnn, 4, 150e3),
    "Mixer": (mixer, 3, 300e3),
    "experts": (experts, 3, 450e3),
    "LSTM": (lstm, 2, 600e3),
    "nnx": (perceptron, 5, 260e3),
    "U-Net": (unet, 0, 2e6),
    "scale": (scale, 0, 100e3),
}


def losses_on_one_device(loss_fn, state, batch, options):
    params, opt_state, stats = state[0], state[1], state[2:]

    def total(params, stats):
        out = loss_fn(params, batch, *stats)
        if options.get("weighted"):
            return out[0] / out[1], ()
        return (out[0], out[1:]) if isinstance(out, tuple) else (out, ())

    @jax.jit
    def step(params, opt_state, stats):
        (loss, new), grads = jax.value_and_grad(total, has_aux=True)(params, stats)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, new if stats else (), loss

    losses = []
    for _ in range(3):
        params, opt_state, stats, loss = step(params, opt_state, stats)
        losses.append(float(loss))
    return losses


SLOW = "GPT", "Llama", "ViT", "Mixer", "T5", "CNN", "LSTM", "experts"
MARKS = {"nnx": needs_nnx} | dict.fromkeys(SLOW, pytest.mark.slow)


@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS.get(x, ())) for x in LOSSES])
def test_any_loss_runs_where_it_fits(name):
    """As it is, sharded and computed again as its plan says, with the losses of one device."""
    make, num_layers, memory = LOSSES[name]
    loss_fn, make_state, batch, options = make()
    keep = options.pop("keep", {})
    state = make_state(*[KEY] * len(inspect.signature(make_state).parameters))
    assert num_layers == layers_of(loss_fn, state, batch)
    pair = isinstance(state, tuple)
    options |= {"tx": TX} if pair else {}
    plan = fit(loss_fn, make_state, batch, memory=memory, headroom=0.0, keep=keep, **options)
    assert plan.memory <= memory
    assert name != "U-Net" or "planned" in plan.plan.recompute
    step, sharded = plan.train_step(), plan.init(*[KEY] * pair)
    losses = []
    for _ in range(3):
        sharded, metrics = step(sharded, plan.put(batch))
        losses.append(float(metrics["loss"]))
    if not pair:
        stats = (state.batch_stats,) if "model_state" in options else ()
        state = state.params, state.opt_state, *stats
    expected = losses_on_one_device(loss_fn, state, batch, options)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def layers_of(loss_fn, state, batch):
    if isinstance(state, tuple):
        return LossTrace(loss_fn, state[0], batch).num_layers
    stats = [state.batch_stats] if isinstance(state, StatsState) else []
    return LossTrace(loss_fn, state.params, batch, *stats).num_layers


# --- Choices --------------------------------------------------------------------------------------


def small(rows=64):
    """A loop of layers whose activations are most of what a device holds."""
    params = {"layers": draw(4, 64, 64), "out": draw(64, 8)}

    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean((x @ params["out"]) ** 2)

    return loss_fn, state_of(params), jax.ShapeDtypeStruct((rows, 16, 64), jnp.float32)


def test_tiles_are_chosen_where_memory_is_short():
    params = {"in": draw(8, 8), "out": draw(8, 1024)}

    def loss_fn(params, batch):
        return cross_entropy(jnp.tanh(batch["x"] @ params["in"]) @ params["out"], batch["y"])

    batch = {"x": draw(2048, 8), "y": RNG.integers(0, 1024, 2048).astype(np.int32)}
    options = {"tx": TX, "memory": 1e6, "headroom": 0.0, "largest": True}
    keep = {"stage": 1, "replicas": 1, "recompute": "none"}
    plan = fit(loss_fn, state_of(params), batch, keep=keep, **options)
    assert plan.plan.tiles > 1
    assert "tiles" in str(plan)
    less = fit(loss_fn, state_of(params), batch, keep=keep | {"tiles": 1}, **options)
    assert less.plan.sequences < plan.plan.sequences
    state, few = plan.init(KEY), jax.tree.map(lambda x: x[: plan.plan.sequences], batch)
    step = plan.train_step()
    assert "in tiles" in str(step.describe(state, few))
    _, metrics = step(state, plan.put(few))
    np.testing.assert_allclose(metrics["loss"], loss_fn(params, few), rtol=1e-6)


def test_a_restart_reads_what_was_found_and_measured(tmp_path, monkeypatch):
    """Without any search, compilation or run, unless something that plans depend on is another."""
    options = {"tx": TX, "memory": 2.0**30, "folder": tmp_path, "measure": 2}
    first = fit(*small(), **options)
    assert first.proofs[0].measured
    names = (FitRequest, "search"), (FitProofs, "prove"), (_fit_proof, "measured_step")
    for place, name in names:
        monkeypatch.delattr(place, name)
    loss_fn, make_state, batch = small()
    x = jnp.ones(batch.shape)
    again = fit(loss_fn, make_state, x, **options | {"tx": optax.adam(1e-2)})
    assert again.proofs == first.proofs
    assert "was read from" in str(again)
    _, metrics = again.train_step()(again.init(KEY), again.put(x))
    np.testing.assert_allclose(metrics["loss"], loss_fn(make_state(KEY)[0], x), rtol=1e-6)

    def is_planned_anew(given, **change):
        with pytest.raises(AttributeError, match="has no attribute 'search'"):
            fit(*given, **options | change)

    is_planned_anew((lambda params, x: 2 * loss_fn(params, x), make_state, batch))
    is_planned_anew(small(32))
    others = ({"target": "cpu:4"}, {"memory": 2.0**29}, {"lossy": "8bit"}, {"measure": False})
    for change in others:
        is_planned_anew(small(), **change)
    for module in (jax, _fit):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", "0.0")
            is_planned_anew(small())


@pytest.mark.parametrize(
    "text", ["", *map(slow, ("[]", '{"plan": ', "[3]", "[\x00")), '[{"plan": {"stage": 9}}]']
)
def test_a_plan_that_was_not_saved_to_its_end_is_made_anew(tmp_path, text):
    options = {"tx": TX, "memory": 2.0**30, "folder": tmp_path, "keep": {"stage": 0}}
    first = fit(*small(), **options)
    (path,) = tmp_path.glob("*.json")
    whole = path.read_text()
    path.write_text(text or whole[:50])
    with pytest.warns(UserWarning, match=f"{path.name} is not used, since fit did not write it"):
        assert fit(*small(), **options).proofs == first.proofs
    assert path.read_text() == whole


def test_the_fastest_of_those_that_ran_is_taken(tmp_path):
    """What they took is kept, and makes the next prediction better."""
    options = {"tx": TX, "memory": 2.0**30, "folder": tmp_path}
    plan = fit(*small(32), **options, measure=2)
    ran = [proof.measured for proof in plan.proofs if proof.measured]
    assert len(ran) == 2
    assert plan.proofs[0].measured == min(ran)
    found = plan.proofs[0].predicted, fit(*small(32), **options).proofs[0].predicted
    off = np.abs(np.log(np.array(found) / min(ran)))
    assert off[1] < off[0] / 2


@pytest.mark.parametrize("stage", [(1, 2), 3])
def test_one_of_equal_programs_is_run(stage):
    """Stages 1 and 2 of one micro-batch are. Layers that are no loop may be sharded as they are."""
    keep = {"stage": stage, "replicas": 1, "microbatches": 1, "recompute": "none"}
    network = lambda params, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x)  # noqa: E731
    loss_fn = lambda params, x: jnp.mean(network(params, x) ** 2)  # noqa: E731
    state = state_of([draw(256, 256) for _ in range(3)])
    plan = fit(loss_fn, state, jnp.ones((16, 256)), tx=TX, memory=2**30, keep=keep, measure=3)
    assert [bool(proof.measured) for proof in plan.proofs] == [True, False][: len(plan.proofs)]
    assert len(plan.proofs) == len(np.atleast_1d(stage))


def test_a_plan_whose_program_needs_more_than_planned_is_not_chosen(monkeypatch):
    first = []

    def program(proofs, fitted):
        """The first program does not fit, though its plan does; others are as they are planned."""
        first[:] = first or [fitted.plan]
        return None, 2.0**31 if fitted.plan == first[0] else fitted.proofs[0].planned

    monkeypatch.setattr(FitProofs, "_compiled", program)
    found = fit(*small(), tx=TX, memory=2.0**30)
    assert found.plan != first[0]
    assert found.memory <= found.machine.usable
    assert {proof.plan: proof.memory for proof in found.proofs}[first[0]] == 2.0**31


def test_rows_of_the_program_that_are_not_those_of_the_plan(monkeypatch):
    """They are printed, and saved with the plan."""
    keep = {"stage": 3, "replicas": 1, "microbatches": 1, "recompute": "none"}
    options = {"tx": TX, "memory": 2.0**30, "keep": keep}
    proof = fit(*small(), **options).proofs[0]
    assert not [row for row in proof.differences if row.name.startswith("reduce-scatter")]
    planned = _fit_proof.rows_of_zero

    def twice(*args):
        return tuple(row._replace(amount=2 * row.amount) for row in planned(*args))

    monkeypatch.setattr(_fit_proof, "rows_of_zero", twice)
    found = fit(*small(), **options)
    (row,) = [x for x in found.proofs[0].differences if x.name == "reduce-scatter over data"]
    assert row.planned == pytest.approx(2 * row.program, rel=0.01)
    assert "reduce-scatter over data" in str(found)


def test_the_largest_batch_that_fits():
    plan = fit(*small(), tx=TX, memory=5e6, largest=True)
    assert (plan.plan.microbatches, plan.memory <= plan.machine.usable) == (1, True)
    assert plan.plan.sequences > 64
    kept = fit(*small(128), tx=TX, memory=5e6, keep={"stage": 3, "microbatches": 2})
    assert (kept.plan.stage, kept.plan.sequences, kept.plan.microbatches) == (3, 128, 2)


def test_what_is_ones_own_is_kept():
    """A mesh, and specs of parameters on its other axis; an update in the backward pass."""
    loss_fn, make_state, batch = small()
    x = RNG.normal(size=batch.shape).astype(np.float32)
    expected = losses_on_one_device(loss_fn, make_state(KEY), x, {})
    mesh = jax.make_mesh((2, 2, 2), ("data", "copies", "model"))
    zero = Zero(mesh, replica_axis="copies", min_shard_size=1)
    specs = {"layers": P(None, None, "model"), "out": P()}
    own = {"zero": zero, "param_specs": specs, "memory": 2**30}
    backward = {"target": "cpu:1", "memory": 2**30, "keep": {"update_in_backward": True}}
    for given in (own, backward):
        plan = fit(loss_fn, make_state, batch, tx=TX, **given)
        step, state, losses = plan.train_step(), plan.init(KEY), []
        for _ in range(3):
            state, metrics = step(state, plan.put(x))
            losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        assert step.updates_in_backward == plan.plan.update_in_backward == (given is backward)
        if given is own:
            assert (plan.zero.mesh, plan.plan.tensor, plan.plan.replicas) == (mesh, 2, 2)
            spec = state[0]["layers"].sharding.spec
            assert "model" in spec[2] if isinstance(spec[2], tuple) else spec[2] == "model"
    with pytest.raises(NoPlanFits, match="too much"):
        fit(loss_fn, make_state, batch, tx=TX, **own | {"memory": 1e4})


def test_a_transformation_that_is_an_object():
    """It updates every second step."""
    tx, (loss_fn, make_state, batch) = optax.MultiSteps(TX, 2), small(8)
    params, x = make_state(KEY)[0], RNG.normal(size=batch.shape).astype(np.float32)
    plan = fit(loss_fn, lambda key: (params, tx.init(params)), batch, tx=tx, memory=2**30)
    state, losses = plan.init(KEY), []
    for _ in range(3):
        state, metrics = plan.train_step()(state, plan.put(x))
        losses.append(float(metrics["loss"]))
    first, second, *_ = losses_on_one_device(loss_fn, make_state(KEY), x, {})
    np.testing.assert_allclose(losses, [first, first, second], rtol=1e-6)


def test_a_target_is_found_before_jax_is_used(monkeypatch):
    """Compilers of a folder are seen only then."""
    monkeypatch.setattr(targets, "topology", lambda name: 1 / 0)
    monkeypatch.delattr(jax, "devices")
    with pytest.raises(ZeroDivisionError):
        fit(*small(), tx=TX, target="v5e:2x4")


@pytest.mark.parametrize("more", [{}, slow({"lossy": "qsgd(8)", "keep": {"sync": "qsgd(8)"}})])
def test_a_loop_of_unknown_length_is_counted_once_with_a_note(more):
    """A draw by rejection, by the partitioner and on each device, where it ends for all."""

    def loss_fn(params, x, key):
        t = jax.random.beta(key, 1.5, 1.0, x.shape[:1])[:, None]
        return jnp.mean((jnp.tanh(t * x @ params["w"]) @ params["v"]) ** 2)

    make_state = state_of({"w": jnp.ones((256, 512)) / 512, "v": jnp.ones((512, 64)) / 512})
    batch = jnp.ones((64, 256))
    loss = Loss(loss_fn, rngs=True, per_device=True if more else None)  # quantized gradients
    found = fit(loss, make_state, batch, tx=TX, memory="64MiB", **more)
    program = found.step.loss_program(found.init(KEY), found.put(batch), KEY)
    assert program.per_device == bool(more)
    assert more or "random numbers depend on the index of a row" in program.why
    assert re.search(r"warning: stage .*: how often the loop %while\S* runs is unknown", str(found))
    assert "No layers were found in the loss" in str(found)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("more", [{}, {"lossy": "qsgd(8)"}, {"update_in_backward": True}])
def test_a_loss_that_prints(more, recompute, capfd):
    """On all rows, and of each device's, whatever is computed again; prints join no layers."""

    def loss_fn(params, x):
        for i in range(3):
            x = x + jnp.tanh(x @ params[f"block_{i}"])
            jax.debug.print("block {}", i)
        jax.debug.callback(lambda w: print("first", w.shape), params["block_0"])
        return jnp.mean(x**2)

    keep = {"recompute": recompute, "stage": 2}
    keep |= {"sync": "qsgd(8)"} if "lossy" in more else more
    if "update_in_backward" in more and recompute == "none":
        return  # such an update computes each layer again
    make_state = state_of({f"block_{i}": jnp.ones((64, 64)) / 64 for i in range(3)})
    lossy = more.get("lossy", ())
    loss = Loss(loss_fn, per_device=True) if lossy else loss_fn
    found = fit(loss, make_state, jnp.ones((8, 64)), tx=TX, memory="1GiB", keep=keep, lossy=lossy)
    found.step(found.init(KEY), found.put(jnp.ones((8, 64))))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert {"block 0", "block 1", "block 2", "first (64, 64)"} <= {*printed.splitlines()}
    assert "Layers were found in the loss, by numbers of parameters: 3." in found.notes
    gains_none = any("gains no memory by itself" in note for note in found.notes)
    assert gains_none == ("update_in_backward" in more)


def test_lossy_choices_are_allowed_by_name():
    options = {"tx": TX, "memory": 280e3, "headroom": 0.0, "keep": {"stage": 0}}
    with pytest.raises(NoPlanFits, match=r"With lossy='\w+' a step is predicted to fit"):
        fit(*small(8), **options)
    plan = fit(*small(8), **options, lossy="8bit")
    assert plan.plan.state_format == "8bit"
    batch = plan.put(np.ones((8, 16, 64), np.float32))
    _, metrics = plan.train_step()(plan.init(KEY), batch)
    assert np.isfinite(metrics["loss"])


def collective(params, x):
    return jax.lax.psum(small()[0](params, x), "data")


def by_value(params, x):
    return jnp.mean(x[x > 0]) * params["out"].sum()


class _PrivateError(ValueError):
    """A class that no message names."""


def failing(params, x):
    raise _PrivateError("not this one")


def calling(params, x):  # what a host returns may differ each time
    return small()[0](params, jax.pure_callback(lambda x: x, x, x))


def mapped(params, x):
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    matmul = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    return jnp.mean(matmul(x, params["out"]) ** 2)


def searching(params, x):
    return jax.lax.while_loop(lambda y: y < 3, lambda y: y + small()[0](params, x), 0.0)


LOSS, STATE, BATCH = small()
LBFGS = optax.lbfgs()
ZERO = Zero(jax.make_mesh((8,), ("data",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_fn": lambda params: 0.0}, r"calls <lambda>\(params, batch\)"),
        ({"loss_fn": 3}, "loss_fn must be a function of parameters and a batch, got 3"),
        ({"loss_fn": collective}, "failed: NameError"),
        ({"loss_fn": searching}, "its gradient was traced .* failed: ValueError"),
        ({"loss_fn": failing}, "failed: ValueError: not this one"),
        ({"loss_fn": lambda p, x: LOSS(p, x.reshape(64, 16, 64))}, "8 examples, and failed"),
        ({"loss_fn": mapped}, "a shard_map over a mesh {'d': 2}, and fit chooses the mesh"),
        ({"loss_fn": by_value}, "failed: NonConcreteBooleanIndexError"),
        ({"loss_fn": calling}, "calls functions of the host"),
        ({"loss_fn": lambda params, x: x}, "must be one floating scalar"),
        ({"batch": jnp.ones((12, 16, 64))}, "12"),
        ({"batch": {"x": BATCH, "y": jnp.ones(8)}}, "8"),
        ({"batch": 2.0}, "no array of the batch has rows"),
        ({"make_state": state_of({})}, "there is nothing to plan"),
        ({"make_state": state_of({"none": jnp.zeros((0, 3))})}, "there is nothing to plan"),
        ({"make_state": STATE(KEY)}, "make_state must be a function, got"),
        ({"make_state": lambda key, more: None}, "missing 1 required positional argument: .more"),
        (
            {"make_state": lambda *, key: None},
            "state of nothing or a random key, and failed .* TypeError",
        ),
        ({"make_state": lambda: 1 / 0}, "failed where it was traced: ZeroDivisionError"),
        ({"memory": None}, "give memory= in bytes"),
        *(({"memory": x}, "memory: expected bytes, or a text") for x in ("1Q", True, [1])),
        *(({"memory": x}, "memory: bytes must be above 0") for x in ("0K", -5, np.nan)),
        *(({"headroom": x}, "from 0 to below 1, got") for x in (-1, 1.0, "8%", np.nan)),
        *(({"measure": x}, "measure must be True, or a number, got") for x in (-1, "yes", 1.5)),
        ({"tx": 3}, "tx must be a transformation, got 3"),
        (
            {"tx": LBFGS, "make_state": lambda: (STATE(KEY)[0], LBFGS.init(STATE(KEY)[0]))},
            "tx.update gets gradients, .* 'value_fn'. A step cannot give the loss",
        ),
        ({"param_specs": P()}, "param_specs needs zero"),
        ({"zero": ZERO, "keep": {"replicas": 2}}, "keep must have {.replicas.: 1}, as all plans"),
        ({"keep": {"pipe": 2}}, "must have {.pipe.: 1}, .* Pipelines are not compared"),
        ({"device": "h100"}, "device must be a DeviceKind, got 'h100'"),
        ({"keep": ["stage"]}, r"keep must be a dict such as .* got \['stage'\]"),
        ({"keep": {"stage": 7}}, "stage=7 is none of 0, 1, 2, 3"),
        ({"keep": {"offload": "no"}}, "offload='no' is none of False"),
        ({"keep": {"offload": "update"}}, "needs offload='update' .*a known link to its host"),
        ({"keep": {"stage": [1, 2]}}, r"stage=\[1, 2\] is none of 0, 1, 2, 3"),
        *(({"folder": x}, "folder must be") for x in (__file__, f"{__file__}/below", 3)),
        ({"has_au": True}, "got 'has_au'; nearest is 'has_aux'"),
        ({"update": "backward"}, "keep={'update_in_backward': True}"),
        ({"target": 8}, "target must be a name such as 'h100x8', got 8"),
        ({"target": ""}, "unknown target ''"),
        ({"target": "cpu:16"}, "'cpu:16' was requested, 8 CPU devices were found"),
        ({"target": "l40x8"}, "needs the figures of l40x8: .*; nearest are l40s"),
        ({"target": "l40sx8", "measure": True}, "and l40sx8 is another machine"),
        ({"zero": 2}, "zero must be a Zero on a mesh of devices, got 2"),
        ({"largest": True, "keep": {"microbatches": 2}}, "microbatches=2 is none of 1"),
        ({"model_state": True}, "names its field"),
        ({"keep": {"stag": 3}}, "nearest is 'stage'"),
        ({"microbatches": 2}, "keep={'microbatches': 2}"),
        *(({"lossy": x}, "got '9bit'; nearest is '8bit'") for x in ("9bit", ["fp8", "9bit"])),
        ({"lossy": "powersgd(-1)"}, "by 'powersgd.RANK.', .* got 'powersgd.-1.'"),
        ({"lossy": 3}, "lossy must be names such as '8bit', got 3"),
        ({"memory": 1e4}, "KiB too much; planned are activations .*Pipelines are not"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(change, message):
    given = {"loss_fn": LOSS, "make_state": STATE, "batch": BATCH, "tx": TX, "memory": 2.0**30}
    with pytest.raises(ValueError, match=message) as raised:
        fit(**given | change)
    assert re.search(r" \(docs: \w+/\w+\)\.", str(raised.value))


def test_a_state_of_codes_is_planned_and_trained_as_it_is():
    """Stored forms: adapters alone change, and codes are never decoded in the state."""
    loss, _, tokens, _ = decoder()
    forms = {"^layers/(query|up|down)$": (stored.frozen(8), stored.lora(2))}
    tx = optax.masked(TX, stored.trained)

    def make_state(key):
        params = stored.store(Decoder(3, WIDTH, 4, 4, 64, 64, 16).init(), forms, key)
        return params, tx.init(params)

    keep = {"recompute": "full", "microbatches": 1, "stage": 3, "replicas": 1, "offload": False}
    options = {"tx": tx, "memory": "1GiB"}
    fn = stored.loss_of(loss)
    found = fit(fn, make_state, tokens, keep=keep | {"update_in_backward": False}, **options)
    state = found.init(KEY)
    before = jax.tree.map(np.asarray, state[0])
    state, metrics = found.train_step()(state, found.put(tokens))
    assert float(metrics["loss"]) == pytest.approx(float(fn(make_state(KEY)[0], tokens)), rel=1e-5)
    changed = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), state[0], before)
    assert jax.tree.leaves(changed["layers"]["up"].base) == [False, False]
    assert changed["layers"]["up"].b
    assert not changed["embed"]


def test_products_in_few_bits_are_compared_on_request():
    """The plan of a device that is faster in int8, and the step that runs it."""
    width = 256
    params = {"layers": jnp.full((2, width, width), 1e-2)}
    body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    loss = lambda p, x: jnp.mean(jax.lax.scan(body, x, p["layers"])[0] ** 2)  # noqa: E731
    kind = DeviceKind("cpu", 2.0**30, 1e14, 1e10, 1e12, None, "none", int8=1e12)
    keep = {"recompute": "none", "microbatches": 1, "stage": 0, "offload": False}
    keep |= {"update_in_backward": False}
    x = np.ones((width * jax.device_count(), width), np.float32)
    options = {"tx": TX, "device": kind, "keep": keep}
    assert fit(loss, state_of(params), x, **options).plan.matmuls is None
    found = fit(loss, state_of(params), x, **options, lossy="matmuls(int8)")
    assert (found.plan.matmuls, found.plan.lossy) == ("int8", True)
    state = found.init(KEY)
    assert "i8[" in str(jax.make_jaxpr(found.loss)(state[0], x))
    _, metrics = found.train_step()(state, found.put(x))
    assert float(metrics["loss"]) == pytest.approx(float(loss(params, x)), rel=0.05)
    with pytest.raises(ValueError, match="products in fp8 are asked for, and cpu has none"):
        fit(loss, state_of(params), x, **options, lossy="matmuls(fp8)")
