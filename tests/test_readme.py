"""README.md, CONTRIBUTING.md and docs/ are true: links resolve, CI or a test runs each command.

``test_docs.py`` runs their examples.
"""

import pathlib
import re

from . import readme
from .examples.test_examples import NAMES
from .test_layers import LAYERS

ROOT = pathlib.Path(__file__).resolve().parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"


def pages(folder):
    """The Markdown files of a folder, without those that the build of the documentation copies."""
    copied = [ROOT / "docs" / n for n in ("_build", "benchmarks", "notebooks", "CHANGELOG.md")]
    found = sorted((ROOT / folder).rglob("*.md"))
    return [page for page in found if not any(page.is_relative_to(path) for path in copied)]


DOCS = pages("docs")
PAGES = [README, CONTRIBUTING, ROOT / "CHANGELOG.md", *DOCS]
PAGES += [page for folder in ("benchmarks", "launch") for page in pages(folder)]


def links(page):
    """The targets of a page's links and pictures that are files, without anchors."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link.split("#")[0] for link in found if not re.match(r"[a-z]+:|#", link)]


def test_every_relative_link_exists():
    # As on GitHub and in the documentation, a leading slash is the repository.
    targets = {
        (page, ROOT / link[1:] if link[0] == "/" else page.parent / link)
        for page in PAGES
        for link in links(page)
    }
    assert len(targets) > 100
    assert not [(page, path) for page, path in targets if not path.exists()]


def test_every_path_in_contributing_exists():
    names = re.findall(r"`([\w.*/-]+)`", CONTRIBUTING.read_text())
    found = [name for name in names if "/" in name or name.endswith(".py")]
    assert len(found) > 40
    assert not [path for path in found if not (ROOT / path).exists()]


def test_the_layers_in_contributing_are_those_of_the_layer_test():
    section = CONTRIBUTING.read_text().split("## The layers")[1].split("##")[0]
    found = re.findall(r"^\| `sharding/([\w/]+)", section, re.M)
    found = [path.strip("/").replace("/", ".") for path in found]
    assert found == [layer for layer in LAYERS if layer != "__main__"]


# Commands that need a cluster, or install the package: .ci/check_wheel installs the wheel.
NOT_IN_CI = ("pip install", "sbatch", "srun", "mpirun", "kubectl", "gcloud")


def commands(page):
    """The lines of a page's shell examples, without comments."""
    lines = (line for block in readme.blocks(page, "sh") for line in block.splitlines())
    return [line for line in (line.split("  #")[0].strip() for line in lines) if line]


def options(text):
    return set(re.findall(r"--[a-z][a-z-]*", text))


def test_ci_or_a_test_runs_every_command():
    """At ``--smoke`` size where it is long: then the command is the same up to its options."""
    found = [command for page in (README, *DOCS) for command in commands(page)]
    assert "make train" in found
    ci, more = ((ROOT / ".ci" / name).read_text() for name in ("run", "commands.py"))
    makefile = (ROOT / "Makefile").read_text()
    examples, cli, check = (
        "".join(path.read_text() for path in (ROOT / "tests" / folder).glob("test_*.py"))
        for folder in ("examples", "sharding/cli", "sharding/check")
    )

    def runs(script):
        """Every benchmark is run by .ci/commands.py; examples by their tests."""
        return (
            script.startswith("benchmarks/") or script in more or pathlib.Path(script).stem in NAMES
        )

    for command in found:
        if command.startswith(NOT_IN_CI) or command in ci + more:
            continue
        script = re.search(r"\S+\.py", command)
        planner = re.search(r"optax-ext (plan|audit|search|check)", command)
        if script:
            assert (ROOT / script[0]).exists(), command
            assert runs(script[0]), command
            assert options(command) <= options(more + examples) | {"--help"}, command
        elif planner:  # with other values; options that take minutes are in the tests
            assert planner[0] in more, command
            assert options(command) <= options(more + cli + check), command
        else:
            target = command.removeprefix("make ")
            recipe = re.search(rf"^{target}:.*\n((\t.*\n)+)", makefile, flags=re.MULTILINE)
            assert recipe, command
            assert command in ci or all(map(runs, re.findall(r"\S+\.py", recipe[1]))), command
