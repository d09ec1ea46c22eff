"""Other libraries that fine-tune in JAX, beside sharding.stored: bytes, losses, lines of code.

One model, its weights, data, first adapters, rank and optimizer for all: losses of a small one on a
CPU, and the program of Llama 2 7B for an H100. Needs the compilers (pip install '.[aot]') and
qwix, quax and jax-lorax; the table says which of them is missing, or why it does not run.

  python benchmarks/peers_fine_tuning.py           # writes results/peers_fine_tuning.md
  python benchmarks/peers_fine_tuning.py --smoke   # a tiny model on the CPU, prints only
"""

import argparse
import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _steps import zero_on
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sharding as shd
from sharding import stored
from sharding.plan import MODELS, Decoder

GIB = 2**30
RANK, BLOCK = 16, 64
NAMES = ("query", "key", "value", "out", "gate", "up", "down")  # of adapted matrices
KEY = jax.random.key(0)
ADAM = optax.adamw(1e-3)
MASKED = optax.masked(ADAM, stored.trained)
SMALL = Decoder(4, 128, 4, 4, 256, 64, 64)
TINY = Decoder(2, 64, 4, 4, 128, 32, 16)
LARGE = dataclasses.replace(MODELS["llama2-7b"], length=1024)
HEADER = """
| base | library | arguments, GiB | temporaries, GiB | first loss | last loss | apart | lines |
|---|---|---|---|---|---|---|---|
""".strip()


class Setup(NamedTuple):
    """How a library trains: what it makes of parameters, and its step."""

    make_state: Callable[[Any], Any]  # from the parameters of the plain loss
    step: Callable[[Any, Any], Any]  # jitted, (state, tokens) -> (state, loss)


# --- The user's code, of which lines are counted --------------------------------------------------


def with_ours(model: Decoder, zero: shd.Zero, *codes: Any) -> Setup:
    forms = {f"layers/({'|'.join(NAMES)})$": (*map(stored.frozen, codes), stored.lora(RANK))}
    loss = stored.loss_of(model.make_loss(jax.checkpoint(model.apply_layer)))
    step = zero.train_step(loss, tx=MASKED, trainable=stored.trained)

    def make_state(params: Any) -> Any:
        params = stored.store(params, forms, KEY)
        return params, MASKED.init(params)

    return Setup(make_state, step)


def with_quax(model: Decoder) -> Setup:
    import equinox as eqx
    import quax
    from quax.examples.lora import LoraArray

    layer = jax.checkpoint(quax.quaxify(model.apply_layer))
    loss_fn = model.make_loss(layer)

    def make_state(params: Any) -> Any:
        adapted = {name: LoraArray(params["layers"][name], rank=RANK, key=KEY) for name in NAMES}
        params = params | {"layers": params["layers"] | adapted}
        is_low = lambda path, _: jax.tree_util.keystr(path).endswith((".a", ".b"))  # noqa: E731
        trained, frozen = eqx.partition(params, jax.tree_util.tree_map_with_path(is_low, params))
        return trained, ADAM.init(trained), frozen

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: Any) -> Any:
        trained, opt_state, frozen = state
        of_trained = lambda trained: loss_fn(eqx.combine(trained, frozen), tokens)  # noqa: E731
        loss, grads = jax.value_and_grad(of_trained)(trained)
        updates, opt_state = ADAM.update(grads, opt_state, trained)
        return (optax.apply_updates(trained, updates), opt_state, frozen), loss

    return Setup(make_state, step)


