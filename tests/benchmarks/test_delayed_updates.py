"""The study of delayed updates: its models, and the cells of its tables."""

import delayed_updates as study
import jax
import jax.numpy as jnp
import numpy as np
import pytest

KEY = jax.random.key(0)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("model", study.WIDTH)
def test_jacobians_at_other_parameters(model):
    """Those at the same parameters are ordinary gradients; the last stage never needs others."""
    params = study.random_params(model, 3, KEY)
    other = study.random_params(model, 3, jax.random.key(1))
    batch = study.task_of(model, 3, 1, 2).held_out
    have = jax.grad(study.loss_of)(params, params, batch)
    for path, g in jax.tree.leaves_with_path(have):
        direction = jnp.cos(jnp.arange(g.size, dtype=g.dtype)).reshape(g.shape)

        def along(t, path=path, direction=direction):
            moved = jax.tree_util.tree_map_with_path(
                lambda p, x: x + t * direction if p == path else x, params
            )
            return study.loss_of(moved, moved, batch)

        slope = (along(1e-5) - along(-1e-5)) / 2e-5
        np.testing.assert_allclose(jnp.sum(g * direction), slope, rtol=1e-7, atol=1e-9)
    mixed = jax.grad(study.loss_of)(params, other, batch)
    last = (lambda g: g["head"]) if "head" in params else (lambda g: g["stages"]["w"][-1])
    np.testing.assert_allclose(last(mixed), last(have), rtol=1e-6)
    difference = mixed["stages"]["w"][0] - have["stages"]["w"][0]
    assert jnp.linalg.norm(difference) > 0.1 * jnp.linalg.norm(have["stages"]["w"][0])


def test_delays_of_the_first_and_the_last_stage():
    rule = study.delays_of("pipemare", 4)
    assert (rule.resolve("input"), rule.resolve("head")) == (7, 1)
    assert rule.resolve("stages/w").tolist() == [7, 5, 3, 1]


def test_cells():
    rates = (0.1, 0.2, 0.4, 0.8)
    assert study.cell(np.array([0.4, 0.1, 0.2, np.inf]), rates, 1.0) == "0.1 at 0.2, to 0.4"
    assert study.cell(np.array([0.4, 0.1, 0.7, 0.2]), rates, 1.0) == "0.1 at 0.2, to 0.2"
    assert study.cell(np.array([0.4, 0.3, 0.2, 0.1]), rates, 1.0) == "0.1 at 0.8, to 0.8"
    assert study.cell(np.array([0.9, 0.5, np.inf, np.inf]), rates, 1.0) == "does not train"


def test_a_pipeline_of_one_stage():
    """Without earlier stages, PipeDream has no delay; one of 1 is the rule of PipeDream-2BW."""
    found = {
        name: study.losses("tanh", 1, variant, 60, (0.1,))
        for name, variant in study.VARIANTS.items()
    }
    assert found["synchronous"][0, 0] < study.initial_loss("tanh", 1)
    for name, like in (
        ("PipeDream (stashing, delay P - i)", "synchronous"),
        ("stashing", "PipeDream-2BW"),
        ("plain delay", "PipeDream-2BW"),
        ("T1", "PipeDream-2BW"),
    ):
        np.testing.assert_allclose(found[name], found[like], rtol=1e-5)
    assert np.abs(found["stashing"] / found["synchronous"] - 1).max() > 1e-3
