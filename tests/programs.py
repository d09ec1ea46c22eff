"""Compiled programs and traces of training, recorded once: what a change of the code must keep.

Of a program: FLOPs, bytes accessed, bytes of memory, collectives and their bytes, by kind. Of a
trace: 20 losses, and 20 norms of each field of the train state. Only public names are used, so that
the record also judges a library whose files have moved.

  python tests/programs.py --record                       # writes tests/programs.json
  python tests/programs.py --check                        # what differs; exits 1 if it is worse
  python tests/programs.py --check --target cpu --match "stage 3"
  PYTHONPATH=../other python tests/programs.py --check    # judges another checkout

The words of a name say what a program is: "stage 3, came, replicas, zen, micro". New names go into
the lists in programs.json; those of accelerators have the optimizer shapes whose bytes an element
differ. Compilers for TPUs and GPUs: ``pip install '.[aot]'``.

Of v5e, whose programs compile for minutes, those of optimizers and five of training are recorded.
Its compiler refuses "stage 1, adamw 8 bits, explicit, offload".
"""

import argparse
import collections
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

# As in conftest.py: XLA's own passes run, LLVM's costly ones do not. Not where pytest collects this
# module: programs of the processes that tests start would be others than theirs.
if __name__ == "__main__":
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=1"
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "64", "XLA_FLAGS": flags}
sys.path += filter(None, os.environ.get("SHARDING_COMPILERS", "").split(os.pathsep))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

FILE = pathlib.Path(__file__).with_suffix(".json")
TARGETS = {"cpu": "cpu:8", "v5e": "v5e:2x4", "h100": "h100x8", "traces": "cpu:8"}
STEPS, TOLERANCE, SLACK = 20, 1e-9, 1e-3  # of traces; of FLOPs and bytes

# A language model: an embedding, layers, a head.
Size = collections.namedtuple("Size", "width heads hidden layers vocab batch length")
LARGE = Size(1024, 16, 4096, 8, 8192, 64, 256)  # compiled only
SMALL = Size(64, 4, 128, 8, 96, 16, 8)  # run


def init(size, dtype):
    """Irregular values; random bits would compile slowly."""
    width, hidden, heads = size.width, size.hidden, (size.heads, size.width // size.heads)
    layer = {"query": (width, *heads), "out": (*heads, width), "scale": (width,)}
    layer |= {"up": (width, hidden), "down": (hidden, width), "bias": (hidden,)}
    layers = {name: (size.layers, *shape) for name, shape in layer.items()}
    shapes = {"embed": (size.vocab, width), "layers": layers, "head": (width, size.vocab)}

    def draw(shape):
        index = jnp.arange(math.prod(shape), dtype=jnp.float32)
        return (0.1 * jnp.sin(0.37 * index * index)).reshape(shape).astype(dtype)

    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def embed(params, batch):
    return params["embed"][batch["tokens"][:, :-1]]


def block(layer, x, _=None):
    query = jnp.einsum("bte,ehd->bthd", x * (1 + layer["scale"]), layer["query"])
    logits = jnp.einsum("bthd,bshd->bhts", query, jnp.roll(query, 1, -1))
    weights = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -1e30))
    x = x + jnp.einsum("bhts,bshd,hde->bte", weights, query, layer["out"])
    hidden = checkpoint_name(x @ layer["up"] + layer["bias"], "hidden")
    return x + jnp.tanh(hidden) @ layer["down"]


def head(params, x, batch):
    """The sum of the losses, and of the weights of their examples."""
    labels = batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels)
    return jnp.sum(losses.mean(1) * batch["weight"]), jnp.sum(batch["weight"])


def batch(size, step, dtype=np.float32):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, size.vocab, (size.batch, size.length + 1), dtype=np.int32)
    return {"tokens": tokens, "weight": (10.0 ** rng.uniform(-1, 1, size.batch)).astype(dtype)}


