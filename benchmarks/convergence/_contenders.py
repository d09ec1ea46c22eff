"""The optimizers that are compared, and what is searched for each.

All get the same treatment: gradients clipped to a global norm of 1, a schedule, and weight decay on
matrices, multiplied by the learning rate: behind the optimizer, but in LAMB before the trust ratio.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext

Hyper = Mapping[str, Any]  # learning_rate and weight_decay, which may be traced, and the betas
Make = Callable[[optax.Schedule, Hyper], optax.GradientTransformation]


def is_matrix(params: Any) -> Any:
    """A tree of booleans: what is decayed."""
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def adamw(schedule: optax.Schedule, hyper: Hyper) -> optax.GradientTransformation:
    """Optax's."""
    wd = hyper["weight_decay"]
    return optax.adamw(schedule, b2=hyper["b2"], weight_decay=wd, mask=is_matrix)


def adafactor(schedule: optax.Schedule, hyper: Hyper) -> optax.GradientTransformation:
    """CAME without its confidence: second moment, clip and momentum are the same."""
    return optax.chain(
        optax_ext.scale_by_adafactor(b2=hyper["b2"], factoring=optax_ext.last_two_dims()),
        optax.ema(0.9, debias=False),
        optax.add_decayed_weights(hyper["weight_decay"], is_matrix),
        optax.scale_by_learning_rate(schedule),
    )


def adafactor_momentum(
    schedule: optax.Schedule, hyper: Hyper, momentum: float | None = 0.9
) -> optax.GradientTransformation:
    """Adafactor with its own decay, 1 - t**-0.8, and momentum; no scale of parameters."""
    return optax_ext.adafactor(
        schedule,
        multiply_by_parameter_scale=False,
        momentum=momentum,
        weight_decay_rate=hyper["weight_decay"],
        weight_decay_times_lr=True,
        weight_decay_mask=is_matrix,
        factoring=optax_ext.last_two_dims(),
    )


def came(
    schedule: optax.Schedule, hyper: Hyper, debias: bool = False
) -> optax.GradientTransformation:
    """As its authors publish it, unless the instability is debiased."""
    return optax_ext.came(
        schedule,
        b2=hyper["b2"],
        b3=hyper["b3"],
        debias_instability=debias,
        weight_decay=hyper["weight_decay"],
        weight_decay_mask=is_matrix,
    )


def lamb(schedule: optax.Schedule, hyper: Hyper) -> optax.GradientTransformation:
    """By the paper: neither scales of norms nor biases have a trust ratio or decay."""
    return optax_ext.lamb(schedule, b2=hyper["b2"], weight_decay=hyper["weight_decay"])


def muon(schedule: optax.Schedule, hyper: Hyper) -> optax.GradientTransformation:
    """Muon for the matrices of blocks, AdamW for embedding, head and norms.

    Updates are scaled to the RMS of AdamW's, so that one learning rate suits both.
    """

    def dimension_numbers(params: Any) -> Any:
        orthogonal = optax.contrib.MuonDimensionNumbers()
        return jax.tree.map_with_path(
            lambda path, x: orthogonal if "blocks" in str(path[0]) and x.ndim > 1 else None, params
        )

    return optax.contrib.muon(
        schedule,
        beta=hyper["momentum"],
        weight_decay=hyper["weight_decay"],
        adam_weight_decay=hyper["weight_decay"],
        weight_decay_mask=is_matrix,
        muon_weight_dimension_numbers=dimension_numbers,
        consistent_rms=0.2,
    )


def lion(schedule: optax.Schedule, hyper: Hyper) -> optax.GradientTransformation:
    """Optax's."""
    wd = hyper["weight_decay"]
    return optax.lion(schedule, b1=hyper["b1"], b2=hyper["b2"], weight_decay=wd, mask=is_matrix)


