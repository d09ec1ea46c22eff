"""The update inside the backward pass: gradients of one layer exist at a time.

Loops over stacked layers are found in the traced loss. They run over the index of a layer, whose
backward rule computes the layer again, takes its gradient, and writes new parameters and new state
into refs of the old ones. What is outside of the loops is differentiated and updated as usual. All
of it is in the global view: refs hold the arrays of all devices, and the update is of their shards.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import evaluate
from sharding._types import Tree
from sharding.collectives._dtypes import to_sum_dtype
from sharding.placement._layout import Layout
from sharding.placement._train_state import parts
from sharding.step import _model_state
from sharding.step._gather_params import MARK
from sharding.step._gather_updated import gather_updated
from sharding.step._global_gradients import GlobalLoss
from sharding.step._layer_updates import OTHERWISE, Refs, Update, by_layer, make_refs
from sharding.step._looped_loss import Layers, LoopedLoss, find_loops, in_order
from sharding.step._loss import Inputs, Loss, loss_args
from sharding.step._microbatches import inverse_weight
from sharding.step._rng import microbatch_key
from sharding.step._step_plan import StepSpec


def check_alone(zero: Any, loss: Loss, snapshot: Any) -> None:
    """Raises on options of a step that its backward pass cannot update with."""
    if zero.mesh.size > 1 and zero.view == "device":
        raise ValueError(
            "update='backward' on several devices gives the loss all rows of the batch, as under "
            f"jit, and the mesh has {zero.mesh.size} devices. Make Zero with view='global': losses "
            "that are means over examples are the same there."
        )
    asked = {
        f"offload={zero.offload!r}": zero.offload is not None,
        "sync=": zero.sync is not None,
        "Precision(gather=...)": zero.precision.gather is not None,
        f"microbatches={loss.microbatches}": loss.microbatches > 1,
        "snapshot=": snapshot is not None,
    }
    for name in (name for name, given in asked.items() if given):
        raise ValueError(
            f"update='backward' is for one micro-batch, without {name}. Leave that out, "
            f"{OTHERWISE}."
        )


def update_in_backward(
    layout: Layout,
    spec: StepSpec,
    opt_specs: Tree,
    loss: Loss,
    state: Tree,
    inputs: Inputs,
    tx: Any,
    grad_norm: bool,
) -> tuple[Any, dict[str, Any], Any]:
    """The new train state, the metrics and the new model state; inside ``on_mesh``."""
    params, opt_state, tx = parts(state, tx)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    trained = treedef.flatten_up_to(spec.trained)
    run = GlobalLoss(layout, spec, _mean_loss(loss, inputs), params)
    number = jnp.zeros((), jnp.int32)  # of the only micro-batch
    keys = microbatch_key(loss.rngs, inputs.key, number, inputs.batch)
    args = loss_args(loss, inputs.batch, inputs.model_state, keys)
    cast, flat = run.cast(leaves), jax.tree.leaves(args)
    closed, results = run.trace(cast, args)
    loops = find_loops(closed, cast, trained, flat)
    if not loops:
        raise ValueError(
            "update='backward' found no layers in the loss: no lax.scan (nn.scan of Flax) slices "
            "trained parameters along their first dim which nothing else uses. Loops inside of "
            "jax.checkpoint, lax.cond and other loops do not count. Stack the parameters of equal "
            f"layers and scan over them, with jax.checkpoint inside of the loop, {OTHERWISE}."
        )

    value = jax.eval_shape(to_sum_dtype, results[0])
    update = Update.trace(layout, spec, opt_specs, tx, params, opt_state, value)
    graph, given = update.graph, [*leaves, *jax.tree.leaves(opt_state)]
    stacks = [by_layer(update, loop) for loop in loops]
    looped = {i: index for index, stack in enumerate(stacks) for i in stack}
    squares = jax.new_ref(to_sum_dtype(jnp.zeros(()))) if grad_norm else None
    refs = [make_refs(graph, list(stack.values()), given, squares) for stack in stacks]
    ran: set[int] = set()  # the loops that run backward

    def gradient(i: int, x: jax.Array) -> jax.Array:
        """In the dtype that the transformation gets, after that of a sum over devices."""
        return x.astype(graph.types[update.grad(i)].dtype)

    def layers(index: int) -> Layers:
        def read(own: Refs, layer: jax.Array) -> dict[int, jax.Array]:
            held = {i: update.read(i, own.replaced[i], layer) for i in stacks[index]}
            return {i: x[0].astype(cast[i].dtype) for i, x in held.items()}

        def taps(params: dict[int, jax.Array]) -> dict[int, jax.Array]:
            return {i: run.tap(i, x.shape) for i, x in params.items()}

        def write(own: Refs, layer: jax.Array, grads: dict[int, jax.Array]) -> None:
            ran.add(index)
            grads = {i: gradient(i, g) for i, g in grads.items()}
            if own.squares is not None:
                own.squares[...] += _squares(list(grads.values()))
            with jax.named_scope("update"):
                for i, one in stacks[index].items():
                    one.write(update, own, layer, grads[i])

        return Layers(refs[index], read, taps, write)

    of_loops = list(map(layers, range(len(loops))))
    rest = [i for i, t in enumerate(trained) if t and i not in looped]

    def total_loss(outside: dict[int, jax.Array], token: jax.Array) -> Any:
        taps = [outside.get(i, x) for i, x in enumerate(cast)]
        own = {i: of_loops[index] for i, index in looped.items()}
        hooks = run.hook, MARK, layout.recomputes
        outs = LoopedLoss(closed, own, token, *hooks)(cast, taps, *flat)
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    with jax.named_scope("loss_and_grad"):
        outside, token = {i: run.tap(i, cast[i].shape) for i in rest}, jnp.zeros(())
        total, vjp, (weight, model_state, aux) = jax.vjp(total_loss, outside, token, has_aux=True)
    metrics: dict[str, Any] = {"loss": to_sum_dtype(total)}
    metrics |= {"weight": weight.astype(metrics["loss"].dtype)} if loss.weighted else {}
    metrics |= {"aux": aux} if loss.has_aux else {}

    # What the update of a layer needs beside it, then the gradients.
    values = graph.constants | dict(enumerate(given))
    values[update.grad(len(leaves))] = metrics["loss"]
    for own in refs:
        evaluate(graph.needed(own.early, values)[0], values)
        for v, ref in own.early.items():
            ref[...] = values[v]
    with jax.named_scope("loss_and_grad"):
        grads, _ = vjp(jnp.ones_like(total))
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
        zeros = {i: jnp.zeros_like(x) for i, x in enumerate(leaves) if i not in grads}
        values |= {update.grad(i): g for i, g in (zeros | grads).items() if i not in looped}
        new = {j: jax.freeze(ref) for own in refs for j, ref in own.replaced.items()}
        others = {j: v for j, v in enumerate(graph.outputs) if j not in new}
        values |= {i: update.shard(i, leaves[i]) for i in rest}
        evaluate(graph.needed(others.values(), values)[0], values)
        new |= {j: update.shard(j, values[v]) for j, v in others.items()}
    with jax.named_scope("gather_params"):
        shards = treedef.unflatten(new[i] for i in range(len(leaves)))
        outside = treedef.unflatten(i in rest for i in range(len(leaves)))
        gathered = gather_updated(layout, shards, params, spec.placed, outside)
        new |= {i: x for i, x in enumerate(jax.tree.leaves(gathered)) if i not in looped}
    params, opt_state = jax.tree.unflatten(jax.tree.structure((params, opt_state)), in_order(new))
    if isinstance(state, tuple):
        return (params, opt_state), metrics, model_state
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, metrics, model_state


def _mean_loss(loss: Loss, inputs: Inputs) -> Any:
    """A function that returns the mean loss, and what a loss returns beside it."""

    def mean_loss(params: Tree, *args: Any) -> Any:
        total, weight, new, aux = loss.split(loss.fn(params, *args))
        if loss.model_state:
            new, _ = _model_state.checked(inputs.model_state, new)
        weight = lax.stop_gradient(weight)
        if loss.weighted:  # divided before gradients are used
            total *= inverse_weight(jnp.asarray(weight, total.dtype))
        return total, (weight, new, aux)

    return mean_loss


def _squares(grads: list[jax.Array]) -> Any:
    return sum(jnp.sum(jnp.square(to_sum_dtype(g))) for g in grads)
