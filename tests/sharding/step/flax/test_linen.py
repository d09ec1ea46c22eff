"""Flax linen: gathered classes, unmodified models, partition metadata and logical axes."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync

from ....tiers import slow
from .. import runs
from ..runs import F64, TX, WIDTH, assert_same, make_train_state_of, train, train_alone, zero_of

pytestmark = pytest.mark.usefixtures("x64")
VOCAB, HIDDEN, KEY = 24, 32, 5
SGD = optax.sgd(0.1)
Dense = functools.partial(nn.Dense, use_bias=False, **F64)


class Block(nn.Module):
    """Written with ``compact``; a bool decides what is computed."""

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        h = jnp.tanh(nn.Dense(HIDDEN, **F64)(nn.LayerNorm(**F64)(x)))
        h = nn.Dropout(0.5, deterministic=not train)(h * 2 if train else h)
        return x + Dense(WIDTH)(h) * scale


class SetupBlock(nn.Module):
    def setup(self):
        self.up, self.down = Dense(HIDDEN), Dense(WIDTH)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class CountingBlock(nn.Module):
    """Keeps a statistic, as batch norms do, and sows what it computes."""

    @nn.compact
    def __call__(self, x, train):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros((), jnp.float64))
        if train and not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * x.mean()
        h = jnp.tanh(Dense(WIDTH)(x))
        self.sow("intermediates", "hidden", h)
        return x + h + mean.value  # a gradient flows through the statistic


class Nested(nn.Module):
    """A block in a block: the outer one gathers for both."""

    @nn.compact
    def __call__(self, x):
        return SetupBlock(name="inner")(x) + Dense(WIDTH)(x)


class LM(nn.Module):
    """Every kind of block, one after the other and scanned; its embedding is used twice."""

    wrap: Any = None

    @nn.compact
    def __call__(self, tokens, train=True):
        wrap = self.wrap or (lambda cls: cls)
        embed = nn.Embed(VOCAB, WIDTH, **F64)
        x = wrap(Block)()(embed(tokens), train=train, scale=0.5)
        x = wrap(Block)()(x, train)
        x = wrap(CountingBlock)()(wrap(Nested)()(wrap(SetupBlock)()(x)), train)
        scan = nn.scan(
            lambda block, x, _: (block(x, train), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        return embed.attend(scan(wrap(Block)(name="stack"), x, None)[0])


def batch(step):
    """Eighths whose losses differ in scale by up to 1000."""
    rng = np.random.default_rng(step)
    weight = np.repeat(10.0 ** rng.uniform(-2, 1, 8), 2)
    return {"tokens": rng.integers(0, VOCAB, (16, 5)), "weight": weight}


def params_of(lm, *inputs):
    return runs.draw(jax.eval_shape(lambda: lm.init(jax.random.key(0), *inputs))["params"])


def make_state(lm):
    return make_train_state_of(lambda: params_of(lm, batch(0)["tokens"], False))


def loss_of(lm):
    def loss_fn(params, batch, key):
        logits, new = lm.apply(
            {"params": params, "batch_stats": {"CountingBlock_0": {"mean": 0.1}}},
            batch["tokens"],
            rngs={"dropout": key},
            mutable=["batch_stats", "intermediates"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return (losses.mean(-1) * batch["weight"]).mean(), new

    return loss_fn


@functools.cache
def reference():
    """The states and metrics of one device, which knows the keys of eight."""
    loss_fn = loss_of(LM())

    def mean(params, batch, state, key):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(8))
        parts = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch)
        losses, aux = jax.vmap(loss_fn, (None, 0, 0))(params, parts, keys)
        return losses.mean(), aux

    return train_alone(make_state(LM()), mean, batch, key=KEY)


# Class names and paths; of "inner" the block around it gathers.
BLOCKS = (r"^Block_\d$", "SetupBlock", "CountingBlock", "Nested", "inner", "^stack$")
# How blocks gather: stage, options, whether the model takes wrapped classes.
WAYS = {
    "classes": (3, {}, True),
    "found": (3, {"gathered_blocks": BLOCKS}, False),
    "stored": (3, {"reshard_after_forward": False}, True),
    "stage 2": (2, {"gathered_blocks": BLOCKS}, False),
}


@functools.cache
def prepare(way):
    """``(zero, state, step, lowered program)``."""
    stage, options, wrapped = WAYS[way]
    zero = zero_of(stage, **options)
    lm = LM(zero.gathered if wrapped else None)
    state = zero.init(make_state(lm))
    # Of each device: its blocks gather, and keys differ.
    loss = shd.Loss(loss_of(lm), rngs=True, has_aux=True, per_device=True)
    step = zero.train_step(loss, donate=False)
    return zero, state, step, step.lower(state, zero.put(batch(0)), jax.random.key(KEY)).as_text()


@pytest.mark.parametrize("way", ["classes", "found", slow("stage 2")])
def test_equals_one_device(way):
    """Parameters, losses, dropped units, statistics, and what a block sows."""
    zero, state, step, _ = prepare(way)
    expected, expected_metrics = reference()
    for i, one in enumerate(expected_metrics):
        state, found = step(state, zero.put(batch(i)), jax.random.key(KEY))
        np.testing.assert_allclose(found["loss"], one["loss"], rtol=1e-12)
        found, one = found["aux"], one["aux"]
        found, one = ({k: v["CountingBlock_0"] for k, v in x.items()} for x in (found, one))
        mean, one_mean = found["batch_stats"]["mean"], one["batch_stats"]["mean"].mean()
        np.testing.assert_allclose(mean, one_mean, rtol=1e-12)
        (hidden,), (one_hidden,) = (x["intermediates"]["hidden"] for x in (found, one))
        np.testing.assert_allclose(hidden, one_hidden.reshape(hidden.shape), rtol=1e-10)
    runs.assert_close((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert state.step == expected.step


def test_blocks_without_an_effect_are_warned_of_and_described():
    """Below stage 3, where no gradient is reduced in a layer."""
    block, x = SetupBlock(), jax.ShapeDtypeStruct((16, WIDTH), "float64")
    params = jax.tree.map(jnp.zeros_like, jax.eval_shape(block.init, jax.random.key(0), x))
    for stage, num, options, works in (
        (0, 1, {}, False),
        (1, 2, {}, False),
        (2, 1, {"sync": sync.qsgd(8, min_size=1)}, False),
        (2, 1, {}, True),
        (3, 1, {}, True),
    ):
        zero = zero_of(stage, gathered_blocks="SetupBlock", **options)
        state = zero.abstract_state(lambda: (params, SGD.init(params)), tx=SGD)
        step = zero.train_step(
            lambda p, x: jnp.mean(block.apply(p, x) ** 2), tx=SGD, microbatches=num
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step.lower(state, x)
        assert [f"has no effect in this step of stage {stage}" in str(w.message) for w in seen] == (
            [] if works else [True]
        )
        assert ("nothing is gathered below" in str(zero.describe(state, tx=SGD))) == (stage < 3)


def test_blocks_are_gathered_in_each_pass_and_freed():
    """Those that are found in a model, and those of a model that takes wrapped classes."""
    arrays = len(jax.tree.leaves(reference()[0].params))
    for way, passes in (("classes", 2), ("found", 2), ("stored", 1), ("stage 2", 0)):
        _, state, _, program = prepare(way)
        # The table is gathered once. (XLA:CPU, which drops barriers, merges the two passes.)
        found = runs.gathers_behind(program, "2x5x16xf64")
        assert len(found) == passes * (arrays - 1) + min(passes, 1)
        assert sum(found) == (len(found) - 1 if passes == 2 else 0)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
        size = sum(x.nbytes for x in jax.tree.leaves(state.params))
        assert held == (size // 8 if passes else size)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_jitted_model_gathers_its_blocks(stage):
    """The loss is traced more than once, a jitted function the first time alone."""
    lm = nn.Sequential([SetupBlock(), SetupBlock()])
    params = params_of(lm, jnp.ones((1, WIDTH)))
    zero, programs = zero_of(stage, gathered_blocks="SetupBlock"), []
    for apply in (lm.apply, jax.jit(lm.apply)):
        loss_fn = lambda p, x, apply=apply: jnp.mean(apply({"params": p}, x) ** 2)  # noqa: E731
        state = zero.init(lambda: (params, TX.init(params)), tx=TX)
        step, x = zero.train_step(loss_fn, tx=TX, donate=False), zero.put(rows(0))
        program = step.lower(state, x).as_text()
        programs.append(program.count("all_gather") + program.count("reduce_scatter"))
        programs.append(step(state, x)[1]["loss"])
    assert programs[0] == programs[2] >= 4
    assert programs[1] == programs[3]
    with pytest.raises(ValueError, match="or is jitted and was traced before"):
        zero.train_step(loss_fn, tx=TX)(state, x)


INIT = nn.initializers.lecun_normal()
# As tuples, and as a YAML file has them; "unknown" has no rule.
RULES = {
    "tuples": (("batch", ("data",)), ("embed", None), ("mlp", "model"), ("heads", ("model",))),
    "lists": [["batch", ["data"]], ["mlp", "model"], ["heads", ["model"]]],
}


def logical(features, *names, **options):
    return Dense(features, kernel_init=nn.with_logical_partitioning(INIT, names, **options))


class Parallel(nn.Module):
    """Kernels that name mesh axes, and kernels that name their dims, as Flax's lm1b does."""

    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(logical(HIDDEN, "embed", "mlp")(x))
        h = nn.with_logical_constraint(h, ("batch", "mlp"))
        x = x + logical(WIDTH, "heads", "embed")(h)
        up = nn.with_partitioning(INIT, ("fsdp", "model"))  # the mesh has no axis fsdp
        return x + logical(WIDTH, "mlp", "unknown")(jnp.tanh(Dense(HIDDEN, kernel_init=up)(x)))


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Parallel()(Parallel()(x))


