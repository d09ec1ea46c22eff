"""The documentation is true: the Python blocks of its pages run, and the API pages are complete.

The blocks of a page run in order and share their names, as a reader would paste them.
"""

import pathlib
import re

import jax
import pytest

import optax_ext
import sharding
import sharding.pipeline
import sharding.plan
import sharding.sync

from . import flax_nnx

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = [DOCS / "index.md", *sorted(DOCS.glob("guides/*.md")), *sorted(DOCS.glob("recipes/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def run_blocks(page):
    """Runs the Python blocks of a page; tracebacks name the page and its lines."""
    text = page.read_text()
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        before = "\n" * text[: block.start(1)].count("\n")
        exec(compile(before + block[1], page, "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_blocks_run(page, monkeypatch, tmp_path):
    if "import nnx" in page.read_text() and flax_nnx.nnx is None:
        pytest.skip(flax_nnx.why)
    monkeypatch.chdir(tmp_path)  # where pages write checkpoints
    with jax.numpy_rank_promotion("allow"):  # biases broadcast, as readers write them
        run_blocks(page)


def test_the_guide_to_pipelines_shows_what_it_prints(capsys):
    page = DOCS / "guides" / "pipelines.md"
    with jax.numpy_rank_promotion("allow"):
        run_blocks(page)
    text = page.read_text()
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    shown = re.findall(r"^```text\n(.*?)\n```$", text, re.M | re.S)
    tables = re.findall(r"\|---\|\n((?:\|.*\|\n)+)", text[text.index("## What they cost") :])
    assert len(shown) >= 3
    assert len(tables) >= 2
    for line in "\n".join([*shown, *tables[:2]]).splitlines():
        # Which results of branches are copied depends on the compiler.
        assert line in printed or line.startswith("  copied in a tick"), line


def test_the_guide_to_peer_checkpoints_shows_what_it_prints(monkeypatch, tmp_path, capsys):
    page = DOCS / "guides" / "peer_checkpoints.md"
    monkeypatch.chdir(tmp_path)
    run_blocks(page)
    (shown,) = re.findall(r"^```text\n(.*?)\n```$", page.read_text(), re.M | re.S)
    assert shown in capsys.readouterr().out


def test_a_broken_block_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as error:
        run_blocks(page)
    assert error.traceback[-1].lineno == 5  # counted from 0


@pytest.mark.parametrize(
    ("module", "page"),
    [
        (optax_ext, "optax_ext"),
        (sharding, "sharding"),
        (sharding.sync, "sync"),
        (sharding.plan, "plan"),
        (sharding.pipeline, "pipeline"),
        (sharding.recovery, "recovery"),
        (sharding.remat, "remat"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_api_pages_have_every_public_name(module, page):
    lines = (DOCS / "api" / f"{page}.rst").read_text()
    if module is sharding:
        lines += (DOCS / "api" / "plan.rst").read_text()
        lines += (DOCS / "api" / "pipeline.rst").read_text()
        lines += (DOCS / "api" / "recovery.rst").read_text()
    documented = set(re.findall(r"^\.\. (?:auto)?(?:class|function|data):: (\w+)$", lines, re.M))
    exported = set(re.findall(r" as (\w+)$", pathlib.Path(module.__file__).read_text(), re.M))
    modules = {"pipeline", "recovery", "remat", "sync", "targets"}
    assert exported - documented <= {"__version__", *modules}
