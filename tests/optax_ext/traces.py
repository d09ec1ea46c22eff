"""Traces of an optimizer over hundreds of steps, and the numbers that a golden file stores of one.

The gradients are the same bits on every machine: PCG64's raw integers (a stream that NumPy
guarantees; its distributions it does not) and exact powers of two. They are full rank, their rows,
columns and elements span several decades, and some steps jump up (the update is clipped) and some
down (it is not).
"""

import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import dims

SHAPES = {
    "scalar": (),
    "one element": (1,),
    "vector": (128,),
    "matrix": (64, 128),
    "single column": (512, 1),
    "single row": (1, 32),
    "stacked": (2, 64, 48),
    "convolution": (3, 3, 16, 32),
}
WHOLE_SIZE = 150  # leaves up to this size are kept whole at these steps, for a readable failure
WHOLE_STEPS = (1, 200, 500)


def uniform(shape, *seed):
    """Uniform in (-1, 1), never 0."""
    raw = np.random.PCG64(zlib.crc32(repr(seed).encode())).random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(11)) * 2.0**-52 - (1 - 2.0**-53)).reshape(shape)


def _decades(shape, spread, *seed):
    """Powers of two from 2**-spread to 2**spread."""
    return np.ldexp(1.0, np.rint(uniform(shape, *seed) * spread).astype(int))


def gradients(shape, num_steps, seed=0, jumps=3):
    """(num_steps, *shape), float64; elements and steps jump by up to 2**jumps up or down."""
    g = uniform((num_steps, *shape), seed, "signs", shape)
    g = g * _decades((num_steps, *shape), jumps, seed, "elements", shape)
    g = g * _decades((num_steps,) + (1,) * len(shape), jumps, seed, "steps", shape)
    for dim, size in enumerate(shape):  # lasting differences between rows and between columns
        along = [1] * (len(shape) + 1)
        along[dim + 1] = size
        g = g * _decades(along, 5, seed, "dim", dim, shape)
    return g


def parameters(shape, seed=0):
    return uniform(shape, seed, "parameters", shape)


def positive(field):
    """Whether a field holds averages of squares, to be compared by relative error."""
    return field.startswith(("nu", "instability"))


def project(field, x):
    """One number that moves if any single element does.

    The weights lie in 1 < abs(w) < 2, so an error of e in one element moves the number by e or
    more. Averages of squares are positive and span many decades: of these the logarithm is
    projected, so that e is a relative error, in small elements as in large ones.
    """
    xp = jnp if isinstance(x, jax.Array) else np
    weights = uniform(x.shape, "projection", field, x.shape)
    return xp.sum((xp.log(x) if positive(field) else x) * (weights + np.sign(weights)))


def run(tx, state_of, *, num_steps, shapes, from_zero):
    """{leaf: {field: its summaries at every step}} of a transformation, in one ``lax.scan``.

    ``state_of(state)`` gives {field: tree}. ``from_zero`` sets the parameters to zero before every
    step: what is then in them is the update alone. Else they are observed as ``params``.
    """
    params = {k: parameters(s) for k, s in shapes.items()}
    grads = {k: gradients(s, num_steps) for k, s in shapes.items()}
    zero = jax.tree.map(np.zeros_like, params)

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = updates if from_zero else optax.apply_updates(params, updates)
        fields = state_of(state) | {"update" if from_zero else "params": params}
        seen = {
            leaf: {f: summary(f, of[leaf]) for f, of in fields.items() if of[leaf] is not None}
            for leaf in shapes
        }
        return (zero if from_zero else params, state), seen

    run_all = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[1])
    seen = run_all(zero if from_zero else params, grads)
    return jax.tree.map(np.asarray, seen)


def step_of(tx):
    """From gradients, state and parameters to new parameters and state."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def unroll(tx, grads, params):
    """(updates, params, states) after every step, stacked, of gradients stacked over steps."""

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (updates, params, state)

    # All in one program: each operation outside of it would be one more.
    run = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[1])
    return jax.device_get(run(params, grads))


def summary(field, x):
    """What a golden file keeps of one array: the projection, and all of it if it is small."""
    xp = jnp if isinstance(x, jax.Array) else np
    kept = {"projection": project(field, x)}
    if field == "update":  # CAME's reach 200, where the sum's own rounding is above 1e-12
        kept["rms"] = xp.sqrt(xp.mean(x * x))
    return kept | ({"whole": x} if x.size <= WHOLE_SIZE else {})


def compare_to_golden(file, name, tx, state_of, **options):
    """The summaries of a trace of ``run`` and those of a golden file."""
    seen = run(tx, state_of, **options)
    with np.load(pathlib.Path(__file__).parent / "golden" / file) as arrays:
        golden = dict(arrays)
    keys = [k for k in golden if k.startswith(f"{name}/") and k.split("/")[1] in seen]
    assert {tuple(k.split("/")[1:3]) for k in keys} == {
        (leaf, field) for leaf, fields in seen.items() for field in fields
    }
    for key in keys:
        _, leaf, field, kind, *step = key.split("/")
        have, want = seen[leaf][field][kind], golden[key]
        if kind == "whole":
            compare(have[int(step[0]) - 1], want, scale_of(field, want), key)
        elif kind == "rms":
            compare(have, want, want, key)
        else:
            compare(have, want, np.maximum(1.0, golden.get(f"{name}/{leaf}/{field}/rms", 1.0)), key)


def scale_of(field, want):
    """What errors are relative to: each average of squares, of other elements max(1, it)."""
    return want if positive(field) else np.maximum(1.0, np.abs(want))


def compare(have, want, scale, message):
    """Within 1e-12 of the scale."""
    np.testing.assert_allclose(have / scale, want / scale, rtol=0, atol=1e-12, err_msg=message)


def compare_to_reference(make, reference, cases, num_steps, options=(), theirs=()):
    """Every update and state field within 1e-12 of NumPy references, all arrays in one program.

    Args:
      make: the transformation, which takes a factoring; or its alias, with a learning rate of 1.
      reference: the class in ``references``.
      cases: name of an array -> shape, factoring; as ``dims.CASES``.
      num_steps: how many steps.
      options: further arguments of the transformation; ``theirs`` are those of the reference.
    """
    grads = {k: gradients(shape, num_steps) for k, (shape, _) in cases.items()}
    tx = make(factoring=dims.rule(cases), **dict(options))
    updates, _, states = unroll(tx, grads, {k: np.zeros(s) for k, (s, _) in cases.items()})
    if not hasattr(states, "nu"):  # of an alias, which negates
        updates, states = jax.tree.map(np.negative, updates), states[0]
    for k, (shape, factoring) in cases.items():
        alone = reference(shape, **dims.as_kwargs(factoring), **dict(theirs))
        steps = []
        for g in grads[k]:
            step = {"update": alone.step(g)} | alone.state()
            steps.append(jax.tree.map(np.copy, step))  # a scalar's state changes in place
        for field in steps[0]:
            have = updates[k] if field == "update" else getattr(states, field)[k]
            want = [step[field] for step in steps]
            assert (have is None) == (want[0] is None), (k, field)
            if have is not None:
                have, want = np.asarray(have, np.float64), np.stack(want)  # it may be bfloat16
                compare(have, want, scale_of(field, want), f"{k}, {field}; dim 0 is the step")
