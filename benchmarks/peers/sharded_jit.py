"""ZeRO's stages beside plain `jit` with `NamedSharding`, and beside MaxText's axis rules.

The same decoder, optax.adamw and batch. By `jit`: parameters, moments and, by a constraint,
gradients are sharded along their largest dim that the devices divide. By MaxText's rules: the
logical axes of its Llama, as its base.yml maps them to an fsdp axis, and its constraints of
activations; written here, none of its code runs. Losses are of eight CPU devices. Programs for
accelerators are compiled, and not run: pip install '.[aot]'.

  python benchmarks/peers/sharded_jit.py          # writes results/peers_sharded_jit.md
  python benchmarks/peers/sharded_jit.py --smoke  # the CPU and a tiny model, prints only
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _measured
import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import sharding as shd
from sharding.plan import MODELS, Decoder, targets

GIB = 2**30
TX = optax.adamw(1e-3, weight_decay=0.1)
TINY = Decoder(2, 64, 4, 4, 128, 96, length=16)
TRAINED = Decoder(4, 128, 4, 4, 352, 1024, length=64)
SMALL = Decoder(24, 2048, 16, 16, 5504, 32000, length=1024)
LARGE = dataclasses.replace(MODELS["llama2-7b"], length=1024)
WAYS = {
    "jit_0": "`jit`, replicated",
    "zero_0": "`Zero(stage=0)`",
    "jit_1": "`jit`, state sharded",
    "zero_1": "`Zero(stage=1)`",
    "jit_2": "`jit`, state and gradients sharded",
    "zero_2": "`Zero(stage=2)`",
    "jit_3": "`jit`, all sharded",
    "rules": "`jit`, MaxText's rules",
    "zero_3": "`Zero(stage=3)`",
}
FULL = ("jit_3", "rules", "zero_3")
CASES = (
    ("h100x8", "1.3B", SMALL, tuple(WAYS)),
    ("h100x8", "7B", LARGE, FULL),
    ("v5e:2x4", "1.3B", SMALL, ("jit_2", "zero_2", *FULL)),
    ("v5e:2x4", "7B", LARGE, ("zero_2", *FULL)),
)
HEADER = """
| target | model | way | held, GiB | temporaries, GiB | total, GiB | sent, GiB | trace, s | XLA, s |
|---|---|---|---|---|---|---|---|---|
""".strip()
HEADER_OF_LOSSES = """
| way | apart | held, MB | sent, MB | seconds | lines |
|---|---|---|---|---|---|
""".strip()
# MaxText's logical axes of a Llama's parameters, and what base.yml maps them to: with an fsdp axis
# alone `embed` and `embed_vocab` are sharded, and no other.
AXES = {
    "embed": ("vocab", "embed_vocab"),
    "unembed": ("embed_vocab", "vocab"),
    **dict.fromkeys(("query", "key", "value"), ("layers", "embed", "heads")),
    "out": ("layers", "heads", "embed"),
    **dict.fromkeys(("up", "gate"), ("layers", "embed", "mlp")),
    "down": ("layers", "mlp", "embed"),
}
RULES = {"embed": "fsdp", "embed_vocab": "fsdp"}


@dataclasses.dataclass(frozen=True)
class Constrained(Decoder):
    """The decoder, with activations whose batch is sharded over fsdp, as MaxText's Llama has."""

    mesh: Any = None

    def _constrain(self, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, PartitionSpec("fsdp", *(None,) * (x.ndim - 1)))
        )

    def _linear(self, params: Any, name: str, x: Any) -> Any:
        return self._constrain(super()._linear(params, name, x))

    def _norm(self, params: Any, x: Any) -> Any:
        return self._constrain(super()._norm(params, x))

    def embed(self, shared: Any, tokens: Any) -> Any:
        """As the decoder's."""
        return self._constrain(super().embed(shared, tokens))

    def apply_layer(self, params: Any, x: Any) -> Any:
        """As the decoder's."""
        return self._constrain(super().apply_layer(params, self._constrain(x)))


def ours(mesh: Any, loss_fn: Any, init: Any, stage: int) -> Any:
    """The user's code, of which lines are counted."""
    zero = shd.Zero(mesh, stage=stage)
    step = zero.train_step(loss_fn, tx=TX)
    state = zero.abstract_state(lambda: (init(), TX.init(init())), tx=TX)
    return state, step


def by_jit(mesh: Any, loss_fn: Any, init: Any, stage: int) -> Any:
    """The same."""

    def placed(x: Any, least: int) -> Any:
        spec = [None] * x.ndim
        fitting = [i for i in range(x.ndim) if x.shape[i] % mesh.size == 0]
        if stage >= least and fitting:
            spec[max(fitting, key=lambda i: x.shape[i])] = "data"
        return NamedSharding(mesh, PartitionSpec(*spec))

    def step(state: Any, tokens: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        of_grads = jax.tree.map(lambda x: placed(x, 2), grads)
        grads = jax.lax.with_sharding_constraint(grads, of_grads) if stage >= 2 else grads
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params, opt_state = jax.eval_shape(lambda: (init(), TX.init(init())))
    of_state = (
        jax.tree.map(lambda x: placed(x, 3), params),
        jax.tree.map(lambda x: placed(x, 1), opt_state),
    )
    step = jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))
    state = jax.tree.map(lambda x, place: x.update(sharding=place), (params, opt_state), of_state)
    return state, step