# What the words of a name stand for.
STACKED = optax_ext.last_two_dims(batch=(0,))
BY_LAYER = optax_ext.by_path({"layers": STACKED}, default=optax_ext.last_two_dims())
OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3)),
    "came": lambda: optax_ext.came(1e-4, weight_decay=0.1),
    "came by layer": lambda: optax_ext.came(1e-4, factoring=BY_LAYER),
    "came bf16": lambda: optax_ext.came(1e-4, mu_dtype=jnp.bfloat16),
    "adafactor": lambda: optax_ext.adafactor(1e-3),
    "adafactor momentum": lambda: optax_ext.adafactor(1e-3, momentum=0.9),
    "lamb": lambda: optax_ext.lamb(1e-3, weight_decay=0.1),
    "lars": lambda: optax_ext.lars(1e-2, weight_decay=1e-3),
    "adamw 8 bits": lambda: optax_ext.adamw8bit(1e-3),
    "adamw 4 bits": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), 4),
    "adamw kernel": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), rounding="nearest"),
    "came 8 bits": lambda: optax_ext.came8bit(1e-4),
    "master weights": lambda: optax_ext.master_weights(optax_ext.came(1e-4)),
    "muon": lambda: shd.by_owner(optax.contrib.muon(1e-3)),
    "noise scale": lambda: optax.chain(optax_ext.gradient_noise_scale(16), optax.adamw(1e-3)),
}
BLOCK = [(1024, 1024), (1024, 4096), (4096, 1024), (1024,), (4096,), (1024, 1)]
SHAPES = {  # of optimizers alone
    "matrix": [(4096, 1024)],
    "shard": [(4096, 172)],
    "stack": [(4, 1024, 16, 64)],
    "layers": [*BLOCK, *BLOCK, (7, 13), ()],
}
MESHES = {
    "replicas": {"replica": 2, "data": 4},
    "torus": {"x": 2, "y": 4},
    "tensor": {"data": 4, "model": 2},
    "pipeline": {"pipe": 4, "data": 2},
}
ZERO = {
    "replicas": {"replica_axis": "replica"},
    "torus": {"axis": ("x", "y")},
    "spread": {"shard_state_over_replicas": True},
    "offload": {"offload": "optimizer"},
    "stored": {"reshard_after_forward": False},
    "bfloat16": {"precision": shd.Precision(compute=jnp.bfloat16, reduce=jnp.float32)},
    "int8": {"precision": shd.Precision(gather=jnp.int8)},
    "powersgd": {"sync": shd.sync.powersgd(4)},
    "top_k": {"sync": shd.sync.top_k(0.05)},
    "qsgd": {"sync": shd.sync.qsgd()},
    "qsgd nearest": {"sync": shd.sync.qsgd(rounding="nearest")},
    "zen": {"sync": shd.sync.zen(0.1)},
}
SCHEDULES = {
    name: getattr(shd.pipeline, name.replace("1f1b", "one_f_one_b").replace("-", "_"))
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera")
}
PIPELINE = {
    "residuals": {"recompute": False},
    "tick": {"gather": "tick"},
    "uneven": {"num_layers": (3, 2, 2, 1)},
}


def options_of(words, table):
    return {k: v for word in words for k, v in table.get(word, {}).items()}


def optimizer_program(target, optimizer, shapes):
    """An optimizer's step on one device, its parameters and state donated."""
    tx, dtype = OPTIMIZERS[optimizer](), jnp.bfloat16 if "master" in optimizer else jnp.float32

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    place = SingleDeviceSharding(shd.targets.topology(TARGETS[target])[0])
    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES[shapes]]
    types = params, jax.eval_shape(tx.init, params), params
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), types)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=place).lower(*types).compile()


def layers_of(zero, words, size):
    """``run(layers, x)``: a scan, or one layer after the other."""

    def split(layers):
        return [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(size.layers)]

    layer = jax.checkpoint(block) if "global" in words else zero.gathered(block)
    if "unrolled" in words:
        return lambda layers, x: functools.reduce(lambda x, p: layer(p, x), split(layers), x)
    return lambda layers, x: jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0]


def pipeline_on(mesh, words):
    schedule = next(SCHEDULES[word] for word in words if word in SCHEDULES)(4, 8)
    options = {"num_layers": 8, "embed": embed, "block": block, "head": head}
    return shd.Pipeline(mesh, schedule, **options | options_of(words, PIPELINE))


