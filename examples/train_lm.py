"""Trains a byte-level language model with CAME, its memory cut over the devices by ZeRO.

The text is the source code of Python's standard library; the devices are the GPUs or TPUs there
are, else 8 virtual CPU devices. Stop it by any means: the same command goes on where it was.
Everything of a run is in runs/NAME/: metrics.jsonl, loss.png, layout.txt (where each array lies),
summary.json, checkpoints. It starts with a plan: what a device holds and sends at each stage of
ZeRO. --audit reads the same, and more, from the compiled step.

  python examples/train_lm.py                                   # CAME, ZeRO stage 2: 3 minutes
  python examples/train_lm.py --optimizer adamw --stage 0       # plain data parallelism
  python examples/train_lm.py --state 8bit                      # CAME's momentum in 8 bits
  python examples/train_lm.py --config ngrams --sync zen        # sparse gradients of a large table
  python examples/train_lm.py --compare came,adafactor,adamw    # three runs, one plot
  python examples/train_lm.py --data ~/books --steps 2000 --name books
  python examples/train_lm.py --config gpt2-small --microbatches 4
  python examples/train_lm.py --stage 3 --audit                 # what the compiled step costs
  python examples/train_lm.py --noise-scale                     # would a larger batch be worth it?
  srun python examples/train_lm.py --distributed                # many processes: see launch/
"""

import argparse
import copy
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from _corpus import Corpus
from _distributed import any_stop, ending_together, is_main, join, my_rows, wait_for_all
from _model import CONFIGS, NGRAM_DISTANCES, Block, TransformerLM, sample
from _report import (
    Metrics,
    Progress,
    bits,
    console,
    plot_compare,
    plot_loss,
    print_audit,
    print_plan,
    print_summary,
    read_metrics,
    write_json,
)
from flax.training.train_state import TrainState

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan import estimate, kind_of

DECAY = {"weight_decay": 0.1}
RULE = {"factoring": optax_ext.flax_transformer()}  # attention kernels: embed x (heads, head_dim)

# How to make each of a learning rate's schedule, and the rate's peak for --config small. Those of
# came, adafactor and adamw are the best of three each on held-out text; the others are not tuned.
OPTIMIZERS = {
    "came": (
        # A short run does not outlive the early spike that debias_instability removes.
        lambda lr: optax_ext.came(
            lr, **RULE, debias_instability=True, **DECAY, weight_decay_mask=optax_ext.decay_mask
        ),
        4e-3,
    ),
    "adafactor": (lambda lr: optax_ext.adafactor(lr, **RULE), 3e-2),
    "adamw": (lambda lr: optax.adamw(lr, b2=0.95, **DECAY, mask=optax_ext.decay_mask), 4e-3),
    "lamb": (lambda lr: optax_ext.lamb(lr, **DECAY), 1e-2),
    "lion": (lambda lr: optax.lion(lr, **DECAY, mask=optax_ext.decay_mask), 5e-4),
    "muon": (lambda lr: optax.contrib.muon(lr, adam_learning_rate=lambda i: lr(i) / 5), 2e-2),
    "sgd": (lambda lr: optax.sgd(lr, momentum=0.9), 3e-1),
}

# How an optimizer's moments are stored between steps.
STATES = ("float32", *optax_ext.STATE_FORMATS)


def zen_of_table(config, windows):
    """The rows of the table that a device's part of a batch reads are sent, all else whole."""
    read = windows * config.context * len(NGRAM_DISTANCES)  # if no n-gram comes twice
    return sync.by_path({"ngram_embed": sync.zen(min(1.0, read / config.ngrams))})


# How gradients meet, by the model's size and a device's windows of a batch; None for a plain sum.
SYNCS = {
    "dense": lambda config, windows: None,
    "zen": zen_of_table,
    "qsgd8": lambda config, windows: sync.qsgd(8),
    "qsgd4": lambda config, windows: sync.qsgd(4),
    "powersgd": lambda config, windows: sync.powersgd(4, **RULE),
    "topk": lambda config, windows: sync.top_k(0.01),
    "ef21": lambda config, windows: sync.top_k(0.01, feedback="ef21"),
    # Deep gradient compression has momentum and clipping in it: see make_optimizer.
    "dgc": lambda config, windows: sync.top_k(0.01, momentum=0.9, clip_norm=1.0),
}


