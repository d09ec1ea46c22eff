"""Flax linen, Flax nnx, Equinox and plain trees: a sharded step equals the unsharded one."""

import functools
import warnings
from typing import Any, NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

from ....flax_nnx import needs_nnx, nnx
from ... import model

pytestmark = pytest.mark.usefixtures("x64")
VOCAB, WIDTH, HIDDEN, LAYERS, STEPS = 24, 16, 48, 2, 5
TOLERANCE = 1e-12
F64 = {"param_dtype": jnp.float64}


# Their states show the scale of the gradients, which their updates (or a clip) would hide.
CAME = optax_ext.came(1e-3, weight_decay=0.1)
ADAMW = optax.adamw(1e-3)  # compiles sooner


def batch(step):
    """Eighths whose losses differ in scale by up to 1000."""
    rng = np.random.default_rng(step)
    weight = np.repeat(10.0 ** rng.uniform(-2, 1, 8), 2)
    return {"tokens": rng.integers(0, VOCAB, (16, 5)), "weight": weight}


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return (losses.mean(-1) * batch["weight"]).mean()


def zero_of(stage=3, model_axis=False, **kwargs):
    names = ("data", "model") if model_axis else ("data",)
    mesh = jax.make_mesh(
        (4, 2) if model_axis else (8,), names, axis_types=(AxisType.Auto,) * len(names)
    )
    return shd.Zero(mesh, stage=stage, min_shard_size=0, **kwargs)


def as_pair(state):
    return state if isinstance(state, tuple) else (state.params, state.opt_state)


def train_alone(make, loss_fn, tx=CAME):
    """The reference: ``((params, opt_state), losses)`` of plain optax on one device."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = as_pair(jax.jit(make)())
    losses = []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batch(i))
        losses.append(float(loss))
    return (params, opt_state), losses


def train(zero, make, loss_fn, tx=CAME, param_specs=None, keys=None, **kwargs):
    """``(state, metrics of each step)`` with ZeRO."""
    abstract = jax.eval_shape(make)
    tx = tx if isinstance(abstract, tuple) else None
    state = zero.init(make, tx=tx, param_specs=param_specs)
    step = zero.train_step(loss_fn, tx=tx, **kwargs)
    metrics = []
    for i in range(STEPS):
        key = None if keys is None else jax.random.fold_in(keys, i)
        state, out = step(state, zero.put(batch(i)), key)
        metrics.append(out)
    return state, metrics


def assert_same(state, reference, losses=None, expected_losses=None):
    distance, leaf = model.worst_leaf(as_pair(state), reference)
    assert distance < TOLERANCE, leaf
    if losses is not None:
        losses = [float(x["loss"]) for x in losses]
        np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)


def assert_exact(zero, make, loss_fn, make_alone, loss_alone, tx=CAME, **kwargs):
    """Trains both ways and compares; returns the sharded state and its metrics."""
    reference, expected_losses = train_alone(make_alone, loss_alone, tx)
    state, metrics = train(zero, make, loss_fn, tx, **kwargs)
    assert_same(state, reference, metrics, expected_losses)
    return state, metrics


def bytes_held(tree):
    """Of one device, as a part of all."""
    leaves = jax.tree.leaves(tree)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)


# --- Flax linen ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Written with ``compact``; a bool decides what is computed."""

    width: int = WIDTH
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        h = jnp.tanh(nn.Dense(HIDDEN, **F64)(nn.LayerNorm(**F64)(x)))
        if train:
            h = h * 2
        h = nn.Dropout(self.rate, deterministic=not train)(h)
        return x + nn.Dense(self.width, **F64)(h) * scale


class SetupBlock(nn.Module):
    """Written with ``setup``."""

    def setup(self):
        self.up, self.down = nn.Dense(HIDDEN, **F64), nn.Dense(WIDTH, **F64)

    def __call__(self, x, train=False, *, scale=1.0):
        return x + self.down(jnp.tanh(self.up(x)) * (2.0 if train else 1.0)) * scale


class CountingBlock(nn.Module):
    """Keeps a statistic, as batch norms do, and sows what it computes."""

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros((), jnp.float64))
        if train and not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * x.mean()
        h = jnp.tanh(nn.Dense(HIDDEN, **F64)(x))
        self.sow("intermediates", "hidden", h)
        return x + nn.Dense(WIDTH, **F64)(h) * scale + mean.value


class Partitioned(nn.Module):
    """Kernels that carry metadata: sharded over the axis "model"."""

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        init = nn.initializers.lecun_normal()
        up = nn.Dense(HIDDEN, kernel_init=nn.with_partitioning(init, (None, "model")), **F64)
        down = nn.Dense(WIDTH, kernel_init=nn.with_partitioning(init, ("model", None)), **F64)
        return x + down(jnp.tanh(up(x))) * scale


