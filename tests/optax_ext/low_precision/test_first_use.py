"""The first use of a format: on CPUs nothing, elsewhere known numbers, once."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import kernels
from optax_ext.low_precision import _first_use

FORMATS = {
    "dynamic": optax_ext.Dynamic(8),
    "4 bits": optax_ext.Linear(4),
    "rows and columns": optax_ext.Dynamic(4, rank1=True),
    "float8": optax_ext.Float8(),
    "bfloat16": optax_ext.BFloat16(),
}


@pytest.fixture
def accelerator(monkeypatch, tmp_path):
    """As if the default backend were one, with a folder of its compilation cache."""
    _first_use._check_once.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_first_use, "_file", lambda: tmp_path / "folder" / "codes.json")
    yield tmp_path / "folder" / "codes.json"
    _first_use._check_once.cache_clear()


def last_codes(*args, **kwargs):
    """As a compiler made them: every code is the last one."""
    found = quantize(*args, **kwargs)
    return type(found)(**(vars(found) | {"codes": jnp.full_like(found.codes, 255)}))


quantize = _first_use.quantize


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_right_codes_are_remembered(accelerator, monkeypatch, name, rounding):
    _first_use.check_codes(FORMATS[name], rounding)
    assert str(FORMATS[name]) in accelerator.read_text()
    _first_use._check_once.cache_clear()  # another process
    monkeypatch.setattr(_first_use, "quantize", None)
    _first_use.check_codes(FORMATS[name], rounding)


def test_codes_of_another_compiler_are_checked_anew(accelerator, monkeypatch):
    """A new libtpu, or plugin of CUDA, comes without a new jaxlib."""
    device = jax.local_devices()[0]
    seen = []
    monkeypatch.setattr(_first_use, "_errors", lambda *args: seen.append(args) or [0.0])
    for version in ("PJRT C API\ncuda 12", "PJRT C API\ncuda 13", "PJRT C API\ncuda 12"):
        client = types.SimpleNamespace(platform_version=version)
        kind = types.SimpleNamespace(client=client, device_kind=device.device_kind)
        monkeypatch.setattr(jax, "local_devices", lambda kind=kind: [kind])
        _first_use._check_once.cache_clear()
        _first_use.check_codes(FORMATS["dynamic"], "nearest")
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["dynamic", "4 bits", "float8"])
def test_wrong_codes_raise_before_a_state_is_made(accelerator, monkeypatch, name):
    """Also where init is traced; and again in the next call."""
    monkeypatch.setattr(_first_use, "quantize", last_codes)
    tx = optax_ext.low_precision_state(optax.adam(1e-3), FORMATS[name])
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(RuntimeError, match=r"differ by .* Use another format or float32 state"):
            init({"w": jnp.ones((256, 256))})
    assert not accelerator.exists()


def test_a_file_that_cannot_be_used_is_no_error(accelerator, monkeypatch):
    accelerator.parent.write_text("a file in the place of the folder")
    _first_use.check_codes(FORMATS["dynamic"], "nearest")


def test_nothing_is_checked_on_cpus(monkeypatch):
    _first_use._check_once.cache_clear()
    monkeypatch.setattr(_first_use, "quantize", last_codes)
    optax_ext.adamw8bit(1e-3).init({"w": jnp.ones((256, 256))})


def wrong_kernel(kernel, default, *arguments):
    """In the place of a kernel for TPUs: codes are zeros."""
    out, state = default(*arguments)
    return out, jax.tree.map(lambda x: x * (x.dtype.itemsize > 1), state)


def test_a_wrong_kernel_gives_way_to_the_form_of_xla(accelerator, monkeypatch):
    """A right one is remembered; of a wrong one a warning, and the state of XLA's form."""
    tx, params = optax_ext.adamw8bit(1e-3), {"w": jnp.ones((70, 300))}
    _, want = jax.jit(tx.update)(params, tx.init(params), params)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(_first_use, "_RIGHT", {})
    tx.init(params)
    assert "kernels of Dynamic(bits=8" in accelerator.read_text()
    monkeypatch.setattr(_first_use, "_RIGHT", {})
    monkeypatch.setattr(kernels, "for_tpus", wrong_kernel)
    tx.init(params)  # remembered, as of another process
    accelerator.unlink()
    monkeypatch.setattr(_first_use, "_RIGHT", {})
    with pytest.warns(UserWarning, match="XLA's form takes their place"):
        state = tx.init(params)
    _, found = jax.jit(tx.update)(params, state, params)
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_a_kernel_that_does_not_compile_gives_way(accelerator, monkeypatch):
    def broken(*args):
        raise RuntimeError("Mosaic failed to compile\nand why")

    tx, params = optax_ext.adamw8bit(1e-3), {"w": jnp.ones((70, 300))}
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(_first_use, "_RIGHT", {})
    monkeypatch.setattr(kernels, "for_tpus", broken)
    with pytest.warns(UserWarning, match=r"failed \(Mosaic failed to compile\): XLA's form"):
        state = tx.init(params)
    tx.update(params, state, params)
    assert "kernels of" not in accelerator.read_text()


@pytest.mark.parametrize("folder", [None, "gs://bucket/cache", "/cache"])
def test_the_file_is_in_the_folder_of_the_compilation_cache(monkeypatch, folder):
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_compilation_cache_dir=folder))
    found = _first_use._file()
    assert str(found) == ("/cache/optax_ext_codes.json" if folder == "/cache" else "None")
