"""The check of a machine: what is right passes; what is planted is found and named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding as shd
from optax_ext import kernels
from optax_ext.low_precision import _first_use
from sharding.check import _check_wire
from sharding.check._machine_report import MachineCheck, NotHere, run_checks
from sharding.cli import main


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