class LM(nn.Module):
    """Two blocks, one after the other or scanned, and an embedding that is used twice."""

    block: Any = Block
    scan: bool = False

    @nn.compact
    def __call__(self, tokens, train=True):
        embed = nn.Embed(VOCAB, WIDTH, **F64)
        x = embed(tokens)
        if not self.scan:
            for i in range(LAYERS):
                block = self.block()
                x = block(x, train) if i % 2 else block(x, train=train, scale=0.5)
            return embed.attend(x)
        scan = nn.scan(
            lambda block, x, _: (block(x, train, scale=0.5), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        x, _ = scan(self.block(name="blocks"), x, None)
        return embed.attend(x)


def linen_state(lm, tx=CAME):
    def make():
        params = lm.init(jax.random.key(0), jnp.zeros((1, 5), jnp.int32), train=False)["params"]
        return TrainState.create(apply_fn=lm.apply, params=params, tx=tx)

    return make


@functools.cache
def linen_reference(block, scan, tx):
    lm = LM(block, scan)
    return train_alone(linen_state(lm, tx), linen_loss(lm), tx)


def linen_loss(lm):
    return lambda params, batch: cross_entropy(lm.apply({"params": params}, batch["tokens"]), batch)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("block", "scan", "stage"),
    [
        (Block, False, 3),
        (Block, False, 2),
        (Block, True, 3),
        (SetupBlock, False, 3),
        (SetupBlock, True, 3),
    ],
)
def test_linen(block, scan, stage):
    zero = zero_of(stage)
    tx = CAME if block is Block else ADAMW
    lm = LM(zero.gathered(block), scan)
    reference, losses = linen_reference(block, scan, tx)
    state, metrics = train(zero, linen_state(lm, tx), linen_loss(lm), tx)
    assert_same(state, reference, metrics, losses)
    assert state.step == STEPS
    if stage == 3:
        assert bytes_held(state.params) < 0.2


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("block", [Block, SetupBlock])
def test_linen_outside_a_step(block, scan):
    """A gathered class has the names, the initial values and the outputs of the class."""
    unsharded, layered = LM(block, scan), LM(zero_of().gathered(block), scan)
    params, expected = linen_state(layered)().params, linen_state(unsharded)().params
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    chex.assert_trees_all_equal(params, expected)
    for train in (False, True):
        outputs = [
            lm.apply({"params": params}, batch(0)["tokens"], train=train)
            for lm in (unsharded, layered)
        ]
        np.testing.assert_array_equal(*outputs)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("scan", [False, True])
def test_linen_dropout(scan):
    """A layer that is computed twice drops the same units both times, and those it always did."""

    def run(stage, wrap):
        zero = zero_of(stage)
        block = functools.partial(zero.gathered(Block) if wrap else Block, rate=0.5)
        lm = LM(block, scan)

        def loss_fn(params, batch, key):
            logits = lm.apply({"params": params}, batch["tokens"], rngs={"dropout": key})
            return cross_entropy(logits, batch)

        make = linen_state(lm, ADAMW)
        state, metrics = train(zero, make, loss_fn, rngs=True, keys=jax.random.key(1))
        return as_pair(state), [float(x["loss"]) for x in metrics]

    reference, losses = run(2, wrap=False)
    for stage in (3,) if scan else (2, 3):
        state, found = run(stage, wrap=True)
        assert model.worst_leaf(state, reference)[0] < TOLERANCE
        np.testing.assert_allclose(found, losses, rtol=TOLERANCE)


def test_linen_mutable_collections():
    """A gathered block passes its statistics on, and what it sows."""
    zero = zero_of()
    tokens = jnp.zeros((1, 5), jnp.int32)

    def loss_of(lm):
        stats = lm.init(jax.random.key(0), tokens)["batch_stats"]

        def loss_fn(params, batch):
            logits, new = lm.apply(
                {"params": params, "batch_stats": stats},
                batch["tokens"],
                mutable=["batch_stats", "intermediates"],
            )
            return cross_entropy(logits, batch), new

        return loss_fn

    unsharded, layered = LM(CountingBlock), LM(zero.gathered(CountingBlock))

    def run(zero, lm):
        state = zero.init(linen_state(lm, optax.sgd(0.1)))
        return zero.train_step(loss_of(lm), has_aux=True)(state, zero.put(batch(0)))

    # The statistic is added to the output: a gradient flows through it.
    (state, metrics), (expected_state, expected) = run(zero, layered), run(zero_of(2), unsharded)
    assert metrics["aux"]["batch_stats"]["CountingBlock_1"]["mean"] != 0
    assert metrics["aux"]["intermediates"]["CountingBlock_1"]["hidden"][0].shape[0] == 16
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=TOLERANCE)
    jax.tree.map(compare, metrics, expected)
    assert_same(state, as_pair(expected_state))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_linen_partition_metadata(stage):
    zero = zero_of(stage, model_axis=True)
    lm = LM(zero.gathered(Partitioned))
    make = linen_state(lm)
    abstract = jax.eval_shape(make)
    requested = zero.specs(abstract, param_specs=nn.get_partition_spec(abstract.params))
    found = zero.specs(abstract)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    assert jax.tree.leaves(requested, is_leaf=is_spec) == jax.tree.leaves(found, is_leaf=is_spec)
    reference, losses = linen_reference(Partitioned, False, CAME)
    state, metrics = train(zero, make, linen_loss(lm))
    assert_same(state, reference, metrics, losses)
    kernel = state.params["Partitioned_0"]["Dense_0"]["kernel"].value
    assert kernel.sharding.spec == (P("data", "model") if stage == 3 else P(None, "model"))


