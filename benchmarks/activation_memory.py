"""Bytes of activations against time: planned choices beside the presets of MaxText.

The layers of llama2-7b and llama2-70b in one scan, each choice compiled for one H100 or TPU v5e:
bytes are those of the program, times those of a roofline at the device's figures. Nothing is run.

  python benchmarks/activation_memory.py           # prints, writes results/activation_memory.*
  python benchmarks/activation_memory.py --tpu     # results/activation_memory_v5e.*; an hour
  python benchmarks/activation_memory.py --graphs  # losses: results/activation_memory_graphs.md
  python benchmarks/activation_memory.py --smoke   # a small model on this CPU, prints only
"""

import argparse
import dataclasses
import functools
import math
import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import matplotlib
from _networks import MONET, NETWORKS, array, identity

import sharding as shd
from sharding.plan._format import size
from sharding.plan.audit._program_memory import step_temporaries
from sharding.plan.machine._devices import num_bytes
from sharding.plan.model._models import MODELS, gpt2
from sharding.plan.model._models import PRESETS as MAXTEXT
from sharding.plan.model._traced_work import Work, work_of
from sharding.remat._joint_graph import JointGraph, in_host_memory
from sharding.remat._loss_loops import policy_of, wait_of
from sharding.remat._plan_activations import device_of_target, loss_search

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Name of a model, target, sequences of one device, tokens of a sequence.
GPU_CASES = (("llama2-7b", "h100x1", 4, 2048), ("llama2-70b", "h100x1", 1, 4096))
TPU_CASES = (("llama2-7b", "v5e:1x1", 1, 2048), ("llama2-70b", "v5e:1x1", 1, 2048))
# By the name of a preset, what is saved, and what in host memory.
PRESETS = {
    **{name: (MAXTEXT[name], ()) for name in ("full", "save_out_proj", "save_qkv_proj")},
    **{name: (MAXTEXT[name], ()) for name in ("save_dot_except_mlp", "minimal")},
    "minimal_with_context": (MAXTEXT["minimal_with_context"], ()),
    "qkv_proj_offloaded": ((), ("query_proj", "key_proj", "value_proj")),
    "minimal_offloaded": ((), MAXTEXT["minimal"]),
}


def layers_of(model):
    """A loss of stacked layers in a scan, with a ``checkpoint`` around each."""

    def loss(params, x, checkpoint=identity):
        layer = checkpoint(model.apply_layer)
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    return loss


def by_preset(loss, preset, like, *args, target):
    """A policy of MaxText around each layer, as a plan ``like`` another one."""
    checkpoint = functools.partial(jax.checkpoint, policy=policy_of(*PRESETS[preset]))
    by_hand = functools.partial(loss, checkpoint=checkpoint)
    kind, device = device_of_target(target)
    forward = work_of(loss, *args, kind=kind).seconds
    (params, _), (leaves, treedef) = args, jax.tree.flatten(args)
    trained = [i < len(jax.tree.leaves(params)) for i in range(len(leaves))]
    # As it is: a plan of a loss opens its checkpoints.
    joint = JointGraph(lambda xs: [by_hand(*treedef.unflatten(xs))], leaves, array(), trained, kind)
    host, work = num_bytes([t for t in joint.graph.types if in_host_memory(t)]), joint.work
    link = kind.host_link if kind else math.inf
    beside = (forward, work.seconds - forward) if kind and kind.tile else (0.0, 0.0)
    work += Work(0.0, wait_of(host / link, *beside))
    peak = step_temporaries(by_hand, *args, device)
    return dataclasses.replace(like, peak=peak, work=work, host=host)


def measure(name, target, sequences, length):
    """Frontiers without and with offloading, and plans of presets."""
    model = gpt2(4, 64, 2) if name == "smoke" else MODELS[name]
    dtype = jnp.float32 if target == "cpu:1" else jnp.bfloat16
    loss, params = layers_of(model), model.abstract(dtype)["layers"]
    x = jax.ShapeDtypeStruct((sequences, length, model.width), dtype)
    frontiers, presets = {}, {}
    for offload in (False, True) if target != "cpu:1" else (False,):
        print(f"{name} on {target}, offload={offload}", flush=True)
        found = shd.remat.frontier(loss, params, x, device=target, offload=offload, stage=3)
        frontiers["with host memory" if offload else "on the device"] = found
        print(found, flush=True)
    for preset in PRESETS:
        if "offloaded" not in preset or target != "cpu:1":
            presets[preset] = by_preset(loss, preset, found[0], params, x, target=target)
            print(preset, size(presets[preset].peak), flush=True)
    return frontiers, presets


