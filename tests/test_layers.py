"""The math does not know the sharding, and both packages stand on public interfaces alone."""

import ast
import collections
import functools
import itertools
import pathlib
import re
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
SHARDING = [name for name in FILES if name.startswith("sharding/")]
MODULES = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in FILES]

# What places arrays. The math sees arrays with their global shapes.
PLACEMENT = {
    *("AbstractMesh", "AxisType", "Mesh", "NamedSharding", "PartitionSpec", "axis_name"),
    *("axis_names", "device_put", "devices", "make_mesh", "memory_kind", "pmean", "psum"),
    *("shard_map", "sharding", "with_sharding_constraint"),
}


def imported(tree):
    """The dotted names that a module imports, wherever in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def names(tree):
    """Every identifier, attribute and argument name of a module; not its prose."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.update(name.split("."))
    return found


@functools.cache
def module(name):
    """The imports, the names and the definitions of a file of the packages."""
    tree = ast.parse(FILES[name].read_text())
    # Not those inside of functions and classes; overloads count once.
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    own = [node.name for node in own if "overload" not in map(ast.unparse, node.decorator_list)]
    return imported(tree), names(tree), own


def run(code, *arguments):
    """In a fresh interpreter, away from the repository."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=pathlib.Path(sys.executable).parent,
    )
    assert done.returncode == 0, done.stderr


def test_the_math_imports_numbers_and_itself():
    assert "optax_ext/_came.py" in MATH
    known = {"jax", "numpy", "optax", "optax_ext"} | set(sys.stdlib_module_names)
    for name in MATH:
        assert {i.split(".")[0] for i in module(name)[0]} <= known, name


# It asks whether arrays are on several devices, not on which: the same numbers to rounding. Where
# types have shardings (Explicit axes), it gathers dims that an operation cannot split by shards.
ASKED = {"optax_ext/_matrix_passes.py": {"PartitionSpec", "sharding"}}


def test_the_math_places_nothing():
    for name in MATH:
        assert PLACEMENT & module(name)[1] == ASKED.get(name, set()), name


def test_only_public_interfaces():
    for file in FILES:
        imports, names, _ = module(file)
        assert not {"_src", "_src.core"} & names, file
        for name in imports:
            package, *parts = name.split(".")
            if package not in (file.split("/")[0], "", "__future__"):  # __version__ is public
                assert not [p for p in parts if p[0] == "_" and not p.endswith("__")], (file, name)


# Each layer of `sharding` imports only itself and those before it, and so do the folders of `plan`.
LAYERS = (
    *("_types", "_jaxprs", "_own_gradient", "_traced_types", "_user_line", "placement"),
    *(
        "collectives",
        "sync",
        "offload",
        "loss",
        "tiles",
        "stored",
        "matmuls",
        "recovery",
        "step",
        "_zero",
        "_local_steps",
        "pipeline",
        "plan",
    ),
    *("remat", "plan.search", "check", "cli", "__main__"),
)
PLAN_LAYERS = ("_format", "machine", "model", "cost", "audit", "search")


@pytest.mark.parametrize(
    ("package", "layers"), [("sharding", LAYERS), ("sharding.plan", PLAN_LAYERS)]
)
def test_imports_go_one_way(package, layers):
    def layer_of(name):
        """The layer of a module's dotted name or file; None outside of the package."""
        inside = name.removesuffix(".py").replace("/", ".").removeprefix(f"{package}.")
        found = [x for x in (*layers, inside.split(".")[0]) if f"{inside}.".startswith(f"{x}.")]
        return max(found, key=len) if inside != name else None

    folder = package.replace(".", "/")
    files = {name for name in SHARDING if name.startswith(f"{folder}/")}
    assert len(files) > 30
    for name in files - {f"{folder}/__init__.py", "sharding/plan/__init__.py"}:  # public faces
        assert layer_of(name) in layers, f"{name} belongs to no layer"
        imports, own = module(name)[0], layers.index(layer_of(name))
        assert not [i for i in imports if layer_of(i) in layers[own + 1 :]], name
        # The package itself imports every layer; imports are absolute.
        assert not [i for i in imports if i == "sharding" or i.startswith(".")], name


def test_the_planner_has_few_public_names():
    """Types of results are not among them: its functions return them."""
    imports = ast.parse(FILES["sharding/plan/__init__.py"].read_text()).body
    names = [x.asname for node in imports if isinstance(node, ast.ImportFrom) for x in node.names]
    assert len(names) <= 20


def test_one_name_for_one_thing():
    """In ``sharding`` no two modules, and no two functions or classes, share a name."""
    modules = [name.split("/")[-1] for name in SHARDING if not name.endswith("/__init__.py")]
    assert not [name for name in modules if modules.count(name) > 1]
    places = collections.defaultdict(list)
    for file in SHARDING:
        for name in module(file)[2]:
            places[name].append(file)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_the_math_loads_neither_the_sharding_nor_flax_which_is_not_needed():
    run(
        "import optax_ext, sys; "
        "found = {'sharding', 'flax', 'orbax', 'torch'} & {m.split('.')[0] for m in sys.modules}; "
        "assert not found, found; "
        "sys.modules['flax'] = None; import sharding"
    )


IMPORT = """
import importlib, os, sys, warnings
import sharding
warnings.filterwarnings("ignore", message=".*fork.*")
left = [name for name in sys.argv[1:] if name not in sys.modules]
assert 0 < len(left) < len(sys.argv) / 2
for name in left:
    pid = os.fork()
    if not pid:
        importlib.import_module(name)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


@pytest.mark.script
def test_every_module_imports_alone():
    """What the packages import is imported with them, whatever is asked for; the rest by itself."""
    run(IMPORT, *MODULES)


# --- CONTRIBUTING ---------------------------------------------------------------------------------

CONTRIBUTING = (pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def test_where_is_what_names_each_module_once():
    table = CONTRIBUTING.split("## Where is what")[1].split("## Walks")[0]
    modules = [name for name in FILES if not name.endswith("__init__.py")]
    assert [name for name in modules if table.count(f"`{name}`") != 1] == []


def called_names():
    """What each function, class and method of the packages names."""
    called = collections.defaultdict(set)
    for path in FILES.values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                called[node.name] |= names(node)
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                called[f"{node.name}.{getattr(method, 'name', '')}"] |= names(method)
    return called


def test_walks_are_calls():
    """In CONTRIBUTING each function calls, or passes on, the next one of its walk."""
    called = called_names()
    text = CONTRIBUTING.split("## Walks")[1].split("\n## ")[0]
    walks = [re.findall(r"`([\w.]+)`", part) for part in re.split(r":|\.\s", text)]
    walks = [walk for walk in walks if len(walk) > 1]
    assert len(walks) >= 6
    for walk in walks:
        for caller, callee in itertools.pairwise(walk):
            parts = callee.split(".")
            assert set(parts[-1:]) <= called[caller] or parts[0] in called[caller], (caller, callee)