class Logical(nn.Module):
    """Kernels that name their dims, as Flax's lm1b does; rules say which axes these are."""

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        h = jnp.tanh(nn.Dense(HIDDEN, kernel_init=up, **F64)(x))
        return x + nn.Dense(WIDTH, kernel_init=down, **F64)(h) * scale


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rules", [[["mlp", "model"]], (("mlp", "model"), ("embed", None))])
@pytest.mark.parametrize("stage", [2, 3])
def test_linen_logical_axes(stage, rules):
    """Names become mesh axes by the rules in the context; without a rule they are replicated."""
    zero = zero_of(stage, model_axis=True)
    lm = LM(zero.gathered(Logical))
    reference, losses = linen_reference(Logical, False, ADAMW)
    with nn.logical_axis_rules(rules):
        state, metrics = train(zero, linen_state(lm, ADAMW), linen_loss(lm), ADAMW)
    assert_same(state, reference, metrics, losses)
    kernel = state.params["Logical_0"]["Dense_0"]["kernel"].value
    assert kernel.sharding.spec == (P("data", "model") if stage == 3 else P(None, "model"))


def test_linen_logical_axes_that_have_no_mesh_axis():
    zero = zero_of(2, model_axis=True)
    abstract = jax.eval_shape(linen_state(LM(Logical), ADAMW))
    message = r"Logical_0/Dense_0/kernel.* 'embed' is not in the mesh .*logical_axis_rules\(rules\)"
    with pytest.raises(ValueError, match=message):
        zero.specs(abstract)
    message = (
        r"rule \('mlp', 'tensor'\) of its logical axis 'mlp' .* the mesh has \('data', 'model'\)"
    )
    with (
        nn.logical_axis_rules([("mlp", "tensor"), ("unused", "axis")]),
        pytest.raises(ValueError, match=message),
    ):
        zero.specs(abstract)
    found = zero.specs(abstract, param_specs=P())
    assert found.params["Logical_0"]["Dense_0"]["kernel"].value == P()


# --- Flax nnx -----------------------------------------------------------------------------------

if nnx is not None:

    class NnxBlock(nnx.Module):
        """Counts its calls, in a variable that is no parameter."""

        def __init__(self, rngs, partitioned=False):
            def kernel(*names):
                init = nnx.initializers.lecun_normal()
                return nnx.with_partitioning(init, names) if partitioned else init

            up, down = kernel(None, "model"), kernel("model", None)
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, kernel_init=up, **F64)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, kernel_init=down, **F64)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x, *, scale=1.0):
            self.calls[...] += 1.0
            return x + self.down(jnp.tanh(self.up(x))) * scale

    class NnxLM(nnx.Module):
        """As ``LM``."""

        def __init__(self, block, rngs, **kwargs):
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **F64)
            self.blocks = nnx.List([block(rngs, **kwargs) for _ in range(LAYERS)])

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, scale=0.5)
            return self.embed.attend(x)


def nnx_parts(block, pure=False, **kwargs):
    """(make_state, loss_fn, the model): what a user writes to train an nnx model."""
    lm = NnxLM(block, nnx.Rngs(0), **kwargs)
    graph, params, rest = nnx.split(lm, nnx.Param, ...)

    def loss_fn(params, batch):
        lm = nnx.merge(graph, params, rest, copy=True)
        loss = cross_entropy(lm(batch["tokens"]), batch)
        return loss, {"calls": lm.blocks[0].calls[...]}

    return nnx.to_pure_dict(params) if pure else params, loss_fn, lm