def table_of(frontiers, presets):
    """Plans and presets, from the fewest bytes to the most."""
    plans = {each.summary: each for found in frontiers.values() for each in found}
    plans |= {f"**{name}**": each for name, each in presets.items()}
    rows = []
    for what, each in sorted(plans.items(), key=lambda pair: pair[1].peak):
        host, again = size(each.host) if each.host else "", each.extra_flops / each.plain.flops
        figures = f"{size(each.peak)} | {host} | {again:.1%} | {each.extra_time:.1%}"
        rows.append(f"| {what} | {'too much | | |' if each.peak == math.inf else figures} |")
    columns = "| computes again | peak | in host memory | products again | extra time |"
    return _results.table(f"{columns}\n|---|---|---|---|---|", rows)


def unet(params, x, checkpoint=identity):
    """Six blocks down and six up, whose skips are 4 MiB, as the insides of blocks are 16."""

    @checkpoint
    def block(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])

    skips, half = [], len(params) // 2
    for i, p in enumerate(params):
        skips += [x] if i < half else []
        x = block(p, x if i < half else x + skips.pop())
    return jnp.sum(x**2)


def gradient(loss, params, batch, target):
    """Bytes of temporaries, bytes read and written, and operations of products, as compiled."""
    device = device_of_target(target)[1]
    placed = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda t: t.update(sharding=placed), (params, batch))
    program = jax.jit(jax.grad(loss), out_shardings=placed).lower(*args).compile()
    found = shd.audit(program)
    return step_temporaries(loss, params, batch, device), found.nbytes, found.matmul_flops


def in_budgets(loss, by_hand, params, batch, target, budgets):
    """Rows of plans of a loss: a budget is bytes, or a share of what the loss needs by itself.

    The last budget is what ``by_hand`` needs, the loss with a checkpoint around each block.
    """
    plain, hand = (gradient(fn, params, batch, target) for fn in (loss, by_hand))
    search = loss_search(loss, params, batch, target)

    def more(of, at):  # than the plain gradient, of these
        one, base = (sum(x[at].values()) if at == 1 else x[at] for x in (of, plain))
        return f"{one / base - 1:+.1%}" if base else ""

    def row(budget, program, extra, of, took):
        cells = size(plain[0]), budget, program, extra, more(of, 1), more(of, 2), took
        print(target, cells, flush=True)
        return " | ".join(cells) + " |"

    rows = [row("by hand", size(hand[0]), " | ", hand, "")]
    limits = [plain[0] * budget if budget < 1 else budget * 2**20 for budget in budgets]
    for limit in (*limits, hand[0]):
        start = sum(os.times()[:4])
        try:
            found = search.fastest(limit)
        except ValueError as error:
            least = re.search("smallest takes (.*?),", str(error))[1]
            rows.append(f"{size(plain[0])} | {size(limit)} | needs {least} | | | | | |")
            continue
        took = f"{sum(os.times()[:4]) - start:.0f}"
        of = gradient(found, params, batch, target)
        extra = f"{found.extra_time:.1%} | {found.at_least:.1%}"
        in_tiles = f", {found.tiles} tiles" if found.tiles > 1 else ""
        rows.append(row(size(limit), size(found.peak) + in_tiles, extra, of, took))
    return rows


