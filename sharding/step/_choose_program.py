"""How a loss runs: each device its own rows, where that is proven to be the same loss.

A step trains the loss of the whole batch, as it is under ``jit``. Two programs compute it:

| program | runs where | gradients are reduced by |
|---|---|---|
| per device | the loss is proven a mean, a sum, or ratios of sums over rows | this library |
| partitioned | rows meet in it, or nothing is proven | XLA's partitioner |

Sums that a loss divides by are computed before it, of all rows; what is left is a mean or a sum.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_ext.equations import trace
from optax_ext.traced_graph import Graph, evaluate
from sharding._jaxprs import all_equations
from sharding._types import Batch, Tree
from sharding.loss._loss_options import KEYWORDS, NUMBERED, Rewrite
from sharding.loss._marks import marking
from sharding.loss._row_states import Coupled, Rows, Shared, State
from sharding.loss._rows import LossRows, plain_type, rows_of_loss
from sharding.placement._layout import Layout
from sharding.placement._specs import axes_of, only_axes
from sharding.step._device_pieces import DevicePiece
from sharding.step._loss import Inputs, StepLoss, loss_args, microbatch_key
from sharding.step.flax._modules import BlocksAreMissing

_ASKED = "as the step asks"


class LossProgram(NamedTuple):
    """How a loss runs, and why."""

    loss: StepLoss
    per_device: bool
    why: str
    # What a micro-batch of the loss is a part of, of a batch.
    with_totals: Callable[[Batch], Batch] = lambda batch: batch
    # The parts of a partitioned loss, some of which run per device; known once it is traced.
    pieces: tuple[DevicePiece, ...] = ()

    def __str__(self) -> str:
        how = f"{'per device' if self.per_device else 'partitioned'}: {self.why}"
        return "\n  ".join([how, *map(str, self.pieces)])


class ProvenLoss(NamedTuple):
    """What is proven of a loss and of all that it returns."""

    rows: LossRows | None  # None if nothing is, as ``must_be_whole`` says
    total: State
    weight: State | None
    model_state: list[State]
    aux: list[State]
    is_returned: bool  # whether devices can average or join their aux
    must_be_whole: str  # why, if no device can run it by itself, whatever it does with rows
    error: Exception | None = None  # of the loss as it is traced

    @classmethod
    def of(
        cls, rows: LossRows, is_weighted: bool, num_states: int, must_be_whole: str
    ) -> "ProvenLoss":
        """Of a total, its weight if it has one, leaves of a model state, and aux."""
        total, *more = rows.results
        weight = more.pop(0) if is_weighted else None
        first = len(rows.results) - len(more)
        # Devices average floating values, and keep one of others.
        states = [
            v
            if isinstance(v, Shared) or jnp.issubdtype(rows.type_of(first + k).dtype, jnp.floating)
            else Coupled("a model state that is not floating depends on rows")
            for k, v in enumerate(more[:num_states])
        ]
        is_returned = _are_returned(rows, first + num_states)
        return cls(rows, total, weight, states, more[num_states:], is_returned, must_be_whole)

    def with_totals(self, weights: list[int]) -> "ProvenLoss":
        """The same where values that it divides by are those of all rows."""
        assert self.rows is not None
        options = self.weight is not None, len(self.model_state), self.must_be_whole
        return ProvenLoss.of(self.rows.given(weights), *options)

    def is_apart(self, random: bool = False) -> bool:
        """Whether the losses of parts of the rows add up, or average, to that of all."""
        parts = [self.total] + ([] if self.weight is None else [self.weight])
        return any(all(_adds_up(v, (power,), random) for v in parts) for power in (0, 1))

    @property
    def is_sum(self) -> bool:
        return self.weight is None and _adds_up(self.total, (1,), random=True)

    @property
    def is_exact(self) -> bool:
        """Whether each device may compute its own rows, and all that is returned is the same."""
        return (
            not self.must_be_whole
            and self.is_apart()
            and all(_adds_up(v, (0,)) for v in self.model_state)
            and self.is_returned
        )

    def reduction(self, model_state: Tree) -> Any:
        """How the new model states of devices, each of which is exact, become one."""
        kinds = ["same" if isinstance(v, Shared) else "mean" for v in self.model_state]
        return jax.tree.unflatten(jax.tree.structure(model_state), kinds)

    @property
    def cause(self) -> str:
        """Why it is not, in words."""
        meet = [self.total, self.weight, *self.model_state, *self.aux]
        found = [str(v) for v in meet if isinstance(v, Coupled)]
        if self.must_be_whole:
            return self.must_be_whole
        if found:
            return f"rows meet in {found[0]}"
        if any(map(_is_random, meet)):
            return "its random numbers depend on the index of a row"
        return f"it is {self.rows}, and returns what devices cannot average or join"


def choose_program(
    zero: Any, loss: StepLoss, params: Tree, specs: Tree, inputs: Inputs
) -> LossProgram:
    """How a step of these types runs a loss; ``specs`` are those of parameters.

    Raises:
      ValueError: if micro-batches would change its value, or an option needs gradients of devices
        and these are not parts of the loss.
    """
    if rewrite := Rewrite.of(loss.fn):
        plain = dataclasses.replace(loss, fn=rewrite.plain)
        program = choose_program(zero, plain, params, specs, inputs)
        again = dataclasses.replace(program.loss, fn=rewrite.again(program.loss.fn))
        return program._replace(loss=again, why=f"{program.why}, in tiles")
    call = LossCall(zero, loss, params, specs, inputs)
    if loss.per_device:
        return LossProgram(loss, True, "the loss of each device's rows, as per_device=True says")
    if loss.microbatches == 1 and loss.per_device is not None:
        return LossProgram(loss, False, _ASKED)
    if call.parts == 1:
        return call.alone()
    proof = call.prove()
    totals = _totals_of(call, proof)
    if totals is not None:
        loss = dataclasses.replace(loss, fn=totals)
        proof = proof.with_totals(totals.weights)
    cause = _cause(proof)
    if totals is not None and proof.is_exact:
        cause = "the loss is a ratio of sums over rows, whose divisors are computed of all rows"
    if loss.microbatches > 1 and loss.coupled is None:
        _check_apart(loss, proof, cause)
    exact = proof.is_exact and loss.per_device is None
    if _is_planned_for_all(zero, loss, inputs, exact, cause):
        exact, cause = False, "it is planned for the rows of all devices"
    if proof.is_sum:
        loss = dataclasses.replace(loss, times=call.parts if exact else loss.microbatches)
    if exact:
        loss = dataclasses.replace(loss, reduction=proof.reduction)
    program = LossProgram(loss, exact, _ASKED if loss.per_device is False else cause)
    return program if totals is None else program._replace(with_totals=totals.add)


def choose_evaluation(
    zero: Any, loss: StepLoss, is_loss: bool, params: Tree, specs: Tree, inputs: Inputs
) -> LossProgram:
    """How an evaluation runs: by devices, if their results, averaged or joined, are the same."""
    if loss.per_device is not None:
        return LossProgram(loss, loss.per_device, _ASKED)
    if loss.rngs and zero.num_devices > 1:
        return LossProgram(loss, False, "its keys are those of all rows")
    call = LossCall(zero, loss, params, specs, inputs)
    if zero.num_devices == 1:
        return call.alone()
    if is_loss:
        proof = call.prove()
        return LossProgram(loss, proof.is_exact and not proof.is_sum, _cause(proof))
    rows, whole, _ = call.traced(functools.partial(call.rows_of, loss.fn))
    exact = rows is not None and _are_returned(rows, 0)
    cause = "it returns means over rows, or what each row gives" if exact else "rows meet in it"
    return LossProgram(loss, exact and not whole, whole or cause)


def _is_planned_for_all(
    zero: Any, loss: StepLoss, inputs: Inputs, is_exact: bool, cause: str
) -> bool:
    """Whether what a loss computes again is planned for a micro-batch of all devices."""
    planned = getattr(loss.fn, "num_rows", None)
    shapes = (x.shape for x in jax.tree.leaves(inputs.batch))
    rows = next((shape[0] for shape in shapes if shape), 0) // loss.microbatches
    if planned is not None and not is_exact and planned * zero.num_devices == rows != planned:
        raise ValueError(
            f"the loss is planned for {planned} rows, those of one of {zero.num_devices} devices, "
            f"and no device runs it by itself: {cause}. Plan for a batch of {rows} rows."
        )
    return planned == rows and zero.num_devices > 1


def _cause(proof: ProvenLoss) -> str:
    if proof.rows is None or not proof.is_exact:
        return proof.cause
    return f"the loss is a {proof.rows.word} over rows"


def check_of_devices(program: LossProgram, options: dict[str, bool]) -> None:
    """Raises if an option needs gradients of devices, and a program has none."""
    for name in (name for name, is_given in options.items() if is_given and not program.per_device):
        raise ValueError(
            f"{name} needs gradients of single devices, which are parts of a loss only where that "
            f"is a mean or a sum over rows. Of this one, {program.why}. Leave {name} out; or train "
            "the mean of the losses of each device's rows, as DDP does, by shd.Loss(loss_fn, "
            "per_device=True) (docs: understand/meaning)."
        )


def _check_apart(loss: StepLoss, proof: ProvenLoss, cause: str) -> None:
    """Raises if the mean over micro-batches is not known to be the loss."""
    if proof.error is not None:
        raise proof.error
    has_keys = bool(loss.rngs)
    if proof.is_apart(random=has_keys):
        return
    if not has_keys and (_is_random(proof.total) or _is_random(proof.weight)):
        cause += ", and all would draw the same (rngs=True gives each a key)"
    given = {name: getattr(loss, name) for name in KEYWORDS if loss.rngs is not NUMBERED}
    said = "".join(f"{name}={value!r}, " for name, value in given.items() if value)
    raise ValueError(
        f"microbatches={loss.microbatches} would train another loss than that of the batch: "
        f"{cause}. Make the step with microbatches=1; or, if the mean over micro-batches is meant, "
        f"give shd.Loss(loss_fn, {said}coupled='by_microbatch') (docs: understand/meaning)."
    )


# --- What is proven -------------------------------------------------------------------------------


class LossCall(NamedTuple):
    """A loss in a step, and what it is called with, real or abstract."""

    zero: Any
    loss: StepLoss
    params: Tree
    specs: Tree  # of parameters
    inputs: Inputs

    @property
    def parts(self) -> int:
        """Of the rows of a batch."""
        return int(self.zero.num_devices) * self.loss.microbatches

    def types(self) -> tuple[Any, ...]:
        """Of the arguments of the loss."""
        of_loss, loss = self.zero.precision.of_loss, self.loss
        batch, key = jax.tree.map(plain_type, self.inputs.batch), self.inputs.key
        key = jax.random.key(0) if loss.rngs and key is None else key
        keys = jax.eval_shape(lambda key: microbatch_key(loss.rngs, key, 0, batch), key)
        rest = loss_args(loss, batch, self.inputs.model_state, keys)
        params, *rest = jax.tree.map(plain_type, (self.params, *rest))
        return jax.tree.map(lambda x: x.update(dtype=of_loss(x.dtype)), params), *rest

    def alone(self) -> LossProgram:
        """How it runs on one device."""
        fn = getattr(self.loss.fn, "computes", self.loss.fn)
        closed, whole, _ = self.traced(lambda args: trace(fn, *args)[0])
        whole = "" if closed is None else whole
        return LossProgram(self.loss, not whole, whole or "one device has all rows")

    def prove(self) -> ProvenLoss:
        """What it does with rows, by its trace."""
        loss, num_states = self.loss, 0
        # A plan of what is computed again is for one number of rows.
        fn = getattr(loss.fn, "computes", loss.fn)

        def split(params: Tree, *args: Any) -> Any:
            nonlocal num_states
            total, weight, state, aux = loss.split(fn(params, *args))
            num_states = len(jax.tree.leaves(state))
            return total, weight if loss.weighted else None, state, aux

        rows, whole, error = self.traced(functools.partial(self.rows_of, split))
        if rows is None:
            return ProvenLoss(None, Coupled(whole), None, [], [], False, whole, error)
        return ProvenLoss.of(rows, loss.weighted, num_states, whole)

    def rows_of(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> LossRows:
        """What a function of the arguments does with the rows of the batch."""
        has_rows = [False, True] + [False] * (len(args) - 2)
        has_rows[-1] |= self.loss.rngs == "per_example"
        return rows_of_loss(fn, args, has_rows, self.parts)

    def traced(self, run: Callable[[Any], Any]) -> tuple[Any, str, Exception | None]:
        """What ``run`` makes of the types of arguments, such as a trace; None if it raises.

        And why no device can run the loss by itself, whatever it does with rows; the error.
        """
        layout, errors = self.zero._layout, list[Exception]()
        # As under jit where axes are Auto; or where the user's are Explicit, which it may name.
        for explicit in dict.fromkeys((frozenset(), layout.other_axes)):
            mesh = _mesh_of(layout, explicit)
            args = _typed(mesh, self.types(), self.specs, explicit) if explicit else self.types()
            try:
                with marking(per_device=True), jax.sharding.use_abstract_mesh(mesh):
                    found = run(args)
            except BlocksAreMissing:
                raise
            except Exception as error:  # of the user's function, or of what only a step gives it
                errors.append(error)
                continue
            jaxpr, why = getattr(found, "graph", found).jaxpr, ""
            if _axes_named(jaxpr) & set(layout.data_axes):
                why = "it places arrays along the axes of the data"
            elif jaxpr.effects:
                why = "what it prints, calls back or writes to references is of all rows"
            return found, why, None
        first = errors[0]
        return None, f"it cannot be traced by itself ({type(first).__name__}: {first})", first


def _mesh_of(layout: Layout, explicit: Collection[str]) -> Any:
    """The mesh, of which some axes are part of types."""
    mesh = layout.mesh.abstract_mesh if isinstance(layout.mesh, Mesh) else layout.mesh
    kinds = [AxisType.Explicit if x in explicit else AxisType.Auto for x in mesh.axis_names]
    return mesh.update(axis_types=tuple(kinds))


def _typed(mesh: Any, args: tuple[Any, ...], specs: Tree, explicit: Collection[str]) -> Any:
    """Types of arguments with their shardings over some axes."""
    params, *rest = args
    treedef = jax.tree.structure(params)
    place = lambda x, spec: x.update(  # noqa: E731
        sharding=NamedSharding(mesh, only_axes(spec, explicit))
    )
    placed = map(place, jax.tree.leaves(params), treedef.flatten_up_to(specs))
    others = jax.tree.map(lambda x: place(x, PartitionSpec()), rest)
    return treedef.unflatten(placed), *others


def _axes_named(jaxpr: Any) -> set[str]:
    """The axes of shardings in a jaxpr."""
    given = (eqn.params.get("sharding") for eqn in all_equations(jaxpr))
    specs = [getattr(sharding, "spec", ()) for sharding in given]
    return {axis for spec in specs for entry in spec or () for axis in axes_of(entry)}


def _adds_up(v: State, powers: tuple[int, ...], random: bool = False) -> bool:
    """Whether a value is shared, or a sum or mean over rows, of one of these powers."""
    is_sum = isinstance(v, Rows) and v.is_sum and not v.ratios and (random or not v.random)
    return isinstance(v, Rows | Shared) and (is_sum or isinstance(v, Shared)) and v.power in powers


def _are_returned(rows: LossRows | None, first: int) -> bool:
    """Whether results of a loss, averaged or joined over devices, are what all rows give.

    Scalars are averaged, and arrays joined, which have to have rows in their first dim.
    """
    if rows is None:
        return False
    for value, v in list(zip(rows.graph.outputs, rows.results, strict=True))[first:]:
        aval = rows.graph.types[value]
        if aval.shape:
            if not isinstance(v, Rows) or v.random or v.is_linear or v.power:
                return False
            if (v.dims, v.before, v.after, v.own) != ((0,), 1, 1, None):
                return False
        elif not (_adds_up(v, (0,)) and jnp.issubdtype(aval.dtype, jnp.floating)):
            return False
    return True


def _is_random(v: State | None) -> bool:
    return isinstance(v, Rows) and v.random


# --- Sums that a loss divides by ------------------------------------------------------------------


def _weights(call: LossCall, proof: ProvenLoss) -> list[int]:
    """The values of a loss's graph that it divides sums by, if they can be computed before it.

    So they can if each is a scalar of the batch alone.
    """
    if proof.rows is None or proof.weight is not None:
        return []
    graph = proof.rows.graph
    weights = sorted({weight for _, weight in proof.rows.ratios}, key=str)
    first = len(jax.tree.leaves(call.params))
    of_batch = range(first, first + len(jax.tree.leaves(call.inputs.batch)))
    for weight in weights:
        if not isinstance(weight, int) or graph.types[weight].shape:
            return []
        _, needed = graph.needed([weight], ())
        if not set(needed) - graph.constants.keys() <= set(of_batch):
            return []
    return weights


@dataclasses.dataclass(frozen=True)
class _Totals:
    """A loss of a batch, and of its totals: the sums over all rows that it divides by."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]  # types: of parameters, and what comes after the batch
    weights: list[int]  # values of the graph
    names: list[str]  # of the primitives before the last weight

    def __call__(self, params: Tree, given: Any, *rest: Any) -> Any:
        """The loss, with totals in the place of the sums of these rows."""
        graph, values = self._graph(params, given["batch"], *rest)
        totals = dict(zip(self.weights, given["totals"], strict=True))
        for eqn in graph.equations:
            evaluate([eqn], values)
            values |= {value: totals[value] for value in eqn.results if value in totals}
        return jax.tree.unflatten(graph.out_treedef, [values[x] for x in graph.outputs])

    def add(self, batch: Batch) -> dict[str, Any]:
        """A batch and its totals."""
        params, *rest = self.args
        with marking(per_device=True):
            graph, values = self._graph(params, batch, *rest)
        evaluate(graph.needed(self.weights, ())[0], values)
        return {"batch": batch, "totals": [values[weight] for weight in self.weights]}

    def _graph(self, *args: Any) -> tuple[Graph, dict[Any, Any]]:
        leaves, treedef = jax.tree.flatten(args)
        flat = lambda leaves: self.fn(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        graph = Graph(flat, leaves, [False] * len(leaves), exact=True)
        if _names_before(graph, self.weights) != self.names:
            raise ValueError(
                "the loss is another program for other numbers of rows, and its weights are not "
                "found. Return the pair (sum, weight) with weighted=True."
            )
        return graph, graph.constants | dict(enumerate(leaves))


def _totals_of(call: LossCall, proof: ProvenLoss) -> _Totals | None:
    """A loss of which these sums are computed before it, if there are any."""
    weights = _weights(call, proof)
    if proof.rows is None or not weights or hasattr(call.loss.fn, "computes"):
        return None
    params, _, *rest = call.types()
    names = _names_before(proof.rows.graph, weights)
    return _Totals(call.loss.fn, (params, *rest), weights, names)


def _names_before(graph: Graph, weights: list[int]) -> list[str]:
    last = max(graph.producer[weight] for weight in weights)
    return [eqn.primitive.name for eqn in graph.equations[: last + 1]]
