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
import optax
from jax import lax

from optax_ext.equations import name_of
from optax_ext.traced_graph import Graph, evaluate
from sharding._types import Tree
from sharding._user_line import line_of, warn
from sharding.collectives._map_arrays import to_sum_dtype
from sharding.loss._effects import Run, check_effects
from sharding.loss._marks import marking
from sharding.offload._host_memory import DEVICE, HOST, HostStack, on_host
from sharding.placement._layout import Layout
from sharding.placement._train_state import parts
from sharding.step import _global_gradients, _model_state
from sharding.step._layer_scan import Microbatches, cast_params, find_loops
from sharding.step._layer_updates import (
    OTHERWISE,
    LayerUpdate,
    plan_update,
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
    step = BackwardUpdate(spec, loss, parts(state, tx), inputs, grad_norm)
    params, opt_state, metrics, model_state = step.run()
    if isinstance(state, tuple):
        return (params, opt_state), metrics, model_state
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, metrics, model_state


class BackwardUpdate:
    """One step: a loss in pieces, and the update as a graph.

    Numbers are of parameters (``i``), of inputs and outputs of the update, which are parameters and
    state (``j``), and of the values of its graph (``v``). An input has the same ``j`` and ``v``.
    """

    def __init__(
        self, spec: StepSpec, loss: Loss, parts: tuple[Any, ...], inputs: Inputs, grad_norm: bool
    ):
        self.spec, self.loss, self.inputs, self.grad_norm = spec, loss, inputs, grad_norm
        self.params, self.opt_state, tx = parts
        self.leaves, treedef = jax.tree.flatten(self.params)
        self.trained = treedef.flatten_up_to(spec.trained)

        # What is to be computed: the loss with its loops, and the update with those that they make.
        whole = _global_gradients.GlobalLoss(spec, loss.fn, self.params)
        self.cast = whole.cast(self.leaves)
        self.each, self.arguments = _global_gradients.split_rows(spec.layout, loss, inputs)
        several = loss.microbatches > 1
        first = jax.tree.map(lambda x: x[0], self.each) if several else self.each
        args = self.arguments(inputs.model_state, first)
        traced = _trace_loss(spec.layout, loss, treedef.unflatten(self.cast), args)
        loops = find_loops(traced, self.trained)
        value = jax.eval_shape(to_sum_dtype, traced.types[traced.outputs[0]])
        of_update = spec, tx, self.params, self.opt_state, value
        self.update, self.stacks = plan_update(of_update, [loop.params for loop in loops])

        # Where it is stored. ``values`` are known for all layers; loops have refs of theirs.
        self.given = [*self.leaves, *jax.tree.leaves(self.opt_state)]
        self.outside = set(range(len(self.leaves))).difference(*self.stacks)
        self.refs = self.update.refs
        self.refs.update(self._make_refs())
        self.values = self.update.known
        self.values |= enumerate(self.given)
        self.unstreamed = self._load_unstreamed()
        self.values |= {
            i: self.update.shard(i, self.values[i]) for i in self.outside if self.trained[i]
        }

        loops = [
            loop.of(stack)._replace(streamed=_host_stacks(stack, self.refs))
            for loop, stack in zip(loops, self.stacks, strict=True)
            if stack
        ]
        in_turn = bool(jax.tree.leaves(inputs.model_state))
        microbatches = Microbatches(loss.microbatches, spec.precision.of_accumulator, in_turn)
        self.pieces = LossPieces(whole, self.cast, traced, loops, microbatches, self._read)
        self._load_read()
        if not loops and not any(piece.complete for piece in self.pieces.pieces[1:]):
            raise ValueError(_no_layers(traced, len(self.leaves)))

    # --- Memory -----------------------------------------------------------------------------------

    def _make_refs(self) -> dict[int, Any]:
        """Refs of the parameters and the state that loops update, by their numbers."""
        written = [j for stack in self.stacks for one in stack.values() for j in one.outputs]
        for j in (j for j in written if on_host(self.given[j]) and any(self.update.held[j][:1])):
            raise ValueError(
                f"offload='all' leaves {self.update.names[j]!r} of shape {self.given[j].shape} in "
                "host memory, and its layers are on different devices, as ZeRO shards the longest "
                "dim, while each device streams its shard of every layer. At stage 3 name another "
                "dim (param_specs), raise offload_min_size above its size, or leave out offload."
            )
        given = {j: self.given[j] for j in written}
        return {j: HostStack(x) if on_host(x) else jax.new_ref(x) for j, x in given.items()}

    def _load_unstreamed(self) -> list[int]:
        """Copies to the device the state in host memory that no loop streams; its numbers."""
        found = [j for j, x in enumerate(self.given) if on_host(x) and j not in self.refs]
        self.values |= {j: jax.device_put(self.given[j], DEVICE) for j in found}
        return found

    def _load_read(self) -> None:
        """Copies to the device the parameters in host memory that are read outside of loops."""
        for i in (i for i in self.outside | self.pieces.read if on_host(self.leaves[i])):
            self.cast[i] = jax.device_put(self.leaves[i], DEVICE).astype(self.cast[i].dtype)
            warn(
                f"offload='all' leaves {self.update.names[i]!r} of shape {self.leaves[i].shape} in "
                "host memory, and each step copies all of it to the device"
                f"{', beside its gradient' * self.trained[i] if i in self.outside else ''}. A "
                "stack is streamed layer by layer if it is trained, one lax.scan of the loss "
                "slices it, and the loss does not use it otherwise."
            )

    def _read(self, index: int, layer: jax.Array) -> dict[int, jax.Array]:
        """The parameters of a layer of a loop, in the dtypes that the loss gets."""
        held = {i: self.update.read(i, layer) for i in self.stacks[index]}
        return {i: x[0].astype(self.cast[i].dtype) for i, x in held.items()}

    # --- The layers of loops, and the rest --------------------------------------------------------

    def _gradient(self, i: int, x: jax.Array) -> jax.Array:
        """In the dtype that the transformation gets."""
        return x.astype(self.update.graph.types[self.update.grad(i)].dtype)

    def _terms(self, index: int, layer: jax.Array, grads: dict[int, jax.Array]) -> Any:
        """The terms of a layer."""
        found: dict[int, jax.Array] = {}
        for i, one in self.stacks[index].items():
            found |= one.terms_of_layer(self.update, layer, self._gradient(i, grads[i]))
        return found, _squares({})

    def _write(self, index: int, layer: jax.Array, grads: dict[int, jax.Array]) -> Any:
        """Updates a layer; returns the sum of its squares, too."""
        grads = {i: self._gradient(i, x) for i, x in grads.items()}
        with jax.named_scope("update"):
            for i, one in self.stacks[index].items():
                one.write(self.update, layer, grads[i])
        return {}, _squares(grads if self.grad_norm else {})

    def _write_with_terms(self, index: int, layer: jax.Array, grads: dict[int, jax.Array]) -> Any:
        found, _ = self._terms(index, layer, grads)
        return found, self._write(index, layer, grads)[1]

    def _backward(
        self, kept: ForwardPass, take: Any, wanted: Iterable[int], how: Run
    ) -> tuple[dict[int, Any], Any]:
        """Values of the update, each computed as soon as its gradients are; all squares."""
        graph, grad = self.update.graph, self.update.grad
        found: dict[int, Any] = {}
        known, complete, squares = dict(self.values), set(self.unused), [jnp.zeros(())]

        def visit(grads: dict[int, Any], taken: Any, cotangents: Any) -> Any:
            grads = {i: self._gradient(i, x) for i, x in grads.items()}
            terms, of_layers = taken if taken is not None else ({}, jnp.zeros(()))
            found.update({t: reduce(graph, t, x) for t, x in terms.items()})
            squares.extend([_squares(grads), jnp.sum(of_layers)])
            known.update({grad(i): x for i, x in grads.items()})
            complete.update(grads)
            ready = self.update.ready(wanted, complete, found)
            with jax.named_scope("update"):
                evaluate(graph.needed(ready, known)[0], known)
            new = {v: known[v] for v in ready}
            # XLA:TPU updates early by itself; on CPUs what is independent runs at the same time.
            if self.spec.layout.platform == "gpu":
                new, cotangents = lax.optimization_barrier((new, cotangents))
            found.update(new)
            return cotangents

        with jax.named_scope("loss_and_grad"):
            self.pieces.backward(take, kept, visit, how)
        return found, sum(squares)

    def _evaluate(self, wanted: Iterable[int]) -> None:
        """Computes values of all layers, from what is known."""
        wanted = list(wanted)
        equations, _ = self.update.graph.needed(wanted, self.values)
        used = {*wanted, *(v for eqn in equations for v in eqn.operands)}
        for v in used & self.values.keys():
            if on_host(self.values[v]):
                self.values[v] = jax.device_put(self.values[v], DEVICE)
        evaluate(equations, self.values)

    # --- The step ---------------------------------------------------------------------------------

    def run(self) -> tuple[Any, Any, dict[str, Any], Any]:
        """New parameters, new optimizer state, metrics and the new model state."""
        metrics, model_state, kept = self._forward()
        update, graph = self.update, self.update.graph
        of_layers = [one for stack in self.stacks for one in stack.values()]
        new_of = {j: v for j, v in enumerate(graph.outputs) if j not in self.refs}
        # What is made of terms alone waits for all of them. If more depends on terms, a backward
        # pass before the update computes them.
        late = {v for v in new_of.values() if v in update.of_terms and not graph.reads[v]}
        wanted = [v for v in new_of.values() if v not in late]
        take = self._write
        if update.of_terms.intersection(graph.outputs) - late:
            self._evaluate(v for one in of_layers for v in one.reduced.early)
            terms, _ = self._backward(kept, self._terms, update.terms, Run.SILENTLY)
            # All of the second pass is computed after the first.
            terms, cotangents, grads = lax.optimization_barrier(
                ({t: terms[t] for t in update.terms}, kept.cotangents, kept.grads)
            )
            kept = kept._replace(cotangents=cotangents, grads=grads)
            self.values |= terms
        elif update.terms:
            self._evaluate(v for one in of_layers for v in one.reduced.early)
            take, wanted = self._write_with_terms, [*wanted, *update.terms]
        self._evaluate(v for one in of_layers for v in one.new.early)
        found, squares = self._backward(kept, take, wanted, Run.AGAIN)
        self.values |= {t: found[t] for t in update.terms if t in found}
        self._evaluate(late)
        if self.grad_norm:
            metrics["grad_norm"] = jnp.sqrt(squares)
        new = {j: self.values[v] if v in late else found[v] for j, v in new_of.items()}
        return *self._new_state(new), metrics, model_state

    def _forward(self) -> tuple[dict[str, Any], Any, ForwardPass]:
        """Metrics, the new model state, and what the backward pass needs."""
        layout, loss, inputs = self.spec.layout, self.loss, self.inputs
        with jax.named_scope("loss_and_grad"):
            results, kept = self.pieces.forward(self.arguments, inputs.model_state, self.each)
        total, weight, model_state, aux = results
        total, weight = jnp.sum(to_sum_dtype(total)), to_sum_dtype(weight)
        weight = jnp.sum(weight.astype(jnp.promote_types(weight.dtype, total.dtype)))
        if loss.microbatches > 1:
            aux = _global_gradients.join_rows(layout, inputs.batch, aux)
        _, metrics = _global_gradients.mean_metrics(loss, total, weight, aux)
        self.values[self.update.grad(len(self.leaves) + 1)] = metrics["loss"]
        # Parameters that the loss is not differentiated by.
        used = {i for piece in self.pieces.pieces for i in piece.complete}
        self.unused = self.outside - used
        zeros = {i: jnp.zeros_like(self.values[i]) for i in self.unused}
        self.values |= {self.update.grad(i): self._gradient(i, x) for i, x in zeros.items()}
        return metrics, model_state, kept

    def _new_state(self, new: dict[int, Any]) -> tuple[Any, Any]:
        """Parameters and optimizer state, of what is updated outside of loops."""
        new = {j: self.update.shard(j, x) for j, x in new.items()}
        new |= {
            j: ref.stack if isinstance(ref, HostStack) else jax.freeze(ref)
            for j, ref in self.refs.items()
        }
        new |= _gathered(self.spec, self.params, new, self.outside)
        new |= {j: jax.device_put(new[j], HOST) for j in self.unstreamed}
        structure = jax.tree.structure((self.params, self.opt_state))
        params, opt_state = structure.unflatten(new[j] for j in sorted(new))
        return params, opt_state


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
            graph = Graph(run, inputs, [True] * len(inputs), exact=True)
    except ValueError as error:
        if not _global_gradients.loss_axes(layout).names_types(error):
            raise
        raise ValueError(
            "the loss names Explicit axes in types, as by out_sharding or reshard, and "
            "update='backward' traces it for Auto axes. Use jax.lax.with_sharding_constraint, "
            f"{OTHERWISE}. jax says: {error}"
        ) from error
    check_effects(graph.jaxpr, OTHERWISE)
    return graph


def _no_layers(graph: Graph, num_params: int) -> str:
    return (
        "update='backward' found no layers in the loss: the backward pass completes all gradients "
        "at its end. It looks for loops, lax.scan (nn.scan of Flax), that slice stacked parameters "
        "along their first dim, and for parameters that are used one after the other. "
        f"{_most_params(graph, num_params)}What is inside of jax.checkpoint, of lax.cond and other "
        "loops, and of a loss by remat.plan that computes operations again, does not count: pass "
        f"the loss itself, with jax.checkpoint around each layer, {OTHERWISE}."
    )


def _most_params(graph: Graph, num_params: int) -> str:
    """A sentence about the operation that takes most of several parameters, if one does."""
    views = cast_params(graph, num_params)
    for eqn in graph.equations:
        count = len({views[v].param for v in eqn.operands if v in views})
        if 2 * count > num_params > 1:
            one = " at ".join(filter(None, (name_of(eqn), line_of(eqn.source_info))))
            return f"But {count} of {num_params} parameters are operands of one {one}. "
    return ""


def _squares(grads: dict[int, jax.Array]) -> Any:
    return jnp.zeros(()) + optax.tree.norm([to_sum_dtype(g) for g in grads.values()], squared=True)