def graphs(smoke=False):
    """Losses as they are, within budgets."""
    columns = "| plain | budget | program | extra time | at least | traffic | products | CPU s |"
    head, scale = f"{columns}\n|---|---|---|---|---|---|---|---|", 16 if smoke else 1
    params = [{"a": array(256, 1024), "b": array(1024, 256)}] * 12
    cases = {"cpu:1": (110, 140)}
    if not smoke:
        cases = {"h100x1": (62, 68, 80, 100, 140), "v5e:1x1": (20, 40)} | cases
    sections = []
    for target, budgets in cases.items():
        by_hand = functools.partial(unet, checkpoint=jax.checkpoint)
        rows = in_budgets(unet, by_hand, params, array(4096, 256), target, budgets)
        table = _results.table(head, [f"| {row}" for row in rows])
        sections.append(f"## U-Net of 12 blocks on {target}\n\n{table}")
    rows = []
    for name in ["LSTM"] if smoke else NETWORKS:
        try:
            by_hand, (loss, *given) = NETWORKS[name](scale, True)[0], NETWORKS[name](scale)
            target = "cpu:1" if smoke else "h100x1"
            found = in_budgets(loss, by_hand, *given, target, (1 / 2, 1 / 3))
            rows += [f"| {name} | {row}" for row in found]
        except Exception as error:
            print(name, type(error).__name__, error, flush=True)
        if not smoke:
            table = _results.table(
                f"| network {columns}\n|---|---|---|---|---|---|---|---|---|", rows
            )
            networks = f"## Networks on h100x1\n\n{table}"
            _results.write(
                "activation_memory_graphs",
                "Activations: losses as they are",
                ABOUT_GRAPHS,
                *sections,
                networks,
                PLANNING,
                script="activation_memory",
            )


def beside_monet(smoke=False):
    """Rows of plans at the shares of memory that MONeT's authors publish for three networks."""
    target, scale = ("cpu:1", 16) if smoke else ("h100x1", 1)
    for name, (make, (whole, published)) in list(MONET.items())[: 1 if smoke else 3]:
        loss, params, batch = make(scale)
        plain = step_temporaries(loss, params, batch, device_of_target(target)[1])
        search = loss_search(loss, params, batch, target)
        for memory, overhead in published.items():
            cells = [name, f"{memory / whole:.0%}", f"{overhead:+.1f}%", size(plain)]
            try:
                found = search.fastest(plain * memory / whole)
            except ValueError as error:
                least = re.search("smallest takes (.*?),", str(error))[1]
                yield f"| {' | '.join(cells)} | needs {least} | | |"
                continue
            cells += [f"{found.peak / plain:.0%}", f"{found.extra_time:+.1%}"]
            yield f"| {' | '.join([*cells, f'{found.at_least:+.1%}'])} |"


def monet(smoke=False):
    """A table of these, and what authors of other planners report."""
    names = ("network", "budget", "MONeT, time", "ours, plain", "compiled", "extra time")
    names = (*names, "at least")
    head = f"| {' | '.join(names)} |\n{'|---' * len(names)}|"
    table = _results.table(head, beside_monet(smoke))
    if not smoke:
        title = "Activations: beside the figures of other planners"
        options = {"script": "activation_memory"}
        _results.write("activation_memory_peers", title, ABOUT_PEERS, table, PEERS, **options)


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a small model on this CPU")
    parser.add_argument("--tpu", action="store_true", help="a TPU v5e instead of an H100")
    parser.add_argument("--graphs", action="store_true", help="whole losses instead of stacks")
    parser.add_argument("--peers", action="store_true", help="beside published plans of others")
    options = parser.parse_args()
    if options.peers:
        monet(options.smoke)
        return
    if options.graphs:
        graphs(options.smoke)
        return
    if options.smoke:
        table_of(*measure("smoke", "cpu:1", 2, 64))
        return
    cases, suffix = (TPU_CASES, "_v5e") if options.tpu else (GPU_CASES, "")
    sections = []
    for name, target, sequences, length in cases:
        frontiers, presets = measure(name, target, sequences, length)
        what = f"{sequences} sequence{'s' if sequences > 1 else ''} of {length} tokens"
        sections.append(f"## {name} on {target}, {what}\n\n{table_of(frontiers, presets)}")
        shown = {name: each for name, each in presets.items() if each.peak < math.inf}
        figure = plot_frontiers(frontiers, shown)
        most = max(each.peak for each in shown.values())
        figure.axes[0].set_xlim(0, 1.1 * most / 2**30)  # what stores all is far beyond
        figure.savefig(_results.RESULTS / f"activation_memory{suffix}_{name}.png", dpi=150)
        _results.write(
            f"activation_memory{suffix}",
            "Activations: bytes against time",
            f"With `--tpu`. {ABOUT}" if options.tpu else ABOUT,
            *sections,
            script="activation_memory",
        )


