"""Asynchronous pipelines equal their papers' recursions.

In NumPy, and on one device at earlier parameters, by the delays that ``test_async_schedules.py``
tests.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sharding as shd
from sharding.pipeline import one_f_one_b, pipedream, pipedream_2bw, pipemare

from ...tiers import slow
from . import model
from .model import linear_embed, mesh_of, squared_head

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
WIDTH, EXAMPLES = 5, 12


# --- A chain of tanh layers, and its backward pass by hand ----------------------------------------


def init_chain(layers):
    rng = np.random.default_rng(0)
    return {
        "in": 0.7 * rng.normal(size=(3, WIDTH)),
        "layers": {"w": 0.6 * rng.normal(size=(layers, WIDTH, WIDTH))},
        "out": 0.7 * rng.normal(size=(WIDTH, 2)),
    }


def chain_batches(updates):
    """Minibatches of weights that differ; a whole example of some has none."""
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(updates, EXAMPLES, 3)),
        "y": rng.normal(size=(updates, EXAMPLES, 2)),
        "weight": 10 ** rng.uniform(-1, 0.5, (updates, EXAMPLES)) * (rng.random(EXAMPLES) > 0.2),
    }


def chain_block(layer, h, batch, key=None):
    return h + model.drop(jnp.tanh(h @ layer["w"]), key)


def chain_pipeline(mesh, layers, schedule=None, **options):
    functions = {"embed": linear_embed, "block": chain_block, "head": squared_head}
    schedule = schedule or one_f_one_b(mesh.shape["pipe"], 2)
    return shd.Pipeline(mesh, schedule, num_layers=layers, **functions | options)


def chain_forward(params, batch, received=None, per_stage=1):
    """The inputs of all layers and the head, and the tanhs of all layers, of (in, ws, out).

    Stages may run again from inputs that they ``received``.
    """
    first, ws, _ = params
    inputs, tanhs = [batch["x"] @ first], []
    for i, w in enumerate(ws):
        if received and i and i % per_stage == 0:
            inputs[i] = received[i]
        tanhs.append(np.tanh(inputs[i] @ w))
        inputs.append(inputs[i] + tanhs[i])
    return inputs, tanhs


def chain_backward(params, batch, inputs, tanhs):
    """The gradients of the sum, at parameters that may be others than those of the activations."""
    _, ws, out = params
    cotangent = 2 * batch["weight"][:, None] * (inputs[-1] @ out - batch["y"])
    grad_out = inputs[-1].T @ cotangent
    g = cotangent @ out.T
    grads = []
    for i in reversed(range(len(ws))):
        inner = g * (1 - tanhs[i] ** 2)
        grads.insert(0, inputs[i].T @ inner)
        g = g + inner @ ws[i].T
    return batch["x"].T @ g, grads, grad_out


class Chain:
    """Versions of (in, ws, out): part i belongs to a stage, and each has updates of its own."""

    def __init__(self, stages, layers):
        params = init_chain(layers)
        per_stage = layers // stages
        self.stage = [0, *(i // per_stage for i in range(layers)), stages - 1]
        self.versions = [[x] for x in (params["in"], *params["layers"]["w"], params["out"])]

    def at(self, versions):
        """The parameters of a version for each stage."""
        parts = zip(self.stage, self.versions, strict=True)
        first, *ws, out = (x[max(versions[s], 0)] for s, x in parts)
        return first, ws, out

    def stacked(self):
        first, *ws, out = (x[-1] for x in self.versions)
        return {"in": first, "layers": {"w": np.stack(ws)}, "out": out}


def split(batches, each):
    """[updates, examples, ...] to [updates, micro-batches, examples, ...]."""
    return {k: x.reshape(len(x), each, -1, *x.shape[2:]) for k, x in batches.items()}


def run(pipe, schedule, tx, batches, key=None, calls=1, sharding=None, **options):
    """Parameters and losses after ``calls`` runs over parts of the batches."""
    training = shd.AsyncPipeline(pipe, schedule, tx, **options)
    params = init_chain(sum(pipe.layer_counts))
    state = training.init(pipe.stack(jax.tree.map(jnp.asarray, params)))
    step, losses, each = jax.jit(training.run), [], schedule.microbatches_per_update
    batches = split(batches, each)
    for call in range(calls):
        part = slice(call * schedule.num_updates, (call + 1) * schedule.num_updates)
        args = [jax.device_put({k: x[part] for k, x in batches.items()}, sharding)]
        state, (sums, weights) = step(state, *args, *([] if key is None else [key]))
        losses += list(np.asarray(sums / weights))
    return state, losses


RATE = 0.01  # at which delays do not make training diverge


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stages", "microbatches", "aligned", "recompute", "scaled"),
    [(4, 3, True, False, True), (3, 2, False, True, False)],
)
def test_pipemare(stages, microbatches, aligned, recompute, scaled):
    """Forward passes at old parameters, backward passes at T2's estimate; T1 scales by delays."""
    updates, layers, anneal, decay = 16, 2 * stages, 10, 0.3
    batches = chain_batches(updates)
    warmup = [(stages - 1 - s) * (2 if aligned else 1) for s in range(stages)]
    delays = [w / microbatches for w in warmup]
    chain = Chain(stages, layers)
    delay = np.array([delays[s] for s in chain.stage])
    horizon = delay + 1  # of T2: a correction on the last stage, too, whose passes are one
    delta = [np.zeros_like(x[0]) for x in chain.versions]
    # Micro-batch m is m - warmup passes behind: so many updates are in its parameters.
    parts = split(batches, microbatches)
    for t in range(updates):
        grads = []
        for i in range(microbatches):
            m, part = t * microbatches + i, {k: x[t, i] for k, x in parts.items()}
            forward = [max(0, (m - w) // microbatches) for w in warmup]
            acts = chain_forward(chain.at(forward), part)
            first, *ws, out = (
                # The last stage runs its forward pass as a part of the backward pass.
                x[-1] - (d * c if s < stages - 1 else 0)
                for x, d, c, s in zip(chain.versions, horizon, delta, chain.stage, strict=True)
            )
            if recompute:
                acts = chain_forward((first, ws, out), part, acts[0], layers // stages)
            first, ws, out = chain_backward((first, ws, out), part, *acts)
            grads.append([first, *ws, out])
        weight, power = np.sum(batches["weight"][t]), 1 - min(t / anneal, 1) if scaled else 0
        for i, x in enumerate(chain.versions):
            change = -RATE * sum(g[i] for g in grads) / weight / max(delay[i], 1) ** power
            x.append(x[-1] + change)
            gamma = decay ** (1 / horizon[i])
            delta[i] = gamma * delta[i] + (1 - gamma) * change

    def optimizer(*, forward, backward):
        return optax.chain(
            optax.sgd(RATE),
            optax_ext.scale_by_delay(forward, anneal) if scaled else optax.identity(),
            optax_ext.discrepancy_correction(forward - backward + 1, decay),
        )

    schedule = pipemare(stages, microbatches, updates, aligned=aligned)
    pipe = chain_pipeline(mesh_of(pipe=stages), layers, recompute=recompute)
    options = {"backward_params": optax_ext.backward_params}
    state, _ = run(pipe, schedule, optimizer, batches, **options)
    model.assert_close(jax.device_get(state.params), chain.stacked(), 1e-12)


# --- Against one device ---------------------------------------------------------------------------


def train_with_history(schedule, tx, layers, keyed):
    """Two runs of plain JAX on one device: gradients at parameters of earlier steps."""
    microbatches = schedule.microbatches_per_update
    delays = schedule.delays()[0].astype(int)
    of_layers = np.repeat(delays, layers // len(delays))

    def delayed(versions):
        """Each stage's parameters as they were its delay ago."""
        ago = [versions[max(len(versions) - 1 - n, 0)] for n in range(max(delays) + 1)]
        stacked = jnp.stack([ago[n]["layers"]["w"][i] for i, n in enumerate(of_layers)])
        ends = {"in": ago[delays[0]]["in"], "out": ago[delays[-1]]["out"]}
        return ends | {"layers": {"w": stacked}}

    def one(params, batch, key):
        keys = [None if key is None else jax.random.fold_in(key, i) for i in range(layers + 2)]
        h = linear_embed(params, batch, keys[layers])
        for w, k in zip(params["layers"]["w"], keys, strict=False):
            h = chain_block({"w": w}, h, batch, k)
        return squared_head(params, h, batch)

    @jax.jit
    def step(params, late, opt_state, batch, first):
        def total(params):
            keys = None
            if keyed:
                numbers = first + jnp.arange(microbatches)
                keys = jax.vmap(jax.random.fold_in, (None, 0))(model.step_key(0), numbers)
            axes = (None, 0, 0 if keyed else None)
            sums, weights = jax.vmap(one, axes)(params, batch, keys)
            return jnp.sum(sums), jnp.sum(weights)

        (loss, weight), grads = jax.value_and_grad(total, has_aux=True)(late)
        grads = jax.tree.map(lambda g: g / weight, grads)
        out, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, out), opt_state, loss / weight

    params, batches = init_chain(layers), chain_batches(2 * schedule.num_updates)
    batches = split(batches, microbatches)
    opt_state, losses = jax.jit(tx.init)(params), []
    for t in range(2 * schedule.num_updates):
        number = t % schedule.num_updates
        if number == 0:  # the pipeline is empty between two runs
            versions = [params]
        batch = {k: x[t] for k, x in batches.items()}
        first = number * microbatches
        params, opt_state, loss = step(params, delayed(versions), opt_state, batch, first)
        versions.append(params)
        losses.append(float(loss))
    return params, losses


def hidden_embed(shared, batch):
    """The embedding, in branches and within the mesh."""
    w = jax.lax.cond(batch["x"][0, 0] > 0, lambda s: s["in"], lambda s: 1 * s["in"], shared)
    return jax.lax.with_sharding_constraint(batch["x"] @ w, jax.P("data"))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("schedule", "kind", "keyed"),
    [
        slow((pipedream(4, 5), EXPLICIT, True)),
        (pipedream_2bw(4, 3, 4), AUTO, False),
        pytest.param(pipedream(4, 5, vertical_sync=True), EXPLICIT, True, marks=pytest.mark.slow),
    ],
)
def test_one_device_beside_a_data_axis(schedule, kind, keyed):
    """Two runs, an optimizer with a state, random numbers; embeddings within remat and branches."""
    layers, batches = 4, chain_batches(2 * schedule.num_updates)
    tx = optax.adamw(1e-3, weight_decay=0.1)
    want, expected = train_with_history(schedule, tx, layers, keyed)
    mesh = mesh_of(kind, data=2, pipe=schedule.num_stages)
    sharding = jax.NamedSharding(mesh, jax.P(None, None, "data"))
    pipe = chain_pipeline(mesh, layers, rngs=keyed, recompute=schedule.name == "pipedream")
    if kind == AUTO:
        hidden_head = jax.checkpoint(jax.jit(squared_head))
        pipe = dataclasses.replace(pipe, embed=jax.checkpoint(hidden_embed), head=hidden_head)
    key = model.step_key(0) if keyed else None
    with jax.set_mesh(mesh):
        state, losses = run(pipe, schedule, tx, batches, key, calls=2, sharding=sharding)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    model.assert_close(jax.device_get(state.params), jax.device_get(want), 1e-12)


def test_a_state_keeps_its_placement():
    """One program for all runs; the caller's parameters outlive a state that is donated."""
    mesh = mesh_of(data=2, pipe=4)
    traces = []

    def head(*args):
        traces.append(args)
        return squared_head(*args)

    pipe = dataclasses.replace(chain_pipeline(mesh, 4), head=head)
    params = jax.tree.map(jnp.asarray, init_chain(4))
    training = shd.AsyncPipeline(pipe, pipedream(4, 3), optax.adam(1e-2))
    step, batches = jax.jit(training.run, donate_argnums=0), split(chain_batches(3), 1)
    counts = []
    for given in (params, jax.device_put(params, jax.NamedSharding(mesh, jax.P()))):
        state = training.init(given)
        on_stages = jax.NamedSharding(mesh, jax.P("pipe"))
        assert state.params["layers"]["w"].sharding.is_equivalent_to(on_stages, 3)
        for _ in range(2):
            before = jax.tree.map(lambda x: x.sharding, state)
            state, _ = step(state, batches)
            counts.append(len(traces))
            same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, before)
            assert all(jax.tree.leaves(same))
        jax.block_until_ready(given)
    assert len(set(counts)) == 1


def test_bfloat16_parameters_and_aux():
    updates = 3

    def embed(shared, batch):
        return linear_embed(shared, batch).astype(jnp.bfloat16)

    def head(shared, h, batch):
        return squared_head(shared, h, batch), {"norm": jnp.sum(h**2)}

    pipe = chain_pipeline(mesh_of(pipe=2), 2, embed=embed, head=head, has_aux=True)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), init_chain(2))
    training = shd.AsyncPipeline(pipe, pipemare(2, 2, updates), optax.adam(1e-2))
    batches = {k: x.astype(np.float32) for k, x in split(chain_batches(updates), 2).items()}
    state = training.init(params)
    new, (_, aux) = jax.jit(training.run)(state, batches)
    types = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (new, state)]
    assert types[0] == types[1]
    assert aux["norm"].shape == ()
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), new.params, state.params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stored_residuals_hold_no_parameters(asynchronous):
    """A layer's residuals are its input and its tanh: no array has the weights once per slot."""
    pipe = chain_pipeline(mesh_of(pipe=2), 4, recompute=False)
    params = jax.tree.map(jnp.asarray, init_chain(4))
    batches = chain_batches(7)
    if asynchronous:
        training = shd.AsyncPipeline(pipe, pipemare(2, 2, 7), optax.sgd(0.1))
        text = str(jax.make_jaxpr(training.run)(training.init(params), split(batches, 2)))
    else:
        batch = {k: x[0] for k, x in batches.items()}
        text = str(jax.make_jaxpr(jax.grad(lambda p: pipe.loss(p, batch)[0]))(params))
    # Of the first stage: 2 (S - 1) + 1, and no more than there are micro-batches; then one more
    # for what is not stored.
    slots, rows = (4 if asynchronous else 3), 2
    per_microbatch = EXAMPLES // 2
    assert f"[{slots},{rows},{per_microbatch},{WIDTH}]" in text
    assert f"[{slots},{rows},{WIDTH},{WIDTH}]" not in text


