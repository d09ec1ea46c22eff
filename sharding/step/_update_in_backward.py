"""The update inside the backward pass: gradients of one layer exist at a time.

The loss is traced and differentiated piece by piece, from its last to its first. A loop over
stacked layers writes new parameters and new state into refs of the old ones, layer by layer; other
parameters are updated after the piece that completes their gradients. If the update depends on sums
of all gradients, as on their norm, a first backward pass computes these. All of it is partitioned:
refs hold the arrays of all devices, and the update is of their shards.

A layer's way is ``LossPieces.backward``, ``StackBackward``, ``StackUpdate.take`` and
``LayerUpdate.write``.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.equations import name_of
from optax_ext.traced_graph import Graph, Value, evaluate
from optax_ext.user_line import line_of
from sharding._types import Tree
from sharding._user_line import warn
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.loss._derivatives import Differentiated, bits
from sharding.loss._effects import Prints, check_effects
from sharding.loss._marks import marking
from sharding.loss._stack import (
    ParamNumber,
    Slot,
    Stack,
    cast_params,
    find_stacks,
    param_numbers,
)
from sharding.offload._host_memory import DEVICE, HOST, HostStack, on_host
from sharding.placement._layout import Layout
from sharding.placement._train_state import parts
from sharding.step import _global_gradients
from sharding.step._backward_pieces import ForwardPass, LossPieces, Pending
from sharding.step._layer_updates import (
    OTHERWISE,
    StackUpdate,
    plan_update,
    reduce,
    squared_norm,
)
from sharding.step._loss import Inputs, StepLoss
from sharding.step._stack_backward import Microbatches, StackPasses, Take
from sharding.step._step_plan import StepSpec
from sharding.step._update import gather_updated


def check_alone(zero: Any, snapshot: Any) -> None:
    """Raises on options of a step that its backward pass cannot update with."""
    asked = {
        "update_on='host'": zero.update_on == "host",
        "sync=": zero.sync is not None,
        "Precision(gather=...)": zero.precision.gather is not None,
        "snapshot=": snapshot is not None,
    }
    for name in (name for name, given in asked.items() if given):
        raise ValueError(f"update='backward' is without {name}. Leave that out, {OTHERWISE}.")


def update_in_backward(
    spec: StepSpec, loss: StepLoss, state: Tree, inputs: Inputs, tx: Any, grad_norm: bool
) -> tuple[Any, dict[str, Any], Any]:
    """The new train state, the metrics and the new model state; inside ``on_mesh``."""
    step = BackwardUpdate(spec, loss, parts(state, tx), inputs, grad_norm)
    params, opt_state, metrics, model_state = step.run()
    if isinstance(state, tuple):
        return (params, opt_state), metrics, model_state
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, metrics, model_state


class BackwardUpdate:
    """One step: a loss in pieces, and the update as a graph; ``Value`` is of the latter here."""

    def __init__(
        self,
        spec: StepSpec,
        loss: StepLoss,
        parts: tuple[Any, ...],
        inputs: Inputs,
        grad_norm: bool,
    ):
        self.spec, self.loss, self.inputs, self.grad_norm = spec, loss, inputs, grad_norm
        self.params, self.opt_state, tx = parts
        self.leaves, treedef = jax.tree.flatten(self.params)
        trained = treedef.flatten_up_to(spec.trained)
        numbers = param_numbers(len(self.leaves))
        self.trained = {i for i in numbers if trained[i]}
        self.frozen = set(numbers) - self.trained

        # What is computed: the loss with its stacks, and the update with those that layers make.
        whole = _global_gradients.GlobalLoss(spec, loss.fn, self.params)
        self.cast = whole.cast(self.leaves)
        self.each, self.arguments = _global_gradients.split_rows(spec.layout, loss, inputs)
        traced = self._traced(treedef.unflatten(self.cast))
        differentiated = Differentiated.of(traced, bits(self.trained))
        stacks = find_stacks(traced, len(self.leaves), differentiated)
        stacks = [x for x in stacks if x.own or self._streamed(x)]
        value = jax.eval_shape(to_sum_dtype, traced.types[traced.outputs[0]])
        of_update = spec, tx, self.params, self.opt_state, value
        self.update, self.stacks = plan_update(of_update, [stack.params for stack in stacks])
        updated = list(zip(stacks, self.stacks, strict=True))
        for _, update in updated:
            update.sums_squares = grad_norm
        self.passes = [
            self._passes(stack, whole, update)
            for stack, update in updated
            if update.of or self._streamed(stack)
        ]

        # Where it is stored: what layers update in refs; ``values`` are known for all layers.
        self._place()
        in_turn = bool(jax.tree.leaves(inputs.model_state))
        microbatches = Microbatches(loss.microbatches, spec.precision.of_accumulator, in_turn)
        traced_loss = whole, self.cast, traced, differentiated
        self.pieces = LossPieces(*traced_loss, self.passes, microbatches)
        self._load_read()
        if not self.passes and not any(piece.complete for piece in self.pieces.pieces[1:]):
            raise ValueError(_no_layers(traced, len(self.leaves)))

    def _traced(self, params: Tree) -> Graph:
        """The loss of parameters in its dtypes, and of the first micro-batch."""
        several = self.loss.microbatches > 1
        first = jax.tree.map(lambda x: x[0], self.each) if several else self.each
        args = self.arguments(self.inputs.model_state, first)
        return _trace_loss(self.spec.layout, self.loss, params, args)

    def _streamed(self, stack: Stack) -> list[ParamNumber]:
        """The untrained parameters in host memory that a loop slices."""
        return [x.param for x in stack.frozen.values() if on_host(self.leaves[x.param])]

    def _passes(
        self, stack: Stack, whole: _global_gradients.GlobalLoss, update: StackUpdate
    ) -> StackPasses:
        """A loop that reads its layers itself, those of frozen parameters, too."""
        frozen = {}
        for i in {view.param for view in stack.frozen.values()}:
            # Of what is in host memory a layer is cast once it is loaded.
            frozen[i] = self.leaves[i] if on_host(self.leaves[i]) else self.cast[i]
        return StackPasses(stack.of({*update.of, *frozen}), whole, update, frozen)

    # --- Memory -----------------------------------------------------------------------------------

    def _place(self) -> None:
        """Finds where parameters and state are while they are updated."""
        held = [*self.leaves, *jax.tree.leaves(self.opt_state)]
        self.given = {Slot(Value(j)): x for j, x in enumerate(held)}
        in_layers = (stack.of for stack in self.stacks)
        self.outside = set(param_numbers(len(self.leaves))).difference(*in_layers)
        self.refs = self.update.refs
        self.refs.update(self._make_refs())
        self.values = self.update.known
        self.values |= self.given.items()
        # State in host memory that no stack streams is copied to the device.
        unstreamed = [j for j, x in self.given.items() if on_host(x) and j not in self.refs]
        self.values |= {j: jax.device_put(self.given[j], DEVICE) for j in unstreamed}
        self.unstreamed = [j for j in unstreamed if j not in self.frozen]
        own = self.outside & self.trained
        self.values |= {i: self.update.shard(i, self.values[i]) for i in own}

    def _make_refs(self) -> dict[Slot, Any]:
        """Refs of the parameters and the state that layers update."""
        given = {j: self.given[j] for stack in self.stacks for j in stack.outputs}
        frozen = {i: x for one in self.passes for i, x in one.frozen.items()}
        for j, x in (given | frozen).items():
            if on_host(x) and any(self.update.held[j][:1]):
                raise ValueError(
                    f"offload leaves {self.update.names[j]!r} of shape {x.shape} in host "
                    "memory, and its layers are on different devices, as ZeRO shards the longest "
                    "dim, while each device streams its shard of every layer. At stage 3 name "
                    "another dim (param_specs), raise offload_min_size above its size, or leave "
                    "out offload."
                )
        return {j: HostStack(x) if on_host(x) else jax.new_ref(x) for j, x in given.items()}

    def _load_read(self) -> None:
        """Copies to the device the parameters in host memory that are read outside of stacks."""
        read = self.outside & self.trained | self.pieces.read
        for i in (i for i in read if on_host(self.leaves[i])):
            self.cast[i] = jax.device_put(self.leaves[i], DEVICE).astype(self.cast[i].dtype)
            beside = i in self.outside and i in self.trained
            warn(
                f"offload='all' leaves {self.update.names[i]!r} of shape {self.leaves[i].shape} in "
                "host memory, and each step copies all of it to the device"
                f"{', beside its gradient' * beside}. A "
                "stack is streamed layer by layer if one lax.scan of the loss slices it, and the "
                "loss does not use it otherwise."
            )

    # --- The passes -------------------------------------------------------------------------------

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
        self.values[self.update.loss] = metrics["loss"]
        # Parameters that the loss is not differentiated by.
        self.unused = self.outside.difference(*(piece.complete for piece in self.pieces.pieces))
        zeros = {i: jnp.zeros_like(self.values[i]) for i in self.unused}
        zeros = self.update.cast_grads(zeros)
        self.values |= {self.update.grad(i): x for i, x in zeros.items()}
        return metrics, model_state, kept

    def _backward(
        self, kept: ForwardPass, take: Take, wanted: Iterable[Value], prints: Prints
    ) -> tuple[dict[Value, Any], Any]:
        """Values of the update, each computed as soon as its gradients are; all squares."""
        update, graph = self.update, self.update.graph
        found: dict[Value, Any] = {}
        known, complete, squares = dict(self.values), set(self.unused), [jnp.zeros(())]
        pending = Pending(dict(kept.grads), dict(kept.cotangents))
        with jax.named_scope("loss_and_grad"):
            for number in reversed(range(len(self.pieces.pieces))):
                grads, taken = self.pieces.backward(number, pending, take, kept, prints)
                grads = update.cast_grads(grads)
                known |= {update.grad(i): x for i, x in grads.items()}
                complete.update(grads)
                # What the layers of a stack found: (layer, ...).
                terms, of_layers = taken or ({}, jnp.zeros(()))
                found |= {t: reduce(graph, t, x) for t, x in terms.items()}
                squares += [squared_norm(grads), jnp.sum(of_layers)]
                # What depends on no other gradients is computed now, which then can be freed.
                ready = update.ready(wanted, complete, found)
                with jax.named_scope("update"):
                    evaluate(graph.needed(ready, known)[0], known)
                new = {v: known[v] for v in ready}
                # XLA:TPU updates early by itself; on CPUs what is independent runs at once.
                if self.spec.layout.platform == "gpu":
                    both = new, pending.cotangents
                    new, pending.cotangents = lax.optimization_barrier(both)
                found |= new
        return found, sum(squares)

    def _evaluate(self, wanted: Iterable[Value]) -> None:
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
        of_layers = [one for stack in self.stacks for one in stack.of.values()]
        slots = {Slot(Value(j)): v for j, v in enumerate(graph.outputs)}
        new_of = {j: v for j, v in slots.items() if not (j in self.refs or j in self.frozen)}
        # What is made of terms alone waits for all of them. If more depends on terms, a backward
        # pass before the update computes them.
        late = {v for v in new_of.values() if v in update.of_terms and not graph.reads[v]}
        wanted = [v for v in new_of.values() if v not in late]
        take = functools.partial(StackUpdate.take, terms=False, write=True)
        if update.of_terms.intersection(graph.outputs) - late:
            self._evaluate(v for one in of_layers for v in one.reduced.early)
            first = functools.partial(StackUpdate.take, terms=True, write=False)
            terms, _ = self._backward(kept, first, update.terms, Prints.NONE)
            # All of the second pass is computed after the first.
            terms, cotangents, grads = lax.optimization_barrier(
                ({t: terms[t] for t in update.terms}, kept.cotangents, kept.grads)
            )
            kept = kept._replace(cotangents=cotangents, grads=grads)
            self.values |= terms
        elif update.terms:
            self._evaluate(v for one in of_layers for v in one.reduced.early)
            take = functools.partial(StackUpdate.take, terms=True, write=True)
            wanted += update.terms
        self._evaluate(v for one in of_layers for v in one.new.early)
        found, squares = self._backward(kept, take, wanted, Prints.OF_CHECKPOINTS)
        self.values |= {t: found[t] for t in update.terms if t in found}
        self._evaluate(late)
        if self.grad_norm:
            metrics["grad_norm"] = jnp.sqrt(squares)
        new = {j: self.values[v] if v in late else found[v] for j, v in new_of.items()}
        return *self._new_state(new), metrics, model_state

    def _new_state(self, new: dict[Slot, Any]) -> tuple[Any, Any]:
        """Parameters and optimizer state, of what is updated outside of stacks."""
        new = {j: self.update.shard(j, x) for j, x in new.items()}
        new |= {
            j: ref.stack if isinstance(ref, HostStack) else jax.freeze(ref)
            for j, ref in self.refs.items()
        }
        new |= {i: self.leaves[i] for i in self.frozen}
        new |= self._gathered(new).items()
        new |= {j: jax.device_put(new[j], HOST) for j in self.unstreamed}
        structure = jax.tree.structure((self.params, self.opt_state))
        params, opt_state = structure.unflatten(new[j] for j in sorted(new))
        return params, opt_state

    def _gathered(self, new: dict[Slot, Any]) -> dict[ParamNumber, jax.Array]:
        """Parameters outside of stacks, as they are between steps; the old ones if untrained."""
        treedef, numbers = jax.tree.structure(self.params), param_numbers(len(self.leaves))
        with jax.named_scope("gather_params"):
            shards = treedef.unflatten(new[i] for i in numbers)
            own = treedef.unflatten(i in self.trained & self.outside for i in numbers)
            gathered = jax.tree.leaves(gather_updated(self.spec, shards, self.params, own))
        return {i: (gathered if i in self.trained else self.leaves)[i] for i in self.outside}


def _trace_loss(layout: Layout, loss: StepLoss, params: Tree, args: Any) -> Graph:
    """The loss of parameters and of other arguments: total, weight, new model state and aux."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    inputs, given = jax.tree.flatten((types, *args))

    def run(inputs: list[Any]) -> Any:
        params, *args = given.unflatten(inputs)
        model_state = args[1] if loss.model_state else None
        total, weight, new, aux = loss.split(loss.fn(params, *args), model_state)
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