make_parallel = make_train_state_of(lambda: params_of(TwoLayers(), jnp.ones((2, WIDTH))))


def parallel_loss(params, x):
    return jnp.mean((TwoLayers().apply({"params": params}, x) - 1) ** 2)


def rows(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(16, WIDTH)) * np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), 2)[:, None]


@functools.cache
def parallel_reference():
    return train_alone(make_parallel, lambda params, x, *_: (parallel_loss(params, x), None), rows)


@pytest.mark.parametrize(
    ("stage", "kind", "rules"), [(2, AxisType.Auto, "lists"), (3, AxisType.Explicit, "tuples")]
)
def test_metadata_shards_as_the_rules_in_context_say(stage, kind, rules):
    zero = zero_of(stage, "tensor", kind, gathered_blocks="Parallel")
    with nn.logical_axis_rules(RULES[rules]):
        found = train(zero, make_parallel, parallel_loss, data=rows)
    assert_same(found, parallel_reference())
    state = found[0]
    found = [x["kernel"].value.sharding.spec for x in state.params["Parallel_1"].values()]
    columns = [P(None, "model"), P("data", "model")][stage - 2]
    by_row = [P("model", None), P("model", "data")][stage - 2]
    assert found == [columns, by_row, by_row, columns]
    assert "metadata names 'fsdp', which the mesh lacks" in str(zero.describe(state))
    # Rules are for making the state: afterwards the arrays themselves say where they are.
    zero.train_step(parallel_loss).lower(state, zero.put(rows(0)))


