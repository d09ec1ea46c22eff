"""The strict rig of every test: virtual CPU devices, no silent rank promotion, exact float64.

Warnings are errors too; that is said in pyproject.toml. Compiled programs are kept in .jax_cache.
"""

import collections
import gc
import importlib.util
import os
import pathlib
import re
from importlib import metadata

# Before jax starts a backend. With TEST_PLATFORMS=cuda,cpu they run on a GPU: `make test-gpu`.
os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_PLATFORMS", "cpu")
# Tests compile much and compute little: XLA's own passes run, LLVM's costly ones do not. Its older
# emitters compile the same programs in a third of the time; jaxlib 0.10 is the last that has them.
# The compiler for TPUs ends the process over flags that it does not know.
# Each flag once: workers of pytest-xdist inherit them, and the cache of programs reads them.
os.environ["XLA_FLAGS"] = " ".join(
    dict.fromkeys(
        os.environ.get("XLA_FLAGS", "").split()
        + [
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",  # small programs are not worth 32 parts
        ]
        * (os.environ["JAX_PLATFORMS"] == "cpu")
        + ["--xla_cpu_use_fusion_emitters=false"]
        * (
            os.environ["JAX_PLATFORMS"] == "cpu"
            and metadata.version("jaxlib").startswith("0.10.")
            and not os.environ.get("SHARDING_COMPILERS")
            and not importlib.util.find_spec("libtpu")
        )
    )
)

# Programs are compiled once, and read by later runs and by the processes that tests start.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# One frame of Python for each operation of a program, not the whole stack: XLA copies them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")
# Threads of XLA's pool. By default there is one a device; where each waits in a collective for the
# others, what it waits for may have none left to run in, and the process aborts after 40 seconds.
os.environ.setdefault("NPROC", "64")

import jax
import pytest

from .multiprocess.processes import Processes

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
if os.environ["JAX_PLATFORMS"] != "cpu":  # whose products of float32 have fewer bits by default
    jax.config.update("jax_default_matmul_precision", "highest")
# One program after the other: on few cores, devices of a second one take the threads that a
# collective of the first one waits for.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# Traces are millions of small objects, few of them garbage: searching for it took 5 % of the time.
gc.set_threshold(50_000, 50, 100)

FLAGS = os.environ["XLA_FLAGS"]
CACHE_BYTES = 2 * 1024**3  # several versions of every program


@pytest.fixture
def x64():
    """Float64 is float64 in a test that asks for this."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def processes(tmp_path):
    """Starts processes, which end with the test."""
    processes = Processes(tmp_path)
    yield processes
    processes.kill()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """What scripts are trained on."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    return path


@pytest.fixture
def scopes_in_cache_key():
    """For tests of the names in compiled programs: the cache ignores names, so that it could answer
    with the program of an earlier version, whose scopes had other names.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def pytest_sessionstart(session):
    """Removes the oldest programs of a cache that has grown over its limit.

    JAX's own limit takes a lock and lists the whole folder for every program.
    """
    folder = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if hasattr(session.config, "workerinput") or not folder.is_dir():
        return
    programs = [(path.stat(), path) for path in folder.glob("*-cache")]
    size = 0
    for stat, path in sorted(programs, key=lambda pair: pair[0].st_mtime, reverse=True):
        size += stat.st_size
        if size > CACHE_BYTES:
            path.unlink(missing_ok=True)  # another run may have removed it


def pytest_configure(config):
    """A test that the command line names runs, whatever its marks."""
    marked = any(str(word).startswith("-m") for word in config.invocation_params.args)
    if not marked and any("::" in str(name) for name in config.args):
        config.option.markexpr = ""


def pytest_collection_modifyitems(config, items):
    """Scripts run first, so that no worker waits for one at the end.

    Doctests that import ``flax.nnx`` run where it imports, as the tests of it do.
    """
    # Processes that tests start read them; those of a test decide its last bits.
    assert os.environ["XLA_FLAGS"] == FLAGS, "a module that was collected changed XLA_FLAGS"
    items.sort(key=lambda item: item.get_closest_marker("script") is None)
    for item in items:
        doctest = getattr(item, "dtest", None)
        if doctest is not None and "import nnx" in doctest.docstring:
            from .flax_nnx import needs_nnx

            item.add_marker(needs_nnx)


def pytest_collection_finish():
    """What is imported by now lives as long as the process: it is not searched for garbage."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """One line on what was skipped, and why."""
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        why = re.sub(r"^Skipped: |'\S+' (?=needs)", "", why)
        reasons[re.split(r"[,:;.](?: |$)", why)[0]] += 1
    if reasons:
        told = "; ".join(f"{count} {why}" for why, count in reasons.most_common())
        terminalreporter.write_line(f"{reasons.total()} skipped: {told}")
