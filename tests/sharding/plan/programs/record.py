"""Records the compiled programs in this folder: what the compilers of each platform write.

One program, small enough to count by hand, for machines that are not here; what stands in it and
says nothing about it (file names, the compilers' own notes) is left out.

  python tests/sharding/plan/programs/record.py
"""

import pathlib
import re

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import NamedSharding

from sharding.plan import targets

LAYERS, WIDTH, ROWS = 3, 512, 256
MESHES = {
    "cpu:8": (("data",), (8,)),
    "h200x8": (("data",), (8,)),
    "v5e:4x4": (("x", "y"), (4, 4)),
    "v5e:4x4*2": (("slice", "x", "y"), (2, 4, 4)),
}


def lower(target):
    """Layers whose weights are sharded over all inner axes, gathered one by one, trained by SGD."""
    names, sizes = MESHES[target]
    mesh = targets.mesh(target, sizes, names)
    inner = names[-2:] if len(names) > 1 else names
    outer = names[:-2]
    sharded = P(None, inner[::-1])  # the shards of the first all-gather are adjacent

    def gather(w):
        for axis in inner:
            w = lax.all_gather(w, axis, axis=0, tiled=True)
        return w

    def layer(x, w):
        with jax.named_scope("gather"):
            unsharded = gather(w)
        return jnp.tanh(x @ unsharded), None

    def loss(params, x):
        y, _ = lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(y * y)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        if outer:
            with jax.named_scope("reduce_gradients"):
                grads = lax.psum(grads, outer)
        with jax.named_scope("update"):
            return params - 0.1 * grads, lax.pmean(value, names)

    step = jax.shard_map(
        step, mesh=mesh, in_specs=(sharded, P(names)), out_specs=(sharded, P()), check_vma=False
    )
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.float32)
    shardings = (NamedSharding(mesh, sharded), NamedSharding(mesh, P(names)))
    return jax.jit(step, in_shardings=shardings, donate_argnums=0).lower(params, x)


def path_of(target):
    return pathlib.Path(__file__).with_name(re.sub("[:*]", "_", target) + ".txt")


def strip(text):
    """Without tables of files and notes for the compiler's own use."""
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", text)
    text = re.sub(r" ?(?:source_\w+|stack_frame_id|scheduling_name)=(?:\"[^\"]*\"|\d+)", "", text)
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for target in MESHES:
        path_of(target).write_text(strip(lower(target).compile().as_text()))