def with_qwix(model: Decoder, codes: str | None = None) -> Setup:
    import qwix
    from flax.traverse_util import flatten_dict, unflatten_dict

    rule = {"rank": RANK, "alpha": RANK, "weight_qtype": codes, "tile_size": BLOCK}
    path = f".*/({'|'.join(NAMES)})"
    module = qwix.apply_lora_to_model(
        in_flax(model), qwix.LoraProvider(module_path=path, **(rule if codes else rule_16(rule)))
    )
    tokens = jnp.zeros((1, model.length + 1), jnp.int32)

    def make_state(params: Any) -> Any:
        params = to_flax(params)
        made = module.init(KEY, tokens)["params"]
        of_layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made["layers"])
        encode = lambda layer: qwix.quantize_params(layer, of_layer)  # noqa: E731
        params = params | {"layers": jax.vmap(encode)(params["layers"])}
        all_parts = flatten_dict(made) | flatten_dict(params)
        trained = {k: x for k, x in all_parts.items() if "_lora_" in k[-1]}
        frozen = {k: x for k, x in all_parts.items() if k not in trained}
        return trained, ADAM.init(trained), frozen

    def loss_fn(trained: Any, frozen: Any, tokens: Any) -> jax.Array:
        return module.apply({"params": unflatten_dict(trained | frozen)}, tokens)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: Any) -> Any:
        trained, opt_state, frozen = state
        loss, grads = jax.value_and_grad(loss_fn)(trained, frozen, tokens)
        updates, opt_state = ADAM.update(grads, opt_state, trained)
        return (optax.apply_updates(trained, updates), opt_state, frozen), loss

    return Setup(make_state, step)


def with_lorax(model: Decoder) -> Setup:
    import lorax

    raise AssertionError(f"{lorax} is for versions of JAX below 0.5, and was not tried.")


# --- The same model in Flax, which qwix needs -----------------------------------------------------


