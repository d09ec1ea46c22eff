"""Gradients on one GPU: what plans for activations promise beside what they take there.

Plans are found where compilers are. On the GPU each network has a process of its own, which
compiles beside the others; then each is timed alone, all its programs in turns.

  python benchmarks/activation_time.py --plan h200x1  # anywhere; results/activation_time.json
  python benchmarks/activation_time.py --minutes 4    # on that GPU; results/activation_time.md
  python benchmarks/activation_time.py --smoke        # small, on any device, prints only
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import _results
import jax
import jax.numpy as jnp
from _networks import NETWORKS, array, identity

from sharding.plan import kind_of
from sharding.plan._format import size
from sharding.plan.audit._program_memory import step_temporaries, temporaries_of
from sharding.plan.model._models import MODELS
from sharding.plan.model._traced_work import work_of_jaxpr
from sharding.remat._loss_search import LossSearch, PlannableLoss
from sharding.remat._plan_activations import device_of_target, loss_search

PLANS = _results.RESULTS / "activation_time.json"
SHARES = (1 / 2, 1 / 3)  # of the bytes of the plain gradient
GIB = 2**30
SCANNED = "7B layers, scanned"
BUDGETS = (6, 8.5, 17, 27)  # GiB


def scanned(params, x, checkpoint=identity):
    """Layers of llama2-7b, whose plain gradient fits no GPU."""
    layer = checkpoint(MODELS["llama2-7b"].apply_layer)
    x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def losses_of(name, scale):
    """A loss, the same with a checkpoint around each block, and their arguments."""
    if name == SCANNED:
        model = MODELS["llama2-7b"]
        x = array(4, 2048, model.width, dtype=jnp.bfloat16)
        args = model.abstract(jnp.bfloat16)["layers"], x
        return scanned, functools.partial(scanned, checkpoint=jax.checkpoint), *args
    return NETWORKS[name](scale)[0], *NETWORKS[name](scale, True)


def plans_of(name, scale, target):
    """For each budget: bytes to plan for, whether in order, whether with copies to the host."""
    loss, by_hand, *types = losses_of(name, scale)
    device, found = device_of_target(target)[1], {}
    if name == SCANNED:
        limits = {f"{n} GiB{with_host}": n * GIB for with_host in ("", ", host") for n in BUDGETS}
    else:
        plain = step_temporaries(loss, *types, device)
        limits = {f"{share:.2f} of plain": share * plain for share in SHARES}
        limits["bytes of by hand"] = step_temporaries(by_hand, *types, device)
    for what, limit in limits.items():
        offload = what.endswith("host")
        search, bytes_of = loss_search(loss, *types, target, offload=offload), {}

        def recorded(planned, *args, compiled=search.compiled, bytes_of=bytes_of, **options):
            plan = compiled(planned, *args, **options)
            if plan and not options:  # else ``search.plan`` would find another one
                bytes_of[plan.loops, plan._schedule] = planned
            return plan

        search.compiled = recorded
        try:
            plan = search.fastest(limit)
            in_order = any(plan._schedule.again)
            found[what] = bytes_of[plan.loops, plan._schedule], in_order, offload
        except (KeyError, ValueError) as error:
            print(name, what, error, file=sys.stderr, flush=True)
    return found


def arguments(types):
    """Random numbers of these types; tokens are small ones."""

    def make(i, t):
        if jnp.issubdtype(t.dtype, jnp.integer):
            return jax.random.randint(jax.random.key(i), t.shape, 0, 256, t.dtype)
        return 0.03 * jax.random.normal(jax.random.key(i), t.shape, t.dtype)

    leaves, treedef = jax.tree.flatten(types)
    return treedef.unflatten([jax.jit(make, static_argnums=1)(*each) for each in enumerate(leaves)])


def roofline(loss, types, kind):
    """Seconds of a gradient, operation by operation."""
    return work_of_jaxpr(jax.make_jaxpr(jax.grad(loss))(*types).jaxpr, kind).seconds


def programs_of(name, scale, target, plans):
    """The compiled gradient and its time by a roofline, the one to compare with first."""
    loss, by_hand, *types = losses_of(name, scale)
    kind, device = kind_of(target), jax.devices()[0]
    losses = {"plain": loss, "by hand": by_hand} if name != SCANNED else {"by hand": by_hand}
    for what, (planned, in_order, offload) in plans.items():
        plan = LossSearch(PlannableLoss(loss, *types, device), kind, offload).plan(planned)
        if not in_order:
            schedule = plan._schedule._replace(again=())
            plan = dataclasses.replace(plan, _schedule=schedule)
        losses[f"planned, {what}"] = plan
    programs = {}
    for what, fn in losses.items():
        if what.startswith("planned"):
            longer = fn.work.seconds / fn.plain.seconds
        else:
            longer = roofline(fn, types, kind) / roofline(loss, types, kind)
        programs[what] = jax.jit(jax.grad(fn)).lower(*types).compile(), longer
    return programs, arguments(types)


def difference(found, exact):
    """Of gradients, relative to the largest of each array."""

    def relative(a, b):
        return jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-30)

    return max(map(float, jax.tree.leaves(jax.tree.map(jax.jit(relative), found, exact))))


def rows_of(name, scale, rounds, planned, ready, go):
    """Of the table, once ``go`` is there."""
    programs, args = programs_of(name, scale, planned["target"], planned["plans"][name])
    ready.touch()
    while not go.exists():
        time.sleep(0.1)
    exact = next(iter(programs.values()))[0](*args)
    errors = {what: difference(run(*args), exact) for what, (run, _) in programs.items()}
    del exact
    taken = {what: [] for what in programs}
    for _ in range(rounds):
        for what, (run, _) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            taken[what].append(time.perf_counter() - start)
    first = next(iter(programs))
    for what, (run, longer) in programs.items():
        extra = statistics.median(t / u for t, u in zip(taken[what], taken[first], strict=True)) - 1
        own, memory = statistics.median(taken[what]), run.memory_analysis()
        host = memory.host_temp_size_in_bytes
        nbytes = f"{size(temporaries_of(run))} | {size(host) if host else ''}"
        extras = f"{longer / programs[first][1] - 1:+.1%} | {extra:+.1%}"
        print(f"| {name} | {what} | {nbytes} | {own:.4f} | {extras} | {errors[what]:.0e} |")


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", metavar="TARGET", help="find the plans, and end")
    parser.add_argument("--minutes", type=float, default=4.0, help="to compile")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="small; prints only")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # a network's process
    options = parser.parse_args()
    scale, rounds = (16, 2) if options.smoke else (1, options.rounds)
    names = ["LSTM"] if options.smoke else [*NETWORKS, SCANNED]
    if options.one:
        name, path, *files = options.one
        planned = json.loads(pathlib.Path(path).read_text())
        rows_of(name, scale, rounds, planned, *map(pathlib.Path, files))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "plans.json") if options.smoke else PLANS
        if options.plan or options.smoke:
            target = options.plan or "cpu:1"
            plans = {name: plans_of(name, scale, target) for name in names}
            path.write_text(json.dumps({"target": target, "plans": plans}, indent=1))
        if options.plan:
            return
        processes, ends = {}, time.monotonic() + 60 * options.minutes
        for i, name in enumerate(names):
            files = [pathlib.Path(folder, f"{i}.{what}") for what in ("ready", "go")]
            command = [sys.executable, __file__, "--one", name, str(path), *map(str, files)]
            command += ["--rounds", str(rounds), *(["--smoke"] if options.smoke else [])]
            processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), *files
        for process, ready, _ in processes.values():
            while not ready.exists() and process.poll() is None and time.monotonic() < ends:
                time.sleep(0.1)
        for process, ready, _ in processes.values():
            if not ready.exists():
                process.kill()

        def rows():
            for process, _, go in processes.values():
                go.touch()
                yield from process.communicate()[0].splitlines()

        table = _results.table(HEAD, rows())
    device = _results.machine(jax.devices()[0].device_kind)
    if not options.smoke:
        _results.write("activation_time", "Activations: time on a GPU", f"{device}. {ABOUT}", table)


HEAD = """| network | gradient | bytes | in host memory | seconds | planned | measured | error |
|---|---|---|---|---|---|---|---|"""

ABOUT = """The networks of [`activation_memory_graphs.md`](activation_memory_graphs.md), planned
without the GPU, and the layers of llama2-7b for 4 sequences of 2,048 tokens in bfloat16, whose
plain gradient does not fit. By hand is a `jax.checkpoint` around each block. Bytes are temporaries
of the program; seconds are medians. Planned is how much longer than the network's first row a
gradient takes by a roofline, measured the median of what it took longer, one run after the other.
The error is the largest difference of a gradient from that of the first row, relative to the
largest element of its array."""


if __name__ == "__main__":
    main()
