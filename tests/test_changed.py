"""tests/changed.py finds tests for every file that has any."""

import pytest

from . import changed

TEST_FILES = {
    str(path.relative_to(changed.ROOT)): path.read_text()
    for path in changed.ROOT.glob("tests/**/test_*.py")
}
MODULES = [
    str(path.relative_to(changed.ROOT))
    for package in changed.PACKAGES
    for path in sorted(changed.ROOT.glob(f"{package}/**/*.py"))
]


@pytest.mark.parametrize("path", MODULES)
def test_every_module_has_tests(path):
    found = changed.tests_of(path, TEST_FILES)
    assert found > {path, "tests/test_layers.py"}
    assert all((changed.ROOT / name).exists() for name in found)


@pytest.mark.parametrize("prefix", changed.TESTS)
def test_every_entry_is_for_a_file(prefix):
    assert list(changed.ROOT.glob(f"{prefix}*"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("sharding/sync/_zen.py", "tests/sharding/sync/test_zen.py"),
        ("sharding/_zero.py", "tests/sharding/test_zero.py"),
        ("tests/sharding/model.py", "tests/sharding/step/test_exact.py"),
        ("tests/sharding/step/test_exact.py", "tests/sharding/step/test_exact.py"),
        ("examples/train_lm.py", "tests/test_train_lm.py"),
        ("README.md", "tests/test_readme.py"),
        ("benchmarks/convergence/_rows.py", "tests/benchmarks/test_rows.py"),
    ],
)
def test_known_files(path, expected):
    assert expected in changed.tests_of(path, TEST_FILES)


def test_files_without_tests():
    assert changed.tests_of("LICENSE", TEST_FILES) == set()
