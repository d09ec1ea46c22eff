"""Training over many processes is training in one, with as many devices."""

import functools
import json

import numpy as np
import pytest

from ..sharding import model
from . import worker
from .processes import ROOT, Processes, finish

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}

# Few, for each process compiles each. CAME and Adafactor sum over shards in their update.
CASES = {2: ("came-2-float64", "adamw-3-float64"), 4: ("adafactor-3-float32",)}


@functools.cache
def in_one_process(case):
    losses, compiled, state = worker.train(case)
    assert compiled == 0
    return losses, state


@functools.cache
def run(count, folder):
    """Trains all cases of ``count`` processes, which write to the folder."""
    processes = Processes(folder)
    module = worker.__name__[worker.__name__.index("tests.") :]
    try:
        for process in processes.start_python(
            count, "-m", module, folder, *CASES[count], PYTHONPATH=str(ROOT)
        ):
            code, output = finish(process)
            assert code == 0, output
    finally:
        processes.kill()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {count: tmp_path_factory.mktemp(f"processes-{count}") for count in CASES}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("count", "case"), [(count, case) for count, cases in CASES.items() for case in cases]
)
def test_equals_one_process(folders, count, case):
    folder = folders[count]
    run(count, folder)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case}-*.json"))]
    assert len(results) == count
    losses, expected = in_one_process(case)
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["compiled"] == 0
    tolerance = TOLERANCE[case.split("-")[2]]
    np.testing.assert_allclose(results[0]["losses"], losses, rtol=tolerance)
    with np.load(folder / f"{case}.npz") as state:
        distance, leaf = model.worst_leaf([state[name] for name in state], expected)
    assert distance < tolerance, leaf
