"""Losses of operations that no reader of a jaxpr knows, and of those that JAX is about to have.

The flags of JAX 0.12 put objects in the place of ``remat2``, ``name`` and ``custom_*_call``: losses
with and without flags are compared. Where the JAX that is installed has no such flags,
``test_with_the_newest_jax`` runs this file with another one.
"""

import contextlib
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Effect, Primitive

import optax_ext
import sharding as shd
from optax_ext import equations
from optax_ext.equations import Name, UnknownOperationError, record_of
from sharding._jaxprs import inputs_read
from sharding.plan import fit
from sharding.plan.model._traced_work import update_bytes

ROOT = pathlib.Path(__file__).parents[2]
LAYERS, WIDTH, ROWS = 4, 64, 16
RNG = np.random.default_rng(0)
WEIGHTS = jnp.asarray(RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
TX = optax.sgd(1.0)


def step_of(loss, params=None, **options):
    """A step, a state and a batch: of eight devices, or one that updates in its backward pass."""
    params = {"w": WEIGHTS} if params is None else params
    zero = {key: options.pop(key) for key in ("stage",) if key in options}
    loss = shd.Loss(loss, per_device=options.pop("per_device", None))
    devices = jax.devices()[: 1 if "update" in options else 8]
    zero = shd.Zero(jax.make_mesh((len(devices),), ("data",), devices=devices), **zero)
    state = zero.init(lambda: (params, TX.init(params)), tx=TX)
    return zero.train_step(loss, tx=TX, **options), state, zero.put(X)


def lowered(loss, **options):
    step, *args = step_of(loss, **options)
    return step.lower(*args)


def fitted(loss):
    return fit(loss, lambda: ({"w": WEIGHTS}, TX.init({"w": WEIGHTS})), X, tx=TX, memory=2**30)


READERS = {
    "step": functools.partial(lowered, stage=3),
    "partitioned": functools.partial(lowered, stage=3, per_device=False),
    "backward": functools.partial(lowered, update="backward"),
    "remat": lambda loss: shd.remat.plan(loss, {"w": WEIGHTS}, X, "1GiB"),
    "fit": fitted,
}

# --- Operations that nothing knows ----------------------------------------------------------------


class Happens(Effect):
    """An effect of one's own."""


def own(**params):
    """An operation of one array with parameters of its own."""
    primitive = Primitive("own")
    primitive.def_abstract_eval(lambda x, **_: x)
    return lambda x: primitive.bind(x, **params)


def with_effect(x):
    primitive = Primitive("own")
    primitive.def_effectful_abstract_eval(lambda x: (x, {Happens()}))
    return primitive.bind(x)


def with_reference(x):
    primitive = Primitive("own")
    primitive.def_abstract_eval(lambda ref: jax.typeof(x).update(sharding=None))
    return primitive.bind(jax.new_ref(x))


class Holder:
    """An object with a function in it."""

    def __init__(self, body):
        self.body = body


SINE = jax.make_jaxpr(jnp.sin)(0.0)
UNKNOWN = {
    "a jaxpr": ("holds a function", own(sub=SINE)),
    "a jaxpr among others": ("holds a function", own(branches=(None, SINE))),
    "a function": ("holds a function", own(options=(("rule", jnp.sin),))),
    "an object with a jaxpr": ("holds a function", own(_prim=Holder(SINE))),
    "an effect": ("has side effects", with_effect),
    "a reference": ("reads or writes a reference", with_reference),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["a jaxpr", "a reference"])
def test_each_reader_refuses_what_it_does_not_know(kind, reader):
    found, operation = UNKNOWN[kind]

    def loss(params, x):
        return jnp.mean(operation(x @ params["w"][0]))

    expected = rf"^own at {re.escape(__file__)}:\d+ {found}, and this .*reference/versions"
    with pytest.raises(UnknownOperationError, match=expected):
        READERS[reader](loss)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known(kind):
    found, operation = UNKNOWN[kind]
    with pytest.raises(UnknownOperationError, match=f"^own at .* {found}, and this"):
        equations.trace(operation, X)


INSIDE = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "a loop": lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, x: f(x), x),
    "a branch": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, jnp.sin, x),
    "a derivative": lambda f: jax.custom_gradient(lambda x: (f(x), f)),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_what_is_not_known_inside_of(inside):
    with pytest.raises(UnknownOperationError, match="own at"):
        equations.trace(INSIDE[inside](own(sub=SINE)), X)


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_of_windows_are_known(order):
    """Their operations hold functions, as the maximum of a pooling does."""

    def loss(x):
        return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "SAME") ** 2)

    def of_gradient(x):
        return jnp.sum(jax.grad(loss)(x) ** 2)

    closed, _ = equations.trace(jax.grad((loss, of_gradient)[order - 1]), X)
    assert "select_and_scatter_add" in {equations.name_of(eqn) for eqn in closed.eqns}