def pair_of(params, tx):
    return lambda: (jax.tree.map(jnp.asarray, params), tx.init(params))


def first_of(loss_fn):
    return lambda params, batch: loss_fn(params, batch)[0]


@functools.cache
def nnx_reference(tx):
    """Of pure dicts; metadata changes no value."""
    params, loss_fn, _ = nnx_parts(NnxBlock, pure=True)
    return train_alone(pair_of(params, tx), first_of(loss_fn), tx)


def train_nnx(zero, params, loss_fn, tx, **kwargs):
    """The state and the metrics, found equal to the reference."""
    state, metrics = train(zero, pair_of(params, tx), loss_fn, tx, has_aux=True, **kwargs)
    (reference, losses) = nnx_reference(tx)
    treedef = jax.tree.structure(reference)
    assert_same(treedef.unflatten(jax.tree.leaves(state)), reference, metrics, losses)
    return state, metrics


@pytest.mark.slow(keep=2)
@needs_nnx
@pytest.mark.parametrize(("stage", "pure"), [(3, False), (3, True), (2, False)])
def test_nnx(stage, pure):
    zero = zero_of(stage)
    unsharded = NnxLM(NnxBlock, nnx.Rngs(0))
    params, loss_fn, lm = nnx_parts(zero.gathered(NnxBlock), pure)
    assert jax.tree.structure(nnx.state(lm)) == jax.tree.structure(nnx.state(unsharded))
    state, metrics = train_nnx(zero, params, loss_fn, CAME)
    # The count that the block changed comes out of the call that is computed twice, once.
    assert [x["aux"]["calls"] for x in metrics] == [1] * STEPS
    if stage == 3:
        assert bytes_held(state[0]) < 0.2
    # Outside a step the class does what it did.
    for one in (lm, unsharded):
        nnx.update(one, state[0])
    tokens = batch(0)["tokens"]
    np.testing.assert_allclose(lm(tokens), unsharded(tokens), rtol=TOLERANCE, atol=TOLERANCE)
    assert lm.blocks[0].calls[...] == unsharded.blocks[0].calls[...] == 1


FACTORED = {
    "came": CAME,
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
}


@needs_nnx
@pytest.mark.parametrize("name", FACTORED)
def test_an_nnx_optimizer_under_a_mesh_refuses_factored_state(name):
    """Flax lays each statistic as its parameter, whose rank it has not."""
    with jax.set_mesh(zero_of(model_axis=True).mesh):
        lm = NnxLM(NnxBlock, nnx.Rngs(0), partitioned=True)
        with pytest.raises(ValueError, match="with_sharding_constraint"):
            nnx.Optimizer(lm, FACTORED[name], wrt=nnx.Param)


@pytest.mark.slow(keep=2)
@needs_nnx
@pytest.mark.parametrize(
    ("name", "stage", "pure"),
    [("came", 3, False), ("came", 2, True), ("adafactor", 3, True), ("adafactor", 2, False)],
)
def test_nnx_partition_metadata_with_factored_state(name, stage, pure):
    """What to do instead: the pair, and the model's own specs."""
    zero = zero_of(stage, model_axis=True)
    with nnx.use_eager_sharding(False):  # the model is made unsharded; zero.init shards it
        params, loss_fn, lm = nnx_parts(zero.gathered(NnxBlock), pure, partitioned=True)
    specs = nnx.get_partition_spec(nnx.state(lm, nnx.Param))
    specs = nnx.to_pure_dict(specs) if pure else specs
    state, _ = train_nnx(zero, params, loss_fn, FACTORED[name], param_specs=specs)
    nnx.update(lm, state[0])
    spec = P("data", "model") if stage == 3 else P(None, "model")
    assert lm.blocks[0].up.kernel[...].sharding.spec == spec


