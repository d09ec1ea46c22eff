"""``python -m sharding search``."""

import json

import pytest

from sharding.cli import main
from sharding.plan import MODELS, Decoder, ParallelPlan, PlanFile, Verification
from sharding.plan.fastest._chosen_plan import short

SEARCH = ("search", "--model", "gpt2-small", "--target", "h100x8", "--batch", "64")
FIGURES = ("--memory", "80", "--tflops", "989", "--bandwidth", "3350", "--link", "450")


def test_it_lists_the_fastest_plans_and_their_code(capsys):
    assert main(SEARCH) == 0
    text = capsys.readouterr().out
    assert "plans on h100x8" in text
    assert "No plan that fits can take less than" in text
    assert "step = zero.train_step(" in text
    assert "…" not in text  # tables are as wide as they need


def test_json_has_every_figure(capsys):
    assert main((*SEARCH, "--json", "--top", "3")) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["plans"]) == 3
    times = [plan["seconds"]["seconds"] for plan in found["plans"]]
    assert times == sorted(times)
    assert found["bound"] < times[0]
    assert found["plans"][0]["tokens"] == 64 * MODELS["gpt2-small"].length


@pytest.mark.parametrize(
    ("batch", "sequences"),
    [("64", 64), ("64k-tokens", 64), ("1M-tokens", 1024), ("65636-tokens", 64)],
)
def test_batches(batch, sequences, capsys):
    assert main((*SEARCH[:-1], batch, "--json", "--top", "1")) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["tokens"] == sequences * 1024


def test_what_is_kept(capsys):
    keep = ("--keep", "stage=3", "--keep", "offload=false", "--keep", "state_format=none")
    assert main((*SEARCH, *keep, "--json")) == 0
    plans = [it["plan"] for it in json.loads(capsys.readouterr().out)["plans"]]
    assert all(it["stage"] == 3 and not it["offload"] for it in plans)


@pytest.mark.slow
def test_lossy_formats_only_where_they_are_given(capsys):
    keep = ("--keep", "pipe=1", "--keep", "stage=1", "--keep", "recompute=full")
    options = (*SEARCH, "--json", "--top", "200", *keep, "--no-offload")
    main(options)
    assert not any(it["lossy"] for it in json.loads(capsys.readouterr().out)["plans"])
    main((*options, "--state", "8bit"))
    assert any(it["lossy"] for it in json.loads(capsys.readouterr().out)["plans"])
    main((*options, "--sync", "powersgd(4)", "--stochastic-rounding", "--master"))
    plans = [it["plan"] for it in json.loads(capsys.readouterr().out)["plans"]]
    assert {it["weights"] for it in plans} == {"master", "stochastic"}
    assert {it["sync"] for it in plans} == {None, "powersgd(4)"}
    untied = ("search", "--model", "llama2-7b", "--target", "h100x8", "--batch", "32")
    main((*untied, "--json", "--keep", "schedule=2bw", "--asynchronous"))
    assert all(it["lossy"] for it in json.loads(capsys.readouterr().out)["plans"])


def test_a_file_of_the_best_plan_and_a_picture(tmp_path, capsys):
    path, picture = tmp_path / "plan.json", tmp_path / "plans.png"
    assert main((*SEARCH, "--write", str(path), "--plot", str(picture), "--json")) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    file = PlanFile.read(path)
    assert file.promised == {"memory": best["memory"], "seconds": best["seconds"]["seconds"]}
    assert (file.model, file.target, file.length) == ("gpt2-small", "h100x8", 1024)
    assert picture.stat().st_size > 1000


OWN = """
import jax, jax.numpy as jnp
from sharding.plan import TracedModel

def apply_layer(w, x):
    return x + jnp.tanh(x @ w)

def make_loss(layer):
    def loss_fn(params, x):
        y, _ = jax.lax.scan(lambda y, w: (layer(w, y), None), x, params["layers"])
        return jnp.mean((y @ params["out"]) ** 2)
    return loss_fn

def init(dtype):
    return {"layers": jnp.zeros((8, 512, 512), dtype), "out": jnp.zeros((512, 8), dtype)}

model = TracedModel(init, apply_layer, make_loss, jax.ShapeDtypeStruct((512,), jnp.float32))
make = lambda: model
wrong = lambda: 3
"""


