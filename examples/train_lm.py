"""Trains a byte-level language model with CAME, its optimizer state sharded by ZeRO.

The text is the source code of Python's standard library. The devices are the GPUs or TPUs of this
machine, or else 8 virtual CPU devices. Stop it by any means: the same command resumes the run.
A run writes runs/NAME/: metrics.jsonl, loss.png, layout.txt (the placement of each array),
summary.json, checkpoints. It starts with a plan: the bytes that a device holds and sends at each
stage of ZeRO. --audit reads the same, and more, from the compiled step.

  python examples/train_lm.py                                   # CAME, ZeRO stage 2: 3 minutes
  python examples/train_lm.py --optimizer adamw --stage 0       # plain data parallelism
  python examples/train_lm.py --state 8bit                      # CAME's momentum in 8 bits
  python examples/train_lm.py --config ngrams --sync zen        # sparse gradients of a large table
  python examples/train_lm.py --compare came,adafactor,adamw    # three runs, one plot
  python examples/train_lm.py --data ~/books --steps 2000 --name books
  python examples/train_lm.py --config gpt2-small --microbatches 4
  python examples/train_lm.py --stage 3 --audit                 # what the compiled step costs
  python examples/train_lm.py --update-in-backward              # gradients of one layer at a time
  python examples/train_lm.py --memory 2GiB                     # plan what activations to store
  python examples/train_lm.py --noise-scale                     # estimate the critical batch size
  python examples/train_lm.py --pipeline 4 --schedule gpipe     # a pipeline of 4 stages, 2 replicas
  python examples/train_lm.py --peer-checkpoints                # a killed run loses no step
  python examples/train_lm.py --plan auto --memory 8GiB         # the fastest plan that fits
  python examples/train_lm.py --plan plan.json                  # what optax-ext search chose
  srun python examples/train_lm.py --distributed                # many processes: see launch/
"""

import argparse
import copy
import dataclasses
import functools
import json
import os
import pathlib
import secrets
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
from _distributed import any_stop, ending_together, is_main, join, wait_for_all
from _memory import plan_loss
from _model import CONFIGS, NGRAM_DISTANCES, Block, TransformerLM, sample
from _pipeline import SCHEDULES, CheckpointForm, make_pipeline, token_losses
from _plan import choose_plan, not_with_auto, take_plan
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
from _snapshots import Snapshots
from flax.training.train_state import TrainState

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan import estimate, kind_of, pipeline_wire
from sharding.remat import OverBudgetError

DECAY = {"weight_decay": 0.1}
FACTORING = {"factoring": optax_ext.flax_transformer()}  # attention: embed x (heads, head_dim)


def muon(lr):
    """Muon for the matrices of the blocks, each on one device; AdamW for all other parameters."""
    matrices = shd.by_owner(optax.contrib.muon(lr, **DECAY), **FACTORING)
    others = optax.adamw(lambda i: lr(i) / 5, b2=0.95, **DECAY, mask=optax_ext.decay_mask)
    return optax.partition({True: matrices, False: others}, optax_ext.hidden_matrices)


# Each optimizer as a function of its learning rate schedule, and the peak of the schedule for
# --config small: for came, adafactor and adamw the best of three on held-out text, else not tuned.
OPTIMIZERS = {
    "came": (
        # Debiasing removes the large updates of the first steps, which dominate a short run.
        lambda lr: optax_ext.came(
            lr,
            **FACTORING,
            debias_instability=True,
            **DECAY,
            weight_decay_mask=optax_ext.decay_mask,
        ),
        4e-3,
    ),
    "adafactor": (lambda lr: optax_ext.adafactor(lr, **FACTORING), 3e-2),
    "adamw": (lambda lr: optax.adamw(lr, b2=0.95, **DECAY, mask=optax_ext.decay_mask), 4e-3),
    "lamb": (lambda lr: optax_ext.lamb(lr, **DECAY, stacked=FACTORING["factoring"]), 1e-2),
    "lion": (lambda lr: optax.lion(lr, **DECAY, mask=optax_ext.decay_mask), 5e-4),
    "muon": (muon, 2e-2),
    "sgd": (lambda lr: optax.sgd(lr, momentum=0.9), 3e-1),
}

# Formats of the optimizer's moments between steps.
STATES = ("float32", *optax_ext.STATE_FORMATS)


