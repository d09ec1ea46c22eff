"""What ZeRO's stages hold: by the paper, by the planner, and in programs for GPUs and TPUs.

The paper counts 16 bytes a parameter: parameters and gradients in 16 bits, float32 masters and both
moments (Rajbhandari et al., ZeRO, SC 2020, figure 1). Programs hold activations and temporaries,
too. Nothing is run. Needs the compilers: pip install '.[aot]'.

  python benchmarks/zero_memory.py            # writes results/zero_memory.md
  python benchmarks/zero_memory.py --only losses    # one of its tables: losses as jit has them,
  python benchmarks/zero_memory.py --only backward  # the update inside the backward pass
  python benchmarks/zero_memory.py --smoke    # the CPU and one layer, prints only
"""

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax
from _steps import jitted_step, zero_on

import optax_ext
import sharding as shd
from sharding.plan import MODELS, Decoder, ParallelPlan, estimate, kind_of, targets
from sharding.plan.cost._plan_costs import PlanCosts
from sharding.plan.search._search import machine_of

GIB = 2**30
LENGTH = 1024
ADAMW = optax.adamw(1e-3)
SMALL = {
    "1.3B": Decoder(24, 2048, 16, 16, 5504, 32000),
    "7B": MODELS["llama2-7b"],
    "13B": MODELS["llama2-13b"],
}
LARGE = {"70B": MODELS["llama2-70b"], "405B": MODELS["llama3-405b"]}
# Axes of data parallelism: those of the torus.
MESHES = {
    "cpu:8": {"data": 8},
    "h100x8": {"data": 8},
    "h100x64": {"data": 64},
    "h100x512": {"data": 512},
    "v5e:2x4": {"x": 2, "y": 4},
    "v5e:4x4": {"x": 4, "y": 4},
    "v5p:2x2x2": {"x": 2, "y": 2, "z": 2},
    "v5p:4x4x4": {"x": 4, "y": 4, "z": 4},
    "v5p:8x8x8": {"x": 8, "y": 8, "z": 8},
}
COLUMNS = {
    "arguments": "{arguments:.2f}",
    "temporaries": "{temporaries:.2f}",
    "gathered": "{gathered:.2f}",
    "gradients": "{gradients:.2f}",
    "total": "{total:.2f}",
    "/ planned": "{ratio:.3f}",
    "sent": "{sent:.1f}",
    "/ theory": "{of_theory:.3f}",
    "compiled in, s": "{seconds:.0f}",
}
# Losses of a model, as `jit` computes them: their length and targets, and numbers of micro-batches
# of each loss.
LOSSES: dict[str, tuple[int, tuple[str, ...], dict[str, tuple[int, ...]]]] = {
    "gpt2-small": (
        512,
        ("h100x8", "v5e:4x4", "v5p:2x2x2"),
        {"mean": (1, 4), "mean, partitioned": (1,), "contrastive": (1,), "batch norm": (1,)},
    ),
    "llama2-7b": (1024, ("h100x8", "v5p:2x2x2"), {"mean": (1,), "contrastive": (1,)}),
}


def paper_bytes(params: float, stage: int, devices: int) -> float:
    """Bytes of one device in the paper's figure 1, without activations."""
    shards = [devices if stage >= least else 1 for least in (3, 2, 1)]
    return params * sum(n / s for n, s in zip((2, 2, 12), shards, strict=True))