@pytest.mark.parametrize("name", ["model", "make"])
def test_a_model_of_ones_own(name, tmp_path, monkeypatch, capsys):
    """Searched, verified and written as those with a name."""
    (tmp_path / f"own_{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "plan.json"
    machine = ("search", "--target", "cpu:8", "--batch", "64", *FIGURES)
    options = ("--model", f"own_{name}:{name}", "--verify", "1", "--write", str(path), "--json")
    assert main((*machine, *options)) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["verified"]["failures"] == []
    file = PlanFile.read(path)
    assert file.model == f"own_{name}:{name}"
    assert file.promised["memory"] == best["verified"]["memory"]
    assert main((*SEARCH, "--model", f"own_{name}:wrong")) == 2
    assert "made no sharding.plan.TracedModel or Decoder, but 3" in capsys.readouterr().err


def test_offload_on_gpus_is_not_verified(capsys):
    """Without an error: the other plans are."""
    keep = ("--keep", "offload=true", "--keep", "pipe=1")
    assert main((*SEARCH, *keep, "--verify", "1", "--top", "1")) == 0
    out, err = capsys.readouterr()
    assert "plan 1: not verified, compile-only GPUs have no host memory" in err
    assert "compiled for the target" not in out
    assert "offload='optimizer'" in out


def test_options_that_a_search_decides_are_not_taken(capsys):
    for option in ("--mesh", "--replica-axis", "--compute-dtype"):
        with pytest.raises(SystemExit):
            main((*SEARCH, option, "x=8"))
        assert "unrecognized arguments" in capsys.readouterr().err


def test_pipelines_are_verified_too(tmp_path, capsys, monkeypatch):
    """Compiled for CPUs, with the figures of a GPU; one plan holds, and is written."""
    model = Decoder(4, 64, 4, 4, 128, 96, 32)
    monkeypatch.setitem(MODELS, "gpt2-small", model)
    keep = ("--keep", "pipe=4", "--keep", "schedule=aligned", "--no-offload")
    path = tmp_path / "plan.json"
    arguments = (*SEARCH[:3], "--target", "cpu:8", "--batch", "16", *FIGURES, *keep)
    options = ("--dtype", "float32", "--verify", "1", "--top", "2", "--write", str(path))
    assert main((*arguments, *options, "--json")) == 0
    out, err = capsys.readouterr()
    assert "plan 1: program / plan: memory" in err
    first, second = json.loads(out)["plans"]
    found = first["verified"]
    assert found["wire"] == pytest.approx(found["planned_wire"], rel=0.02)
    assert found["flops"] == pytest.approx(found["planned_flops"], rel=0.01)
    assert found["failures"] == []
    assert "verified" not in second
    file = PlanFile.read(path)
    assert file.plan.pipe == 4
    assert "pipeline = shd.Pipeline(" in file.code()


def test_gpus_of_another_kind(capsys):
    """Their figures make them known."""
    assert main((*SEARCH, "--target", "foox8", *FIGURES, "--top", "1")) == 0
    assert "on foox8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise RuntimeError('no GPU')", "--model {}:model: RuntimeError: no GPU."),
        ("def model(): raise RuntimeError('bad')", "but failed: RuntimeError: bad."),
        (
            f"{OWN}\nmodel = dataclasses.replace(model, make_loss=lambda _: lambda p, x: p['no'])",
            "its loss of one example failed: KeyError: 'no'.",
        ),
    ],
)
def test_a_module_that_fails(line, message, tmp_path, monkeypatch, capsys):
    name = f"failing_{len(line)}"
    (tmp_path / f"{name}.py").write_text("import dataclasses\n" + line)
    monkeypatch.syspath_prepend(tmp_path)
    assert main((*SEARCH, "--model", f"{name}:model")) == 2
    assert message.format(name) in capsys.readouterr().err


def test_the_best_is_one_that_holds(tmp_path, capsys, monkeypatch):
    """The text, the code and the file are those of the same plan; without one there is no file."""

    def fails(file, *args, **options):
        flops = 2.0 if file.plan == first or not some_hold else 1.0
        return Verification(1.0, 1.0, 1.0, 1.0, 1.0, flops, 9.0)

    path = tmp_path / "plan.json"
    command = (*SEARCH, "--verify", "5", "--top", "5", "--write", str(path), "--no-offload")
    assert main((*SEARCH, "--json", "--no-offload")) == 0
    plans = [ParallelPlan(**it["plan"]) for it in json.loads(capsys.readouterr().out)["plans"]]
    first, some_hold = plans[0], True
    monkeypatch.setattr("sharding.cli._search_command.verify", fails)
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Best: {short(plans[1])}." in out
    assert "plan 1 does not hold and is dropped" in out
    assert PlanFile.read(path).plan == plans[1]
    path.unlink()
    some_hold = False
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert "error: none of the first 5 plans holds" in err
    assert "Best:" not in out
    assert not path.exists()


def test_products_of_the_update_are_named(capsys):
    muon = (*SEARCH, "--optimizer", "muon", "--top", "1", "--keep", "stage=0", "--keep", "data=8")
    assert main(muon) == 0
    assert "The update of the best plan computes products of" in capsys.readouterr().out
    assert main((*SEARCH, "--optimizer", "adamw", "--top", "1")) == 0
    assert "The update of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "64M"), "--batch must look like 1024 or 4M-tokens, got '64M'"),
        (("--batch", "100-tokens"), "--batch 100-tokens is less than one sequence of 1,024"),
        (("--keep", "stage"), "--keep must look like stage=3, got 'stage'"),
        (("--keep", "rows=3"), "keep has 'rows'"),
        (("--memory", "0.1"), "no plan fits h100x8"),
        (("--model", "7e9"), "search needs a model whose layers are known"),
        (("--top", "0"), "--top must be above 0"),
        (("--target", "cpu:8"), "a search needs --memory, --bandwidth, --tflops, --link"),
        (("--target", "cpu:8", "--memory", "80"), "a search needs --bandwidth, --tflops, --link"),
        (("--target", "foox8", *FIGURES, "--verify", "1"), "foox8 can be searched, not compiled"),
        (("--batch", "1.5"), "--batch 1.5 is no whole number of sequences"),
        (("--keep", "stage=3", "--keep", "stage=2"), "--keep stage is given twice"),
        (("--keep", "weights=master"), "'master' is none of plain that were asked for"),
        (("--dtype", "float32"), "dtype must have 16 bits on h100x8, got float32"),
        (("--write", "no/such/folder/plan.json"), "cannot be written: there is no such folder"),
        (("--model", "broken:module"), "--model broken:module: No module named 'broken'"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, message, capsys):
    assert main((*SEARCH, *arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
