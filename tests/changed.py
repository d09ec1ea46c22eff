"""Runs the tests of what differs from main: python tests/changed.py [options of pytest]

Which tests these are:
- of a module: its doctests; in ``optax_ext`` the test files that are named for it, and the
  contract; in ``sharding`` the test files of its layer that are named for it; where there are none,
  the folder of its layer; and what ``TESTS`` adds;
- of a test file, an example, a page or a notebook: itself, with its ``script`` tests;
- of a helper in ``tests/``: the test files below its folder that import it;
- of another Python file: the test files that import it or name it.

Tests marked ``slow`` are left out. A clean checkout of ``main`` is compared with the commit before.
``make test-all`` runs all tests.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("optax_ext", "sharding")
# Further tests by the beginning of a path.
TESTS = {
    "optax_ext/": ["tests/contract"],
    "optax_ext/equations.py": ["tests/sharding/step"],
    "optax_ext/user_line.py": ["tests/sharding/step/test_gathered_layers.py"],
    "sharding/__init__.py": ["tests/sharding/test_zero.py"],
    "sharding/__main__.py": ["tests/sharding/cli"],
    "sharding/_jaxprs.py": ["tests/sharding/matmuls", "tests/sharding/step"],
    "sharding/_local_steps.py": ["tests/sharding/test_local_steps.py"],
    "sharding/_own_gradient.py": ["tests/sharding/remat"],
    "sharding/_traced_types.py": ["tests/sharding/remat"],
    "sharding/_types.py": ["tests/sharding/test_zero.py"],
    "sharding/_user_line.py": ["tests/sharding/step/test_gathered_layers.py"],
    "sharding/check/": ["tests/sharding/check"],
    "sharding/collectives/": ["tests/sharding/sync"],
    "sharding/placement/": ["tests/sharding/test_zero.py"],
    "sharding/sync/": ["tests/sharding/sync"],
    "sharding/tiles/": ["tests/sharding/tiles"],
    "examples/_": ["tests/test_train_lm.py"],
    "launch/": ["tests/launch"],
    "README.md": ["tests/test_readme.py"],
    "docs/": ["tests/test_readme.py"],
    "CONTRIBUTING.md": ["tests/test_readme.py"],
    ".ci/": ["tests/test_readme.py"],
    "Makefile": ["tests/test_readme.py"],
}


def git(*arguments):
    """The lines that git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed():
    """The files that differ from the last commit shared with main, committed or not."""
    base = git("merge-base", "HEAD", "main")[0]
    if [base] == git("rev-parse", "HEAD"):
        base = "HEAD~1"
    found = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return [path for path in found if (ROOT / path).exists()]


def tests_of_module(file, test_files):
    """The test files that are named for a module of the packages, or the folder of its layer."""
    layer = pathlib.PurePath("tests", *file.parts[: 2 if len(file.parts) > 2 else 1])
    name = file.stem.strip("_")
    if file.parts[0] == "optax_ext":  # whose small modules share files; one is used by `sharding`
        pattern, folder = rf"/test_(\w+_)?{name}(_\w+)?\.py$", "tests"
    else:
        pattern, folder = rf"/test_{name}\.py$", layer
    found = {p for p in test_files if re.search(pattern, p) and p.startswith(f"{folder}/")}
    return found or ({str(layer)} if str(layer) != "tests/sharding" else set())


def tests_of(path, test_files):
    """The tests of one file that changed, of those in ``test_files`` (paths to their texts).

    Returns:
      What pytest runs by its default marks; and what it runs with ``script`` tests.
    """
    file = pathlib.PurePath(path)

    def containing(pattern, folder="tests"):
        return {
            p
            for p, text in test_files.items()
            if p.startswith(f"{folder}/") and re.search(pattern, text, re.MULTILINE)
        }

    listed = {test for prefix, tests in TESTS.items() if path.startswith(prefix) for test in tests}
    if path.startswith(PACKAGES) and file.suffix == ".py":
        quick = tests_of_module(file, test_files) | listed | {path, "tests/test_layers.py"}
        return quick, set()
    if path in test_files:
        return set(), {path}
    if path.startswith("tests/"):
        imports = rf"^\s*(from|import) .*\b{file.stem}\b"
        return containing(imports, file.parent) if file.suffix == ".py" else set(), set()
    if file.suffix == ".md" and path.startswith(("README", "docs/")):
        page = f"tests/test_docs.py::test_blocks_run[{file.stem}]"
        return listed, {page} if "```python" in (ROOT / path).read_text() else set()
    if file.suffix == ".ipynb":
        return set(), {f"tests/test_notebooks.py::test_runs[{file.stem}]"}
    if file.suffix == ".py":
        uses = rf"^\s*(from|import) {file.stem}\b|\b{file.parent.name}/{file.name}\b"
        if path.startswith("examples/"):
            uses += rf"|\"{file.stem}(\.py)?\""
        return set(), listed | containing(uses)
    return listed, set()


def main(options):
    """Runs pytest; its exit code, or 0 if nothing changed."""
    test_files = {str(p.relative_to(ROOT)): p.read_text() for p in ROOT.glob("tests/**/test_*.py")}
    found = [tests_of(path, test_files) for path in changed()]
    scripts = set().union(*(scripts for _, scripts in found))
    quick = set().union(*(quick for quick, _ in found)) - scripts
    print("\n".join(sorted(quick | scripts)) or "No file with tests differs from main.")
    code = 0
    for tests, marks in (quick, "not slow and not script"), (scripts, "not slow"):
        # Doctests last: they import their module anew, and pickles find its classes twice.
        tests = sorted(tests, key=lambda test: (test.startswith(PACKAGES), test))
        command = [sys.executable, "-m", "pytest", "-m", marks, *options, *tests]
        code = code or (subprocess.run(command, cwd=ROOT).returncode if tests else 0)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