@needs_nnx
def test_an_nnx_optimizer_made_without_a_mesh():
    """Its state and the model's go in, and come back into the same objects."""
    tx = CAME
    zero = zero_of(2, model_axis=True)
    with nnx.use_eager_sharding(False):
        lm = NnxLM(NnxBlock, nnx.Rngs(0), partitioned=True)
        optimizer = nnx.Optimizer(lm, tx, wrt=nnx.Param)
    graph, params, rest = nnx.split(lm, nnx.Param, ...)
    specs = nnx.as_pure(nnx.get_partition_spec(params))

    def loss_fn(params, batch):
        return cross_entropy(nnx.merge(graph, params, rest, copy=True)(batch["tokens"]), batch)

    state = nnx.as_pure((params, optimizer.opt_state))
    state = jax.device_put(state, zero.shardings(state, tx=tx, param_specs=specs))
    step = zero.train_step(loss_fn, tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    nnx.update(lm, state[0])
    treedef = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = nnx.data(treedef.unflatten(jax.tree.leaves(state[1])))
    leaves = jax.tree.leaves((nnx.state(lm, nnx.Param), optimizer.opt_state))
    reference, _ = nnx_reference(tx)
    assert_same(jax.tree.structure(reference).unflatten(leaves), reference)


# --- Equinox ------------------------------------------------------------------------------------


class EqxBlock(eqx.Module):
    """A module that is a pytree."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, dtype=jnp.float64, key=keys[0])
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, dtype=jnp.float64, key=keys[1])

    def __call__(self, x, scale=1.0):
        return x + jax.vmap(jax.vmap(lambda x: self.down(jnp.tanh(self.up(x)))))(x) * scale


class EqxLM(eqx.Module):
    """As ``LM``; ``norm`` is a leaf that is no array."""

    embed: jax.Array
    blocks: list[EqxBlock]
    norm: Any

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 1)
        self.embed = jax.random.normal(keys[0], (VOCAB, WIDTH), jnp.float64) / 4
        self.blocks = [EqxBlock(k) for k in keys[1:]]
        self.norm = jnp.tanh

    def __call__(self, tokens, call):
        x = self.embed[tokens]
        for block in self.blocks:
            x = call(block, x, scale=0.5)
        return self.norm(x) @ self.embed.T


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("stage", "static_first"), [(2, False), (3, True), (3, False)])
def test_equinox(stage, static_first):
    """Trees are combined in either order, though a shard is a node of several leaves."""
    zero = zero_of(stage)
    abstract = eqx.filter_eval_shape(EqxLM, jax.random.key(0))
    static = eqx.filter(abstract, lambda x: not isinstance(x, jax.ShapeDtypeStruct))

    def make():
        params = eqx.filter(EqxLM(jax.random.key(0)), eqx.is_array)
        return params, CAME.init(params)

    def loss_of(call):
        def loss_fn(params, batch):
            trees = (static, params) if static_first else (params, static)
            return cross_entropy(eqx.combine(*trees)(batch["tokens"], call), batch)

        return loss_fn

    unsharded, layered = EqxBlock.__call__, zero.gathered(EqxBlock.__call__)
    state, _ = assert_exact(zero, make, loss_of(layered), make, loss_of(unsharded))
    assert state[0].norm is None
    if stage == 3:
        assert bytes_held(state[0]) < 0.2


# --- Plain trees --------------------------------------------------------------------------------


class Layer(NamedTuple):
    """``bias`` is not there in every layer."""

    up: jax.Array
    down: jax.Array
    bias: jax.Array | None = None


def tree_params():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5)

    layers = [
        Layer(normal(WIDTH, HIDDEN), normal(HIDDEN, WIDTH), normal(HIDDEN) if i else None)
        for i in range(2)
    ]
    return {"embed": normal(VOCAB, WIDTH), "layers": layers, "none": None}


def layer(p, x, *, scale=1.0):
    h = x @ p.up if p.bias is None else x @ p.up + p.bias[None, None]
    return x + jnp.tanh(h) @ p.down * scale


def tree_loss(layer):
    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        for p in params["layers"]:
            x = layer(p, x, scale=0.5)
        return cross_entropy(x @ params["embed"].T, batch)

    return loss_fn


def make_tree():
    params = tree_params()
    return params, CAME.init(params)


@functools.cache
def tree_reference():
    return train_alone(make_tree, tree_loss(layer))


@pytest.mark.parametrize("stage", [2, 3])
def test_plain_trees(stage):
    zero = zero_of(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to warn of
        state, metrics = train(zero, make_tree, tree_loss(zero.gathered(layer)))
    assert_same(state, tree_reference()[0], metrics, tree_reference()[1])
    assert state[0]["none"] is None
    assert state[0]["layers"][0].bias is None


def test_a_loss_that_gathers_nothing_is_exact_and_says_so():
    sharded = sum(x.size for x in jax.tree.leaves(tree_params()) if x.size % 8 == 0) * 8
    message = rf"gathers no layer .* {sharded / 2**20:.1f} MiB"
    with pytest.warns(UserWarning, match=message):
        state, metrics = train(zero_of(), make_tree, tree_loss(layer))
    assert_same(state, tree_reference()[0], metrics, tree_reference()[1])
    assert bytes_held(state[0]) < 0.2
