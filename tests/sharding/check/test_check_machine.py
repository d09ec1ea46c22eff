"""The check of a machine: what is right passes; what is planted is found and named. Its rates."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding as shd
from optax_ext import kernels
from optax_ext.low_precision import _first_use
from sharding.check import _check_wire, _measure_machine
from sharding.check._machine_report import MachineCheck, NotHere, run_checks
from sharding.cli import main
from sharding.plan import kind_of
from sharding.plan.machine._collective_time import OPERATIONS, NodeGroup, collective_seconds
from sharding.plan.machine._measured_rates import MeasuredRates, WireTime
from sharding.plan.model._layer_costs import COMPILED, Roofline


def test_what_is_right_passes():
    """A check of each subject."""
    seen = []
    names = ("codes: linear 8", "form 'ring'", "permutation", "sync.top_k", "in memory of peers")
    for name in names:
        report = shd.check_machine(match=name, progress=seen.append)
        assert report.ok
        assert "nothing differs" in str(report)
    assert [found.status for found in seen] == ["ok"] * len(names)
    # A text to publish: no names of hosts or people.
    about = {"optax-ext", "jax", "jaxlib", "Python", "platform", "devices", "torus", "processes"}
    assert report.machine.keys() - about <= {"XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS"}
    assert json.loads(json.dumps(report.to_dict()))["machine"]["jax"] == jax.__version__


@pytest.mark.slow
def test_all_of_it_passes(tmp_path):
    report = shd.check_machine(folder=tmp_path)
    assert report.ok
    assert not [found for found in report.outcomes if found.status == "not here"]
    assert not list(tmp_path.iterdir())


def wrong_codes(*args, **kwargs):
    """As a compiler made them on the first H100: every code is the last one."""
    found = quantize(*args, **kwargs)
    return type(found)(**(vars(found) | {"codes": jnp.full_like(found.codes, 255)}))


quantize = _first_use.quantize
psum_scatter = _check_wire.psum_scatter


@pytest.mark.parametrize(
    ("module", "name", "wrong", "match"),
    [
        (_first_use, "quantize", wrong_codes, "codes: dynamic 8"),
        (_check_wire, "psum_scatter", lambda *a: 2 * psum_scatter(*a), "form 'native'"),
        (_check_wire, "dequantize", lambda c, *a: jnp.zeros(c.shape), "gather of int8"),
    ],
)
def test_what_is_planted_is_found(monkeypatch, module, name, wrong, match):
    monkeypatch.setattr(module, name, wrong)
    report = shd.check_machine(match=match)
    assert [found.status for found in report.outcomes] == ["differs"]
    assert not report.ok
    assert "It affects" in str(report)


def test_a_form_that_is_slower_than_another_is_named(monkeypatch):
    seconds = {None: 3.1e-3, "native": 3.1e-3, "ring": 1e-3, "all_to_all": 2e-3}
    monkeypatch.setattr(_check_wire, "_seconds_of_scatter", lambda form, x: seconds[form])
    report = shd.check_machine(match="time of a step's")
    assert [found.status for found in report.outcomes] == ["slow"]
    assert report.ok
    assert "it takes 3.1 ms, form 'ring' 1 ms" in str(report)
    seconds["ring"] = 1.1e-3
    assert shd.check_machine(match="time of a step's").outcomes[0].status == "ok"


def wrong_kernel(kernel, default, *arguments):
    """A kernel that stores zeros for codes, run in the place of one for TPUs."""
    out, state = default(*arguments)
    return out, jax.tree.map(lambda x: x * (x.dtype.itemsize > 1), state)


def test_a_planted_kernel_is_found(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    match = "kernel of 8-bit"
    assert [found.status for found in shd.check_machine(match=match).outcomes] == ["ok"]
    monkeypatch.setattr(kernels, "for_tpus", wrong_kernel)
    assert [found.status for found in shd.check_machine(match=match).outcomes] == ["differs"]


def test_the_outcomes_of_checks():
    def nothing():
        raise NotHere("there is none")

    def breaks():
        raise RuntimeError("first line\nsecond")

    runs = [lambda: 1.0, lambda: 1.01, lambda: np.nan, nothing, breaks]
    found = run_checks([MachineCheck(str(i), run, "a", "b") for i, run in enumerate(runs)])
    assert [x.status for x in found] == ["ok", "differs", "differs", "not here", "failed"]
    assert found[3].reason == "there is none"
    assert found[4].reason == "RuntimeError: first line"


def test_the_command(capsys, monkeypatch):
    assert main(["check", "--match", "permutation", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["outcomes"])) == (True, 1)
    monkeypatch.setattr(_check_wire.np, "roll", lambda x, *_: x)
    assert main(["check", "--match", "permutation"]) == 1
    assert "differs" in capsys.readouterr().out
    assert main(["check", "--match", "nonsense"]) == 2
    assert "no check has 'nonsense' in its name" in capsys.readouterr().err


def rates_of(target, axis, group, link, start):
    """As a machine has them whose figures are known."""
    unit = dataclasses.replace(kind_of("h100"), link=1.0)
    wire = []
    for operation in ("all-gather", "reduce-scatter", "permute"):
        for nbytes in (4096.0, 1e6, 1e8):
            x = collective_seconds(operation, nbytes, group, unit, ideal=True)
            wire.append(WireTime(axis, operation, nbytes, start + x / link))
    products = {
        dtype: [(n, 2 * n**3 / flops + 3 * n**2 * item / 2e12 + 2e-6) for n in (128, 1024, 4096)]
        for dtype, flops, item in (("bfloat16", 6e14, 2), ("float32", 3e14, 4))
    }
    return MeasuredRates(
        *(target, {"jax": "0"}, 8e10, 2e-6, [(1e6, 1e-6), (1e9, 1e9 / 3e12)], 1e12),
        *(products, wire, 5e10),
        {"bfloat16": [(x, y, x / 1e14 + y / 5e11 + 2e-6) for x, y in ((1e9, 1e7), (1e11, 1e8))]},
    )


@pytest.mark.parametrize(
    ("target", "axis", "group"),
    [("h100x8", "data", NodeGroup(8, 8)), ("newx4", "data", NodeGroup(4, 4))],
)
def test_measured_rates_are_figures_for_plans(tmp_path, target, axis, group):
    """Of a known kind, and of one without a data sheet; as the file gives them back."""
    rates = rates_of(target, axis, group, 3e11, 1e-5)
    rates.write(tmp_path / "machine.json")
    for dtype, flops in (("float32", 3e14), ("", 6e14)):
        kind = shd.DeviceKind.read(tmp_path / "machine.json", dtype)
        found = kind.flops, kind.bandwidth, kind.link, kind.host_link, kind.reached.start
        np.testing.assert_allclose(found, (flops, 3e12, 3e11, 5e10, 1e-5), rtol=1e-6)
    # What a plan times is what was measured.
    for row in rates.wire:
        again = collective_seconds(row.operation, row.nbytes, group, kind)
        np.testing.assert_allclose(again, row.seconds, rtol=1e-6)
    unit = Roofline(kind, COMPILED)
    for n, seconds in rates.products["bfloat16"]:
        np.testing.assert_allclose(unit.matmul(n, n, n).seconds, seconds, rtol=1e-6)
    np.testing.assert_allclose((unit.convolutions, unit.images), (1e14, 5e11), rtol=1e-6)
    older = json.loads((tmp_path / "machine.json").read_text())
    del older["convolutions"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    unit = Roofline(shd.DeviceKind.read(tmp_path / "older.json"), COMPILED)
    assert (unit.convolutions, unit.images) == (unit.flops, unit.operands)
    with pytest.raises(ValueError, match="a dtype of measured products must be one of"):
        shd.DeviceKind.read(tmp_path / "machine.json", "int8")


def test_the_command_measures_and_plans(tmp_path, capsys, monkeypatch):
    for name, values in (
        *(("_PRODUCTS", (64,)), ("_CHANNELS", (8,))),
        *(("_PASSES", (2**16,)), ("_WIRE", (2**12,))),
    ):
        monkeypatch.setattr(_measure_machine, name, values)
    monkeypatch.setattr(_measure_machine, "_LEAST", 0.0)
    monkeypatch.setattr(_measure_machine, "_elementwise", lambda *_: 1e9)
    file = str(tmp_path / "machine.json")
    assert main(["check", "--measure", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "machine.json").read_text())
    assert found["target"] == f"cpu:{jax.device_count()}"
    assert {row["operation"] for row in found["wire"]} == {*OPERATIONS}
    assert all(row["seconds"] > 0 for row in found["wire"])
    # Operations and bytes of one of four images of 32 x 32 by 8 filters of 3 x 3.
    assert found["convolutions"]["float32"][0][:2] == [4 * 1024 * 8 * 2 * 72, 4 * (2 * 32768 + 576)]
    given = ["--model", "gpt2-small", "--machine", file, "--target"]
    assert main(["plan", *given, found["target"]]) == 0
    assert "the measured figures of a cpu" in capsys.readouterr().out
    assert main(["search", *given, found["target"], "--batch", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["device"]["source"].startswith("measured")
    assert main(["plan", *given, "h100x8"]) == 2
    assert "was measured on cpu:" in capsys.readouterr().err
    (tmp_path / "machine.json").write_text("{}")
    assert main(["plan", *given, "cpu:8"]) == 2
    assert "is no file that optax-ext check --measure wrote" in capsys.readouterr().err