def test_what_is_not_known_in_an_update():
    tx = optax.stateless(lambda updates, params: jax.tree.map(own(sub=SINE), updates))
    with pytest.raises(UnknownOperationError, match="own at"):
        inputs_read(jax.make_jaxpr(tx.update)({"w": X}, tx.init({"w": X})).jaxpr)
    low = optax_ext.low_precision_state(optax.chain(tx, optax.adam(1e-3)), 8, min_size=1)
    with pytest.raises(UnknownOperationError, match="own at"):
        jax.eval_shape(low.update, {"w": X}, jax.eval_shape(low.init, {"w": X}))
    with pytest.raises(UnknownOperationError, match="own at"):  # not 0, which is "not known"
        update_bytes(tx, {"w": X}, gpu=False)


def test_what_holds_nothing_is_taken():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    given = {"sizes": (1, 2), "mesh": mesh, "sharding": sharding, "names": frozenset("a")}
    operation = own(**given, dtype=jnp.dtype("int8"), kind=jnp.float32)
    assert len(equations.trace(operation, X)[0].eqns) == 1


# --- Both forms of an operation -------------------------------------------------------------------


def an_object(kind, module="jax.somewhere", **params):
    """The equation of an object, as JAX has them under flags."""
    called = type(kind, (), {"__module__": module, "params": params})()
    primitive = types.SimpleNamespace(name="call_hi_primitive")
    return types.SimpleNamespace(primitive=primitive, params={"_prim": called}, source_info=None)


def of_primitive(fn):
    (eqn,) = jax.make_jaxpr(fn)(0.0).eqns
    return eqn


def test_records_of_objects_are_those_of_primitives():
    name = of_primitive(lambda x: checkpoint_name(x, "a"))
    assert record_of(name) == record_of(an_object("CheckpointName", name="a")) == Name("a")
    assert record_of(an_object("CheckpointName", module="mine", name="a")) is None
    traced = jax.jit(jnp.sin).trace(0.0)
    policy = jax.checkpoint_policies.dots_saveable
    remat = record_of(of_primitive(jax.checkpoint(jnp.sin, policy=policy, prevent_cse=False)))
    options = {"policy": policy, "prevent_cse": False}
    assert record_of(an_object("RematTraced", jaxpr=remat.body, **options)) == remat
    assert remat.options == options
    for kind in ("JVP", "VJP"):
        derivative = an_object(f"Custom{kind}Traced", traced=traced, rule=None)
        assert equations.name_of(derivative) == f"custom_{kind.lower()}_call"
        assert str(record_of(derivative).body) == str(traced.jaxpr)
        assert [*equations.inner_jaxprs(derivative)] == [traced.jaxpr.jaxpr]
    loop = types.SimpleNamespace(eqns=[an_object("Scan3", length=2, jaxpr=traced.jaxpr)])
    with pytest.raises(
        UnknownOperationError, match=r"^lax\.scan was traced with the flag jax_scan3"
    ):
        equations.check_known(loop)
    call = types.SimpleNamespace(name="eval_jaxpr")
    call = types.SimpleNamespace(primitive=call, params={"call_jaxpr": traced.jaxpr})
    assert record_of(call).body is traced.jaxpr


# --- With flags -----------------------------------------------------------------------------------

FLAGS = "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"
needs_flags = pytest.mark.skipif(
    not hasattr(jax.config, FLAGS[0]) or not hasattr(jax.config, FLAGS[-1]),
    reason="this JAX has no such flags; test_with_the_newest_jax runs this with another",
)


@contextlib.contextmanager
def flags(*names):
    for name in names:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name in names:
            jax.config.update(name, False)


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def layer(x, w):
    return jnp.tanh(doubled(checkpoint_name(x @ w, "hidden")))


def mean(x):
    return jnp.mean(jax.nn.relu(x) ** 2)


def scanned(params, x):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    step = jax.checkpoint(lambda x, w: (layer(x, w), None), policy=policy)
    return mean(jax.lax.scan(step, x, params["w"])[0])


def named(params, x):
    def step(x, w):
        hidden = checkpoint_name(jax.nn.relu(x @ w), "hidden")
        return x + jnp.tanh(jnp.sin(hidden)), None

    return mean(jax.lax.scan(step, x, params["w"])[0])


def unrolled(params, x):
    for w in params["w"]:
        x = jax.checkpoint(layer)(x, w)
    return mean(x)


def gathered(params, x):
    zero = shd.Zero(jax.make_mesh((8,), ("data",)), stage=3)
    for w in params["w"]:
        x = zero.gathered(layer)(x, w)
    return mean(x)


LOSSES = {fn.__name__: fn for fn in (scanned, named, unrolled, gathered)}
LISTED = "unrolled", "gathered"


def params_of(name):
    return {"w": list(WEIGHTS) if name in LISTED else WEIGHTS}


def expected(name):
    params = params_of(name)
    value, grads = jax.value_and_grad(LOSSES["unrolled" if name == "gathered" else name])(params, X)
    return float(value), jnp.stack([*params["w"]]) - jnp.stack([*grads["w"]])


