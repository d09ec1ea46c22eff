"""What layers store and compute again, beside what their traced code does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from sharding.plan.machine._devices import num_bytes
from sharding.plan.model._layer_costs import OPERATIONS, layer_work
from sharding.plan.model._models import PARTLY, PRESETS, Decoder, saved_elements
from sharding.plan.model._traced_work import stored_by, work_of

LENGTH = 48
LLAMA = Decoder(2, 64, 4, 2, 96, 128, LENGTH, head_dim=24)  # heads wider than the model
GPT2 = Decoder(2, 64, 4, 4, 256, 128, LENGTH, gated=False, tied=True, biased=True)
SAVED = [*((LLAMA, name) for name in (*PARTLY[::2], "full")), (GPT2, "save_out_proj")]


def work_of_step(fn, params, x):
    def step(params, x, cotangent):
        y, vjp = jax.vjp(fn, params, x)
        return y, vjp(cotangent)

    return work_of(step, params, x, jax.eval_shape(fn, params, x), kind=None)


@pytest.mark.parametrize(("model", "name"), SAVED)
def test_it_is_what_jax_stores_and_computes_again(model, name):
    one = dataclasses.replace(model, layers=1, scan=False)
    (params,), run = one.abstract(jnp.bfloat16)["layers"], model.apply_layer
    x = jax.ShapeDtypeStruct((3, LENGTH, model.width), jnp.bfloat16)
    policy = jax.checkpoint_policies.save_only_these_names(*PRESETS[name])
    saving, full = jax.checkpoint(run, policy=policy), jax.checkpoint(run)
    again = work_of_step(saving, params, x) - work_of_step(run, params, x)
    work = layer_work(model, OPERATIONS, microbatch=3, ideal=True)
    assert again.flops == work.again(name).matmul
    stored, inputs = (
        num_bytes([t for t in stored_by(fn, params, x) if t.ndim == 3]) for fn in (saving, full)
    )
    assert stored - inputs == 2 * x.size // model.width * saved_elements(model, name)
