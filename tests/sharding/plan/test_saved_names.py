"""What layers store and compute again, beside what their traced code does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from sharding.plan.model._layer_costs import OPERATIONS, layer_work
from sharding.plan.model._models import PARTLY, PRESETS, Decoder, saved_elements
from sharding.remat._choose_saved_names import TracedBlock

LENGTH = 48
LLAMA = Decoder(2, 64, 4, 2, 96, 128, LENGTH, head_dim=24)  # heads wider than the model
GPT2 = Decoder(2, 64, 4, 4, 256, 128, LENGTH, gated=False, tied=True, biased=True)
SAVED = [*((LLAMA, name) for name in (*PARTLY[::2], "full")), (GPT2, "save_out_proj")]


def traced(model, batch=3):
    (layer,) = dataclasses.replace(model, layers=1, scan=False).abstract(jnp.bfloat16)["layers"]
    x = jax.ShapeDtypeStruct((batch, LENGTH, model.width), jnp.bfloat16)
    return TracedBlock.of(model.apply_layer, layer, x, None)


@pytest.mark.parametrize(("model", "name"), SAVED)
def test_it_is_what_jax_stores_and_computes_again(model, name):
    block, tokens = traced(model), 3 * LENGTH
    names = [each for each in PRESETS[name][0] if each in block.values]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    again = block.step_of(jax.checkpoint(block.fn, policy=policy)) - block.step
    work = layer_work(model, OPERATIONS, microbatch=3, ideal=True)
    assert again.flops == work.again(name).matmul
    assert sum(block.again(names)[1].values()) == 2 * tokens * saved_elements(model, name)
