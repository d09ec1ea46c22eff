"""Optimizers whose state or parameters have few bits, by what stores them and how it rounds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _contenders import CONTENDERS, Contender

import optax_ext

PARENTS = ("adamw", "came")
BITS = (8, 4)
ROUNDINGS = ("nearest", "stochastic", "compensated")


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs ``inner`` in float32 on parameters of fewer bits; whoever adds the updates rounds."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return inner.init(wide(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(init, update)


# Bfloat16 parameters: what is behind the optimizer.
PARAMS = {
    "bf16_master": optax_ext.master_weights,
    "bf16_stochastic": optax_ext.stochastic_rounding,
    "bf16_nearest": in_float32,
}


def _contenders() -> dict[str, Contender]:
    """By name: optimizer, bits, rounding."""
    out = {}
    for parent in PARENTS:
        of = dataclasses.replace(CONTENDERS[parent], budget=0, parent=parent)
        for bits in BITS:
            for rounding in ROUNDINGS:
                wrap = functools.partial(
                    optax_ext.low_precision_state, bits=bits, rounding=rounding
                )
                name = f"{parent}_{bits}bit_{rounding}"
                out[name] = dataclasses.replace(of, wrap=wrap)
        for name, wrap in PARAMS.items():
            of_params = dataclasses.replace(of, wrap=wrap, param_dtype="bfloat16")
            out[f"{parent}_{name}"] = of_params
    return out


FORMATS = _contenders()