class Fsdp(nn.Module):
    """Kernels that name ZeRO's own axis, as a mesh axis and by rules of their own."""

    @nn.compact
    def __call__(self, x):
        up = nn.with_partitioning(INIT, ("model", "data"))
        x = jnp.tanh(Dense(HIDDEN, kernel_init=up)(x))
        rules = (("mlp", "data"), ("embed", "model"))
        return logical(WIDTH, "mlp", "embed", rules=rules)(x)


def test_metadata_that_names_the_own_axis_chooses_the_dim_of_stage_3():
    def loss_fn(params, x):
        return jnp.mean((Fsdp().apply({"params": params}, x) - 1) ** 2)

    make_fsdp = make_train_state_of(lambda: params_of(Fsdp(), jnp.ones((2, WIDTH))))
    zero = zero_of(3, "tensor", gathered_blocks="Dense")
    found = state, _ = train(zero, make_fsdp, loss_fn, data=rows)
    expected = train_alone(make_fsdp, lambda params, x, *_: (loss_fn(params, x), None), rows)
    assert_same(found, expected)
    kernels = [layer["kernel"].value.sharding.spec for layer in state.params.values()]
    assert kernels == [P("model", "data"), P("data", "model")]
    # Below it parameters are replicated, whatever their names say.
    specs = zero_of(1, "tensor").specs(jax.eval_shape(make_fsdp)).params.values()
    assert [layer["kernel"].value for layer in specs] == [P("model"), P(None, "model")]


def test_specs_of_metadata():
    zero, abstract = zero_of(2, "tensor"), jax.eval_shape(make_parallel)
    message = r"Dense_0/kernel.* 'embed' is not in the mesh .*logical_axis_rules\(rules\)"
    with pytest.raises(ValueError, match=message):
        zero.specs(abstract)
    message = r"rule \('mlp', 'tensor'\) of its logical axis 'mlp' .* the mesh has \('data', 'mod"
    rules = [("mlp", "tensor"), ("unused", "axis")]
    with nn.logical_axis_rules(rules), pytest.raises(ValueError, match=message):
        zero.specs(abstract)
    specs = zero.specs(abstract, param_specs=P()).params["Parallel_0"]
    assert {x["kernel"].value for x in specs.values()} == {P()}
    # Names that are mesh axes need no rules.
    params = params_of(logical(HIDDEN, None, "model"), jnp.ones((1, WIDTH)))
    assert zero.specs((params, TX.init(params)), tx=TX)[0]["kernel"].value == P(None, "model")


def test_blocks_that_are_not_there_raise():
    def lower(stage, blocks):
        zero = zero_of(stage, "tensor", gathered_blocks=blocks)
        zero.train_step(parallel_loss).lower(zero.abstract_state(make_parallel), rows(0))

    message = r"'Decoder' is neither .* It calls TwoLayers \(the model\), Parallel \(P.* Name some"
    with nn.logical_axis_rules(RULES["lists"]):
        for stage in range(4):
            with pytest.raises(ValueError, match=message):
                lower(stage, ("Parallel", "Decoder"))