def figures(name, **options):
    """The loss and the update of a step, checked; its gathers, barriers and temporaries."""
    step, state, x = step_of(LOSSES[name], params_of(name), **options)
    program = step.lower(state, x)
    compiled, text = program.compile(), program.as_text()
    (params, _), metrics = step(state, x)
    value, new = expected(name)
    np.testing.assert_allclose(float(metrics["loss"]), value, rtol=1e-5)
    np.testing.assert_allclose(jnp.stack([*params["w"]]), new, atol=1e-6)
    return {
        "gathers": text.count("stablehlo.all_gather"),
        "gathers compiled": compiled.as_text().count(" all-gather("),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


STEPS = {
    f"{name}, {', '.join(f'{key} {value}' for key, value in options.items())}": (name, options)
    for name in LOSSES
    for options in ({"stage": 1}, {"stage": 3}, {"stage": 3, "per_device": False})
    if name != "gathered" or "per_device" not in options
} | {"scanned, backward": ("scanned", {"update": "backward"})}


@needs_flags
@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_the_same_with_flags(case):
    name, options = STEPS[case]
    without = figures(name, **options)
    with flags(*FLAGS):
        assert figures(name, **options) == without
    if options.get("stage") == 3 and name in LISTED:
        assert max(without["gathers"], without["gathers compiled"]) == 2 * LAYERS  # backward, too


@needs_flags
@pytest.mark.parametrize("name", ["named", "unrolled"])
def test_a_plan_is_the_same_with_flags(name):
    rows = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), jnp.float32)

    def plans():
        plan = shd.remat.plan(LOSSES[name], params_of(name), rows, "1GiB")
        # What JAX makes of jax.checkpoint is another gradient with flags: a barrier is in it.
        more = shd.remat.frontier(LOSSES[name], params_of(name), rows) if name == "named" else []
        return [*map(str, [plan, *more])]

    without = plans()
    with flags(*FLAGS):
        assert plans() == without
    assert len(without) == 1 if name == "unrolled" else any("hidden" in text for text in without)


@needs_flags
def test_fit_is_the_same_with_flags():
    without = fitted(scanned)
    with flags(*FLAGS):
        found = fitted(scanned)
    assert found.proofs == without.proofs


@needs_flags
@pytest.mark.parametrize("reader", READERS)
def test_loops_that_jax_cannot_differentiate(reader):
    line = f"{re.escape(__file__)}:{named.__code__.co_firstlineno + 5}"
    with flags("jax_scan3"), pytest.raises(UnknownOperationError, match=f"^lax.scan at {line} was"):
        READERS[reader](named)


def test_a_traced_function_is_called():
    """``eval_jaxpr`` of JAX 0.12, ``closed_call`` before, is a call like any other."""

    def loss(params, x):
        traced = jax.jit(scanned).trace(params, x)
        return traced(params, x)

    if not callable(jax.jit(jnp.sin).trace(0.0)):
        pytest.skip("this JAX calls no traced functions")
    for options in ({"stage": 3}, {"update": "backward"}):
        found, like = (lowered(fn, **options).as_text() for fn in (loss, scanned))
        assert found.count("all_gather") == like.count("all_gather")
        assert found.count("stablehlo.while") == like.count("stablehlo.while") > 1


# --- On the newest JAX ----------------------------------------------------------------------------

CONSTRAINTS = ROOT / "constraints.txt"
NEWEST = re.search(r"^jax==(.*); python_version >=", CONSTRAINTS.read_text(), re.MULTILINE)[1]


def newer_python():
    """A Python for which there is the newest JAX, found by its name or in pyenv; or None."""
    named = [shutil.which(f"python3.{minor}") for minor in range(12, 20)]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    others = sorted(pyenv.glob("versions/3.*/bin/python"))
    check = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
    for python in filter(None, [*named, *others]):
        if not subprocess.run([python, "-c", check], check=False, capture_output=True).returncode:
            return python
    return None


@pytest.mark.script
@pytest.mark.skipif(hasattr(jax.config, FLAGS[-1]), reason="the other tests are with flags here")
def test_with_the_newest_jax(tmp_path):
    if (python := newer_python()) is None:
        pytest.skip("no Python 3.12 or newer was found, by its name or in pyenv, for JAX's flags")
    venv = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path], check=True)
    install = [sys.executable, "-m", "pip", "--python", venv, "install", "--quiet", "--no-compile"]
    packages = [f"jax=={NEWEST}", "optax", "pytest", "--constraint", CONSTRAINTS]
    subprocess.run([*install, *packages], check=True)
    # XLA of another version has other flags.
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [venv, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        check=False,
    )
    *_, summary = done.stdout.splitlines() or [""]
    assert not done.returncode, done.stdout + done.stderr
    assert re.search(r" [4-9]\d passed, 1 deselected", summary), summary  # and none skipped


def test_the_newest_jax_is_named_in_one_place():
    """But in the table of what was tested, and where results say what made them."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = [name for name in done.stdout.split() if not name.startswith("benchmarks/results/")]
    found = {name for name in names if NEWEST.encode() in (ROOT / name).read_bytes()}
    assert found == {"constraints.txt", "docs/reference/versions.md"}
