"""Other libraries that fine-tune in JAX, beside sharding.stored: bytes, losses, lines of code.

One model, its weights, data, first adapters, rank and optimizer for all: losses of a small one on a
CPU, and the program of Llama 2 7B for an H100. Needs the compilers (pip install '.[aot]') and
qwix, quax and jax-lorax; the table says which of them is missing, or why it does not run.

  python benchmarks/peers/fine_tuning.py           # writes results/peers_fine_tuning.md
  python benchmarks/peers/fine_tuning.py --smoke   # a tiny model on the CPU, prints only
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measured import lines_of
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sharding as shd
from sharding import stored
from sharding.plan import MODELS, Decoder, targets

GIB = 2**30
RANK, BLOCK = 16, 64
NAMES = ("query", "key", "value", "out", "gate", "up", "down")  # of adapted matrices
ADAM = optax.adamw(1e-3)
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
    step: Callable[[Any, Any], Any]  # jitted, (state, tokens) -> (state, metrics)
    zero: shd.Zero | None = None  # by which the state is made, if not by jit
    tx: Any = None  # which ``zero`` needs


# --- The user's code, of which lines are counted --------------------------------------------------


def with_ours(model: Decoder, mesh: jax.sharding.Mesh, *codes: Any) -> Setup:
    """Unmodified: the loss, by paths of parameters, and ``Zero``."""
    zero = shd.Zero(mesh)
    tx = optax.masked(ADAM, stored.trained)
    forms = {f"layers/({'|'.join(NAMES)})$": (*map(stored.frozen, codes), stored.lora(RANK))}
    loss = stored.loss_of(model.make_loss(jax.checkpoint(model.apply_layer, prevent_cse=False)))
    step = zero.train_step(loss, tx=tx, trainable=stored.trained)

    def make_state(params: Any) -> Any:
        params = stored.store(params, forms, jax.random.key(0))
        return params, tx.init(params)

    return Setup(make_state, step, zero, tx)


def with_quax(model: Decoder, _: Any) -> Setup:
    """A layer that takes quax's arrays, and a step by jit."""
    import equinox as eqx
    import quax
    from quax.examples.lora import LoraArray

    layer = jax.checkpoint(quax.quaxify(model.apply_layer), prevent_cse=False)
    loss_fn = model.make_loss(layer)

    def make_state(params: Any) -> Any:
        adapted = {
            name: LoraArray(params["layers"][name], rank=RANK, key=jax.random.key(0))
            for name in NAMES
        }
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
        return (optax.apply_updates(trained, updates), opt_state, frozen), {"loss": loss}

    return Setup(make_state, step)


def with_qwix(model: Decoder, _: Any, codes: str | None = None) -> Setup:
    """A Flax module whose calls qwix intercepts, and a step by jit."""
    import qwix
    from flax.traverse_util import flatten_dict, unflatten_dict

    rule = {"rank": RANK, "alpha": RANK, "weight_qtype": codes, "tile_size": BLOCK}
    provider = qwix.LoraProvider(module_path=f".*/({'|'.join(NAMES)})", **rule)
    module = qwix.apply_lora_to_model(in_flax(model), provider)
    tokens = jnp.zeros((1, model.length + 1), jnp.int32)

    def make_state(params: Any) -> Any:
        params = to_flax(params)
        made = module.init(jax.random.key(0), tokens)["params"]
        of_layer = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made["layers"]
        )
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
        return (optax.apply_updates(trained, updates), opt_state, frozen), {"loss": loss}

    return Setup(make_state, step)


def with_lorax(model: Decoder, _: Any) -> Setup:
    """Not tried where it is imported: it runs with old versions of JAX alone."""
    import lorax

    raise AssertionError(f"{lorax} is for versions of JAX below 0.5, and was not tried.")


# --- The same model in Flax, which qwix needs -----------------------------------------------------


