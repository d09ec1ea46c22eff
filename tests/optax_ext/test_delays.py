"""Delayed updates against plain NumPy recursions, in float64 over hundreds of steps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import delayed_params, discrepancy_correction, params_history, pipeline_delays

STAGES, WIDTH, BATCH, NUM_STEPS = 4, 5, 8, 300
RATE, MOMENTUM = 0.05, 0.6

x64 = pytest.mark.usefixtures("x64")


def example():
    """Parameters of all stages, inputs and targets of every step."""
    rng = np.random.default_rng(0)
    params = np.eye(WIDTH) + rng.normal(size=(STAGES, WIDTH, WIDTH)) / 4
    return params, rng.normal(size=(2, NUM_STEPS, BATCH, WIDTH)) / 2


# --- The references -------------------------------------------------------------------------------


def tanh_chain(params, x, y):
    """Gradients of a chain of tanh stages."""
    hidden = [x]
    for w in params:
        hidden.append(np.tanh(hidden[-1] @ w))
    g, grads = 2 * (hidden[-1] - y) / BATCH, []
    for w, below, above in list(zip(params, hidden[:-1], hidden[1:], strict=True))[::-1]:
        g = g * (1 - above**2)
        grads.insert(0, below.T @ g)
        g = g @ w.T
    return np.stack(grads)


def by_hand(delays, rate):
    """Parameters after each step: stage i of the gradient is taken ``delays[i]`` updates ago."""
    params, (xs, ys) = example()
    seen, velocity = [params], np.zeros_like(params)
    for k in range(NUM_STEPS):
        late = np.stack([seen[max(k - n, 0)][i] for i, n in enumerate(delays)])
        velocity = MOMENTUM * velocity + tanh_chain(late, xs[k], ys[k])
        seen.append(seen[k] - rate * velocity)
    return np.stack(seen[1:])


def loss(params, x, y):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum((x - y) ** 2) / BATCH


def run(tx, split=lambda params: params, join=lambda params: params):
    """Parameters after each step, as one array; ``split`` makes the tree that is optimized."""
    params, batches = example()
    params = split(jnp.asarray(params))

    def step(carry, batch):
        params, state = carry
        grads = jax.grad(lambda p: loss(join(p), *batch))(delayed_params(params, state))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), join(params)

    _, seen = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))(
        (params, tx.init(params)), tuple(map(jnp.asarray, batches))
    )
    return np.asarray(seen)


FORMS = {
    "stacked": ((lambda p: p), (lambda p: p), (lambda delays: np.asarray(delays))),
    "a rule": (
        lambda p: {"stage": list(p)},
        lambda p: jnp.stack(p["stage"]),
        lambda delays: optax_ext.delays_by_path(
            {f"^stage/{i}$": int(n) for i, n in enumerate(delays[:-1])}, default=delays[-1]
        ),
    ),
}


@x64
@pytest.mark.parametrize(("form", "one"), [("stacked", None), ("a rule", None), ("stacked", 1)])
def test_weight_stashing(form, one):
    """PipeDream: each stage at its own version, the last one at the current parameters.

    Or one delay for all: 1 is PipeDream-2BW, P - 1 is PipeDream with vertical sync.
    """
    split, join, make = FORMS[form]
    delays = pipeline_delays(STAGES, method="pipedream")[0].astype(int)
    np.testing.assert_array_equal(delays, [3, 2, 1, 0])
    tx = optax.chain(optax.sgd(RATE / 4, momentum=MOMENTUM), params_history(one or make(delays)))
    by = [one] * STAGES if one else delays
    have, want = run(tx, split, join), by_hand(by, RATE / 4)
    assert np.abs(want[-1] - want[0]).max() > 0.1  # something was learned
    # All steps to 1e-9 of the largest: rounding grows over the steps.
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-9 * np.abs(want).max())


@x64
def test_the_division_by_hand():
    """Delays below 1 divide nothing; beyond the annealing no delay does; one is traced."""
    delays, anneal_steps = np.array([6.5, 1.0, 0.25, 0.0]), 40
    params = jnp.zeros((4, 3))
    tx = optax.inject_hyperparams(optax_ext.scale_by_delay)(jnp.asarray(delays), anneal_steps)
    state, step = tx.init(params), jax.jit(tx.update)
    for k, g in enumerate(np.random.default_rng(2).normal(size=(NUM_STEPS, 4, 3))):
        have, state = step(jnp.asarray(g), state)
        power = max(1 - k / anneal_steps, 0)
        want = g / np.array([6.5**power, 1.0, 1.0, 1.0])[:, None]
        np.testing.assert_allclose(have, want, rtol=1e-12)


@x64
def test_the_correction_by_hand():
    """Without a delay there is no correction; delays are traced."""
    rng = np.random.default_rng(1)
    updates = rng.normal(size=(NUM_STEPS, 3, 2))
    delays = np.array([6.0, 0.25, 0.0])
    tx = optax.inject_hyperparams(discrepancy_correction)(jnp.asarray(delays), 0.3)
    params = jnp.zeros((3, 2))
    state, step = tx.init(params), jax.jit(tx.update)
    delta = np.zeros((3, 2))
    for u in updates:
        out, state = step(jnp.asarray(u), state)
        np.testing.assert_array_equal(out, u)
        for i, n in enumerate(delays):
            gamma = 0.3 ** (1 / n) if n else 0.0
            delta[i] = gamma * delta[i] + (1 - gamma) * u[i]
        want = 7.0 - delays[:, None] * delta
        np.testing.assert_allclose(optax_ext.backward_params(params + 7, state), want, rtol=1e-12)
    np.testing.assert_array_equal(optax_ext.backward_params(params, state)[2], params[2])


def test_an_average_over_long_delays_does_not_lose_its_weight():
    """In float32, 1 - decay ** (1 / 20000) has four digits if it is computed as written."""
    tx = discrepancy_correction(20_000.0)
    state = tx.init(jnp.zeros(()))
    _, state = tx.update(jnp.ones(()), state)
    np.testing.assert_allclose(state.correction, -20_000 * np.expm1(-2 / 20_000), rtol=1e-6)


def test_the_delays_of_the_papers():
    for method, forward, backward in (
        ("pipemare", [3.5, 2.5, 1.5, 0.5], [0, 0, 0, 0]),
        ("pipedream", [1.5, 1.0, 0.5, 0.0], [1.5, 1.0, 0.5, 0.0]),
        ("pipedream_2bw", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("gpipe", [0, 0, 0, 0], [0, 0, 0, 0]),
    ):
        have = pipeline_delays(4, 2, method=method)
        np.testing.assert_array_equal(have, [forward, backward])
        assert {x.dtype for x in have} == {np.dtype("float64")}


PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}
UPDATED = params_history(2).update(PARAMS, params_history(2).init(PARAMS), PARAMS)[1]


NARROW, TURNED = {"w": PARAMS["w"]}, PARAMS | {"w": jnp.ones((4, 6))}
ERRORS = {
    "num_microbatches must be at least 1, got 0": lambda: pipeline_delays(4, 0),
    r"method must be .*, got 'hogwild'": lambda: pipeline_delays(4, method="hogwild"),
    r"delays must not be negative, got -1\.0": lambda: discrepancy_correction(-1.0),
    "delays must be a number or an array, got True": lambda: params_history({"w": True}),
    r"an array of shape \(4,\) for parameter 'w' of shape \(6, 4\)": (
        lambda: discrepancy_correction(np.ones(4)).init(PARAMS)
    ),
    # Delays that set the shapes of the state.
    r"must be whole numbers of updates, got 1\.5": lambda: params_history(1.5),
    r"must be known while tracing.*static_args": (
        lambda: jax.eval_shape(lambda n: params_history(n).init(PARAMS), jnp.ones(()))
    ),
    # States of other delays, or of other transformations.
    "has 2 versions in the state, but its largest delay is 1": (
        lambda: params_history(1).update(PARAMS, UPDATED, PARAMS)
    ),
    r"reads the state of params_history, .* none": lambda: delayed_params(PARAMS, ()),
    "one state of params_history for each parameter, found several": (
        lambda: delayed_params(PARAMS, (UPDATED, UPDATED))
    ),
    "tree does not match": lambda: delayed_params(NARROW, UPDATED),
    r"shape \(4, 6\) does not match the state of params": lambda: delayed_params(TURNED, UPDATED),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message]()


def test_the_state_is_found_in_wrappers():
    """Each parameter has at most one state; those that are masked out are not delayed."""
    both = optax.chain(optax.sgd(1.0), params_history(1), discrepancy_correction(2.0))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    wrapped = {
        "chain": both,
        "masked": optax.masked(both, {"w": True, "b": False}),
        "partition": optax.partition({"a": both, "b": both}, {"w": "a", "b": "b"}),
        "injected": optax.inject_hyperparams(lambda x: optax.chain(optax.scale(x), both))(1.0),
    }
    for name, tx in wrapped.items():
        params, state = PARAMS, tx.init(PARAMS)
        chex.assert_trees_all_equal(delayed_params(params, state), params)
        chex.assert_trees_all_equal(optax_ext.backward_params(params, state), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        late = delayed_params(params, {"opt": state})
        corrected = optax_ext.backward_params(params, [state])
        assert float(late["w"][0, 0]) == 1.0, name
        # gamma is exp(-1): a step of -1 counts 2 (1 - 1 / e) in its first update.
        np.testing.assert_allclose(corrected["w"], 2 * (1 - np.exp(-1)), rtol=1e-6, err_msg=name)
        if name == "masked":
            chex.assert_trees_all_equal((late["b"], corrected["b"]), (params["b"],) * 2)
        else:
            np.testing.assert_allclose(late["b"], 1.0)
            np.testing.assert_allclose(corrected["b"], 2 * (1 - np.exp(-1)), rtol=1e-6)
