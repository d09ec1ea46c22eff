"""Asynchronous pipelines equal the recursions of their papers, in NumPy and by ``params_history``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sharding as shd
from sharding.pipeline import one_f_one_b, pipedream, pipedream_2bw, pipemare

from . import model

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
WIDTH, EXAMPLES = 5, 12


def mesh_of(pipe, kind=AUTO):
    return jax.make_mesh((pipe,), ("pipe",), axis_types=(kind,), devices=jax.devices()[:pipe])


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
        "weight": 10 ** rng.uniform(-1, 0.5, (updates, EXAMPLES)) * (rng.random((EXAMPLES)) > 0.2),
    }


def chain_head(shared, h, batch):
    error = h @ shared["out"] - batch["y"]
    return jnp.sum(batch["weight"] * jnp.sum(error**2, 1)), jnp.sum(batch["weight"])


def chain_pipeline(mesh, layers, **options):
    return shd.Pipeline(
        mesh,
        one_f_one_b(mesh.size, 2),
        num_layers=layers,
        embed=lambda shared, batch: batch["x"] @ shared["in"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
        head=chain_head,
        **options,
    )


def chain_forward(params, batch):
    """The activations before every layer and after the last; ``params`` are (in, ws, out)."""
    first, ws, _ = params
    hs = [batch["x"] @ first]
    for w in ws:
        hs.append(hs[-1] + np.tanh(hs[-1] @ w))
    return hs


def chain_backward(params, batch, hs):
    """The gradients of the sum, at parameters that may be others than those of ``hs``."""
    _, ws, out = params
    cotangent = 2 * batch["weight"][:, None] * (hs[-1] @ out - batch["y"])
    grad_out = hs[-1].T @ cotangent
    g = cotangent @ out.T
    grads = []
    for i in reversed(range(len(ws))):
        # Stored: h and tanh(h w) of the forward pass.
        inner = g * (1 - (hs[i + 1] - hs[i]) ** 2)
        grads.insert(0, hs[i].T @ inner)
        g = g + inner @ ws[i].T
    return batch["x"].T @ g, grads, grad_out


def pieces(batches, each):
    """Micro-batches, in their order."""
    count = len(batches["x"]) * each
    split = {k: x.reshape(count, EXAMPLES // each, *x.shape[2:]) for k, x in batches.items()}
    return [{k: x[m] for k, x in split.items()} for m in range(count)]


class Chain:
    """Versions of (in, ws, out): part i belongs to a stage, and each has updates of its own."""

    def __init__(self, stages, layers):
        params = init_chain(layers)
        per_stage = layers // stages
        self.stage = [0, *(i // per_stage for i in range(layers)), stages - 1]
        self.versions = [[x] for x in (params["in"], *params["layers"]["w"], params["out"])]

    def at(self, versions):
        """The parameters of a version for each stage."""
        first, *ws, out = (
            x[max(versions[s], 0)] for s, x in zip(self.stage, self.versions, strict=True)
        )
        return first, ws, out

    def sgd(self, grads, weight, rate):
        first, ws, out = grads
        for x, g in zip(self.versions, [first, *ws, out], strict=True):
            x.append(x[-1] - rate * g / weight)

    def stacked(self):
        first, *ws, out = (x[-1] for x in self.versions)
        return {"in": first, "layers": {"w": np.stack(ws)}, "out": out}


def total(grads):
    """The sum of gradients of micro-batches."""
    return jax.tree.map(lambda *g: sum(g), *grads)


def run(pipe, schedule, tx, batches, key=None, params=None, calls=1, **options):
    """Parameters and losses after ``calls`` runs over parts of the batches."""
    training = shd.AsyncPipeline(pipe, schedule, tx, **options)
    params = init_chain(sum(pipe.layer_counts)) if params is None else params
    state = training.init(pipe.stack(jax.tree.map(jnp.asarray, params)))
    step, losses = jax.jit(training.run), []
    for call in range(calls):
        part = slice(call * schedule.num_updates, (call + 1) * schedule.num_updates)
        args = (jax.tree.map(lambda x, part=part: x[part], batches),)
        state, (sums, weights) = step(state, *args, *([] if key is None else [key]))
        losses += list(np.asarray(sums / weights))
    return state, losses


def check_chain(state, chain, bound=1e-12):
    distance, leaf = model.worst_leaf(jax.tree.map(np.asarray, state.params), chain.stacked())
    assert distance < bound, leaf


RATE = 0.01  # at which delays do not make training diverge

PIPEDREAM = [
    # stages, layers, vertical sync, aligned, recompute
    (4, 4, False, False, True),
    (4, 8, True, False, False),
    (3, 6, False, True, True),
    (2, 4, True, True, False),
    (8, 8, False, False, False),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("stages", "layers", "vertical", "aligned", "recompute"), PIPEDREAM)
def test_pipedream(stages, layers, vertical, aligned, recompute):
    """w' = w - lr grad f(w_1^{t-P+1}, ..., w_P^t), or all of them at t - P + 1."""
    updates = 30
    batches = chain_batches(updates)
    chain, expected = Chain(stages, layers), []
    factor = 2 if aligned else 1
    for t in range(updates):
        delays = [factor * (stages - 1 - (0 if vertical else s)) for s in range(stages)]
        params = chain.at([t - delay for delay in delays])
        batch = {k: x[t] for k, x in batches.items()}
        hs, weight = chain_forward(params, batch), np.sum(batch["weight"])
        expected.append(
            np.sum(batch["weight"] * np.sum((hs[-1] @ params[2] - batch["y"]) ** 2, 1)) / weight
        )
        chain.sgd(chain_backward(params, batch, hs), weight, RATE)
    pipe = chain_pipeline(mesh_of(stages), layers, recompute=recompute)
    schedule = pipedream(stages, updates, vertical_sync=vertical, aligned=aligned)
    state, losses = run(pipe, schedule, optax.sgd(RATE), batches)
    check_chain(state, chain)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stages", "microbatches", "aligned", "kind"),
    [(4, 4, True, AUTO), (4, 6, False, EXPLICIT), (4, 2, True, EXPLICIT), (3, 1, False, AUTO)],
)
def test_two_buffered_weights(stages, microbatches, aligned, kind):
    """w^{t+1} = w^t - lr grad f(w^{t-1})."""
    updates, layers = 12, 2 * stages
    batches = chain_batches(updates)
    chain = Chain(stages, layers)
    for t in range(updates):
        params, batch = chain.at([t - 1] * stages), {k: x[t] for k, x in batches.items()}
        hs = chain_forward(params, batch)
        chain.sgd(chain_backward(params, batch, hs), np.sum(batch["weight"]), RATE)
    schedule = pipedream_2bw(stages, microbatches, updates, aligned=aligned)
    mesh = mesh_of(stages, kind)
    with jax.set_mesh(mesh):
        state, _ = run(chain_pipeline(mesh, layers), schedule, optax.sgd(RATE), batches)
    check_chain(state, chain)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("technique", ["none", "t1", "t2", "both"])
