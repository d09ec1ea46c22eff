"""``search``: what it lists, verifies and writes, and one sentence for wrong questions."""

import pathlib
import re

import pytest

from sharding.plan import MODELS, Decoder, ParallelPlan, PlanFile
from sharding.plan.cost._ledger import StepRows, WorkRow
from sharding.plan.cost._parallel_plan import short
from sharding.plan.search._verify import Verification

from ...tiers import slow, tiers

SEARCH = "search --model gpt2-small --target h100x8 --batch 64"
# The plans of few layers on one kind of mesh: a search of them is quick.
FEW = "--no-offload --keep tensor=1 --keep pipe=1 --keep recompute=full"
FIGURES = "--memory 80 --tflops 989 --bandwidth 3350 --link 450"


def test_it_lists_the_fastest_plans_and_writes_the_best(run, figures, tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = run(f"{SEARCH} {FEW} --top 3 --write {path}")
    assert code == 0
    assert "plans on h100x8" in out
    assert "No plan that fits can take less than" in out
    assert "built = shd.plan.build(plan, model, tx, mesh" in out
    assert "The update of" not in out
    assert "…" not in out  # tables are as wide as they need
    found = figures(f"{SEARCH} {FEW} --top 3")
    assert len(found["plans"]) == 3
    times = [plan["seconds"]["total"] for plan in found["plans"]]
    assert times == sorted(times)
    assert found["bound"] < times[0]
    best, file = found["plans"][0], PlanFile.read(path)
    assert best["tokens"] == 64 * 1024
    assert file.plan == ParallelPlan(**best["plan"])
    parts = dict(best["memory"])
    total = parts.pop("total")
    assert file.promised == parts | {"memory": total, "seconds": times[0]}
    assert (file.model, file.target, file.length) == ("gpt2-small", "h100x8", 1024)


@pytest.mark.parametrize(
    ("batch", "sequences"), [("64k-tokens", 64), ("1M-tokens", 1024), ("65636-tokens", 64)]
)
def test_batches(batch, sequences, figures):
    found = figures(f"{SEARCH[:-2]}{batch} {FEW} --keep stage=1 --top 1")
    assert found["plans"][0]["tokens"] == sequences * 1024


def test_options_reach_the_search(figures, text):
    keep = "--keep stage=3 --keep offload=false --keep state_format=none --keep pipe=1"
    plans = [it["plan"] for it in figures(f"{SEARCH} {keep}")["plans"]]
    assert all(it["stage"] == 3 and not it["offload"] for it in plans)
    # Another kind of GPU is known by its figures.
    assert "on foox8" in text(f"{SEARCH} {FEW} --target foox8 {FIGURES} --top 1")
    muon = text(f"{SEARCH} {FEW} --optimizer muon --top 1 --keep stage=0")
    assert "The update of the best plan computes products of" in muon


@pytest.mark.parametrize(
    ("target", "keep"),
    [
        slow(("cpu:8", "stage=2 --keep pipe=1")),
        ("cpu:8", "pipe=2 --keep tensor=2"),
        slow(("cpu:1", "update_in_backward=true --update-in-backward")),
        slow(("cpu:8", "update_in_backward=true --update-in-backward --keep stage=3")),
    ],
)
def test_the_printed_code_runs(target, keep, run, monkeypatch):
    tiny = Decoder(2, 64, 4, 4, 256, 512, 32, gated=False, tied=True, biased=True)
    monkeypatch.setitem(MODELS, "gpt2-small", tiny)
    line = f"search --model gpt2-small --target {target} --batch 16 {FIGURES} --optimizer came"
    _, out, _ = run(f"{line} --keep {keep} --keep recompute=full --no-offload")
    names = {}
    exec(out[out.index("import jax") :], names)
    assert 6 < names["metrics"]["loss"] < 7  # the logarithm of 512 tokens


OWN = """
import dataclasses, jax, jax.numpy as jnp
from sharding.plan import TracedModel

def loss_fn(params, x):
    y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), x, params["layers"])
    return jnp.mean((y @ params["out"]) ** 2)

def init(dtype):
    return {"layers": jnp.zeros((8, 512, 512), dtype), "out": jnp.zeros((512, 8), dtype)}

model = TracedModel(loss_fn, init, jax.ShapeDtypeStruct((64, 512), jnp.float32))
make = lambda: model
wrong = lambda: 3
failing = dataclasses.replace(model, loss_fn=lambda p, x: p["no"])
"""


# What both commands are asked, and micro-batches; options of plan, and of search.
ONE_ANSWER = [
    ("gpt2-small --target h100x8 --batch 64", 2, "", "replicas=1"),
    ("gpt2-medium --target l40sx8 --batch 16", 1, "", "replicas=1"),
    ("gpt2-xl --target v5e:2x2 --batch 64 --optimizer muon", 4, "", ""),
    ("gpt2-xl --target a100-40x8 --batch 8 --state bfloat16", 1, "", "state_format=bfloat16"),
    ("llama2-7b --target v5p:2x2x1 --batch 64 --master", 1, "", ""),
    ("llama2-7b --target v5e:2x4*2 --batch 32 --network 3", 1, "", ""),
    ("llama2-7b --target a100-40x2 --batch 2", 1, "", ""),
    ("llama2-7b --target h100x16 --batch 16", 1, "--offload", "offload=true"),
    ("llama2-13b --target h100x16 --batch 64 --optimizer came", 2, "", ""),
    ("llama2-13b --target h200x8 --batch 64 --length 1024", 8, "", "replicas=1"),
    ("llama2-70b --target h200x16 --batch 16 --network 0.39", 1, "", ""),
    ("llama3-8b --target h200x8 --batch 8 --state 4bit", 1, "", "state_format=4bit replicas=1"),
    ("gpt2-xl --target rtx4090x4 --batch 8 --update-in-backward", 2, "", "update_in_backward=true"),
    ("mine:make --target h100x8 --batch 64", 2, "", "replicas=1"),
    ("mine:make --target v5e:2x2 --batch 64 --master", 1, "", ""),
    (f"gpt2-small --target newx8 --batch 8 {FIGURES}", 1, "", "replicas=1"),
    (f"gpt2-small --target cpu:4 --dtype float32 --batch 8 {FIGURES}", 1, "", "replicas=1"),
]


# Costly ones, whose options and machines others have.
COSTLY = (
    "gpt2-medium",
    "gpt2-xl --target v5e",
    "llama2-13b --target h100",
    "llama3-8b",
    "mine:make --target v5e",
)


@pytest.mark.parametrize(
    ("asked", "microbatches", "of_plan", "kept"),
    tiers(ONE_ANSWER, lambda case: not case[0].startswith(COSTLY)),
)
def test_plan_and_search_give_one_answer(asked, microbatches, of_plan, kept, figures, module):
    """Each stage has the same plan, seconds and bytes, and the same one is the best.

    That of the fastest form of recomputation that fits; where none does, layers store their input.
    """
    module(OWN)

    def stages(line):
        found = figures(line)
        names = [
            tuple(x["plan"][n] for n in ("stage", "replicas", "spread")) for x in found["plans"]
        ]
        values = [[x[name] for name in ("plan", "seconds", "memory")] for x in found["plans"]]
        fastest = dict(reversed([*zip(names, values, strict=True)]))
        return {name: fastest[name] for name in names}, found["chosen"]

    planned, chosen = stages(f"plan --model {asked} --microbatches {microbatches} {of_plan}")
    offload = "" if "offload" in kept else "--no-offload"
    keep = ["pipe=1", "tensor=1", f"microbatches={microbatches}", *kept.split()]
    line = f"search --model {asked} {offload} --top 2000"
    searched, _ = stages(" --keep ".join([line, *keep]))
    same = [name for name in searched if name in planned]
    assert same[0] == [*planned][chosen]
    assert [searched[name] for name in same] == [planned[name] for name in same]
    others = [plan["recompute"] for name, (plan, *_) in planned.items() if name not in searched]
    assert {*others} <= {"full"}


def test_a_model_of_ones_own(module, text, figures, tmp_path):
    """Searched, verified and written as those with a name."""
    module(OWN)
    path = tmp_path / "plan.json"
    line = f"search --model mine:make --target cpu:8 --batch 64 {FIGURES} --keep stage=2"
    best = figures(f"{line} --verify 1 --top 1 --write {path}")["plans"][0]
    assert best["program"]["failures"] == []
    shown = " ".join(text(f"{line} --top 1").split())
    assert "A step has 64 sequences of 1 token." in shown
    assert "Layers were found in the loss, in loops over stacked parameters: 8." in shown
    file = PlanFile.read(path)
    assert file.model == "mine:make"
    assert file.promised["memory"] == best["program"]["memory"]
    assert file.promised["seconds"] == best["seconds"]["total"]


def test_the_best_is_one_that_holds(run, figures, tmp_path, monkeypatch):
    """The text, the code and the file are those of the same plan; without one there is no file."""

    def fails(file, *args, **options):
        flops = 2.0 if file.plan == first or not some_hold else 1.0
        planned, program = (
            StepRows((WorkRow("matmul", "products", x, ("flops",)),), {}) for x in (1.0, flops)
        )
        return Verification(planned, program, 1.0, 1.0, 9.0)

    path = tmp_path / "plan.json"
    plans = [ParallelPlan(**it["plan"]) for it in figures(f"{SEARCH} {FEW}")["plans"]]
    first, some_hold = plans[0], True
    monkeypatch.setattr("sharding.cli._search_command.verify", fails)
    line = f"{SEARCH} {FEW} --verify 5 --top 5 --write {path}"
    code, out, _ = run(line)
    shown = " ".join(out.split())
    assert code == 0
    assert f"Best: {short(plans[1])}." in shown
    assert "plan 1 does not hold and is dropped" in shown
    assert PlanFile.read(path).plan == plans[1]
    path.unlink()
    some_hold = False
    code, out, err = run(line)
    assert code == 2
    assert "error: none of the first 5 plans holds" in err
    assert "Best:" not in out
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 64M", "must look like 1024 or 4M-tokens, got '64M'; nearest is 64M-tokens."),
        ("--batch 100-tokens", "--batch 100-tokens is less than one sequence of 1,024"),
        ("--keep stage", "--keep must look like stage=3, got 'stage'"),
        ("--model 7e9", "search needs a model whose layers are known"),
        ("--model mine:wrong", "search needs a model whose layers are known"),
        ("--model mine:failing", "its loss of one example failed: KeyError: 'no'."),
        ("--target cpu:8 --memory 80", "a search needs --bandwidth, --tflops, --link"),
        (f"--target foox8 {FIGURES} --verify 1", "foox8 can be searched, not compiled"),
        ("--write no/such/folder/plan.json", "cannot be written: there is no such folder"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, message, error, module):
    module(OWN)
    assert message in error(f"{SEARCH} {arguments}")


SEARCHED = f"{SEARCH} {FEW} --top 2"
LINES = {
    SEARCHED: {"layers", "utilization", "lossy", "change"},
    "plan --model gpt2-small --target h100x8 --batch 64": {"zero", "most_sequences"},
    "audit --model gpt2-small --target cpu:8 --length 16 --memory 4": {"program"},
}


@pytest.mark.parametrize("line", LINES)
def test_json_has_the_form_that_is_documented(line, figures):
    """Of all commands; each plan has the same keys, and those of its command."""
    page = pathlib.Path(__file__).parents[3] / "docs" / "api" / "command_line.rst"
    tables = page.read_text().split("JSON\n----")[1].split("Each of")
    top, of_plan = (re.findall(r"^   \* - ``(\w+)``", table, re.MULTILINE) for table in tables)
    found = figures(line)
    assert sorted(found) == sorted(top)
    assert set().union(*LINES.values()) | {"find_batch"} == {*of_plan[of_plan.index("layers") :]}
    common = set(of_plan[: of_plan.index("layers")])
    for row in found["plans"]:
        assert common <= set(row) <= common | LINES[line]
        memory = dict(row["memory"])
        total = memory.pop("total")
        assert [*memory] == ["params", "grads", "state", "batch", "activations"]
        assert sum(memory.values()) == pytest.approx(total)
        assert row["left"] == found["machine"]["device"]["memory"] - total
        assert row["fits"] == (row["left"] >= found["machine"]["headroom"] * (total + row["left"]))
        assert ParallelPlan(**row["plan"]).num_devices == found["machine"]["num_devices"]
        assert row["at_least"]["total"] == max(row["at_least"].values())
    assert line.startswith("audit") == (found["chosen"] is None)
    assert set().union(*found["plans"]) == common | LINES[line]
    for row in found["rejected"]:
        assert common <= set(row)
        assert row["memory"]["total"] > 0 < row["seconds"]["total"]
