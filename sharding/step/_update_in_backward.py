"""The update inside the backward pass: gradients of one layer exist at a time.

The loss is traced and differentiated piece by piece, from its last to its first. A loop over
stacked layers writes new parameters and new state into refs of the old ones, layer by layer; other
parameters are updated after the piece that completes their gradients. If the update depends on sums
of all gradients, as on their norm, a first backward pass computes these. All of it is in the global
view: refs hold the arrays of all devices, and the update is of their shards.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import Graph, evaluate
from sharding._types import Tree
from sharding._user_line import line_of
from sharding.collectives._map_arrays import to_sum_dtype
from sharding.offload._host_memory import DEVICE, HOST, HostStack, on_host
from sharding.placement._layout import Layout
from sharding.placement._train_state import parts
from sharding.step import _global_gradients, _model_state
from sharding.step._gather_params import marking
from sharding.step._layer_scan import Microbatches, cast_params, find_loops
from sharding.step._layer_updates import (
    OTHERWISE,
    LayerUpdate,
    Update,
    by_layer,
    reduce,
)
from sharding.step._loss import Inputs, Loss
from sharding.step._loss_pieces import ForwardPass, LossPieces
from sharding.step._step_plan import StepSpec
from sharding.step._update import gather_updated


def check_alone(zero: Any, snapshot: Any) -> None:
    """Raises on options of a step that its backward pass cannot update with."""
    if zero.mesh.size > 1 and zero.view == "device":
        raise ValueError(
            "update='backward' on several devices gives the loss all rows of the batch, as under "
            f"jit, and the mesh has {zero.mesh.size} devices. Make Zero with view='global': losses "
            "that are means over examples are the same there."
        )
    asked = {
        f"offload={zero.offload!r}": zero.offload == "optimizer",
        "sync=": zero.sync is not None,
        "Precision(gather=...)": zero.precision.gather is not None,
        "snapshot=": snapshot is not None,
    }
    for name in (name for name, given in asked.items() if given):
        raise ValueError(f"update='backward' is without {name}. Leave that out, {OTHERWISE}.")


def update_in_backward(
    spec: StepSpec, loss: Loss, state: Tree, inputs: Inputs, tx: Any, grad_norm: bool
) -> tuple[Any, dict[str, Any], Any]:
    """The new train state, the metrics and the new model state; inside ``on_mesh``."""
    layout, (params, opt_state, tx) = spec.layout, parts(state, tx)
    leaves, treedef = jax.tree.flatten(params)
    trained = treedef.flatten_up_to(spec.trained)

    # What is to be computed: the loss in pieces, and the update as a graph.
    run = _global_gradients.GlobalLoss(spec, loss.fn, params)
    cast = run.cast(leaves)
    each, arguments = _global_gradients.split_rows(layout, loss, inputs)
    first = jax.tree.map(lambda x: x[0], each) if loss.microbatches > 1 else each
    args = arguments(inputs.model_state, first)
    traced = _trace_loss(layout, loss, treedef.unflatten(cast), args)
    loops = find_loops(traced, trained)
    value = jax.eval_shape(to_sum_dtype, traced.types[traced.outputs[0]])
    update = Update.trace(spec, tx, params, opt_state, value)
    graph, given = update.graph, [*leaves, *jax.tree.leaves(opt_state)]
    refs, values = update.refs, update.known
    values |= enumerate(given)
    stacks = [by_layer(update, loop.params) for loop in loops]
    outside = set(range(len(leaves))).difference(*stacks)
    refs |= _make_refs(update, given, stacks, outside)
    loops = [
        loop.of(stack)._replace(streamed=_host_stacks(stack, refs))
        for loop, stack in zip(loops, stacks, strict=True)
        if stack
    ]
    in_turn = bool(jax.tree.leaves(inputs.model_state))
    microbatches = Microbatches(loss.microbatches, spec.precision.of_accumulator, in_turn)

    def read(index: int, layer: jax.Array) -> dict[int, jax.Array]:
        held = {i: update.read(i, layer) for i in stacks[index]}
        return {i: x[0].astype(cast[i].dtype) for i, x in held.items()}

    pieces = LossPieces(run, cast, traced, loops, microbatches, read)
    if not loops and not any(piece.complete for piece in pieces.pieces[1:]):
        raise ValueError(
            "update='backward' found no layers in the loss: the backward pass completes all "
            "gradients at its end. It looks for loops, lax.scan (nn.scan of Flax), that slice "
            "stacked parameters along their first dim, and for parameters that are used one after "
            f"the other. {_most_params(traced, len(leaves))}What is inside of jax.checkpoint, of "
            "lax.cond and other loops, and of a loss by remat.plan that computes operations again, "
            "does not count: pass the loss itself, with jax.checkpoint around each layer, "
            f"{OTHERWISE}."
        )

    def gradient(i: int, x: jax.Array) -> jax.Array:
        """In the dtype that the transformation gets."""
        return x.astype(graph.types[update.grad(i)].dtype)

    def write(index: int, layer: jax.Array, grads: dict[int, jax.Array]) -> Any:
        """Updates a layer; returns its terms, none, and the sum of its squares."""
        grads = {i: gradient(i, x) for i, x in grads.items()}
        with jax.named_scope("update"):
            for i, one in stacks[index].items():
                one.write(update, layer, grads[i])
        return {}, _squares(grads if grad_norm else {})

    def sum_up(index: int, layer: jax.Array, grads: dict[int, jax.Array]) -> Any:
        """Returns the terms of a layer."""
        terms: dict[int, jax.Array] = {}
        for i, one in stacks[index].items():
            terms |= one.terms_of_layer(update, layer, gradient(i, grads[i]))
        return terms, _squares({})

    with jax.named_scope("loss_and_grad"):
        results, kept = pieces.forward(arguments, inputs.model_state, each)
    total, weight, model_state, aux = results
    total, weight = jnp.sum(to_sum_dtype(total)), to_sum_dtype(weight)
    weight = jnp.sum(weight.astype(jnp.promote_types(weight.dtype, total.dtype)))
    aux = _global_gradients.join_rows(layout, inputs.batch, aux) if loss.microbatches > 1 else aux
    _, metrics = _global_gradients.mean_metrics(loss, total, weight, aux)
    # State in host memory that no loop streams.
    whole = [j for j, x in enumerate(given) if on_host(x) and j not in refs]
    values |= {j: jax.device_put(given[j], DEVICE) for j in whole}
    values |= {i: update.shard(i, leaves[i]) for i in outside if trained[i]}
    values[update.grad(len(leaves) + 1)] = metrics["loss"]
    used = {i for piece in pieces.pieces for i in piece.complete}
    zeros = {i: jnp.zeros_like(leaves[i]) for i in outside - used}
    values |= {update.grad(i): gradient(i, x) for i, x in zeros.items()}

    def backward(kept: ForwardPass, take: Any, wanted: Iterable[int]) -> tuple[dict[int, Any], Any]:
        """Values of the update, each computed as soon as its gradients are; all squares."""
        found: dict[int, Any] = {}
        known, complete, squares = dict(values), set(zeros), [jnp.zeros(())]

        def visit(grads: dict[int, Any], taken: Any, cotangents: Any) -> Any:
            grads = {i: gradient(i, x) for i, x in grads.items()}
            terms, of_layers = taken if taken is not None else ({}, jnp.zeros(()))
            found.update({t: reduce(graph, t, x) for t, x in terms.items()})
            squares.extend([_squares(grads), jnp.sum(of_layers)])
            known.update({update.grad(i): x for i, x in grads.items()})
            complete.update(grads)
            ready = update.ready(wanted, complete, found)
            with jax.named_scope("update"):
                evaluate(graph.needed(ready, known)[0], known)
            new = {v: known[v] for v in ready}
            # XLA:TPU updates early by itself; on CPUs what is independent runs at the same time.
            if layout.platform == "gpu":
                new, cotangents = lax.optimization_barrier((new, cotangents))
            found.update(new)
            return cotangents

        with jax.named_scope("loss_and_grad"):
            pieces.backward(take, kept, visit)
        return found, sum(squares)

    if update.terms:
        early = [v for stack in stacks for one in stack.values() for v in one.reduced.early]
        evaluate(graph.needed(early, values)[0], values)
        terms, _ = backward(kept, sum_up, update.terms)
        # All of the second pass is computed after the first.
        terms, cotangents, grads = lax.optimization_barrier((terms, kept.cotangents, kept.grads))
        kept = kept._replace(cotangents=cotangents, grads=grads)
        values |= terms
    early = [v for stack in stacks for one in stack.values() for v in one.new.early]
    evaluate(graph.needed(early, values)[0], values)
    new_of = {j: v for j, v in enumerate(graph.outputs) if j not in refs}
    found, squares = backward(kept, write, new_of.values())
    if grad_norm:
        metrics["grad_norm"] = jnp.sqrt(squares)

    new = {
        j: ref.stack if isinstance(ref, HostStack) else jax.freeze(ref) for j, ref in refs.items()
    }
    new |= {j: update.shard(j, found[v]) for j, v in new_of.items()}
    new |= {j: jax.device_put(new[j], HOST) for j in whole}
    new |= _gathered(spec, params, new, outside)
    structure = jax.tree.structure((params, opt_state))
    params, opt_state = structure.unflatten(new[j] for j in sorted(new))
    if isinstance(state, tuple):
        return (params, opt_state), metrics, model_state
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, metrics, model_state


def _gathered(
    spec: StepSpec, params: Tree, new: dict[int, Any], outside: set[int]
) -> dict[int, jax.Array]:
    """New parameters outside of loops, as they are between steps; the old ones if untrained."""
    leaves, treedef = jax.tree.flatten(params)
    trained = treedef.flatten_up_to(spec.trained)
    with jax.named_scope("gather_params"):
        shards = treedef.unflatten(new[i] for i in range(len(leaves)))
        own = treedef.unflatten(t and i in outside for i, t in enumerate(trained))
        gathered = jax.tree.leaves(gather_updated(spec, shards, params, own))
    return {i: gathered[i] if trained[i] else leaves[i] for i in outside}


def _make_refs(
    update: Update, given: list[Any], stacks: list[dict[int, LayerUpdate]], outside: set[int]
) -> dict[int, Any]:
    """Refs of the parameters and the state that loops update, by their numbers."""
    written = [j for stack in stacks for one in stack.values() for j in one.outputs]
    for j in (j for j in [*outside, *written] if on_host(given[j])):
        if j in outside:
            reason = (
                "no loop over stacked layers streams and updates it. Stacks have three dims or "
                "more, are trained, and are sliced by a lax.scan of the loss"
            )
        elif any(update.held[j][:1]):
            reason = (
                "its layers are on different devices, as ZeRO shards the longest dim, while each "
                "device streams its shard of every layer. At stage 3 name another dim (param_specs)"
            )
        else:
            continue
        raise ValueError(
            f"offload='all' leaves {update.names[j]!r} of shape {given[j].shape} in host memory, "
            f"and {reason}. Raise offload_min_size above its size, or leave out offload."
        )
    return {j: HostStack(given[j]) if on_host(given[j]) else jax.new_ref(given[j]) for j in written}


def _host_stacks(stack: dict[int, LayerUpdate], refs: dict[int, Any]) -> tuple[HostStack, ...]:
    of_loop = [refs[j] for one in stack.values() for j in one.outputs]
    return tuple(ref for ref in of_loop if isinstance(ref, HostStack))


def _trace_loss(layout: Layout, loss: Loss, params: Tree, args: Any) -> Graph:
    """The loss of parameters and of other arguments: total, weight, new model state and aux."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    inputs, given = jax.tree.flatten((types, *args))

    def run(inputs: list[Any]) -> Any:
        params, *args = given.unflatten(inputs)
        total, weight, new, aux = loss.split(loss.fn(params, *args))
        if loss.model_state:
            new, _ = _model_state.checked(args[1], new)
        return total, jnp.asarray(weight), new, aux

    try:
        with marking():
            return Graph(run, inputs, [True] * len(inputs), exact=True)
    except ValueError as error:
        if not _global_gradients.names_types(layout, error):
            raise
        raise ValueError(
            "the loss names Explicit axes in types, as by out_sharding or reshard, and "
            "update='backward' traces it for Auto axes. Use jax.lax.with_sharding_constraint, "
            f"{OTHERWISE}. jax says: {error}"
        ) from error


def _most_params(graph: Graph, num_params: int) -> str:
    """A sentence about the operation that takes most of several parameters, if one does."""
    views = cast_params(graph, num_params)
    for eqn in graph.equations:
        count = len({views[v][0] for v in eqn.operands if v in views})
        if 2 * count > num_params > 1:
            one = " at ".join(filter(None, (eqn.primitive.name, line_of(eqn.source_info))))
            return f"But {count} of {num_params} parameters are operands of one {one}. "
    return ""


def _squares(grads: dict[int, jax.Array]) -> Any:
    return sum((jnp.sum(jnp.square(to_sum_dtype(g))) for g in grads.values()), jnp.zeros(()))