def loss_of(name: str, model: Decoder, zero: shd.Zero) -> Any:
    """A loss of ``LOSSES``, each layer computed again; or one of layers that ``zero`` gathers."""
    if name == "gathered":
        layer = zero.gathered(model.apply_layer)
        return model.make_loss(layer if zero.stage == 3 else jax.checkpoint(layer))
    if name == "batch norm":

        def normalized(params: Any, x: jax.Array) -> jax.Array:
            y = model.apply_layer(params, x).astype(jnp.float32)
            mean, variance = jnp.mean(y, axis=(0, 1)), jnp.var(y, axis=(0, 1))
            return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)

        return model.make_loss(jax.checkpoint(normalized))
    if name == "contrastive":
        layer = jax.checkpoint(model.apply_layer)

        def contrastive(params: Any, tokens: jax.Array) -> jax.Array:
            """Of the first half of each sequence and its second half."""
            x = model.embed(params, tokens)
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
            half = x.shape[1] // 2
            first, second = jnp.mean(x[:, :half], axis=1), jnp.mean(x[:, half:], axis=1)
            logits = first.astype(jnp.float32) @ second.astype(jnp.float32).T
            labels = jnp.arange(len(logits))
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return contrastive
    whole = model.make_loss(jax.checkpoint(model.apply_layer))
    return shd.Loss(whole, per_device=False) if name == "mean, partitioned" else whole


def compiled(
    model: Decoder,
    target: str,
    stage: int,
    weights: str,
    replicas: int = 1,
    microbatches: int = 1,
    length: int = LENGTH,
    loss: str = "gathered",
    jit: bool = False,
) -> dict[str, float]:
    """Figures of one device in GiB: a sequence a micro-batch, every layer computed again."""
    model = dataclasses.replace(model, length=length)
    tx = optax_ext.master_weights(ADAMW) if weights == "master" else ADAMW
    sizes = MESHES[target]
    first, *others = sizes
    if replicas > 1:
        sizes = {"replica": replicas, first: sizes[first] // replicas}
        sizes |= {axis: MESHES[target][axis] for axis in others}
    zero = shd.Zero(
        targets.mesh(target, tuple(sizes.values()), tuple(sizes)),
        stage=stage,
        axis=(first, *others),
        replica_axis="replica" if replicas > 1 else None,
    )
    # Planned.
    machine = machine_of(target, kind_of(target) or kind_of("h100"))
    dtype = jnp.float32 if target.startswith("cpu") else jnp.bfloat16
    costs = PlanCosts(model, ADAMW, machine, length=length, dtype=dtype)
    plan = ParallelPlan(
        data=zero.num_devices,
        microbatches=microbatches,
        stage=stage,
        replicas=replicas,
        weights=weights,
    )
    options: Any = {"gathered_once": model.gathered_once, "microbatches": microbatches}
    theory = estimate(
        model.abstract(dtype), tx, zero, batch=4 * microbatches * (length + 1), **options
    )

    def make_state() -> tuple[Any, Any]:
        params = model.init(dtype)
        return params, tx.init(params)

    function, state = loss_of(loss, model, zero), zero.abstract_state(make_state, tx=tx)
    # With a row a device a contrastive loss is another program.
    rows = 2 if loss == "contrastive" else 1
    tokens = model.batch(zero.num_devices * microbatches * rows)
    step: Any
    if jit:
        step = jitted_step(function, tx, state)
        placed = jax.NamedSharding(zero.mesh, jax.P(tuple(MESHES[target])))
        tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=placed)
    else:
        step = zero.train_step(function, tx=tx, microbatches=microbatches)
    lowered = step.lower(state, tokens)
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    found = shd.audit(program, mesh=zero.mesh, device=machine.device)
    return {
        "arguments": sum(found.arguments.values()) / GIB,
        "temporaries": (found.temporaries or 0.0) / GIB,
        "gathered": found.at_peak.get("gathered parameters", 0.0) / GIB,
        "gradients": found.at_peak.get("gradients", 0.0) / GIB,
        "total": found.memory / GIB,
        "ratio": found.memory / costs.fullest(plan),
        "sent": found.wire_bytes / GIB,
        "of_theory": found.wire_bytes / theory.stage(theory.requested).wire,
        "seconds": seconds,
    }


def if_it_fits(**case: Any) -> dict[str, float] | None:
    """What is ``compiled``; what does not fit a TPU is not compiled for it."""
    try:
        return compiled(**case)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def line(*cells: str, **case: Any) -> str:
    """A row."""
    figures = if_it_fits(**case)
    if figures is None:
        return f"| {' | '.join(cells)} | does not fit |{' |' * (len(COLUMNS) - 1)}"
    return f"| {' | '.join((*cells, *(text.format(**figures) for text in COLUMNS.values())))} |"