@pytest.mark.parametrize(("stages", "microbatches", "aligned"), [(4, 3, True), (3, 1, False)])
def test_pipemare(stages, microbatches, aligned, technique):
    """Forward passes at old parameters, backward passes at the newest, or at T2's estimate."""
    updates, layers, anneal, decay = 16, 2 * stages, 10, 0.3
    batches = chain_batches(updates)
    warmup = [(stages - 1 - s) * (2 if aligned else 1) for s in range(stages)]
    delays = [w / microbatches for w in warmup]
    chain = Chain(stages, layers)
    delay = np.array([delays[s] for s in chain.stage])
    delta = [np.zeros_like(x[0]) for x in chain.versions]
    # Micro-batch m is m - warmup passes behind: so many updates are in its parameters.
    stored, split = {}, pieces(batches, microbatches)
    for t in range(updates):
        grads = []
        for m in range(t * microbatches, (t + 1) * microbatches):
            forward = [max(0, (m - w) // microbatches) for w in warmup]
            stored[m] = chain_forward(chain.at(forward), split[m])
            first, *ws, out = (
                # The last stage runs its forward pass as a part of the backward pass.
                x[-1] - (d * c if technique in ("t2", "both") and s < stages - 1 else 0)
                for x, d, c, s in zip(chain.versions, delay, delta, chain.stage, strict=True)
            )
            grads.append(chain_backward((first, ws, out), split[m], stored[m]))
        weight = np.sum(batches["weight"][t])
        before = [x[-1] for x in chain.versions]
        chain.sgd(total(grads), weight, RATE)
        for i, x in enumerate(chain.versions):
            power = 1 - min(t / anneal, 1) if technique in ("t1", "both") else 0
            x[-1] = before[i] + (x[-1] - before[i]) / max(delay[i], 1) ** power
            gamma = decay ** (1 / delay[i]) if delay[i] else 0
            delta[i] = gamma * delta[i] + (1 - gamma) * (x[-1] - before[i])

    def optimizer(forward, backward):
        parts = [optax.sgd(RATE)]
        if technique in ("t1", "both"):
            parts.append(optax_ext.scale_by_delay(forward, anneal))
        if technique in ("t2", "both"):
            parts.append(
                optax_ext.discrepancy_correction(forward, decay, backward_delays=backward)
            )
        return optax.chain(*parts)

    corrected = optax_ext.backward_params if technique in ("t2", "both") else None
    schedule = pipemare(stages, microbatches, updates, aligned=aligned)
    pipe = chain_pipeline(mesh_of(stages), layers, recompute=False)
    state, _ = run(pipe, schedule, optimizer, batches, backward_params=corrected)
    check_chain(state, chain)