def make_optimizer(name, peak, steps, state="float32", exchange="dense", measured=None):
    """The whole chain, and its schedule: warm-up to ``peak``, then a cosine down to 5 % of it.

    With ``measured`` it begins with the noise scale of batches of so many windows.
    """
    make, _ = OPTIMIZERS[name]
    warmup = max(1, min(steps // 20, 1000))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, 0.05 * peak)
    tx = make(schedule)
    if state != "float32":
        tx = optax_ext.low_precision_state(tx, optax_ext.STATE_FORMATS[state])
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    if exchange == "dgc":  # the rest of SGD with momentum
        tx = optax.sgd(schedule)
    if measured:  # before the clip
        tx = optax.chain(optax_ext.gradient_noise_scale(measured), tx)
    return tx, schedule


def train(options, corpus, mesh, directory, stop):
    """One run in ``directory``: begins it, goes on with it or, where it is finished, reads it.

    Returns:
      The run's summary; None if it was stopped.
    """
    check_same_run(options, corpus, directory)
    if (directory / "summary.json").exists():
        console.print(f"{directory} is finished; another --name begins a new run.")
        return json.loads((directory / "summary.json").read_text())

    config = CONFIGS[options.config]
    where = "optimizer" if options.offload else None
    exchange = SYNCS[options.sync](config, options.batch_size // mesh.size)
    zero = shd.Zero(mesh, stage=options.stage, offload=where, sync=exchange)
    # At stage 3 a block gathers its parameters when it runs; at the others this changes nothing.
    # So does the table of n-grams with its gradient: only rows that a batch reads are exchanged.
    embed = shd.sparse_embedding(nn.Embed) if options.sync == "zen" else nn.Embed
    model = TransformerLM(config, block=zero.gathered(Block), embed=embed)
    tx, schedule = make_optimizer(
        options.optimizer,
        options.learning_rate,
        options.steps,
        options.state,
        options.sync,
        options.batch_size if options.noise_scale else None,
    )

    def make_state(key):
        params = model.init(key, jnp.zeros((1, corpus.context), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, windows):
        logits = model.apply({"params": params}, windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean()

    # This is all the sharding there is. A step cuts the batch over the devices, reduce-scatters
    # the gradients, updates each device's shard, and gathers the parameters (stage 3: before).
    step = zero.train_step(loss_fn, microbatches=options.microbatches)
    evaluate = zero.eval_step(loss_fn)

    key = jax.random.key(options.seed)
    sizes, expected_wire = show_plan(options, corpus, zero, make_state, directory)

    manager = ocp.CheckpointManager(
        directory.absolute() / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    held_out = np.split(corpus.validation(16 * options.batch_size), 16)

    def validate(state):
        return float(np.mean([evaluate(state, zero.put(my_rows(x))) for x in held_out]))

    start = manager.latest_step()
    keep = 0 if start is None else start + 1  # rows of steps 0 to start
    metrics = Metrics(directory / "metrics.jsonl", keep, write=is_main())
    if start is None:
        start, state = 0, zero.init(make_state, key)  # born sharded, never whole on one device
        console.print("Measuring the untrained model; the first time, this compiles.")
        metrics.write({"step": 0, "val_loss": validate(state)})
    else:
        console.print(f"Going on from the checkpoint at step {start}.")
        state = restore(manager, start, zero, make_state, key)

    if options.audit:
        windows = corpus.batch(options.seed, start + 1, options.batch_size)
        # Of the real arguments, so that the first step finds its program compiled.
        compiled = step.lower(state, zero.put(my_rows(windows))).compile()
        merged = options.stage == 3 and jax.default_backend() == "cpu"
        notes = ["On CPUs XLA gathers a block once, not once more for the backward pass."] * merged
        tokens = options.batch_size * corpus.context
        found = shd.audit(compiled, mesh=mesh, expected_wire=expected_wire, tokens=tokens)
        print_audit(found, notes)
        # Where gradients are as sparse as the exchange expects.
        sizes["wire_bytes"] = shd.wire_bytes(compiled, branches="cheapest")

    tokens = options.batch_size * corpus.context
    progress = Progress(options.optimizer, metrics.rows, options.steps, tokens, options.batch_size)
    with progress:
        for i in range(start + 1, options.steps + 1):
            windows = corpus.batch(options.seed, i, options.batch_size)
            state, out = step(state, zero.put(my_rows(windows)))
            row = {"step": i, "loss": float(out["loss"]), "learning_rate": float(schedule(i - 1))}
            if options.noise_scale:
                row["noise_scale"] = float(optax_ext.noise_scale(state.opt_state))
            last, stopping = i == options.steps, any_stop(stop)
            if last or i % max(1, options.steps // 10) == 0:
                row["val_loss"] = validate(state)
            metrics.write(row)  # before the checkpoint, so that none is ahead of the metrics
            progress.update(row)
            if last or stopping or i % options.checkpoint_every == 0:
                note = {"devices": zero.num_devices}
                # Written in the background.
                manager.save(i, args=ocp.args.StandardSave(state), custom_metadata=note)
            if stopping and not last:
                manager.close()  # waits until it is written
                return None
    manager.close()

    params, prompt = zero.full_params(state), corpus.prompt()
    summary = {
        "optimizer": options.optimizer,
        "state": options.state,
        "sync": options.sync,
        "steps": options.steps,
        "val_loss": metrics.rows[-1]["val_loss"],
        "bits_per_byte": bits(metrics.rows[-1]["val_loss"]),
        "prompt": prompt.decode(errors="replace"),
        "sample": sample(model, params, prompt, 300, options.seed).decode(errors="replace"),
        **sizes,
    }
    if is_main():
        plot_loss(directory / "loss.png", str(directory), metrics.rows)
        write_json(directory / "summary.json", summary)  # says that the run is finished
    return summary


def restore(manager, step, zero, make_state, key):
    """The state of a checkpoint, whatever devices wrote it."""
    devices = manager.metadata(step).custom_metadata["devices"]
    target = zero.abstract_state(make_state, key, sync_devices=devices)
    state = manager.restore(step, args=ocp.args.StandardRestore(target))
    if devices != zero.num_devices and isinstance(state.opt_state, sync.SyncedState):
        # Each device kept what it has not sent yet; these begin with the mean.
        return zero.resize_sync(state)
    return state


def show_plan(options, corpus, zero, make_state, directory):
    """Prints what each stage would cost, beside AdamW without ZeRO; writes the layout of this one.

    Returns:
      Sizes for the summary, and the bytes that a device should send in a step; None where the
      exchange of gradients is not the plain one.
    """
    state = jax.eval_shape(make_state, jax.random.key(0))  # shapes only: nothing is computed yet
    layout = zero.describe(state)
    adamw, _ = make_optimizer("adamw", 1.0, options.steps)
    tokens = options.batch_size * corpus.context
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    plan, other = (
        estimate(
            state.params,
            tx,
            zero.mesh,
            axis=zero.axis,
            microbatches=options.microbatches,
            offload=options.offload,
            batch=4 * options.batch_size * (corpus.context + 1) / zero.num_devices,
            device=kind_of(zero.mesh.devices.flat[0].device_kind),
            gathered_once=r"^(?!block_)",  # as embed, which the step gathers
            tokens=tokens,
            flops=6 * num_params * tokens / zero.num_devices,  # attention left out
        )
        for tx in (state.tx, adamw)
    )
    console.print(
        f"{directory}: {plan.num_params / 1e6:.2f}M parameters. {corpus.files} files in "
        f"{corpus.path}: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out."
    )
    print_plan(plan, other, zero.stage, plain=zero.sync is None)
    if is_main():
        (directory / "layout.txt").write_text(f"{layout}\n\n{layout.table()}\n")
    sizes = {
        "bytes_per_device": layout.bytes_per_device,
        "bytes_without_zero": dataclasses.replace(zero, stage=0).describe(state).bytes_per_device,
    }
    return sizes, plan.stages[zero.stage].wire if zero.sync is None else None


def compare(options, corpus, mesh, directory, stop):
    """A run for each optimizer, on the same batches, and one plot; None if it was stopped."""
    summaries = {}
    for name in options.compare:
        one = copy.copy(options)
        one.optimizer = name
        one.learning_rate = tuned_learning_rate(one)
        summaries[name] = train(one, corpus, mesh, directory / name, stop)
        if summaries[name] is None:
            return None
        print_summary(summaries[name], directory / name)
    if is_main():
        rows = {name: read_metrics(directory / name / "metrics.jsonl") for name in summaries}
        plot_compare(directory / "compare.png", rows, summaries)
    return summaries


# --- Runs that were begun before ------------------------------------------------------------------


class UserError(Exception):
    """A mistake of whoever gave the command; shown in one line."""


# What decides the losses. Other devices, or another stage, change them by rounding alone, but for
# an exchange that is lossy: what is lost depends on how many devices there are. And what more is in
# a checkpoint.
IDENTITY = (
    *("config", "optimizer", "state", "sync", "learning_rate", "steps", "batch_size", "seed"),
    "noise_scale",
)


def check_same_run(options, corpus, directory):
    """Notes the options of a new run; complains if they are not those an old one began with."""
    asked = {name: getattr(options, name) for name in IDENTITY}
    asked |= {"data": str(corpus.path), "checksum": corpus.checksum}
    note = directory / "options.json"
    if is_main() and not note.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(note, asked)
    wait_for_all("options.json")
    if not note.exists():
        raise UserError(f"{note} is missing: all processes must share the folder --runs-dir")
    begun = {"noise_scale": False} | json.loads(note.read_text())  # older runs do not tell
    for name in asked:
        if asked[name] == begun[name]:
            continue
        what = f"with --{name.replace('_', '-')} {begun[name]}, not {asked[name]}"
        if name == "checksum":
            what = f"when the text in {corpus.path} was another"
        if name == "steps":
            what += " (the learning rate's schedule depends on it)"
        raise UserError(f"{directory} was begun {what}; give another --name to begin a new run")


def catch_signals():
    """Returns a list that gets the number of the first SIGINT or SIGTERM; a second one kills."""
    caught = []

    def note(number, _):
        if caught:
            os._exit(128 + number)
        caught.append(number)
        console.print("Stopping after this step; once more stops at once.")

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return caught


# --- The command line -----------------------------------------------------------------------------


def parse_args():
    """The options of the command line; None where the size or the optimizer decides."""

    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = fail

    add = parser.add_argument_group("the run").add_argument
    add("--name", help="its folder in --runs-dir [made of the options]")
    add("--runs-dir", metavar="PATH", type=pathlib.Path, default="runs", help="[%(default)s]")
    add("--compare", metavar="A,B,...", help="train with each of these optimizers; one plot")
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches [%(default)s]")
    add("--checkpoint-every", type=positive, metavar="STEPS", help="[a tenth of the run]")
    add("--audit", action="store_true", help="show what the compiled step holds, sends, computes")
    add("--noise-scale", action="store_true", help="measure how large a batch is worth it")
    add("--smoke", action="store_true", help="a run of seconds: short for --config smoke")

    add = parser.add_argument_group("model and text").add_argument
    sizes = {"choices": CONFIGS, "default": "small", "metavar": "SIZE"}
    add("--config", **sizes, help=f"{', '.join(CONFIGS)} [%(default)s]")
    add("--data", type=pathlib.Path, metavar="PATH", help="a file or a folder [Python's library]")
    add("--steps", type=positive, metavar="N", help="[the size's]")
    add("--batch-size", type=positive, metavar="N", help="windows a step [the size's]")

    add = parser.add_argument_group("optimizer").add_argument
    names = {"choices": OPTIMIZERS, "default": "came", "metavar": "NAME"}
    add("--optimizer", **names, help=f"{', '.join(OPTIMIZERS)} [%(default)s]")
    states = {"choices": STATES, "default": "float32", "metavar": "FORMAT"}
    add("--state", **states, help=f"its moments: {', '.join(STATES)} [%(default)s]")
    add("--learning-rate", type=float, metavar="X", help="the peak of its schedule [as tuned]")

    names = {"choices": SYNCS, "default": "dense", "metavar": "NAME"}
    add("--sync", **names, help=f"how gradients meet: {', '.join(SYNCS)} [%(default)s]")

    add = parser.add_argument_group("devices; a run may go on with others").add_argument
    add("--devices", type=positive, metavar="N", help="[all; without GPU or TPU 8 virtual ones]")
    add("--distributed", action="store_true", help="join the cluster's other processes")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO [%(default)s]")
    add("--offload", action="store_true", help="keep optimizer state in the host's memory")
    add("--microbatches", type=positive, default=1, metavar="N", help="in a step [%(default)s]")
    return resolve(parser.parse_args())


def resolve(options):
    """Fills in what depends on other options."""
    if options.seed < 0:
        fail(f"--seed must not be negative, got {options.seed}")
    if options.smoke:
        options.config = "smoke"
    config = CONFIGS[options.config]
    options.steps = options.steps or config.steps
    options.batch_size = options.batch_size or config.batch_size
    options.checkpoint_every = options.checkpoint_every or min(max(options.steps // 10, 10), 500)
    if options.sync == "dgc" and (options.optimizer, options.state) != ("sgd", "float32"):
        fail("--sync dgc has the momentum of SGD in it: it needs --optimizer sgd, without --state")
    if options.sync == "zen" and not config.ngrams:
        fail("--sync zen is for a table of n-grams: give --config ngrams")
    if options.stage == 3 and options.sync not in ("dense", "zen"):
        fail(f"--sync {options.sync} keeps a state, for which stage 3 has no room: give --stage 2")
    if options.noise_scale and options.stage == 3 and options.microbatches < 2:
        fail("--noise-scale at stage 3 compares micro-batches: give --microbatches 2 or more")
    if options.noise_scale and options.stage < 3 and options.sync == "zen":
        fail("--noise-scale needs local gradients, which --sync zen adds up in the backward pass")
    if options.compare is None:
        if options.learning_rate is None:
            options.learning_rate = tuned_learning_rate(options)
        if not options.name:
            options.name = f"{options.config}-{options.optimizer}-zero{options.stage}"
            if options.state != "float32":
                options.name += f"-{options.state}"
            if options.sync != "dense":
                options.name += f"-{options.sync}"
        return options
    options.compare = options.compare.split(",")
    options.name = options.name or f"{options.config}-compare"
    for name in options.compare:
        if name not in OPTIMIZERS:
            fail(f"--compare: no optimizer {name!r} (choose from {', '.join(OPTIMIZERS)})")
    if options.learning_rate is not None:
        fail("--learning-rate is for one optimizer: with --compare each has its own")
    return options


def tuned_learning_rate(options):
    """The peak that suits the optimizer and the size of the model."""
    return OPTIMIZERS[options.optimizer][1] * CONFIGS[options.config].learning_rate_scale


def make_mesh(options):
    """A mesh of the accelerators there are, or of virtual CPU devices; of all processes."""
    virtual = options.devices or 8
    jax.config.update("jax_num_cpu_devices", virtual)  # before JAX looks for devices
    devices, processes = jax.devices(), jax.process_count()
    console.quiet = not is_main()
    count = options.devices or (virtual if devices[0].platform == "cpu" else len(devices))
    if count > len(devices):
        raise UserError(f"--devices {count}: there are only {len(devices)}")
    if count % processes:
        raise UserError(f"--devices {count} does not divide by {processes} processes")
    parts = count * options.microbatches
    if options.batch_size % parts:
        raise UserError(
            f"--batch-size {options.batch_size} does not divide by {parts} "
            f"({count} devices x {options.microbatches} micro-batches)"
        )
    if options.noise_scale and parts < 2:
        raise UserError("--noise-scale needs two devices, or --microbatches 2 or more")
    of_process = ([d for d in devices if d.process_index == i] for i in range(processes))
    devices = [d for mine in of_process for d in mine[: count // processes]]
    return jax.make_mesh((count,), ("data",), devices=devices)


def fail(message):
    """Ends the process with one line."""
    print(f"train_lm.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    """Trains as the command line says."""
    options = parse_args()
    directory = options.runs_dir / options.name
    try:
        if options.distributed:
            join()
        stop = catch_signals()  # after JAX, which catches SIGTERM too
        corpus = Corpus(options.data, CONFIGS[options.config].context)
        mesh = make_mesh(options)
        run = compare if options.compare else train
        summary = run(options, corpus, mesh, directory, stop)
    except (UserError, OSError) as error:
        fail(error)
    if summary is None:
        console.print(f"Stopped, and saved. To go on: {shlex.join(['python', *sys.argv])}")
        sys.exit(128 + stop[0])
    if options.compare:
        console.print(f"The comparison: {directory / 'compare.png'}")
    else:
        print_summary(summary, directory)


if __name__ == "__main__":
    with ending_together():
        main()