def small_rows(smoke: bool) -> Iterator[str]:
    """All stages with float32 masters."""
    models = {"tiny": Decoder(2, 64, 4, 4, 128, 96)} if smoke else SMALL
    for name, model in models.items():
        params = sum(x.size for x in jax.tree.leaves(model.abstract()))
        for target in ("cpu:8",) if smoke else ("h100x8", "h100x64"):
            for stage in (0, 3) if smoke else range(4):
                by_paper = paper_bytes(params, stage, targets.parse(target).num_devices) / GIB
                case: Any = {"model": model, "target": target, "stage": stage}
                yield line(name, target, str(stage), f"{by_paper:.2f}", **case, weights="master")


def large_rows() -> Iterator[str]:
    """Stages 2 and 3, and stage 3 with two replicas, without masters."""
    for name, model in LARGE.items():
        for target in ("h100x64", "h100x512", "v5p:4x4x4", "v5p:8x8x8"):
            for stage, replicas in ((2, 1), (3, 1), (3, 2)):
                case: Any = {"model": model, "target": target, "stage": stage}
                about = f"{stage} hybrid" if replicas > 1 else str(stage)
                yield line(name, target, about, **case, weights="plain", replicas=replicas)


def loss_rows(smoke: bool) -> Iterator[str]:
    """Losses at stages 2 and 3, without masters: by ``jit`` alone, and by a step of ours."""
    cases: Any = LOSSES
    if smoke:
        cases = {"tiny": (32, ("cpu:8",), {"mean": (1,), "contrastive": (1,)})}
    models = {**MODELS, "tiny": Decoder(2, 64, 4, 4, 128, 96)}
    for name, (length, names, losses) in cases.items():
        counts = [(loss, k) for loss, counts in losses.items() for k in counts]
        for target, (loss, k), stage in itertools.product(names, counts, (2, 3)):
            case: Any = {"model": models[name], "length": length, "weights": "plain"}
            case |= {"target": target, "stage": stage, "microbatches": k, "loss": loss}
            by_jit = k == 1 and loss != "mean, partitioned"
            found = [if_it_fits(**case, jit=True) if by_jit else {}, if_it_fits(**case)]
            figures = [
                "does not fit" if x is None else f"{x[key]:{form}}" if x else ""
                for key, form in (("of_theory", ".3f"), ("temporaries", ".2f"))
                for x in found
            ]
            yield f"| {' | '.join((name, target, loss, str(stage), str(k), *figures))} |"


