"""Forty plans whose figures stay to the last digit: models, machines, stages, schedules, offload.

``python tests/sharding/plan/test_forty_plans.py`` records them again, where a change is meant.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import re

import jax
import optax
import pytest

from sharding.cli import main
from sharding.plan import MODELS, NoPlanFits, ParallelPlan, audit, kind_of, search
from sharding.plan.cost._plan_costs import PlanCosts
from sharding.plan.search._search import machine_of

ADAMW = optax.adamw(1e-3)
RECORDED = pathlib.Path(__file__).with_name("forty_plans.json")
FIGURES = json.loads(RECORDED.read_text())
DEFAULTS = {field.name: field.default for field in dataclasses.fields(ParallelPlan)}
# Plans, pipelines and searches that take part of a second each, and all programs: others are slow.
FAST = {0, 2, 5, 6, 7, 9, 13, 14, 15, 16, 21, 23, 27, 31, 32, 33, 34, 36, 37, 38, 39}


def chosen(plan):
    """The fields of a plan that are not their defaults."""
    return {name: value for name, value in plan.items() if value != DEFAULTS[name]}


def figures_of_pipeline(line):
    """The fastest pipeline, or the smallest if none fits; what it holds; a plan without one."""
    asked, *texts = line.split(" --keep ")
    given = dict(re.findall(r"--(\w+) (\S+)", asked))
    kept = {name: value_of(value) for name, value in (text.split("=") for text in texts)}
    device, model = kind_of(given["target"]), MODELS[given["model"]]
    if network := given.get("network"):
        device = dataclasses.replace(device, network=1e9 * float(network))
    length = int(given.get("length", model.length))
    of_both = {name: kept[name] for name in ("tensor", "offload")}
    both = []
    for keep in (kept, of_both | {"pipe": 1}):
        options = {"sequences": int(given["batch"]), "length": length, "keep": keep, "top": 1}
        try:
            found = search(model, ADAMW, given["target"], device=device, **options).best
        except NoPlanFits as error:
            found = error.smallest
        fields = chosen(dataclasses.asdict(found.plan))
        both.append([fields, found.seconds.seconds, found.memory])
    plan, machine = ParallelPlan(**both[0][0]), machine_of(given["target"], device)
    held = PlanCosts(model, ADAMW, machine, length=length).pipeline(plan).by_part()
    return json.loads(json.dumps({"plans": both, "held": held}))


def value_of(text):
    """A number, a truth value or a word."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def figures_of(line):
    """Bytes and seconds of a command's plans, or of a recorded program."""
    if line.endswith(".txt"):
        found = audit(RECORDED.with_name("programs").joinpath(line).read_text()).to_dict()
        names = ("memory", "wire_bytes", "matmul_flops", "arguments", "at_peak", "nbytes")
        return {name: found[name] for name in names}
    if line.startswith("pipeline"):
        return figures_of_pipeline(line)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*line.split(), "--json"])
    found = json.loads(out.getvalue())
    first = found["plans"][0]
    if first["seconds"]:
        rows = found["plans"]
        plans = [[chosen(x["plan"]), x["seconds"]["total"], x["memory"]["total"]] for x in rows]
    if line.startswith("search"):
        return {"bound": found["bound"], "compared": found["compared"], "plans": plans}
    names = ("name", "memory", "peak", "unreduced", "wire", "network", "host_wire", "moved")
    return {"stages": [[x["zero"][name] for name in names] for x in found["plans"]]}


# What the layers store depends on the version of jax.
@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="recorded with jax 0.10")
@pytest.mark.parametrize(
    "line",
    [pytest.param(x, marks=() if i in FAST else pytest.mark.slow) for i, x in enumerate(FIGURES)],
)
def test_figures_stay(line):
    assert figures_of(line) == FIGURES[line]


if __name__ == "__main__":
    pairs = [(line, figures_of(line)) for line in FIGURES]
    rows = [f"{json.dumps(line)}: {json.dumps(figures)}" for line, figures in pairs]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
