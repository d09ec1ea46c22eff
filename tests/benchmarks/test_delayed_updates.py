"""The study of delayed updates: its models, and the cells of its tables."""

import delayed_updates as study
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "model", [m if m == "tanh" else pytest.param(m, marks=pytest.mark.slow) for m in study.WIDTH]
)
def test_jacobians_at_other_parameters(model):
    """Those at the same parameters are ordinary gradients; the last stage never needs others."""
    params, other = (study.random_params(model, 3, jax.random.key(i)) for i in (0, 1))
    batch = study.task_of(model, 3, 1, 2).held_out

    @jax.jit
    def found(params, other):
        have, mixed = (jax.grad(study.loss_of)(params, p, batch) for p in (params, other))

        def slope(path, g):
            direction = jnp.cos(jnp.arange(g.size, dtype=g.dtype)).reshape(g.shape)
            sides = [
                jax.tree_util.tree_map_with_path(
                    lambda p, x, t=t: x + t * direction if p == path else x, params
                )
                for t in (1e-5, -1e-5)
            ]
            up, down = (study.loss_of(moved, moved, batch) for moved in sides)
            return jnp.sum(g * direction), (up - down) / 2e-5

        return have, mixed, [slope(path, g) for path, g in jax.tree.leaves_with_path(have)]

    have, mixed, slopes = found(params, other)
    for along, expected in slopes:
        np.testing.assert_allclose(along, expected, rtol=1e-7, atol=1e-9)
    last = (lambda g: g["head"]) if "head" in params else (lambda g: g["stages"]["w"][-1])
    np.testing.assert_allclose(last(mixed), last(have), rtol=1e-6)
    first = [np.asarray(g["stages"]["w"][0]) for g in (mixed, have)]
    assert np.linalg.norm(first[0] - first[1]) > 0.1 * np.linalg.norm(first[1])


def test_delays_of_the_first_and_the_last_stage():
    rule = study.delays_of("pipemare", 4)
    assert (rule.resolve("input"), rule.resolve("head")) == (7, 1)
    assert rule.resolve("stages/w").tolist() == [7, 5, 3, 1]


def test_cells():
    for losses, cell in (
        ([0.4, 0.1, 0.2, np.inf], "0.1 at 0.2, to 0.4"),
        ([0.4, 0.1, 0.7, 0.2], "0.1 at 0.2, to 0.2"),
        ([0.4, 0.3, 0.2, 0.1], "0.1 at 0.8, to 0.8"),
        ([0.9, 0.5, np.inf, np.inf], "does not train"),
    ):
        assert study.cell(np.array(losses), (0.1, 0.2, 0.4, 0.8), 1.0) == cell


@pytest.mark.slow
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