BY_LAYER = optax_ext.by_path(
    {"^layers/[^0-9]": optax_ext.last_two_dims(batch=(0,))}, default=optax_ext.last_two_dims()
)


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """With moments in float32."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return tx.update(wide(grads), state, wide(params))

    return optax.GradientTransformation(lambda params: tx.init(wide(params)), update)


OPTIMIZERS = {
    "Adafactor": optax_ext.adafactor(1e-3, factoring=BY_LAYER),
    "AdamW": optax.adamw(1e-3),
    "AdamW, float32 moments": in_float32(optax.adamw(1e-3)),
    "CAME": optax_ext.came(1e-3, factoring=BY_LAYER),
    "CAME 8-bit": optax_ext.came8bit(1e-3, factoring=BY_LAYER),
    "AdamW 8-bit": optax_ext.adamw8bit(1e-3),
}


# Updated in the backward pass: target, ZeRO stage, model, optimizer, micro-batches of a device,
# whether the global norm is clipped.
IN_BACKWARD = [
    ("h100x1", 0, "llama2-7b", "Adafactor", 1, False),
    ("h100x1", 0, "llama2-7b", "CAME 8-bit", 1, False),
    ("h100x1", 0, "llama2-7b", "CAME 8-bit", 1, True),
    ("h100x1", 0, "llama2-7b", "CAME 8-bit", 4, False),
    ("h100x1", 0, "llama2-7b", "CAME 8-bit", 4, True),
    ("h100x1", 0, "llama2-7b", "AdamW 8-bit", 1, False),
    ("h100x1", 0, "llama2-13b", "CAME 8-bit", 1, False),
    ("h100x1", 0, "7B, 16 numbered layers", "Adafactor", 1, False),
    ("v5e:1x1", 0, "llama2-7b", "Adafactor", 1, False),
    *(("h100x8", stage, "llama2-7b", "AdamW", 1, False) for stage in (1, 2, 3)),
    *(("v5e:2x4", 3, "llama2-7b", name, 1, False) for name in ("AdamW", "CAME")),
]


def prepared(
    zero: shd.Zero, model: Decoder, tx: Any, update: str, microbatches: int, dtype: Any, batch: int
) -> tuple[Any, Any, Any]:
    """A step that computes every layer again; its abstract state, and a batch."""
    loss = model.make_loss(jax.checkpoint(model.apply_layer))
    step = zero.train_step(loss, tx=tx, update=update, microbatches=microbatches)

    def make() -> Any:
        params = model.init(dtype)
        return params, tx.init(params)

    return step, zero.abstract_state(make, tx=tx), model.batch(batch)


def audited(zero: shd.Zero, model: Decoder, tx: Any, update: str, microbatches: int) -> Any:
    """What a step in bfloat16 holds and sends; None if it does not fit."""
    sequences = microbatches * zero.num_devices
    step, *args = prepared(zero, model, tx, update, microbatches, jnp.bfloat16, sequences)
    try:
        program = step.lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    return shd.audit(program, mesh=zero.mesh)


def backward_rows(smoke: bool) -> Iterator[str]:
    """Models that are updated after the backward pass and in it."""
    numbered = dataclasses.replace(MODELS["llama2-7b"], layers=16, scan=False)
    for target, stage, name, optimizer, microbatches, clips in (
        IN_BACKWARD[:8:7] if smoke else IN_BACKWARD
    ):
        model = Decoder(2, 64, 4, 4, 128, 96) if smoke else MODELS.get(name, numbered)
        model = dataclasses.replace(model, length=32 if smoke else LENGTH, scan=name in MODELS)
        zero, tx = zero_on("cpu:1" if smoke else target, stage=stage), OPTIMIZERS[optimizer]
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx) if clips else tx
        found, cells = [], []
        for place in ("after", "backward"):
            start = time.time()
            found.append(audited(zero, model, tx, place, microbatches))
            memory = f"{found[-1].memory / GIB:.2f}" if found[-1] else "does not fit"
            cells += [memory, f"{time.time() - start:.0f}" if found[-1] else ""]
        case = target, str(stage), name, optimizer, str(microbatches), "yes" if clips else ""
        ratios = ["", ""]
        if all(found):
            flops = [sum(x.flops.values()) for x in found]
            ratios[0] = f"{flops[1] / flops[0]:.3f}"
            ratios[1] = (
                f"{found[1].wire_bytes / found[0].wire_bytes:.3f}" if found[0].wire_bytes else ""
            )
        yield f"| {' | '.join((*case, *cells, *ratios))} |"


# Streamed from host memory: target, ZeRO stage, model, optimizer.
STREAMED = [
    ("v5e:1x1", 0, "llama2-7b", "AdamW"),
    ("v5e:1x1", 0, "llama2-7b", "AdamW, float32 moments"),
    ("v5e:1x1", 0, "llama2-7b", "CAME"),
    ("v5e:1x1", 0, "llama2-70b", "AdamW"),
    ("v5e:2x4", 2, "llama2-7b", "AdamW"),
    ("v5e:2x4", 3, "llama2-7b", "AdamW"),
    ("v5e:2x4", 3, "llama2-70b", "AdamW"),
]


def streamed_rows(smoke: bool) -> Iterator[str]:
    """Layers in host memory, updated in the backward pass."""
    for target, stage, name, optimizer in STREAMED[:1] if smoke else STREAMED:
        model = Decoder(2, 64, 4, 4, 128, 96) if smoke else MODELS[name]
        model = dataclasses.replace(model, length=32 if smoke else LENGTH)
        options = {"offload_min_size": 0} if smoke else {}
        zero = zero_on("cpu:1" if smoke else target, stage=stage, offload="all", **options)
        found = audited(zero, model, OPTIMIZERS[optimizer], "backward", 1)
        figures = f"{found.memory / GIB:.2f}", f"{found.host / GIB:.1f}"
        figures += (f"{found.wire_bytes / GIB:.1f}" if stage else "",)
        yield f"| {' | '.join((target, str(stage), name, optimizer, *figures))} |"


def write_backward(smoke: bool) -> None:
    """Prints the tables of the update's place; writes those of full size."""
    columns = [f"{what}: {place}" for place in ("after", "backward") for what in ("GiB", "s")]
    case = "target", "stage", "model", "optimizer", "micro-batches", "clipped"
    columns += ["FLOPs / after", "sent / after"]
    found = _results.table(header(*case, *columns), backward_rows(smoke))
    streamed = _results.table(
        header("target", "stage", "model", "optimizer", "GiB of a device", "of its host", "sent"),
        streamed_rows(smoke),
    )
    if not smoke:
        _results.write_section(
            "zero_memory",
            "The update inside the backward pass",
            "bfloat16, micro-batches of one sequence of 1,024 tokens a device, `jax.checkpoint` "
            "around a layer: GiB of a device, and seconds to trace and compile. Clipped: by the "
            'global norm, exactly, for a second backward pass. The second table: `offload="all"`, '
            "bytes of each device.",
            f"{found}\n\n{streamed}",
            script="zero_memory.py --only backward",
        )


