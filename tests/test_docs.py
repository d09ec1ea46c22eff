"""The documentation is true: the Python blocks of its pages run, and the API pages are complete.

The blocks of a page run in order and share their names, as a reader would paste them.
"""

import ast
import importlib
import inspect
import pathlib
import pydoc
import re
import runpy
import textwrap

import jax
import pytest

import optax_ext
import sharding
import sharding.pipeline
import sharding.plan
import sharding.sync

from . import flax_nnx

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PARTS = ("start", "how_to", "understand", "reference")
PAGES = [ROOT / "README.md", DOCS / "index.md"]
PAGES += [page for part in PARTS for page in sorted(DOCS.glob(f"{part}/*.md"))]
# A second or less each; the others are left to CI, and to `make check` when they change.
QUICK = ("README", "factored_moments", "clusters", "random_keys")
CONSTRUCTORS = ("__init__", "__post_init__")
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def run_blocks(page):
    """Runs the Python blocks of a page; tracebacks name the page and its lines."""
    text = page.read_text()
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        before = "\n" * text[: block.start(1)].count("\n")
        exec(compile(before + block[1], page, "exec"), names)


def shows(text, printed):
    """What a page shows is what its blocks print; a table below "What they cost" too."""
    shown = re.findall(r"^```text\n(.*?)\n```$", text, re.M | re.S)
    tables = re.findall(r"\|---\|\n((?:\|.*\|\n)+)", text.partition("## What they cost")[2])
    lines = {line.rstrip() for line in printed.splitlines()}
    assert shown or tables
    for line in "\n".join([*shown, *tables[:2]]).splitlines():
        assert line.rstrip() in lines, line


# Pages that show what their blocks print.
SHOWN = ("schedules",)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem in QUICK else pytest.mark.script)
        for page in PAGES
        if BLOCK.search(page.read_text())
    ],
    ids=lambda page: page.stem,
)
def test_blocks_run(page, monkeypatch, tmp_path, capsys):
    text = page.read_text()
    if "import nnx" in text and flax_nnx.nnx is None:
        pytest.skip(flax_nnx.why)
    monkeypatch.chdir(tmp_path)  # where pages write checkpoints
    with jax.numpy_rank_promotion("allow"):  # biases broadcast, as readers write them
        run_blocks(page)
    if page.stem in SHOWN:
        shows(text, capsys.readouterr().out)


def test_the_api_pages_have_every_public_name():
    inside = {  # further pages that have names of a module
        sharding: ("local_steps", "loss", "matmuls", "plan", "pipeline", "recovery", "tiles"),
        sharding.plan: ("build", "search", "time"),
        optax_ext: ("low_precision",),
    }
    modules = (
        *(sharding.sync, sharding.plan, sharding.pipeline, sharding.recovery, sharding.remat),
        *(sharding.stored, sharding.tiles, sharding.matmuls),
    )
    for module in (optax_ext, sharding, *modules):
        names = (module.__name__.split(".")[-1], *inside.get(module, ()))
        lines = "".join((DOCS / "api" / f"{name}.rst").read_text() for name in names)
        documented = re.findall(r"^\.\. (?:auto)?(?:class|function|data):: (\w+)$", lines, re.M)
        exported = re.findall(r" as (\w+),?$", pathlib.Path(module.__file__).read_text(), re.M)
        known = {"pipeline", "plan", "recovery", "remat", "stored", "sync", "targets", "tiles"}
        known |= {"matmuls"}
        known |= {"__version__"}
        assert exported
        assert set(exported) - set(documented) <= known, module
        # What help, completion and a star show.
        public = {*exported, *({"plan"} if module is sharding else ())} - {"__version__"}
        star = {}
        exec(f"from {module.__name__} import *", star)
        assert set(dir(module)) == set(star) - {"__builtins__"} == public, module
        assert set(re.findall(r"\b\w+\b", pydoc.plain(pydoc.render_doc(module)))) >= public, module


def documented():
    """What the API pages describe, and its public methods."""
    for page in sorted(DOCS.glob("api/*.rst")):
        for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)$", page.read_text(), re.M):
            if kind == "currentmodule":
                module = importlib.import_module(name)
            if kind in ("autoclass", "autofunction"):
                found = getattr(module, name)
                yield found
                # Methods of Zero stand where they work.
                own = getattr(found, "__bases__", ()) if name == "Zero" else ()
                for name, value in [x for c in (found, *own) for x in vars(c).items()]:
                    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
                    if not name.startswith("_") and inspect.isfunction(value) and value.__doc__:
                        yield value


