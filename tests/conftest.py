"""The strict rig of every test: virtual CPU devices, no silent rank promotion, exact float64.

Warnings are errors too; that is said in pyproject.toml.
"""

import os

# Before jax starts a backend; a machine's accelerators have tests of their own.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and compute little: XLA's own passes run, LLVM's costly ones do not.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
).strip()

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Float64 is float64 in a test that asks for this."""
    with jax.enable_x64(True):
        yield


def pytest_collection_modifyitems(items):
    """Doctests that import ``flax.nnx`` run where it imports, as the tests of it do."""
    try:
        import flax.nnx  # noqa: F401
    except Exception as error:
        skip = pytest.mark.skip(reason=f"flax.nnx does not import: {error}")
        for item in items:
            doctest = getattr(item, "dtest", None)
            if doctest is not None and "import nnx" in doctest.docstring:
                item.add_marker(skip)
