"""Runs the tests of what differs from main: python tests/changed.py [options of pytest]

Which tests these are:
- of a module: its doctests, the test files that are named for it or for its folder
  (``sharding/sync/_zen.py``: ``test_zen.py``) and those that ``TESTS`` lists; if there are none,
  the test files that import it;
- of a helper in ``tests/``: the test files below its folder that import it;
- of another Python file: the test files that import it or name it;
- of a page: those that ``TESTS`` lists, or that name it.

Tests marked ``slow`` are left out. A clean checkout of ``main`` is
compared with the commit before. ``make test-all`` runs all tests.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("optax_ext", "sharding")
# Test files by the beginning of a path: quick ones, and those named for something else.
TESTS = {
    "README.md": ["tests/test_readme.py"],
    "docs/": ["tests/test_docs.py"],
    "optax_ext/": ["tests/contract/test_errors.py", "tests/contract/test_schema.py"],
    "optax_ext/_lamb.py": ["tests/optax_ext/test_layerwise.py"],
    "optax_ext/_lars.py": ["tests/optax_ext/test_layerwise.py"],
    "optax_ext/_trust_ratio.py": ["tests/optax_ext/test_layerwise.py"],
    "optax_ext/_noise_scale.py": ["tests/sharding/step/test_noise_scale.py"],
    "optax_ext/_transformer_rule.py": ["tests/optax_ext/test_transformer_rule.py"],
    "optax_ext/low_precision/": ["tests/optax_ext/test_low_precision.py"],
    "optax_ext/execution_order.py": ["tests/sharding/offload/test_offload.py"],
    "sharding/__init__.py": ["tests/sharding/test_zero.py"],
    "sharding/__main__.py": ["tests/sharding/cli/test_cli.py"],
    "sharding/_zero.py": ["tests/sharding/test_zero.py", "tests/sharding/step/test_program.py"],
    "sharding/cli/": ["tests/sharding/cli/test_cli.py"],
    "sharding/collectives/": ["tests/sharding/collectives/test_scatter.py"],
    "sharding/collectives/_all_gather.py": ["tests/sharding/sync/test_interface.py"],
    "sharding/collectives/_block_codec.py": ["tests/sharding/sync/test_methods.py"],
    "sharding/collectives/_permutation.py": ["tests/sharding/sync/test_zen.py"],
    "sharding/collectives/_sparse_rows.py": ["tests/sharding/sync/test_lookup.py"],
    "sharding/offload/": ["tests/sharding/offload/test_offload.py"],
    "sharding/pipeline/": ["tests/sharding/pipeline/test_schedules.py"],
    "sharding/pipeline/_async_executor.py": ["tests/sharding/pipeline/test_async_pipeline.py"],
    "sharding/pipeline/_buffers.py": ["tests/sharding/pipeline/test_pipeline.py"],
    "sharding/pipeline/_differentiable_loss.py": ["tests/sharding/pipeline/test_pipeline.py"],
    "sharding/pipeline/_executor.py": ["tests/sharding/pipeline/test_pipeline.py"],
    "sharding/pipeline/_layers.py": ["tests/sharding/pipeline/test_composition.py"],
    "sharding/pipeline/_owners.py": ["tests/sharding/pipeline/test_async_pipeline.py"],
    "sharding/pipeline/_stage.py": ["tests/sharding/pipeline/test_pipeline.py"],
    "sharding/placement/": [
        "tests/sharding/test_zero.py",
        "tests/sharding/placement/test_state_specs.py",
    ],
    "sharding/plan/pipelines/_pipeline_wire.py": ["tests/sharding/pipeline/test_pipeline_audit.py"],
    "sharding/plan/program/_tick_loops.py": ["tests/sharding/pipeline/test_pipeline_audit.py"],
    "sharding/plan/": ["tests/sharding/plan/test_plan.py", "tests/sharding/plan/test_audit.py"],
    "sharding/recovery/": ["tests/sharding/recovery/test_peer_checkpoints.py"],
    "sharding/remat/": ["tests/sharding/remat/test_remat_plan.py"],
    "sharding/step/": ["tests/sharding/step/test_program.py", "tests/sharding/step/test_edges.py"],
    "sharding/step/_flax": ["tests/sharding/step/flax/test_nnx_step.py"],
    "sharding/step/_reduce_gradients.py": ["tests/sharding/sync/test_other_axes.py"],
    "sharding/step/_sync_state.py": ["tests/sharding/sync/test_other_axes.py"],
    "sharding/sync/": [
        "tests/sharding/sync/test_interface.py",
        "tests/sharding/sync/test_methods.py",
    ],
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


def tests_of(path, test_files):
    """The tests of one file that changed, of those in ``test_files`` (paths to their texts)."""
    file = pathlib.PurePath(path)

    def containing(pattern, folder="tests"):
        return {
            p
            for p, text in test_files.items()
            if p.startswith(f"{folder}/") and re.search(pattern, text, re.MULTILINE)
        }

    if path in test_files:
        return {path}
    listed = {test for prefix, tests in TESTS.items() if path.startswith(prefix) for test in tests}
    if file.suffix == ".md":
        return listed or containing(rf"\b{file.name}\b")
    if file.suffix != ".py":
        return set()
    name = file.parent.name if file.stem == "__init__" else file.stem
    imports = rf"^\s*(from|import) .*\b{name}\b"
    if path.startswith("tests/"):
        return containing(imports, file.parent)
    if not path.startswith(PACKAGES):
        return containing(rf"{imports}|\b{file.name}\b")
    named = rf"/test_{name.strip('_')}(_\w+)?\.py$"
    found = {p for p in test_files if re.search(named, p)} | listed
    return (found or containing(imports)) | {path, "tests/test_layers.py"}


def main(options):
    """Runs pytest; its exit code, or 0 if nothing changed."""
    test_files = {str(p.relative_to(ROOT)): p.read_text() for p in ROOT.glob("tests/**/test_*.py")}
    found = sorted(set().union(*(tests_of(path, test_files) for path in changed())))
    print("\n".join(found) or "No file with tests differs from main.")
    command = [sys.executable, "-m", "pytest", "-m", "not slow", *options, *found]
    return subprocess.run(command, cwd=ROOT).returncode if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
