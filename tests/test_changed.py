"""tests/changed.py finds tests for every file that has any."""

from . import changed

TEST_FILES = {
    str(path.relative_to(changed.ROOT)): path.read_text()
    for path in changed.ROOT.glob("tests/**/test_*.py")
}


def test_every_module_has_tests():
    for package in changed.PACKAGES:
        for module in changed.ROOT.glob(f"{package}/**/*.py"):
            path = str(module.relative_to(changed.ROOT))
            quick, scripts = changed.tests_of(path, TEST_FILES)
            assert quick > {path, "tests/test_layers.py"}, path
            assert not scripts
            assert all((changed.ROOT / name).exists() for name in quick), path


def test_every_entry_is_for_a_file():
    for prefix, tests in changed.TESTS.items():
        assert list(changed.ROOT.glob(f"{prefix}*")), prefix
        assert all((changed.ROOT / test).exists() for test in tests)


def test_known_files():
    sync, step = "tests/sharding/sync", "tests/sharding/step"
    for path, quick, scripts in (
        ("sharding/sync/_zen.py", {sync}, set()),
        ("sharding/_zero.py", {"tests/sharding/test_zero.py"}, set()),
        ("sharding/step/_precision.py", {f"{step}/test_precision.py"}, set()),
        ("optax_ext/_came.py", {"tests/optax_ext/test_came.py", "tests/contract"}, set()),
        ("tests/test_layers.py", set(), {"tests/test_layers.py"}),
        ("examples/_report.py", set(), {"tests/test_train_lm.py"}),
        ("docs/how_to/mesh.md", set(), {"tests/test_docs.py::test_blocks_run[mesh]"}),
        ("benchmarks/convergence/_rows.py", set(), {"tests/benchmarks/test_rows.py"}),
        ("README.md", {"tests/test_readme.py"}, {"tests/test_docs.py::test_blocks_run[README]"}),
    ):
        found = changed.tests_of(path, TEST_FILES)
        assert quick <= found[0], path
        assert scripts <= found[1], path
    found, _ = changed.tests_of("tests/sharding/model.py", TEST_FILES)
    assert f"{step}/test_exact.py" in found
    assert changed.tests_of("LICENSE", TEST_FILES) == (set(), set())
