"""The update inside the backward pass, on one device: gradients of one layer exist at a time.

Loops over stacked layers are found in the traced loss. They run over the index of a layer, whose
backward rule computes the layer again, takes its gradient, and writes new parameters and new state
into refs of the old ones. What is outside of the loops is differentiated and updated as usual.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import bind_equation, evaluate
from sharding._types import Tree
from sharding.collectives._dtypes import to_sum_dtype
from sharding.offload._host_memory import DEVICE, HOST, on_host
from sharding.offload._streamed_layers import Cell
from sharding.placement._train_state import parts
from sharding.step import _model_state
from sharding.step._gather_params import marking
from sharding.step._layer_updates import OTHERWISE, Refs, Update, by_layer, make_refs
from sharding.step._looped_loss import LoopedLoss, find_loops, in_order, run_loop, sliceable
from sharding.step._loss import Inputs, Loss, loss_args
from sharding.step._microbatches import inverse_weight
from sharding.step._rng import microbatch_key
from sharding.step._step_plan import StepSpec


def check_alone(zero: Any, loss: Loss, snapshot: Any) -> None:
    """Raises on options of a step that its backward pass cannot update with."""
    asked = {
        f"a mesh of {zero.mesh.size} devices": zero.mesh.size > 1,
        f"offload={zero.offload!r}": zero.offload == "optimizer",
        "sync=": zero.sync is not None,
        "Precision(gather=...)": zero.precision.gather is not None,
        f"microbatches={loss.microbatches}": loss.microbatches > 1,
        "snapshot=": snapshot is not None,
    }
    for name in (name for name, given in asked.items() if given):
        raise ValueError(
            f"update='backward' is for one device and one micro-batch, without {name}. Leave that "
            f"out, {OTHERWISE}."
        )


def update_in_backward(
    spec: StepSpec, loss: Loss, state: Tree, inputs: Inputs, tx: Any, grad_norm: bool
) -> tuple[Any, dict[str, Any], Any]:
    """The new train state, the metrics and the new model state; inside ``on_mesh``."""
    params, opt_state, tx = parts(state, tx)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    trained = treedef.flatten_up_to(spec.trained)
    streamed = any(map(on_host, leaves))
    cast = [_cast(x, spec.precision.of_loss(x.dtype)) for x in leaves]
    closed, results, flat = _trace_loss(loss, treedef.unflatten(cast), inputs)
    loops = find_loops(closed, cast, trained, flat)
    if not loops:
        raise ValueError(
            "update='backward' found no layers in the loss: no lax.scan (nn.scan of Flax) slices "
            "trained parameters along their first dim which nothing else uses. Loops inside of "
            "jax.checkpoint, lax.cond and other loops do not count. Stack the parameters of equal "
            f"layers and scan over them, with jax.checkpoint inside of the loop, {OTHERWISE}."
        )

    value = jax.eval_shape(to_sum_dtype, results[0])
    update = Update.trace(spec, tx, params, opt_state, value)
    graph, given = update.graph, [*leaves, *jax.tree.leaves(opt_state)]
    stacks = [by_layer(update, loop) for loop in loops]
    looped = {i for stack in stacks for i in stack}
    for i in (i for i, x in enumerate(leaves) if on_host(x) and i not in looped):
        raise ValueError(
            f"offload='all' leaves {update.names[i]!r} of shape {leaves[i].shape} in host memory, "
            "and no loop over stacked layers streams and updates it. Stacks have three dims or "
            "more, are trained, and are sliced by a lax.scan of the loss. Raise offload_min_size "
            "above its size, or leave out offload."
        )
    make: Any = Cell if streamed else jax.new_ref
    squares = make(to_sum_dtype(jnp.zeros(()))) if grad_norm else None
    refs = [make_refs(graph, list(stack.values()), given, squares, make) for stack in stacks]
    ran: set[int] = set()  # the loops that run backward

    def gradient(i: int, x: jax.Array) -> jax.Array:
        """In the dtype that the transformation gets, after that of a sum over devices."""
        x = x.astype(spec.precision.of_sum(x.dtype))
        return x.astype(graph.types[update.grad(i)].dtype)

    def read(index: int, own: Refs, layer: jax.Array) -> list[jax.Array]:
        return [own.replaced[i][layer].astype(cast[i].dtype) for i in stacks[index]]

    def write(index: int, own: Refs, layer: jax.Array, grads: list[jax.Array]) -> None:
        ran.add(index)
        grads = list(map(gradient, stacks[index], grads))
        if own.squares is not None:
            own.squares[...] += _squares(grads)
        with jax.named_scope("update"):
            for one, grad in zip(stacks[index].values(), grads, strict=True):
                one.write(graph, own, layer, grad)

    rest = [i for i, t in enumerate(trained) if t and i not in looped]

    def total_loss(outside: list[Any], token: jax.Array) -> Any:
        every = dict(enumerate(cast)) | dict(zip(rest, outside, strict=True))
        every |= {i: sliceable(i, x) for i, x in enumerate(cast) if i in looped}
        numbers = iter(range(len(loops)))

        def run(eqn: Any, *args: Any) -> list[Any]:
            if not args[2]:
                return list(bind_equation(eqn, [*args[0], *args[1], *in_order(args[3])]))
            index = next(numbers)
            does = functools.partial(read, index), functools.partial(write, index)
            return run_loop(eqn, args, *does, refs[index], token, streamed)

        outs = LoopedLoss(closed, run, looped.discard).run([*in_order(every), *flat])
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    with jax.named_scope("loss_and_grad"):
        outside, token = [cast[i] for i in rest], jnp.zeros(())
        total, vjp, (weight, model_state, aux) = jax.vjp(total_loss, outside, token, has_aux=True)
    metrics: dict[str, Any] = {"loss": to_sum_dtype(total)}
    metrics |= {"weight": weight.astype(metrics["loss"].dtype)} if loss.weighted else {}
    metrics |= {"aux": aux} if loss.has_aux else {}

    # What the update of a layer needs beside it, then the gradients.
    replaced = {j for own in refs for j in own.replaced}
    others = {j for j, x in enumerate(given) if on_host(x)} - replaced
    values = graph.constants | dict(enumerate(given))
    values |= {j: jax.device_put(given[j], DEVICE) for j in others}
    values[update.grad(len(leaves))] = metrics["loss"]
    for own in refs:
        evaluate(graph.needed(own.early, values)[0], values)
        for v, ref in own.early.items():
            ref[...] = values[v]
    with jax.named_scope("loss_and_grad"):
        grads = dict(zip(rest, vjp(jnp.ones_like(total))[0], strict=True))
    for index in set(range(len(loops))) - ran:
        name = update.names[loops[index][0]]
        raise ValueError(
            f"update='backward' found layers in the loss, such as those of {name!r}, on which its "
            f"derivative does not depend. Leave them out of trainable, {OTHERWISE}."
        )

    grads = {i: gradient(i, g) for i, g in grads.items()}
    if squares is not None:
        metrics["grad_norm"] = jnp.sqrt(squares[...] + _squares(list(grads.values())))
    with jax.named_scope("update"):
        zeros = {i: jnp.zeros_like(x) for i, x in enumerate(leaves) if not on_host(x)}
        values |= {update.grad(i): g for i, g in (zeros | grads).items() if i not in looped}
        freeze = operator.attrgetter("value") if streamed else jax.freeze
        new = {j: freeze(ref) for own in refs for j, ref in own.replaced.items()}
        outputs = {j: v for j, v in enumerate(graph.outputs) if j not in new}
        evaluate(graph.needed(outputs.values(), values)[0], values)
        new |= {j: values[v] for j, v in outputs.items()}
        new |= {j: jax.device_put(new[j], HOST) for j in others}
        new |= {i: x for i, x in enumerate(leaves) if not trained[i]}
    params, opt_state = jax.tree.unflatten(jax.tree.structure((params, opt_state)), in_order(new))
    if isinstance(state, tuple):
        return (params, opt_state), metrics, model_state
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, metrics, model_state


def _cast(x: jax.Array, dtype: Any) -> Any:
    """A parameter as the loss gets it; of one in host memory the type of its layers' loop."""
    return jax.ShapeDtypeStruct(x.shape, dtype) if on_host(x) else x.astype(dtype)


def _trace_loss(loss: Loss, params: Tree, inputs: Inputs) -> tuple[Any, Any, list[Any]]:
    """The trace of the mean loss, and of what it returns beside it; its results; its arguments."""
    number = jnp.zeros((), jnp.int32)  # of the only micro-batch
    keys = microbatch_key(loss.rngs, inputs.key, number, inputs.batch)
    args = loss_args(loss, inputs.batch, inputs.model_state, keys)

    def mean_loss(params: Tree, *args: Any) -> Any:
        total, weight, new, aux = loss.split(loss.fn(params, *args))
        if loss.model_state:
            new, _ = _model_state.checked(inputs.model_state, new)
        weight = lax.stop_gradient(weight)
        if loss.weighted:  # divided before gradients are used
            total *= inverse_weight(jnp.asarray(weight, total.dtype))
        return total, (weight, new, aux)

    with marking("hooks"):
        closed, results = jax.make_jaxpr(mean_loss, return_shape=True)(params, *args)
    return closed, results, jax.tree.leaves(args)


def _squares(grads: list[jax.Array]) -> Any:
    return sum(jnp.sum(jnp.square(to_sum_dtype(g))) for g in grads)