def in_8_bits(make: Make) -> Make:
    """The optimizer with its moments in 8 bits."""
    return lambda schedule, hyper: optax_ext.low_precision_state(make(schedule, hyper))


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs ``inner`` in float32 on parameters of fewer bits; whoever adds the updates rounds."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return inner.init(wide(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer and its search space.

    Attributes:
      make: the transformation of a schedule and the other hyperparameters.
      budget: runs of the search; 0 where a study searches on its own.
      learning_rate: the centre of the grid of learning rates, an exponent of 10.
      betas: what the authors advise, the first from the start of the search.
      weight_decays: values searched, the first from the start of the search.
      shifts: decades by which the learning rate moves with each of the betas, where they change
        the size of updates; none if empty.
      parent: the same in float32; the finals are also run with what its search chose.
      wrap: what is around the optimizer and its clipping.
      param_dtype: of the parameters.
    """

    make: Make
    budget: int
    learning_rate: float
    betas: tuple[dict[str, float], ...]
    weight_decays: tuple[float, ...] = (0.1, 0.0, 1.0)
    shifts: tuple[float, ...] = ()
    parent: str | None = None
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None
    param_dtype: str = "float32"


_B2 = ({"b2": 0.999}, {"b2": 0.99}, {"b2": 0.95})
_CAME = ({"b2": 0.999, "b3": 0.9999}, {"b2": 0.999, "b3": 0.995}, {"b2": 0.95, "b3": 0.995})
# Updates of CAME as published are 1 / sqrt(1 - b3**t) times too large: over 300 steps 11.5 times on
# average for 0.9999 and 1.8 times for 0.995, 0.8 decades less.
_SHIFTS = (0.0, 0.75, 0.75)
_DEBIASED = functools.partial(came, debias=True)  # without the early spike
_MUON = ({"momentum": 0.95}, {"momentum": 0.9}, {"momentum": 0.98})
_LION = ({"b1": 0.9, "b2": 0.99}, {"b1": 0.95, "b2": 0.98})

CONTENDERS = {
    "adamw": Contender(adamw, 12, -2.5, _B2),
    "adafactor": Contender(adafactor, 12, -2.5, _B2),
    "came": Contender(came, 12, -3.0, _CAME, shifts=_SHIFTS),
    "came_debiased": Contender(_DEBIASED, 12, -2.5, _CAME),
    "lamb": Contender(lamb, 12, -2.0, _B2),
    "muon": Contender(muon, 12, -2.0, _MUON),
    "lion": Contender(lion, 6, -3.5, _LION, (1.0, 0.1, 10.0)),
    "adamw_8bit": Contender(in_8_bits(adamw), 6, -2.5, _B2, parent="adamw"),
    "came_8bit": Contender(in_8_bits(came), 6, -3.0, _CAME, shifts=_SHIFTS, parent="came"),
}
# State in few bits by rounding, and what is behind an optimizer of bfloat16 parameters.
_FORMATS = {
    **{
        f"{bits}bit_{rounding}": functools.partial(
            optax_ext.low_precision_state, bits=bits, rounding=rounding
        )
        for bits in (8, 4)
        for rounding in ("nearest", "stochastic", "compensated")
    },
    "bf16_master": optax_ext.master_weights,
    "bf16_stochastic": optax_ext.stochastic_rounding,
    "bf16_nearest": in_float32,
}
FORMATS = {
    f"{parent}_{name}": dataclasses.replace(
        CONTENDERS[parent],
        budget=0,
        parent=parent,
        wrap=wrap,
        param_dtype="bfloat16" if name.startswith("bf16") else "float32",
    )
    for parent in ("adamw", "came")
    for name, wrap in _FORMATS.items()
}
# All, with those of the studies of long runs, of GPT-2 and of fine-tuning alone.
EVERY = {
    **CONTENDERS,
    "adafactor_momentum": Contender(adafactor_momentum, 0, -2.5, ({},)),
    "adafactor_plain": Contender(
        functools.partial(adafactor_momentum, momentum=None), 0, -2.5, ({},)
    ),
    "came_debiased_8bit": Contender(in_8_bits(_DEBIASED), 0, -2.5, _CAME),
    **FORMATS,
}


def schedule(learning_rate: Any, warmup: int, steps: int) -> optax.Schedule:
    """Linear over ``warmup`` steps, then a cosine to a tenth of the peak; all may be traced."""

    def at(count: jax.Array) -> jax.Array:
        done = jnp.clip((count - warmup) / (steps - warmup), 0, 1)
        cosine = 0.1 + 0.45 * (1 + jnp.cos(jnp.pi * done))
        return learning_rate * jnp.minimum((count + 1) / jnp.maximum(warmup, 1), cosine)

    return at


def growth(config: Mapping[str, Any]) -> float:
    """How many times larger CAME's updates are as published than debiased, over a run.

    The mean of 1 / sqrt(1 - b3**t), weighted by the learning rate.
    """
    steps = np.arange(config["steps"])
    rate = np.asarray(schedule(1.0, config["warmup"], config["steps"])(steps))
    factor = (1 - config["hyper"]["b3"] ** (steps + 1.0)) ** -0.5
    return float((factor * rate).sum() / rate.sum())


def transformation(
    contender: Contender, hyper: Hyper, warmup: int, steps: int
) -> optax.GradientTransformation:
    """What a run applies to its gradients."""
    shape = schedule(hyper["learning_rate"], warmup, steps)
    chain = optax.chain(optax.clip_by_global_norm(1.0), contender.make(shape, hyper))
    return contender.wrap(chain) if contender.wrap else chain
