"""Training over many processes is training in one, with as many devices."""

import json

import numpy as np
import pytest

from ..sharding import model
from . import worker
from .processes import ROOT, output_of

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


# Few, for each process compiles each. CAME and Adafactor sum over shards in their update.
@pytest.mark.parametrize(
    ("count", "cases"),
    [
        (2, ["adamw-3-float64-tiny", "adamw-2-float64-tiny-spanned"]),
        pytest.param(2, ["came-2-float64", "adamw-3-float64"], marks=pytest.mark.script),
        pytest.param(
            4, ["adafactor-3-float32", "adamw-1-float64-spanned"], marks=pytest.mark.script
        ),
    ],
    ids=["tiny", "two processes", "four processes"],
)
def test_equals_one_process(tmp_path, processes, count, cases):
    module = worker.__name__[worker.__name__.index("tests.") :]
    command = ("-m", module, tmp_path, *cases)
    for process in processes.start_python(count, *command, PYTHONPATH=str(ROOT)):
        output_of(process)
    for case in cases:
        results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{case}-?.json"))]
        assert len(results) == count
        losses, compiled, expected, _ = worker.train(case)
        for result in results:
            assert result["losses"] == results[0]["losses"]
            assert result["plan"] == results[0]["plan"]
            assert result["compiled"] == compiled == 0
        tolerance = TOLERANCE[case.split("-")[2]]
        np.testing.assert_allclose(results[0]["losses"], losses, rtol=tolerance)
        with np.load(tmp_path / f"{case}.npz") as state:
            distance, leaf = model.worst_leaf([state[name] for name in state], expected)
        assert distance < tolerance, leaf
