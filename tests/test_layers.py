"""The math does not know the sharding, and both packages stand on public interfaces alone."""

import ast
import collections
import pathlib
import subprocess
import sys

import pytest

import optax_ext
import sharding

PACKAGES = {p.__name__: pathlib.Path(p.__file__).parent for p in (optax_ext, sharding)}
FILES = {
    f"{name}/{path.relative_to(root)}": path
    for name, root in PACKAGES.items()
    for path in sorted(root.rglob("*.py"))
}
MATH = [name for name in FILES if name.startswith("optax_ext/")]
MODULES = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in FILES]

# What places arrays. The math sees arrays with their global shapes.
PLACEMENT = {
    "AbstractMesh",
    "AxisType",
    "Mesh",
    "NamedSharding",
    "PartitionSpec",
    "axis_name",
    "axis_names",
    "device_put",
    "devices",
    "make_mesh",
    "memory_kind",
    "pmean",
    "psum",
    "shard_map",
    "sharding",
    "with_sharding_constraint",
}


def imported(source):
    """The dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def names(source):
    """Every identifier, attribute and argument name of a module; not its prose."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from name.split(".")


def run(code):
    """In a fresh interpreter, away from the repository."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=pathlib.Path(sys.executable).parent,
    )
    assert done.returncode == 0, done.stderr


def test_the_files_are_found():
    assert "optax_ext/_came.py" in MATH
    assert "sharding" in MODULES


@pytest.mark.parametrize("name", MATH)
def test_the_math_imports_numbers_and_itself(name):
    known = {"jax", "numpy", "optax", "optax_ext"} | set(sys.stdlib_module_names)
    for module in imported(FILES[name].read_text()):
        assert module.split(".")[0] in known, module


# It asks whether arrays are on several devices, not on which: the same numbers to rounding. Where
# types have shardings (Explicit axes), it gathers dims that an operation cannot split by shards.
ASKED = {"optax_ext/_matrix_passes.py": {"PartitionSpec", "sharding"}}


@pytest.mark.parametrize("name", MATH)
def test_the_math_places_nothing(name):
    assert PLACEMENT & set(names(FILES[name].read_text())) == ASKED.get(name, set())


@pytest.mark.parametrize("name", FILES)
def test_only_public_interfaces(name):
    """Nothing underscored of another package, imported or reached for."""
    source, own = FILES[name].read_text(), name.split("/")[0]
    for module in imported(source):
        parts = module.split(".")
        if parts[0] not in (own, "", "__future__"):
            private = [p for p in parts if p.startswith("_") and not p.endswith("__")]
            assert not private, module  # __version__ and its like are public
    assert not {"_src", "_src.core"} & set(names(source))


# Each layer of `sharding` imports only itself and those before it. `plan` reads all before it.
LAYERS = (
    "placement",
    "collectives",
    "sync",
    "offload",
    "recovery",
    "step",
    "_zero",
    "pipeline",
    "plan",
    "remat",
    "cli",
    "__main__",
)


def layer_of(name):
    """The layer of a module given by its dotted name or its file; None outside ``sharding``."""
    parts = name.removesuffix(".py").replace("/", ".").split(".")
    return parts[1] if parts[0] == "sharding" and len(parts) > 1 else None


def upward_imports(name, source):
    """What a module of ``sharding`` imports from a layer above its own."""
    own = LAYERS.index(layer_of(name))
    layers = {module: layer_of(module) for module in imported(source)}
    return [m for m, layer in layers.items() if layer in LAYERS and LAYERS.index(layer) > own]


@pytest.mark.parametrize("name", [f for f in FILES if f.startswith("sharding/")])
def test_imports_go_one_way(name):
    if name == "sharding/__init__.py":
        return  # the public face
    assert layer_of(name) in LAYERS, f"{name} belongs to no layer"
    source = FILES[name].read_text()
    assert not upward_imports(name, source)
    # The package itself imports every layer.
    assert not [m for m in imported(source) if m == "sharding"]
    assert not [m for m in imported(source) if m.split(".")[0] == "" or m.startswith(".")]


def test_an_upward_import_is_seen():
    source = "from sharding.plan.program._wire import wire_bytes\nfrom sharding import sync"
    assert upward_imports("sharding/step/_update.py", source) == [
        "sharding.plan.program._wire.wire_bytes"
    ]
    assert upward_imports("sharding/placement/_layout.py", source)[-1] == "sharding.sync"


def definitions(source):
    """The functions and classes of a module, not those inside of them; overloads count once."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node for node in ast.parse(source).body if isinstance(node, kinds)]
    return [node.name for node in found if "overload" not in map(ast.unparse, node.decorator_list)]


def test_one_name_for_one_thing():
    """In ``sharding`` no two modules, and no two functions or classes, share a name."""
    files = {name: path for name, path in FILES.items() if name.startswith("sharding/")}
    modules = [path.name for path in files.values() if path.name != "__init__.py"]
    assert not [name for name in modules if modules.count(name) > 1]
    places = collections.defaultdict(list)
    for file, path in files.items():
        for name in definitions(path.read_text()):
            places[name].append(file)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_checks_see_what_they_look_for():
    bad = "def f():\n    from jax._src.core import x\n    return jax.sharding.Mesh(axis_name=1)"
    assert list(imported(bad)) == ["jax._src.core.x"]
    assert {"Mesh", "axis_name", "sharding"} <= set(names(bad))


def test_the_math_loads_neither_the_sharding_nor_flax():
    run(
        "import optax_ext, sys; "
        "found = {'sharding', 'flax', 'orbax', 'torch'} & {m.split('.')[0] for m in sys.modules}; "
        "assert not found, found"
    )


def test_the_sharding_does_not_need_flax():
    run("import sys; sys.modules['flax'] = None; import sharding")


def test_every_module_imports_alone():
    """Each in a process of its own, forked where jax and optax are loaded but nothing of ours.

    Python imports a module's package first; modules that it loads are imported with it.
    """
    run(
        f"""
import importlib, os, pickle, traceback, warnings
import sys, jax, optax
warnings.filterwarnings("ignore", message=".*fork.*")

def loaded_by(name):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        assert not [m for m in sys.modules if m.split(".")[0] in {set(PACKAGES)!r}]
        try:
            importlib.import_module(name)
            os.write(writer, pickle.dumps({set(MODULES)!r} & set(sys.modules)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
    return pickle.loads(os.read(reader, 2**16))

loaded = set().union(*map(loaded_by, {list(PACKAGES)!r}))
assert loaded
for name in {set(MODULES)!r} - loaded:
    assert name in loaded_by(name)
"""
    )
