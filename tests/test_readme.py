"""README.md and docs/ are true: their examples run, and CI runs the README's commands."""

import pathlib
import re

import pytest

from . import flax_nnx, readme

ROOT = pathlib.Path(__file__).parents[1]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, code in enumerate(readme.blocks(page))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code):
    if "import nnx" in code and flax_nnx.nnx is None:
        pytest.skip(flax_nnx.why)
    readme.run(code)


def test_ci_runs_every_command():
    """At ``--smoke`` size where it is long: then the command is the same up to its options."""
    commands = [
        line.split("  #")[0].strip()
        for block in readme.blocks(ROOT / "README.md", "sh")
        for line in block.splitlines()
    ]
    assert "make train" in commands
    ci = (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        if command.startswith("pip install") or command in ci:
            continue  # .ci/check_wheel installs the wheel
        script = re.search(r"\S+\.py", command)
        if script:
            assert script[0] in ci, command
        else:
            target = command.removeprefix("make ")
            recipe = re.search(rf"^{target}:.*\n((\t.*\n)+)", makefile, flags=re.MULTILINE)
            assert recipe, command
            scripts = re.findall(r"\S+\.py", recipe[1])
            assert command in ci or (scripts and all(s in ci for s in scripts)), command