def test_errors_of_states_and_batches():
    pipe, params = chain_pipeline(mesh_of(pipe=2), 4), jax.tree.map(jnp.asarray, init_chain(4))
    schedule, sgd = pipedream(2, 3), optax.sgd(0.1)
    with pytest.raises(ValueError, match="use AsyncPipeline"):
        chain_pipeline(mesh_of(pipe=2), 4, schedule=schedule)
    with pytest.raises(ValueError, match="1f1b-aligned has no updates"):
        shd.AsyncPipeline(pipe, one_f_one_b(2, 2), sgd)
    with pytest.raises(ValueError, match="gather='step'"):
        shd.AsyncPipeline(chain_pipeline(mesh_of(pipe=2), 4, gather="tick"), schedule, sgd)
    training, batches = shd.AsyncPipeline(pipe, schedule, sgd), split(chain_batches(3), 1)
    with pytest.raises(TypeError, match="forward"):
        shd.AsyncPipeline(pipe, schedule, optax.adam).init(params)
    with pytest.raises(ValueError, match=r"\['step'\] has dtype int32"):
        training.init(params | {"step": jnp.zeros((), jnp.int32)})
    state = training.init(params)
    with pytest.raises(ValueError, match=r"3 updates of 1 micro-batches.*got shape"):
        training.run(state, split(chain_batches(3), 2))
    four = chain_pipeline(mesh_of(pipe=4), 4)
    of_four = shd.AsyncPipeline(four, pipedream(4, 3), optax.adam(0.1)).init(params)
    with pytest.raises(ValueError, match=r"count must have dim 0 for the 2 stages, got .*\(4,\)"):
        shd.AsyncPipeline(pipe, schedule, optax.adam(0.1)).run(of_four, batches)
    tied = dataclasses.replace(
        pipe, head=lambda shared, h, batch: (jnp.sum((h @ shared["in"].T) ** 2), 1.0)
    )
    with pytest.raises(ValueError, match=r"embed and head both use \['in'\]"):
        jax.eval_shape(shd.AsyncPipeline(tied, schedule, sgd).run, state, batches)


def test_stored_residuals_do_not_mix_versions():
    block = lambda layer, h, batch: h + jnp.tanh(h @ (2 * layer["w"]))  # noqa: E731
    pipe = chain_pipeline(mesh_of(pipe=2), 4, recompute=False, block=block)
    params, batches = jax.tree.map(jnp.asarray, init_chain(4)), split(chain_batches(3), 1)
    for schedule, corrected, mixes in (
        (pipedream(2, 3), None, False),  # one version for both passes
        (pipedream(2, 3), lambda params, _: params, True),
        (pipemare(2, 1, 3), None, True),
        (pipemare(2, 1, 3), lambda params, _: params, True),
    ):
        training = shd.AsyncPipeline(pipe, schedule, optax.sgd(0.1), backward_params=corrected)
        state = training.init(params)
        expected = pytest.raises(ValueError, match="block changes its parameters before it uses")
        with expected if mixes else contextlib.nullcontext():
            jax.eval_shape(training.run, state, batches)
