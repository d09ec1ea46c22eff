"""Every notebook runs from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
QUICK = "quickstart"  # the others are slow


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem == QUICK else pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
# The kernel client's own event loop warns on some versions of Python.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_runs(path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=path.parent)