def plot_frontiers(frontiers, others):
    """Bytes against time of activations: a line for each frontier, points for the other plans."""

    def point(plan):
        return plan.peak / 2**30, 100 * plan.extra_time

    figure, axes = plt.subplots(figsize=(6.1, 3.6), layout="constrained")
    for name, plans in frontiers.items():
        line = {"drawstyle": "steps-post", "marker": "o", "markersize": 4, "label": name}
        axes.plot(*zip(*map(point, plans), strict=True), **line)
    for name, plan in others.items():
        axes.plot(*point(plan), "x", color="black", markersize=5)
        axes.annotate(name, point(plan), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="peak of activations and temporaries, GiB", ylabel="extra time, % of a step")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


ABOUT = """All layers in one scan, bfloat16, one device and its sequences; parameters, gradients
and logits are not counted. Bytes are temporaries of programs compiled for the target (of the TPU by
those of 4 and 8 layers); products again are exact; extra time is by a roofline at the device's
figures, and was not measured. Presets of MaxText, in bold, are policies around each layer. Segments
are a scan over scans; (host) is what is copied to host memory."""

ABOUT_GRAPHS = """With `--graphs`: `remat.plan` of losses in which nothing is marked, float32, one
device. Plain is what the gradient of the loss takes without a plan. Programs are compiled for the
target: bytes of their temporaries, and how much more memory they read and write, and how many more
operations of matrix products they run, than the plain one;
convolutions of GPUs are not counted. Extra time is the plan's, by a roofline at the
device's figures; no schedule of the same operations within these bytes takes less than what "at
least" says. By hand is the loss with a `jax.checkpoint` around each block, whose bytes are the last
budget. CPU s are seconds of one core to plan, programs compiled included. Of a TPU what its fast
memory holds is not counted. Where no plan fits, the least bytes that one needs are in its place.
What a GPU takes is in [`activation_time.md`](activation_time.md). Rockmate, which plans modules of
PyTorch, is reported to take 10 to 20 % of time for activations 2 to 5 times smaller (Zhao et al.,
ICML 2023)."""

ABOUT_PEERS = """With `--peers`: three networks of MONeT at the batches that its authors publish
(ResNet-50 184, VGG-16 176, U-Net 11 of 416 x 608). Budgets are shares of what a step takes without
a plan, which was 15.06, 14.12 and 14.32 GB of theirs. Theirs are of all memory, and times were
measured in PyTorch, whose convolutions MONeT chooses, too, which is why some are negative. Ours are
of temporaries, in float32, of programs compiled for an H100; extra time is by a roofline, and was
not measured; no schedule of the same operations within the budget takes less than what "at least"
says."""

PEERS = """## What their papers report

| planner | activations | overhead | source |
|---|---|---|---|
| MONeT | 3 times less memory in all | 9 to 16 % | Shah et al., ICLR 2021 |
| Rockmate | 2 to 5 times smaller | 10 to 20 % | Zhao et al., ICML 2023 |
| POFO, with host copies | 4 to 6 times smaller | below 20 % | Beaumont et al., NeurIPS 2021 |
| Checkmate | inputs up to 5.1 times larger | - | Jain et al., MLSys 2020 |

These are of abstracts. `remat.plan` makes activations 3 times smaller for 13.3 % (GPT-2) and 21.0 %
(ResNet-50) of time, as planned: [its table](activation_memory_graphs.md)."""

PLANNING = """## CPU seconds of planning

`remat.plan` of four layers of width 64, 512 tokens, of the models of jax-ml/bonsai, for 0.6 of what
the loss needs by itself, on a CPU that others used: the compiler's seconds, whose work is the same,
show how busy it was. Before is commit f7e30915, after b3a9b13d; the plans are the same. In 21
searches, of seven graphs, schedules take as long as before, or none is found as before. By
`ScheduleSearch.find` and `Lowered.compile`:

| model | search, before | after | compiler, before | after | in all, before | after |
|---|---|---|---|---|---|---|
| Qwen3 | 8.9 | 5.6 | 14.3 | 19.6 | 27.9 | 31.5 |
| Mamba2 | 7.0 | 3.6 | 14.6 | 16.0 | 26.2 | 24.8 |
| UMT5 | 12.9 | 6.9 | 11.3 | 11.6 | 30.8 | 25.3 |"""


if __name__ == "__main__":
    main()