def zen_of_table(config, windows):
    """Sparse sync of the n-gram table, at the density of the rows that a device reads."""
    num_rows = windows * config.context * len(NGRAM_DISTANCES)  # if no n-gram occurs twice
    return sync.by_path({"ngram_embed": sync.zen(min(1.0, num_rows / config.ngrams))})


# Each gradient sync, from the model's size and the windows per device; None sums the gradients.
SYNCS = {
    "dense": lambda config, windows: None,
    "zen": zen_of_table,
    "qsgd8": lambda config, windows: sync.qsgd(8),
    "qsgd4": lambda config, windows: sync.qsgd(4),
    "powersgd": lambda config, windows: sync.powersgd(4, **FACTORING),
    "gradzip": lambda config, windows: sync.gradzip(4, **FACTORING),
    "topk": lambda config, windows: sync.top_k(0.01),
    "ef21": lambda config, windows: sync.top_k(0.01, feedback="ef21"),
    # Deep gradient compression includes momentum and clipping: see make_optimizer.
    "dgc": lambda config, windows: sync.top_k(0.01, momentum=0.9, clip_norm=1.0),
}


def make_optimizer(
    name, peak, steps, state="float32", sync_name="dense", noise_scale_batch=None, batches=None
):
    """The chain of transformations, and its schedule: warm-up to ``peak``, then cosine to 5 %.

    With ``noise_scale_batch`` the chain starts by measuring the noise scale of such batches. With
    ``batches``, ``steps`` are of the first size, and rates grow with the root of the size.
    """
    make, _ = OPTIMIZERS[name]
    warmup = max(1, min(steps // 20, 1000))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, 0.05 * peak)
    schedule = batches.rates(schedule) if batches else schedule
    tx = make(schedule)
    if state != "float32":
        tx = optax_ext.low_precision_state(tx, optax_ext.STATE_FORMATS[state])
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    if sync_name == "dgc":  # the rest of SGD with momentum is in the sync
        tx = optax.sgd(schedule)
    if noise_scale_batch:  # before the clip
        tx = optax.chain(optax_ext.gradient_noise_scale(noise_scale_batch), tx)
    return tx, schedule


def train(options, corpus, mesh, directory, stop):
    """One run in ``directory``: starts or resumes it; of a finished run, reads the summary.

    Returns:
      The summary of the run; None if it was stopped.
    """
    run_id = check_same_run(options, corpus, directory)
    if (directory / "summary.json").exists():
        console.print(f"{directory} is finished. Give another --name to start a new run.")
        return json.loads((directory / "summary.json").read_text())

    config, auto = CONFIGS[options.config], options.plan == "auto"
    zero = shd.Zero(
        mesh,
        stage=options.stage,
        replica_axis="replica" if options.replicas > 1 else None,
        shard_state_over_replicas=options.spread,
        offload="optimizer" if options.offload else None,
        sync=SYNCS[options.sync](config, options.batch_size // mesh.size),
    )
    # At stage 3 each block gathers its parameters when it runs; at other stages nothing changes.
    # With --sync zen only the rows of the n-gram table that a batch reads are sent.
    embed = shd.sparse_embedding(nn.Embed) if options.sync == "zen" else nn.Embed
    names = jax.checkpoint_policies.save_only_these_names(*options.saved)
    policy = names if options.saved else None
    block = Block if options.pipeline or auto else zero.gathered(Block, policy=policy)
    if options.recompute and not options.pipeline:  # a pipeline gathers and computes its stages
        block = nn.remat(block, policy=policy)
    model = TransformerLM(config, block_class=block, table_class=embed)

    @functools.cache
    def optimizer(noise_scale_batch):
        return make_optimizer(
            options.optimizer,
            options.learning_rate,
            options.batches.examples(options.steps) // options.batch_size,
            options.state,
            options.sync,
            noise_scale_batch,
            options.batches,
        )

    def for_batch(state, size):  # the noise scale is measured of batches of one size
        return state.replace(tx=optimizer(size if options.noise_scale else None)[0])

    tx, schedule = optimizer(options.batch_size if options.noise_scale else None)

    def make_state(key, form=lambda params: params):
        params = model.init(key, jnp.zeros((1, corpus.context), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=form(params), tx=tx)

    key, pipeline, param_specs = jax.random.key(options.seed), None, None
    if options.pipeline:
        pipeline = make_pipeline(
            model, mesh, make_schedule(options), options.layers, options.recompute, policy
        )
        checkpoint_form = CheckpointForm(pipeline, make_state, key)
        make_state = functools.partial(make_state, form=pipeline.stack)
        param_specs = pipeline.param_specs(jax.eval_shape(make_state, key).params)

    def loss_of(model):
        return lambda params, windows: token_losses(
            apply_model(model, params, windows[:, :-1]), windows
        ).mean()

    loss_fn = trained_loss = loss_of(model)
    if auto:
        windows = jax.ShapeDtypeStruct((options.batch_size, corpus.context + 1), jnp.int32)
        try:
            planned = choose_plan(options, mesh, loss_fn, make_state, windows, directory / "plans")
        except ValueError as error:
            raise UserError(error) from error
        console.print(str(planned), soft_wrap=True)
        zero, mesh = planned.zero, planned.zero.mesh
    sizes, stage_plan, expected_wire = show_plan(
        options, corpus, zero, make_state, pipeline, directory
    )
    if options.memory and not auto:
        rows = options.batch_size // options.microbatches // mesh.size
        windows = jax.ShapeDtypeStruct((rows, corpus.context + 1), jnp.int32)
        planned = plan_loss(
            loss_of(TransformerLM(config)),
            jax.eval_shape(make_state, key).params,
            windows,
            stage_plan,
            options.memory,
            mesh.local_devices[0],
        )
        console.print(str(planned.plan), *planned.notes(), sep="\n", soft_wrap=True)
        trained_loss, sizes["activation_bytes"] = planned.plan, planned.plan.peak
        if options.stage == 3:  # all parameters are gathered in front of the loss
            expected_wire = None

    # This is all the sharding there is. A step shards the batch over the devices, reduce-scatters
    # the gradients, updates each device's shard, and gathers the parameters (stage 3: before).
    # A pipeline is one more loss: each stage's parameters are sharded over its own devices.
    form = "no pipeline"
    if pipeline:
        form = f"a pipeline of {options.pipeline} stages, {pipeline.schedule.name}"
    snapshots = Snapshots(
        options.peer_checkpoints,
        mesh,
        run_id,
        options.snapshot_every,
        {"devices": zero.num_devices, "form": form},
    )
    if pipeline:
        steps = {options.batch_size: zero.train_step(pipeline, snapshot=snapshots.store)}
        evaluate = zero.eval_step(pipeline)
    elif auto:
        steps, evaluate = {options.batch_size: planned.train_step()}, zero.eval_step(loss_fn)
    else:
        # A larger batch has more micro-batches of the same size: memory stays.
        steps = {
            size: zero.train_step(
                trained_loss,
                microbatches=options.microbatches * size // options.batch_size,
                snapshot=snapshots.store,
                update="backward" if options.update_in_backward else "after",
            )
            for size in options.batches.sizes.values()
        }
        evaluate = zero.eval_step(loss_fn)

    manager = ocp.CheckpointManager(
        directory.absolute() / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    # With --memory an evaluation, too, takes a micro-batch at a time.
    parts = 16 * (options.microbatches if options.memory else 1)
    held_out = np.split(corpus.validation(16 * options.batch_size), parts)

    index, count = zero.data_shard()

    def place(windows):
        return zero.put(np.split(windows, count)[index])

    def validate(state):
        return float(np.mean([evaluate(state, place(x)) for x in held_out]))

    def target(sync_devices=None):
        return zero.abstract_state(
            make_state, key, param_specs=param_specs, sync_devices=sync_devices
        )

    start = manager.latest_step()
    in_memory = snapshots.restore(start, target)
    if in_memory:
        start, state, devices = in_memory
        state = resized(zero, state, devices)
    num_rows = 0 if start is None else start + 1  # of steps 0 to start
    metrics = Metrics(directory / "metrics.jsonl", num_rows, write=is_main())
    if start is None:
        start, state = 0, zero.init(make_state, key, param_specs=param_specs)  # created sharded
        console.print("Evaluating the untrained model, which compiles the first time.")
        metrics.write({"step": 0, "val_loss": validate(state)})
        snapshots.save(0, state)
    elif not in_memory:
        console.print(f"Resuming from the checkpoint at step {start}.")
        if pipeline:
            state = restore(manager, start, checkpoint_form.zero, checkpoint_form.make_state, key)
            state = checkpoint_form.to_stages(state, target())
        else:
            state = restore(manager, start, zero, make_state, key)

    if options.audit:
        windows = corpus.batch(options.seed, start + 1, options.batches.size(start))
        state = for_batch(state, len(windows))
        # Lowered for the real arguments, so that the first step reuses the compiled program.
        compiled = steps[len(windows)].lower(state, place(windows)).compile()
        merged = options.stage == 3 and jax.default_backend() == "cpu" and not pipeline
        notes = ["On CPUs XLA gathers a block once, not again in the backward pass."] * merged
        tokens = len(windows) * corpus.context
        found = shd.audit(compiled, mesh=mesh, expected=expected_wire, tokens=tokens)
        print_audit(found, notes)
        # For gradients as sparse as the sync expects; gradzip's steps take one branch or the other.
        taken = ("cheapest", "dearest") if options.sync == "gradzip" else ("cheapest",)
        sent = [shd.wire_bytes(compiled, branches=branches) for branches in taken]
        sizes["wire_bytes"] = sum(sent) / len(sent)

    of_run = options.steps, corpus.context, options.batches
    with Progress(options.optimizer, metrics.rows, *of_run) as progress:
        for i in range(start + 1, options.steps + 1):
            windows = corpus.batch(options.seed, i, options.batches.size(i - 1))
            state, out = steps[len(windows)](for_batch(state, len(windows)), place(windows))
            row = {"step": i, "loss": float(out["loss"]), "learning_rate": float(schedule(i - 1))}
            if options.noise_scale:
                row["noise_scale"] = float(optax_ext.noise_scale(state.opt_state))
            last, stopping = i == options.steps, any_stop(stop)
            if last or i % max(1, options.steps // 10) == 0:
                row["val_loss"] = validate(state)
            metrics.write(row)  # before the checkpoint, which must not be ahead of the metrics
            progress.update(row)
            snapshots.save(i, state)
            if last or stopping or i % options.checkpoint_every == 0:
                note = {"devices": zero.num_devices}
                # The checkpoint is written in the background.
                saved = ocp.args.StandardSave(checkpoint_form.of(state) if pipeline else state)
                manager.save(i, args=saved, custom_metadata=note)
                del saved
            if stopping and not last:
                manager.close()  # waits for the checkpoint
                snapshots.close(finished=False)
                return None
    manager.close()
    snapshots.close(finished=True)

    params, prompt = zero.full_params(state), corpus.prompt()
    params = pipeline.unstack(params) if pipeline else params
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
        write_json(directory / "summary.json", summary)  # marks the run as finished
    return summary


def apply_model(model, params, tokens):
    """The logits of all positions."""
    return model.apply({"params": params}, tokens)


def restore(manager, step, zero, make_state, key):
    """The state of a checkpoint, for this mesh and stage whatever mesh wrote it."""
    devices = manager.metadata(step).custom_metadata["devices"]
    target = zero.abstract_state(make_state, key, sync_devices=devices)
    return resized(zero, manager.restore(step, args=ocp.args.StandardRestore(target)), devices)


def resized(zero, state, devices):
    """The state that so many devices saved, for those that there are now."""
    if devices != zero.num_devices and isinstance(state.opt_state, sync.SyncedState):
        # Each device had its own error-feedback residual; all start from their mean.
        return zero.resize_sync(state)
    return state


def show_plan(options, corpus, zero, make_state, pipeline, directory):
    """Prints the cost of each stage and of AdamW without ZeRO; writes the layout of this run.

    Returns:
      Sizes for the summary; the plan of this run's stage; and the bytes that a device should send
      in a step, None unless gradients are summed.
    """
    state = jax.eval_shape(make_state, jax.random.key(0))  # shapes only: nothing is computed
    param_specs = pipeline and pipeline.param_specs(state.params)
    layout = zero.describe(state, param_specs=param_specs)
    adamw, _ = make_optimizer("adamw", 1.0, options.steps)
    tokens = options.batch_size * corpus.context
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    plan, other = (
        dataclasses.replace(
            estimate(
                state.params,
                tx,
                planned,
                param_specs=param_specs,
                microbatches=1 if pipeline else options.microbatches,
                batch=4 * options.batch_size * (corpus.context + 1) / zero.num_devices,
                device=kind_of(zero.mesh.devices.flat[0].device_kind),
                # As embed, which the step gathers; a pipeline gathers all parameters once.
                gathered_once="" if pipeline else r"^(?!block_)",
                tokens=tokens,
                flops=6 * num_params * tokens / zero.mesh.size,  # attention left out
            ),
            num_params=num_params,
        )
        for tx, planned in ((state.tx, zero), (adamw, dataclasses.replace(zero, sync=None)))
    )
    console.print(
        f"{directory}: {num_params / 1e6:.2f}M parameters. {corpus.num_files} files in "
        f"{corpus.path}: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out."
    )
    notes, between_stages = [], 0.0
    if pipeline:
        console.print(f"Pipeline: {str(pipeline.schedule).splitlines()[0]}.", soft_wrap=True)
        shape = options.batch_size // zero.num_devices, corpus.context + 1
        windows = jax.ShapeDtypeStruct(shape, jnp.int32)
        between_stages = pipeline_wire(pipeline, state.params, windows)
        notes = [
            f"Bytes sent are those of ZeRO; stages send {between_stages / 2**20:.3g} MiB more."
        ]
    print_plan(plan, other, notes)
    if is_main():
        (directory / "layout.txt").write_text(f"{layout}\n\n{layout.table()}\n")
    without_zero = dataclasses.replace(zero, stage=0, shard_state_over_replicas=False).describe(
        state, param_specs=param_specs
    )
    sizes = {
        "bytes_per_device": layout.bytes_per_device,
        "bytes_without_zero": without_zero.bytes_per_device,
    }
    found = plan.stage(plan.requested)
    return sizes, found, None if zero.sync else found.wire + between_stages


def compare(options, corpus, mesh, directory, stop):
    """One run per optimizer, on the same batches, and one plot; None if a run was stopped."""
    summaries = {}
    for name in options.compare:
        run_options = copy.copy(options)
        run_options.optimizer = name
        run_options.learning_rate = tuned_learning_rate(run_options)
        summaries[name] = train(run_options, corpus, mesh, directory / name, stop)
        if summaries[name] is None:
            return None
        print_summary(summaries[name], directory / name)
    if is_main():
        rows = {name: read_metrics(directory / name / "metrics.jsonl") for name in summaries}
        plot_compare(directory / "compare.png", rows, summaries)
    return summaries


# --- Resuming a run -------------------------------------------------------------------------------


class UserError(Exception):
    """A mistake in the command; reported in one line."""


# Options that determine the losses of a run or the contents of its checkpoints. The devices, the
# stage and the pipeline are none of them: they change losses by rounding alone, except with a lossy
# sync.
IDENTITY = (
    *("config", "optimizer", "state", "sync", "learning_rate", "steps", "batch_size", "seed"),
    *("noise_scale", "double_batch"),
)


def check_same_run(options, corpus, directory):
    """Writes the options of a new run; raises if a resumed run was started with others.

    Returns:
      A name of the run that no other one has.
    """
    requested = {name: getattr(options, name) for name in IDENTITY}
    requested |= {"data": str(corpus.path), "checksum": corpus.checksum}
    path = directory / "options.json"
    if is_main() and not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, requested | {"run_id": f"{directory.name}-{secrets.token_hex(4)}"})
    wait_for_all("options.json")
    if not path.exists():
        raise UserError(f"{path} is missing: all processes must share the folder --runs-dir.")
    absent = {"noise_scale": False, "double_batch": []}  # in older runs
    started = absent | json.loads(path.read_text())
    for name in requested:
        if requested[name] == started[name]:
            continue
        what = f"with --{name.replace('_', '-')} {started[name]}, not {requested[name]}"
        if name == "checksum":
            what = f"with other text in {corpus.path}"
        if name == "steps":
            what += " (the learning rate schedule depends on it)"
        raise UserError(f"{directory} was started {what}. Give another --name to start a new run.")
    return started.get("run_id", directory.name)  # absent in older runs


def catch_signals():
    """A list that gets the number of the first SIGINT or SIGTERM; a second signal ends at once."""
    caught = []

    def catch(number, _):
        if caught:
            os._exit(128 + number)
        caught.append(number)
        console.print("Stopping after this step. Another signal stops at once.")

    signal.signal(signal.SIGINT, catch)
    signal.signal(signal.SIGTERM, catch)
    return caught


# --- The command line -----------------------------------------------------------------------------


def parse_args():
    """The options of the command line, with defaults that depend on other options resolved."""

    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    def windows(text):
        return [positive(part) for part in text.split(",")]

    def memory(text):
        try:
            return shd.remat.in_bytes(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(error) from None

    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = fail

    add = parser.add_argument_group("the run").add_argument
    add("--name", help="folder in --runs-dir [from the options]")
    add("--runs-dir", metavar="PATH", type=pathlib.Path, default="runs", help="[%(default)s]")
    add("--compare", metavar="A,B,...", help="train with each of these optimizers; one plot")
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches [%(default)s]")
    add("--checkpoint-every", type=positive, metavar="STEPS", help="[a tenth of the run]")
    memory_folder = {"nargs": "?", "const": "/dev/shm", "type": pathlib.Path, "metavar": "FOLDER"}
    add("--peer-checkpoints", **memory_folder, help="in the memory of machines [/dev/shm]")
    add("--snapshot-every", type=positive, default=1, metavar="STEPS", help="in memory [1]")
    add("--audit", action="store_true", help="memory, traffic and work of the compiled step")
    add("--noise-scale", action="store_true", help="estimate the critical batch size")
    smoke = {"dest": "config", "action": "store_const", "const": "smoke"}
    smoke["default"] = argparse.SUPPRESS  # that of --config
    add("--smoke", **smoke, help="a run of seconds: short for --config smoke")

    add = parser.add_argument_group("model and text").add_argument
    sizes = {"choices": CONFIGS, "default": "small", "metavar": "SIZE"}
    add("--config", **sizes, help=f"{', '.join(CONFIGS)} [%(default)s]")
    add("--data", type=pathlib.Path, metavar="PATH", help="a file or a folder [Python's library]")
    add("--steps", type=positive, metavar="N", help="[the size's]")
    add("--batch-size", type=positive, metavar="N", help="windows a step [the size's]")

    add("--double-batch", type=windows, default=[], metavar="N,...", help="after N windows")

    add = parser.add_argument_group("optimizer").add_argument
    names = {"choices": OPTIMIZERS, "default": "came", "metavar": "NAME"}
    add("--optimizer", **names, help=f"{', '.join(OPTIMIZERS)} [%(default)s]")
    states = {"choices": STATES, "default": "float32", "metavar": "FORMAT"}
    add("--state", **states, help=f"moments in {', '.join(STATES)} [%(default)s]")
    add("--learning-rate", type=float, metavar="X", help="peak of its schedule [as tuned]")

    names = {"choices": SYNCS, "default": "dense", "metavar": "NAME"}
    add("--sync", **names, help=f"gradient sync: {', '.join(SYNCS)} [%(default)s]")

    add = parser.add_argument_group("devices; a run may resume on others").add_argument
    add("--devices", type=positive, metavar="N", help="[all; without GPU or TPU 8 virtual ones]")
    add("--distributed", action="store_true", help="join the cluster's other processes")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO [2]")
    early = "update each layer once its gradient exists"
    add("--update-in-backward", action="store_true", help=early)
    add("--offload", action="store_true", help="optimizer state in host memory")
    add("--memory", type=memory, metavar="BYTES", help="of a device, for state and activations")
    add("--pipeline", type=positive, metavar="STAGES", help="a pipeline of the layers [none]")
    add("--schedule", choices=SCHEDULES, metavar="NAME", help=f"{', '.join(SCHEDULES)} [1f1b]")
    add("--microbatches", type=positive, metavar="N", help="in a step [1; 2 for each STAGE]")
    plan = "auto: the fastest that fits; none; or a FILE of optax-ext search [auto on GPU and TPU]"
    add("--plan", metavar="PLAN", help=plan)
    return resolve(parser.parse_args())


def resolve(options):
    """Checks the options, and fills in those that depend on others."""
    if options.seed < 0:
        fail(f"--seed must not be negative, got {options.seed}.")
    options.layers, options.recompute = None, "stage" if options.pipeline else ""
    options.saved, options.replicas, options.spread = (), 1, False
    options.not_with_auto = not_with_auto(options)
    if options.plan == "auto" and options.not_with_auto:
        fail(f"--plan auto does not go with {options.not_with_auto}.")
    given = {"stage": options.stage, "microbatches": options.microbatches}
    options.keep = {name: value for name, value in given.items() if value is not None}
    options.keep |= {"offload": True} if options.offload else {}
    options.stage = 2 if options.stage is None else options.stage
    if options.plan not in (None, "auto", "none"):
        try:
            take_plan(options)
        except (ValueError, OSError) as error:
            fail(error)
    config = CONFIGS[options.config]
    options.steps = options.steps or config.steps
    options.batch_size = options.batch_size or config.batch_size
    grown = {at: options.batch_size * 2**k for k, at in enumerate((0, *options.double_batch))}
    options.batches = optax_ext.BatchSchedule(grown)
    if options.double_batch and (options.pipeline or options.plan == "auto"):
        fail("--double-batch adds micro-batches: it goes without --pipeline and --plan auto.")
    options.checkpoint_every = options.checkpoint_every or min(max(options.steps // 10, 10), 500)
    options.microbatches = options.microbatches or 2 * (options.pipeline or 0) or 1
    check_pipeline(options, config)
    if options.sync == "dgc" and (options.optimizer, options.state) != ("sgd", "float32"):
        fail("--sync dgc includes the momentum of SGD: it needs --optimizer sgd, without --state.")
    if options.sync == "zen" and not config.ngrams:
        fail("--sync zen is for an n-gram table: give --config ngrams.")
    if options.stage == 3 and options.sync not in ("dense", "zen"):
        fail(f"--sync {options.sync} has a state, which stage 3 does not support: give --stage 2.")
    if options.update_in_backward:
        for name in ("pipeline", "offload", "peer_checkpoints", "noise_scale"):
            if getattr(options, name):
                fail(f"--update-in-backward does not go with --{name.replace('_', '-')}.")
        if options.sync != "dense":
            fail(f"--update-in-backward does not go with --sync {options.sync}.")
    if options.noise_scale and options.stage == 3 and options.microbatches < 2:
        fail("--noise-scale at stage 3 compares micro-batches: give --microbatches 2 or more.")
    if options.noise_scale and options.stage < 3 and options.sync == "zen":
        fail(
            "--noise-scale needs the gradients of single devices, which --sync zen sums in the "
            "backward pass: give another --sync."
        )
    if options.compare is None:
        if options.learning_rate is None:
            options.learning_rate = tuned_learning_rate(options)
        return options
    options.compare = options.compare.split(",")
    for name in options.compare:
        if name not in OPTIMIZERS:
            fail(f"--compare: no optimizer {name!r} (choose from {', '.join(OPTIMIZERS)}).")
    if options.learning_rate is not None:
        fail("--learning-rate is for one optimizer: with --compare each has its own.")
    return options


def run_name(options):
    """The name of the folder of a run."""
    if options.name or options.compare:
        return options.name or f"{options.config}-compare"
    auto = options.plan == "auto"
    parts = [options.config, options.optimizer, "auto" if auto else f"zero{options.stage}"]
    parts += [options.state] * (options.state != "float32")
    parts += [options.sync] * (options.sync != "dense")
    parts += [f"pipeline{options.pipeline}"] if options.pipeline else []
    return "-".join(parts)


def check_pipeline(options, config):
    """Checks the options of a pipeline, and what does not go together with one."""
    if not options.pipeline:
        if options.schedule:
            fail(f"--schedule {options.schedule} is that of a pipeline: give --pipeline STAGES.")
        return
    if options.memory:
        fail("--memory is for runs without --pipeline, which recomputes its stages by itself.")
    if options.sync != "dense":
        fail(f"--pipeline sums dense gradients: give --sync dense, not {options.sync}.")
    if options.state != "float32":
        fail(
            f"--state {options.state} depends on the size of arrays, which --pipeline stacks: give "
            "--state float32."
        )
    if options.noise_scale and options.stage == 3:
        fail("--noise-scale with --pipeline needs the gradients of replicas: give --stage 2.")
    try:
        schedule = make_schedule(options)
    except ValueError as error:
        fail(f"--pipeline {options.pipeline}: {error}")
    if config.layers < schedule.num_virtual_stages:
        fail(
            f"--pipeline {options.pipeline}: {schedule.name} has {schedule.num_virtual_stages} "
            f"groups of layers, but --config {options.config} has {config.layers} layers."
        )


def make_schedule(options):
    """The schedule of the pipeline."""
    return SCHEDULES[options.schedule or "1f1b"](options.pipeline, options.microbatches)


def tuned_learning_rate(options):
    """The peak of the schedule for an optimizer and a size of the model."""
    return OPTIMIZERS[options.optimizer][1] * CONFIGS[options.config].learning_rate_scale


def make_mesh(options):
    """A mesh of the accelerators of all processes, or of virtual CPU devices."""
    virtual = options.devices or 8
    jax.config.update("jax_num_cpu_devices", virtual)  # before JAX looks for devices
    devices, processes = jax.devices(), jax.process_count()
    console.quiet = not is_main()
    count = options.devices or (virtual if devices[0].platform == "cpu" else len(devices))
    if count > len(devices):
        raise UserError(f"--devices {count}: there are only {len(devices)}.")
    if count % processes:
        raise UserError(f"--devices {count} is not divisible by {processes} processes.")
    stages, own = options.pipeline or 1, count // processes
    if count % stages or (own % stages and stages % own):
        raise UserError(
            f"--pipeline {stages} neither divides the {own} devices of a process, nor is it a "
            f"multiple of them that divides all {count}."
        )
    replicas = count // stages
    num_shards = replicas * options.microbatches  # of the batch
    if options.batch_size % num_shards:
        of = f"replicas of {stages} stages" if options.pipeline else "devices"
        raise UserError(
            f"--batch-size {options.batch_size} is not divisible by {num_shards} "
            f"({replicas} {of} x {options.microbatches} micro-batches)."
        )
    if options.noise_scale and options.pipeline and replicas < 2:
        raise UserError(f"--noise-scale needs two replicas of the {stages} stages.")
    if options.noise_scale and num_shards < 2:
        raise UserError("--noise-scale needs two devices, or --microbatches 2 or more.")
    by_process = ([d for d in devices if d.process_index == i] for i in range(processes))
    devices = [d for local in by_process for d in local[:own]]
    if not options.pipeline:
        if options.replicas == 1:
            return jax.make_mesh((count,), ("data",), devices=devices)
        if count % options.replicas:
            raise UserError(
                f"{options.replicas} replicas of the plan do not divide {count} devices."
            )
        sizes = (options.replicas, count // options.replicas)
        return jax.make_mesh(sizes, ("replica", "data"), devices=devices)
    # In the order of processes: they have replicas of their own, or several share one. Axes are
    # Auto: where a state changes its stages, the compiler places what is between.
    grid, auto = np.reshape(devices, (replicas, stages)), (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(grid, ("data", "pipe"), axis_types=auto)


def is_planned(options, mesh):
    """Whether a step is planned that nothing is said of: on accelerators that are known."""
    kind = kind_of(mesh.devices.flat[0].device_kind)
    return bool(kind and mesh.size == jax.device_count() and not options.not_with_auto)


def fail(message):
    """Prints an error in one line and exits."""
    print(f"train_lm.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    """Runs the command line."""
    options = parse_args()
    try:
        if not jax.config.jax_compilation_cache_dir:  # resumed runs read their programs
            programs = options.runs_dir.absolute() / "programs"
            jax.config.update("jax_compilation_cache_dir", str(programs))
        if options.distributed:
            join()
        stop = catch_signals()  # after JAX, which also catches SIGTERM
        corpus = Corpus(options.data, CONFIGS[options.config].context)
        mesh = make_mesh(options)
        if options.plan is None and is_planned(options, mesh):
            options.plan = "auto"
        directory = options.runs_dir / run_name(options)
        run = compare if options.compare else train
        summary = run(options, corpus, mesh, directory, stop)
    except (UserError, OverBudgetError, OSError) as error:
        fail(error)
    if summary is None:
        command = shlex.join([sys.executable, *sys.argv])  # of a .venv, where this is in one
        console.print(f"Stopped and saved. To resume: {command}", markup=False, soft_wrap=True)
        sys.exit(128 + stop[0])
    if options.compare:
        console.print(f"Comparison: {directory / 'compare.png'}")
    else:
        print_summary(summary, directory)


if __name__ == "__main__":
    with ending_together():
        main()