def training(target, name, size, dtype=jnp.float32):
    """``(zero, make_state, tx, param_specs, step, keys of a call)`` of a sharded step."""
    stage, optimizer, *words = name.split(", ")
    axes = next((MESHES[word] for word in words if word in MESHES), {"data": 8})
    mesh = shd.targets.mesh(TARGETS[target], tuple(axes.values()), tuple(axes))
    kind = AxisType.Explicit if "explicit" in words else AxisType.Auto
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(axes))
    zero = shd.Zero(mesh, int(stage[-1]), **options_of(words, ZERO))
    tx, specs = OPTIMIZERS[optimizer](), None
    dtype = jnp.bfloat16 if optimizer == "master weights" else dtype
    pipe = pipeline_on(mesh, words) if "pipeline" in words else None

    def make():
        params = init(size, dtype)
        params = pipe.stack(params) if pipe else params
        return params, tx.init(params)

    options = dict.fromkeys(("weighted", "has_aux", "rngs", "grad_norm"), "weighted" in words)
    if pipe:
        specs, loss_fn = pipe.param_specs(jax.eval_shape(make)[0]), pipe
        options = {}
    else:
        run = layers_of(zero, words, size)

        def loss_fn(params, batch, *keys):
            x = embed(params, batch)
            for key in keys:
                x *= 1 + jax.random.uniform(key, x.shape, x.dtype)
            total, weight = head(params, run(params["layers"], x), batch)
            return ((total, weight), {"weight": weight}) if keys else total / len(x)

    if "stack" in words:  # as a plan of activations says
        sizes = size._replace(batch=size.batch // zero.num_devices // (1 + ("micro" in words)))
        compute = zero.precision.compute or dtype
        types = jax.eval_shape(lambda: (init(size, compute), batch(sizes, 0)))
        device = mesh.devices.flat[0]
        loss_fn = shd.remat.plan(loss_fn, *types, "1GiB", device=device, stage=3)
    if "tensor" in words:
        wide = P(None, None, "model")
        layers = {"query": wide, "up": wide, "out": P(), "down": P(), "scale": P(), "bias": P()}
        specs = {"embed": P(), "layers": layers, "head": P()}
    if "global" in words or options.get("rngs"):  # keys are those of each device
        of_loss = {k: options.pop(k) for k in ("weighted", "has_aux") if k in options}
        of_loss |= {"rngs": options.get("rngs", False), "per_device": "global" not in words}
        loss_fn = shd.Loss(loss_fn, **of_loss)
    microbatches, takes_keys = 2 if "micro" in words else 1, options.pop("rngs", False)
    step = zero.train_step(loss_fn, tx=tx, microbatches=microbatches, **options)
    return zero, make, tx, specs, step, lambda i: [jax.random.key(i)] * takes_keys


def program(target, name):
    if name.startswith("stage"):
        zero, make, tx, specs, step, keys = training(target, name, LARGE)
        state = zero.abstract_state(make, tx=tx, param_specs=specs)
        return step.lower(state, batch(LARGE, 0), *keys(0)).compile()
    if name != "2BW, three updates":
        return optimizer_program(target, *name.split(", "))
    # PipeDream-2BW: three updates without a flush.
    pipe = pipeline_on(shd.targets.mesh(TARGETS[target], (4, 2), ("pipe", "data")), ["1f1b"])
    schedule = shd.pipeline.pipedream_2bw(4, 8, minibatches=3)
    training_2bw = shd.AsyncPipeline(pipe, schedule, optax.sgd(1e-3, momentum=0.9))
    state = jax.eval_shape(lambda: training_2bw.init(pipe.stack(init(LARGE, jnp.float32))))
    batches = jax.tree.map(lambda x: np.stack([x.reshape(8, 8, *x.shape[1:])] * 3), batch(LARGE, 0))
    return jax.jit(training_2bw.run, donate_argnums=0).lower(state, batches).compile()


def trace(name):
    """Losses, and norms of each field of the state, of a run in float64."""
    numbers = collections.defaultdict(list)
    with jax.enable_x64(True):
        zero, make, tx, specs, step, keys = training("cpu", name, SMALL, jnp.float64)
        state = zero.init(make, tx=tx, param_specs=specs)
        for i in range(STEPS):
            state, metrics = step(state, zero.put(batch(SMALL, i, np.float64)), *keys(i))
            numbers["loss"].append(float(metrics["loss"]))
            squares = collections.Counter()
            for path, x in jax.tree_util.tree_leaves_with_path(state):
                names = [key.name for key in path if hasattr(key, "name")]  # of NamedTuples
                field = ".".join(names[-2:]) if path[0].idx else "params"
                squares[field] += float(np.sum(np.square(np.asarray(x, np.float64))))
            for field, square in squares.items():
                numbers[f"norm of {field}"].append(square**0.5)
    return numbers


KINDS = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute|ragged-all-to-all"
CALLS = r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"


def nbytes(result):
    """Of the arrays of a type, ``(f32[8,4]{1,0}, s32[])``."""
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * int(re.sub(r"\D", "", dtype) or 8) // 8
        for dtype, dims in re.findall(r"([a-z]+\d*)\w*\[([\d,]*)\]", result)
    )