def rule_16(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule without codes."""
    return {k: rule[k] for k in ("rank", "alpha")}


class _Called(Decoder):
    """A decoder whose matrices are modules."""

    def _linear(self, params: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
        return params[name](x)


def in_flax(model: Decoder, dtype: Any = None) -> Any:
    """The loss as a linen module, of the same computation."""
    from flax import linen as nn

    called = _Called(**dataclasses.asdict(model))
    shapes = model.abstract(dtype or DTYPE[model])

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            params: dict[str, Any] = {}
            for name, of in shapes["layers"].items():
                if name in NAMES:
                    options = {"dtype": of.dtype, "param_dtype": of.dtype, "use_bias": False}
                    params[name] = nn.Dense(of.shape[-1], name=name, **options)
                else:
                    scale = self.param(name, nn.initializers.ones, *_type(of["scale"], 1))
                    params[name] = {"scale": scale}
            return called.apply_layer(params, x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            make = lambda name, of: self.param(name, nn.initializers.ones, *_type(of))  # noqa: E731
            params = {name: make(name, shapes[name]) for name in ("embed", "unembed")}
            params["norm"] = {"scale": make("norm", shapes["norm"]["scale"])}
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            stack = nn.scan(nn.remat(Layer, prevent_cse=False), length=model.layers, **axes)
            x, _ = stack(name="layers")(called.embed(params, tokens), None)
            total, weight = called.head(params, x, tokens)
            return total / weight

    return Model()


def _type(x: Any, first: int = 0) -> tuple[tuple[int, ...], Any]:
    return x.shape[first:], x.dtype


def to_flax(params: Any) -> Any:
    """Parameters by the names of the module."""
    layers = {
        name: {"kernel": x} if name in NAMES else x["scale"] for name, x in params["layers"].items()
    }
    return {**params, "norm": params["norm"]["scale"], "layers": layers}


DTYPE = {SMALL: jnp.float32, TINY: jnp.float32, LARGE: jnp.bfloat16}

# --- What is measured -----------------------------------------------------------------------------

# By what is frozen: library, its setup, what of it is needed beside JAX.
CASES: dict[str, list[tuple[str, Callable[..., Setup], tuple[Any, ...]]]] = {
    "16 bits": [
        ("`sharding.stored`", with_ours, ()),
        ("qwix", with_qwix, ()),
        ("quax", with_quax, ()),
        ("lorax", with_lorax, ()),
    ],
    "NF4": [("`sharding.stored`", with_ours, (4,)), ("qwix", with_qwix, ("nf4",))],
    "linear 4 bits": [
        ("`sharding.stored`", with_ours, (optax_ext.Linear(4, block_size=BLOCK),)),
        ("qwix", with_qwix, ("int4",)),
    ],
}


def tokens_of(model: Decoder, chain: int, steps: int) -> np.ndarray:
    """Batches of eight sequences of a Markov chain of its own, (steps, 8, length + 1)."""
    rng = np.random.default_rng(chain)
    odds = rng.dirichlet(np.full(model.vocabulary, 0.1), model.vocabulary).cumsum(1)
    tokens = rng.integers(model.vocabulary, size=(steps, 8, model.length + 1))
    for i in range(model.length):
        above = rng.random((steps, 8, 1)) < odds[tokens[..., i]]
        tokens[..., i + 1] = np.where(above.any(-1), above.argmax(-1), model.vocabulary - 1)
    return tokens.astype(np.int32)


def pretrained(model: Decoder, steps: int) -> Any:
    """Parameters after steps of plain training on another chain."""
    tx = optax.adam(3e-3)
    loss_fn = model.make_loss()

    def step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    params = model.init(DTYPE[model])
    run = jax.jit(lambda state, all_tokens: jax.lax.scan(step, state, all_tokens)[0])
    return run((params, tx.init(params)), tokens_of(model, 1, steps))[0]


def with_adapters(params: Any) -> Any:
    """Parameters in which A of each matrix is the same for every library."""

    def of(path: Any, x: Any) -> Any:
        keys = jax.tree_util.keystr(path)
        if x.shape[2:] != (RANK,) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        (number,) = [i for i, name in enumerate(NAMES) if f"'{name}'" in keys]
        bound = x.shape[1] ** -0.5
        return jax.random.uniform(jax.random.key(number), x.shape, x.dtype, -bound, bound)

    return jax.tree_util.tree_map_with_path(of, params)


def losses(setup: Setup, model: Decoder, params: Any, batches: np.ndarray, zero: Any) -> np.ndarray:
    """Of each step."""

    def make() -> Any:
        trained, *others = setup.make_state(params)
        return with_adapters(trained), *others

    state = jax.jit(make)() if zero is None else zero.init(make, tx=MASKED)
    found = []
    for tokens in batches:
        state, loss = setup.step(state, tokens if zero is None else zero.put(tokens))
        found.append(float(loss if zero is None else loss["loss"]))
    return np.array(found)


def program(setup: Setup, model: Decoder, zero: shd.Zero, ours: bool) -> tuple[float, float]:
    """GiB of arguments and temporaries of a step on one sequence."""
    make = lambda: setup.make_state(model.init(DTYPE[model]))  # noqa: E731
    tokens = model.batch(1)
    if ours:
        state = zero.abstract_state(make, tx=MASKED)
    else:
        place = NamedSharding(zero.mesh, PartitionSpec())
        state, tokens = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            (jax.eval_shape(make), tokens),
        )
    found = setup.step.lower(state, tokens).compile().memory_analysis()
    return found.argument_size_in_bytes / GIB, found.temp_size_in_bytes / GIB


def lines_of(user_code: Callable[..., Any]) -> int:
    """Without those that are empty."""
    return sum(bool(line.strip()) for line in inspect.getsource(user_code).splitlines()[1:])


def rows(smoke: bool) -> Iterator[str]:
    """A row of each library and base."""
    model, target = (TINY, "cpu:1") if smoke else (SMALL, "h100x1")
    params = pretrained(model, 5 if smoke else 300)
    batches = tokens_of(model, 2, 4 if smoke else 50)
    for base, cases in CASES.items():
        first = None
        for library, user_code, arguments in cases:
            try:
                ours = user_code is with_ours
                on_cpu = shd.Zero(jax.make_mesh((1,), ("data",))) if ours else None
                of = lambda model, zero: user_code(model, *([zero] * ours), *arguments)  # noqa
                found = losses(of(model, on_cpu), model, params, batches, on_cpu)
                zero = zero_on(target)
                large = TINY if smoke else LARGE
                sizes = program(of(large, zero), large, zero, ours)
            except (ImportError, AttributeError) as error:
                yield f"| {base} | {library} | {type(error).__name__}: {error} | | | | | |"
                continue
            first = found if first is None else first
            apart = "" if found is first else f"{np.abs(found - first).max():.1e}"
            yield (
                f"| {base} | {library} | {sizes[0]:.2f} | {sizes[1]:.2f} | {found[0]:.4f} | "
                f"{found[-10:].mean():.4f} | {apart} | {lines_of(user_code)} |"
            )


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    table = _results.table(HEADER, rows(smoke))
    if not smoke:
        _results.write("peers_fine_tuning", "Libraries that fine-tune in JAX", ABOUT, table)


ABOUT = ""

if __name__ == "__main__":
    main()
