"""Every notebook runs from top to bottom, in this process, and draws a plot."""

import json
import pathlib
import time

import jax
import matplotlib
import pytest

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
pytestmark = pytest.mark.script


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*non-interactive:UserWarning")
def test_runs(path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    matplotlib.use("agg")
    names = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3
    start = time.process_time()
    with jax.numpy_rank_promotion("allow"):  # as readers have it
        for number, cell in enumerate(cells):
            source = "".join(line for line in cell["source"] if not line.startswith("%"))
            exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
    assert matplotlib.pyplot.get_fignums()
    assert time.process_time() - start < 60  # a reader waits less than a minute
    matplotlib.pyplot.close("all")