def collectives(text):
    """Counts and bytes of results by kind; those in loops as often as they run."""
    found = re.findall(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    bodies = {name: body for _, name, body in found}

    @functools.cache
    def count(name):
        total = collections.Counter()
        for line in bodies[name].splitlines():
            if match := re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line):
                total[match[2]] += 1
                total[f"{match[2]} bytes"] += nbytes(match[1])
            trips = 1
            if condition := re.search(r"condition=%?([\w.\-]+)", line):
                # Where XLA does not state it, what the condition compares with.
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                bounds = re.findall(r" constant\((\d+)\)", bodies[condition[1]])
                trips = int(known[1]) if known else max(map(int, bounds), default=1)
            for callee in re.findall(r"[\w.\-]+", " ".join(re.findall(CALLS, line))):
                for key, value in count(callee).items():
                    total[key] += trips * value
        return total

    return count(next(name for entry, name, _ in found if entry))


def measure(compiled):
    """What XLA states of a program, the body of a loop once; what ``shd.audit`` counts in loops."""
    memory, cost, audit = compiled.memory_analysis(), compiled.cost_analysis(), shd.audit(compiled)
    numbers = {
        "FLOPs": (cost or {}).get("flops"),  # programs for GPUs have none
        "bytes accessed": (cost or {}).get("bytes accessed"),
        "matmul FLOPs in loops": audit.matmul_flops,
        "bytes accessed in loops": sum(audit.nbytes.values()),
        "temporaries": memory.temp_size_in_bytes,
        "host temporaries": memory.host_temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "not aliased": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        **collectives(compiled.as_text()),
    }
    return {key: int(value) for key, value in numbers.items() if value}


def verdicts(recorded, now):
    """(number, recorded, now, verdict) of the numbers of a program or a trace."""
    for key in sorted(recorded | now):
        old, new = (np.atleast_1d(numbers.get(key, 0)) for numbers in (recorded, now))
        tolerance, less = (SLACK, new[-1] < old[-1]) if old.size == 1 else (TOLERANCE, False)
        same = old.shape == new.shape and np.allclose(new, old, rtol=tolerance, atol=0)
        yield key, old[-1], new[-1], "equal" if same else "better" if less else "worse"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--record", action="store_true", help=f"write {FILE.name}")
    task.add_argument("--check", action="store_true", help=f"compare with {FILE.name}")
    parser.add_argument("--target", choices=TARGETS, help="all by default")
    parser.add_argument("--match", default="", metavar="TEXT", help="in the names of programs")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as in conftest.py
    jax.config.update("jax_enable_compilation_cache", False)  # which does not store all numbers
    folder = pathlib.Path(shd.__file__).parents[1]
    git = ["git", "-C", folder, "log", "-1", "--format=%h", "--", "optax_ext", "sharding"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    about, record = {"commit": commit, "jax": jax.__version__}, json.loads(FILE.read_text())
    print(f"{folder}: {about}; recorded: {record['about']}")
    totals = collections.Counter()
    for target in [options.target] if options.target else TARGETS:
        try:
            shd.targets.topology(TARGETS[target])
        except ValueError as error:
            print(f"{target}: skipped, {error}")
            continue
        recorded, start = record["numbers"].setdefault(target, {}), time.perf_counter()
        names = record["names"][target] if options.record else recorded
        names = [name for name in names if options.match in name]
        for name in names:
            try:
                now = trace(name) if target == "traces" else measure(program(target, name))
            except Exception as error:
                print(f"{target:<6} {name}: {type(error).__name__}: {error}"[:300])
                totals["worse"] += 1
                continue
            if options.record:
                recorded[name] = now
            for key, old, new, verdict in verdicts(recorded[name], now):
                totals[verdict] += 1
                if verdict != "equal":
                    print(f"{verdict:<6} {target:<6} {name:<50} {key:<24} {old:,} -> {new:,}")
        print(f"{target}: {len(names)} programs in {time.perf_counter() - start:.0f} s")
    if options.record:
        record["about"] = about
        FILE.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(", ".join(f"{totals[verdict]} {verdict}" for verdict in ("equal", "better", "worse")))
    return totals["worse"] > 0 and options.check


if __name__ == "__main__":
    sys.exit(main())