def header(*columns: str) -> str:
    """The header of a table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def write_losses(smoke: bool) -> None:
    """Prints the table of losses; writes that of full size into the file of all tables."""
    columns = [f"{what}: {step}" for what in ("/ theory", "GiB") for step in ("jit", "step")]
    names = "model", "target", "loss", "stage", "micro-batches"
    found = _results.table(header(*names, *columns), loss_rows(smoke))
    if not smoke:
        _results.write_section(
            "zero_memory",
            "Losses as jit computes them",
            "AdamW in bfloat16; bytes sent over the planner's, and temporaries. Every loss is that "
            "of plain `jit`, with `jax.checkpoint` around a layer. Jit: shardings of the state "
            "alone. Step: `zero.train_step(loss)`; partitioned with `per_device=False`. 1,024 "
            "tokens, GPT-2 512. Below 1: XLA gathers gradients of embedded tokens instead of "
            "reducing that of the table, if it is larger. 7B at stage 2 on v5p: XLA copies three "
            "matrices of attention into another layout, 3.0 GiB.",
            found,
            script="zero_memory.py --only losses",
        )


def main() -> None:
    """Prints the tables; writes those of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model, the CPU alone; no file")
    tables = {"losses": write_losses, "backward": write_backward}
    parser.add_argument("--only", choices=tables, help="one table alone")
    options = parser.parse_args()
    smoke = options.smoke
    if smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    if options.only:
        tables[options.only](smoke)
        return
    small = _results.table(header("model", "target", "stage", "paper", *COLUMNS), small_rows(smoke))
    if smoke:
        write_losses(smoke)
        write_backward(smoke)
        return
    large = _results.table(header("model", "target", "stage", *COLUMNS), large_rows())
    _results.write(
        "zero_memory",
        "ZeRO's stages: the paper, the planner, the programs",
        f"GiB of one device, a sequence of {LENGTH:,} tokens each, every layer computed again.",
        "## All stages with float32 masters and moments\n\n"
        "Paper: bytes of figure 1, of parameters, gradients and state. The program's arguments are "
        "parameters, state and batch; its temporaries gradients, activations, and what is "
        "gathered; gathered and gradients are their part at the peak, estimated from the program.",
        small,
        "## Large models\n\nAdamW in bfloat16. Hybrid: two replicas.",
        large,
    )
    write_losses(smoke)
    write_backward(smoke)


if __name__ == "__main__":
    main()