def by_rules(mesh: Any, loss_fn: Any, init: Any) -> Any:
    """The same, where the model names its logical axes."""

    def placed(path: Any, x: Any) -> Any:
        axes = AXES.get(path[-1].key, ()) if hasattr(path[-1], "key") else ()
        return NamedSharding(mesh, PartitionSpec(*(RULES.get(name) for name in axes)))

    def step(state: Any, tokens: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    state = jax.eval_shape(lambda: (init(), TX.init(init())))
    of_state = jax.tree_util.tree_map_with_path(placed, state)
    step = jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))
    return jax.tree.map(lambda x, place: x.update(sharding=place), state, of_state), step


def prepared(way: str, target: str, model: Decoder, dtype: Any, rows: int) -> Any:
    """The mesh of a way, its state's types, its step, and a batch's type."""
    what, _, stage = way.partition("_")
    axis = "fsdp" if what == "rules" else "data"
    mesh = targets.mesh(target, (targets.parse(target).num_devices,), (axis,))
    if what == "rules":
        model = Constrained(**dataclasses.asdict(model), mesh=mesh)
    loss_fn = model.make_loss(jax.checkpoint(model.apply_layer))
    init = lambda: model.init(dtype)  # noqa: E731
    make = {"jit": by_jit, "zero": ours, "rules": by_rules}[what]
    state, step = make(mesh, loss_fn, init, *([int(stage)] if stage else []))
    place = NamedSharding(mesh, PartitionSpec(axis))
    return mesh, state, step, model.batch(rows * mesh.size).update(sharding=place)


def row_of_program(target: str, name: str, model: Decoder, way: str, dtype: Any) -> str:
    """What a step holds and sends, of one device."""
    mesh, state, step, tokens = prepared(way, target, model, dtype, 1)
    begun = time.perf_counter()
    lowered = step.lower(state, tokens)
    traced = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"| {target} | {name} | {WAYS[way]} | does not fit | | | | | |"
    seconds = (traced - begun, time.perf_counter() - traced)
    found = shd.audit(program, mesh=mesh)
    sizes = (sum(found.arguments.values()), found.temporaries or 0.0, found.memory)
    cells = [f"{n / GIB:.2f}" for n in (*sizes, found.wire_bytes)]
    cells += [f"{n:.1f}" for n in seconds]
    return f"| {target} | {name} | {WAYS[way]} | {' | '.join(cells)} |"


def program_rows(smoke: bool) -> Iterator[str]:
    """Of all cases."""
    cases = (("cpu:8", "tiny", TINY, ("jit_3", "rules", "zero_3")),) if smoke else CASES
    for target, name, model, ways in cases:
        for way in ways:
            dtype = jnp.float32 if smoke else jnp.bfloat16
            yield row_of_program(target, name, model, way, dtype)


def loss_rows(smoke: bool) -> Iterator[str]:
    """Of steps on eight CPU devices, in float32, beside the replicated one."""
    model, steps = (TINY, 3) if smoke else (TRAINED, 20)
    rng = np.random.default_rng(0)
    after = rng.integers(model.vocabulary, size=(model.vocabulary, 4))
    batches = rng.integers(model.vocabulary, size=(steps, 8, model.length + 1))
    for i in range(model.length):
        batches[..., i + 1] = after[batches[..., i], rng.integers(4, size=(steps, 8))]
    params = jax.jit(model.init)()
    first: np.ndarray | None = None
    lines = {"jit": by_jit, "zero": ours, "rules": by_rules}
    for way, name in WAYS.items():
        mesh, types, step, batch = prepared(way, "cpu:8", model, jnp.float32, 1)
        given = jax.tree.map(jnp.copy, (params, TX.init(params)))  # the step donates it
        state = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), given, types)
        program = step.lower(state, batch).compile()
        losses, seconds = [], []
        for tokens in batches.astype(np.int32):
            started = time.perf_counter()
            state, metrics = step(state, jax.device_put(tokens, batch.sharding))
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - started)
        first = np.array(losses) if first is None else first
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        sent = shd.audit(program, mesh=mesh).wire_bytes
        cells = [f"{np.abs(np.array(losses) - first).max():.1e}"]
        cells += [f"{n / 1e6:.2f}" for n in (held, sent)]
        cells += [f"{statistics.median(seconds[_measured.PASSED :]):.2f}"]
        yield f"| {name} | {' | '.join(cells)} | {_measured.lines_of(lines[way.split('_')[0]])} |"


def main() -> None:
    """Prints the tables, and writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)
    programs = _results.table(HEADER, program_rows(smoke))  # finds compilers before jax is used
    losses = _results.table(HEADER_OF_LOSSES, loss_rows(smoke))
    if not smoke:
        title = "Training beside plain jit and MaxText's sharding"
        parts = (ABOUT, losses, PROGRAMS, programs)
        _results.write("peers_sharded_jit", title, *parts, script="peers/sharded_jit")


ABOUT = """A decoder of four layers of width 128 (1.06M parameters), 20 steps of AdamW on eight
sequences of 64 tokens, float32, on eight virtual CPU devices of two cores. `apart`: the largest
difference of a step's loss from the first way's. Bytes are of one device: held between steps, and
sent by its program. Seconds are medians beside other work on the cores: read no more than an order
from them. Lines are those of the script from a model to a step; of `jit`, for all stages."""
PROGRAMS = """Programs of the same step in bfloat16 with a sequence of 1,024 tokens a device, each
layer computed again; compiled and not run. Held: parameters, moments and batch. Seconds
are of the clock, on two cores."""

if __name__ == "__main__":
    main()
