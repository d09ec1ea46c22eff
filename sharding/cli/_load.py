"""Models and optimizers of the command line: by name, or as MODULE:ATTRIBUTE of the user's code."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from typing import Any

import jax
import optax

import optax_ext
from sharding._types import DType
from sharding.plan._format import nearest, users_code
from sharding.plan.model._models import MODELS, Decoder, count_to_params
from sharding.plan.search._traced_model import AnyModel, TracedModel
from sharding.step.owners._by_owner import by_owner


def model_of(text: str | None, dtype: DType, length: int | None) -> tuple[Any, AnyModel | None]:
    """Abstract parameters, and the model where its layers are known."""
    if not text:
        raise ValueError("--model is missing: a number, a name, or MODULE:NAME.")
    model: AnyModel | None = MODELS.get(text)
    params = None
    if ":" in text:
        kinds = "a TracedModel(loss, init, batch), or a function that makes parameters"
        with users_code(f"--model {text} must be {kinds}, but failed"):
            model, params = _made_model(load(text, "--model"))
    if isinstance(model, TracedModel):
        with users_code(f"--model {text}: its loss of one example failed"):
            model.traced(1, dtype, "none")
    if isinstance(model, Decoder):
        if length and model.biased and length > model.length:
            positions = f"{model.length} positions"
            raise ValueError(f"{text} has {positions}, --length {length} was requested.")
        if length and not model.biased:
            model = dataclasses.replace(model, length=length)
    if model or ":" in text:
        return model.abstract(dtype) if model else params, model
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.lower())
    if not match:
        raise ValueError(
            f"--model {text!r} is no number and no model{nearest(text, list(MODELS))}."
        )
    scale = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]
    count = float(match[1]) * scale
    if not 1 <= count <= 1e15:
        raise ValueError(f"--model {text!r}: from 1 to 1e15 parameters can be planned.")
    return count_to_params(round(count), dtype), None


def _made_model(made: Any) -> tuple[AnyModel | None, Any]:
    """What a user's attribute is, or makes without arguments: a model, or abstract parameters."""
    models = [made] if isinstance(made, AnyModel) else []

    def params() -> Any:
        result = made()
        models.extend([result] if isinstance(result, AnyModel) else [])
        return None if models else result

    found = None if models else jax.eval_shape(params)
    return (models[0] if models else None), found


def optimizer_of(text: str, by_layer: bool = False) -> optax.GradientTransformation:
    """A transformation by its name, or by the path of one or of a function that makes one.

    With ``by_layer`` statistics are those of each layer of a stack, where a name has any.
    """
    if ":" in text:
        made = load(text, "--optimizer")
        if not isinstance(made, optax.GradientTransformation):
            with users_code(f"--optimizer {text} must make one without arguments, but failed"):
                made = made()
        if not isinstance(made, optax.GradientTransformation):
            raise ValueError(f"--optimizer {text} made no optimizer, but {made!r}.")
        return made
    if text == "muon":  # optax.contrib.muon takes arrays of two dims: not stacked layers
        matrices = by_owner(optax.contrib.muon(1e-3), factoring=optax_ext.flax_transformer())
        inner = {True: matrices, False: optax.adamw(1e-3)}
        return optax.partition(inner, optax_ext.hidden_matrices)
    makers = {
        name: getattr(module, name)
        for module in (optax.contrib, optax, optax_ext)
        for name in dir(module)
        if name.islower() and not name.startswith("_") and callable(getattr(module, name))
    }
    rate: dict[str, Any] = {"learning_rate": 1e-3}
    stacks = [rate | {"factoring": optax_ext.flax_transformer()}] * by_layer
    for options in [*stacks, rate, {}] if text in makers else ():
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            made = makers[text](**options)
            if isinstance(made, optax.GradientTransformation):
                return made
    # Those that look like optimizers: they take a learning rate.
    code = {name: getattr(inspect.unwrap(x), "__code__", None) for name, x in makers.items()}
    known = [name for name in makers if "learning_rate" in getattr(code[name], "co_varnames", ())]
    raise ValueError(f"--optimizer {text!r} is no optimizer{nearest(text, known)}.")


def load(path: str, option: str) -> Any:
    """What ``module:attribute`` names; modules of the working folder, too."""
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with users_code(f"{option} {path}"):  # the module runs
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