def test_docstrings_have_the_errors_that_are_raised_and_of_functions_arguments_and_an_example():
    docs = {x: inspect.getdoc(x) for x in documented()}
    examples = "".join(re.findall(r"(?:>>>|\.\.\.) .*", "\n".join(docs.values())))
    lacking = []
    for x, doc in docs.items():
        words = set(re.findall(r"\w+", doc))
        parts = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(x)))).body
        if inspect.isclass(x):
            parts = [part for part in parts[0].body if getattr(part, "name", "") in CONSTRUCTORS]
        raised = [n.exc for part in parts for n in ast.walk(part) if isinstance(n, ast.Raise)]
        raised = {getattr(getattr(error, "func", None), "id", "") for error in raised} - {""}
        if not re.search(r"[Ee]rrors(, are|\b.* are) those", doc):
            lacking += [(x, error) for error in raised - words]
        if "." not in x.__qualname__ and not inspect.isclass(x):
            lacking += [] if f"{x.__name__}(" in examples else [(x, "example")]
            if not re.search(r"[Aa]rguments.* are those|arguments it takes|same arguments", doc):
                lacking += [(x, arg) for arg in inspect.signature(x).parameters if arg not in words]
    assert len(docs) > 300
    assert not lacking, lacking


def messages():
    """The strings of the packages, f-strings with the strings that they name."""
    files = [path for name in ("optax_ext", "sharding") for path in (ROOT / name).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    named = {ast.unparse(node.targets[0]): node.value for node in nodes if type(node) is ast.Assign}

    def text(node):
        if isinstance(node, ast.FormattedValue):
            node = named.get(ast.unparse(node.value))
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return node.value if isinstance(getattr(node, "value", None), str) else "{}"

    return [text(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]


def test_the_messages_of_the_error_index_are_raised():
    """With the pages that the index links; pages are named in one form, in the changelog too."""
    raised, changelog = messages(), (ROOT / "CHANGELOG.md").read_text()
    listed = []
    for named in re.findall(r"\S*docs:\s*\S+", "\n".join([*raised, changelog])):
        page = re.fullmatch(r"`?\(docs: (\w+/\w+)\)[`.,;]?", named)
        assert page is not None, named
        assert list(DOCS.glob(f"{page[1]}.*")), named
    index = (DOCS / "reference/errors.md").read_text().partition("## Error messages")[2]
    rows = re.findall(r"^\| (`.*?`) \| (.*)$", index, re.M)
    assert len(rows) > 20
    for shown, advice in rows:
        texts = re.findall(r"`([^`]+)`", shown)
        found = [message for message in raised if all(text in message for text in texts)]
        links = re.findall(r"\]\((?:\.\./)?([^)#]+)\.md", advice)
        links = {link if "/" in link else f"reference/{link}" for link in links}
        assert found, shown
        assert set(re.findall(r"\(docs: (.*?)\)", "".join(found))) == links, shown
        listed += found
    unlisted = {m for m in raised if "(docs: " in m} - set(listed)
    assert not [m for m in unlisted if not any(m in message for message in listed)]


def test_the_page_of_versions_has_those_that_are_asked_for_and_tested():
    page = (DOCS / "reference/versions.md").read_text()
    for file, name in (("pyproject.toml", r'"{}>=([\d.]+)'), ("constraints.txt", "^{}==([\\d.]+)")):
        for package in ("jax", "optax", "flax", "orbax-checkpoint"):
            found = re.findall(name.format(package), (ROOT / file).read_text(), re.M)
            assert found
            assert all(f" {version} |" in page or f" {version}," in page for version in found)


def test_readme_states_what_its_picture_shows():
    shown = runpy.run_path(str(DOCS / "pictures.py"))["memory"]()
    for page in PAGES[:2]:
        alt = re.search(r"^(.*)memory.png", page.read_text(), re.M)[1]
        assert {f"{x + 1e-9:.3g}" for x in shown.values()} <= set(re.findall(r"[\d.]+\b", alt)), (
            page
        )


def test_each_technique_of_the_survey_is_shown_or_has_its_reason():
    """The last column names a test or results that exist; where it has none, "here" says why."""
    rows = re.findall(
        r"^\| (?!technique)(\w.*) \|$", (DOCS / "reference/survey.md").read_text(), re.M
    )
    rows = [row.split(" | ") for row in rows]
    assert len(rows) > 40
    for name, _, here, shown in rows:
        if shown == "-":
            assert re.match("does not apply: |not here: |host memory alone: ", here), name
            continue
        path, _, test = shown.strip("`").partition("::")
        assert (ROOT / path).exists(), (name, path)
        assert f"def {test}" in (ROOT / path).read_text() if test else True, (name, shown)