class _Called(Decoder):
    """A decoder whose matrices are modules."""

    def _linear(self, params: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
        return params[name](x)


def in_flax(model: Decoder) -> Any:
    """The loss as a linen module, of the same computation."""
    from flax import linen as nn

    called = _Called(**dataclasses.asdict(model))
    shapes = model.abstract(DTYPE[model])

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
        if not re.search(r"(\.a|_lora_a'\)\])$", keys):
            return x
        (number,) = [i for i, name in enumerate(NAMES) if f"'{name}'" in keys]
        bound = x.shape[1] ** -0.5
        return jax.random.uniform(jax.random.key(number), x.shape, x.dtype, -bound, bound)

    return jax.tree_util.tree_map_with_path(of, params)


def losses(setup: Setup, params: Any, batches: np.ndarray) -> np.ndarray:
    """Of each step, on the CPU."""

    def make() -> Any:
        trained, *others = setup.make_state(params)
        return with_adapters(trained), *others

    zero = setup.zero
    state = zero.init(make, tx=setup.tx) if zero else jax.jit(make)()
    found = []
    for tokens in batches:
        state, metrics = setup.step(state, zero.put(tokens) if zero else tokens)
        found.append(float(metrics["loss"]))
    return np.array(found)


def program(setup: Setup, model: Decoder, mesh: Any) -> tuple[float, float]:
    """GiB of arguments and temporaries of a step on one sequence."""
    make = lambda: setup.make_state(model.init(DTYPE[model]))  # noqa: E731
    if setup.zero:
        state, tokens = setup.zero.abstract_state(make, tx=setup.tx), model.batch(1)
    else:
        place = NamedSharding(mesh, PartitionSpec())
        state, tokens = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            (jax.eval_shape(make), model.batch(1)),
        )
    found = setup.step.lower(state, tokens).compile().memory_analysis()
    return found.argument_size_in_bytes / GIB, found.temp_size_in_bytes / GIB


def rows(smoke: bool) -> Iterator[str]:
    """A row of each library and base."""
    there = targets.mesh("cpu:1" if smoke else "h100x1", (1,), ("data",))  # before JAX is used
    small, large = (TINY, TINY) if smoke else (SMALL, LARGE)
    params = pretrained(small, 5 if smoke else 300)
    batches = tokens_of(small, 2, 4 if smoke else 50)
    here = jax.make_mesh((1,), ("data",))
    for base, cases in CASES.items():
        first = None
        for library, user_code, codes in cases:
            try:
                found = losses(user_code(small, here, *codes), params, batches)
                sizes = program(user_code(large, there, *codes), large, there)
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
        title = "Libraries that fine-tune in JAX"
        parts = (ABOUT, BETTER, table, WHY)
        _results.write("peers_fine_tuning", title, *parts, script="peers/fine_tuning")


ABOUT = """Losses, in float32: a decoder of four layers of width 128, trained for 300 steps on a
Markov chain, then fine-tuned for 50 steps of AdamW on another one, with the same tokens, first
adapters of rank 16 and learning rate. The first loss, the mean of the last ten, and the largest
difference of a step from this library's on the same base. GiB: the compiled step of Llama 2 7B in
bfloat16, all 32 layers, for an H100, one sequence of 1,024 tokens, every layer computed again.
Lines: the user's, from a loss (qwix: a Flax module) and 16-bit parameters to a step, without
imports. qwix 0.1.8, quax 0.4.6, jax-lorax 0.3.1 on qax 0.4.1."""
BETTER = """What each does better, by its code:

- **qwix** quantizes activations, too, in int8, int4, fp8 or MXFP, with ranges that are calibrated
  or fixed; it trains for such a model (QAT), multiplies in few bits, and exports for phones. Codes
  are XLA's own 4-bit types. Adapters are also of convolutions.
- **quax** takes any array type of the user, with a rule for each primitive, nested in each other:
  LoRA is one of its examples. A `LoraArray` raises where W + A B would be formed, if not allowed.
- **lorax** adapts convolutions and look-ups in embeddings by low rank, in functions as they are.
- **`sharding.stored`** takes the loss of any framework as it is, decodes a layer at a time under
  ZeRO and offload, stores scales of NF4 in 8 bits, and reads checkpoints a matrix at a time."""

WHY = """On the same 16 bits the libraries agree to the rounding of float32. In 4 bits their grids
differ: qwix's blocks of 64 lie along the dim that is summed over, with scales in the dtype of the
parameters; this library's lie along the other one, and scales of NF4 have 8 bits. That is all:
`sharding.stored` with the decoded NF4 as a base without codes has the same 50 losses to 1e-6, which
are up to 0.05 from those of the base that was not coded. One run each says nothing of which grid is
better. qwix's NF4 has the smallest temporaries, ours the smallest arguments. quax has no codes of
its own, and no rule for `jax.checkpoint`: its layer is wrapped inside that. lorax asks for JAX
below 0.5, and qax, on which it is built, fails when it is imported, in 0.10, 0.11 and 0.12."""

if __name__ == "__main__":
    main()
