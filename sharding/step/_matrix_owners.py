"""Optimizers of matrices under ZeRO: every matrix is updated by one device, its owner.

Muon, Shampoo or SOAP multiply and factorize full matrices. On sharded matrices the partitioner
would all-gather every one of them to every device, each of which would do the work of all. Here the
update of one matrix is traced and split in three:

- *before*: operations on elements, up to the first one that the matrix products depend on and that
  is no operation on elements (momentum); on shards;
- *core*: from there to the last matrix product; at the owner, between two all-to-alls;
- *after*: the rest (scale, weight decay, learning rate); on shards.
"""

import contextlib
import contextvars
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from optax_ext import FactoringRule, last_two_dims
from optax_ext.execution_order import ELEMENTWISE, REDUCTIONS, Graph, evaluate
from optax_ext.kernels import Path
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._sharded_dim import choose_sharded_dim
from sharding.placement._specs import (
    axes_of,
    entry_of,
    is_spec,
    parameter_path,
    path_str,
    rule_for_tree,
)
from sharding.step._matrix_form import MatrixForm

P = PartitionSpec

_MIN_SIZE = 1024  # elements of an array that is worth an all-to-all
_SHAPE_NAMES = "broadcast_in_dim concatenate iota pad reshape rev slice squeeze transpose"
_SHAPES = frozenset(_SHAPE_NAMES.split())  # primitives that change shapes alone
# Primitives that change the placement alone; a trace inside a shard_map has none of them.
_PLACEMENT = frozenset({"mesh_cast", "reshard", "sharding_constraint"})

# The layout and, by the parameter's path, the spec of its shards.
_ON_MESH: contextvars.ContextVar[tuple[Layout, dict[Path, P]] | None] = contextvars.ContextVar(
    "on_mesh", default=None
)


@contextlib.contextmanager
def owners_on(layout: Layout, shards: Any) -> Iterator[None]:
    """Updates in this context are spread over a mesh; ``shards`` are the specs of parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(shards, is_leaf=is_spec)
    sharded = layout.stage > 0 and layout.num_shards > 1
    token = _ON_MESH.set((layout, dict(leaves)) if sharded else None)
    try:
        yield
    finally:
        _ON_MESH.reset(token)


def by_owner(
    tx: optax.GradientTransformation,
    *,
    factoring: FactoringRule = last_two_dims(),
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Applies a transformation of one matrix to every matrix, each on one device of the mesh.

    The update is that of ``tx`` on each matrix alone: by default the last two dims of a parameter
    are a matrix, and leading dims are a stack of independent ones. In a step of ``Zero`` at stages
    1 to 3, matrices of one shape, from all parameters, are spread evenly over the devices by an
    all-to-all and back by another one, where the partitioner would all-gather them. Where there are
    fewer than half as many matrices as devices, and outside of a step, nothing is moved.

    Extra arguments, such as ``value``, are the same for every matrix; so are random keys that
    ``tx.init`` makes. State has the form of the matrices, (stack..., rows, cols). It is sharded as
    that of other transformations, and does not depend on the mesh. What ``tx`` does to elements
    before and after its matrix products stays on shards.

    Args:
      tx: a transformation of one matrix, such as ``optax.contrib.muon``. A norm over all
        parameters (``clip_by_global_norm``) must be outside: inside it is that of one matrix.
      factoring: which dims are the rows and the columns of a matrix. ``optax_ext.flax_transformer``
        knows attention: kernels (embed, heads, head_dim) are matrices (embed, heads * head_dim),
        fused ones stacks of three. All dims that are neither stack matrices.
      wire_dtype: the dtype in which matrices are sent to their owners and updates back, where it is
        narrower than theirs; None for theirs. ``jnp.bfloat16`` halves these bytes of float32.
        State, and what state is computed from, is never rounded. Muon amplifies the rounding where
        singular values are small: a first update differed by 4 %, parameters after 200 steps by
        1.3 % of the distance that they had moved, the validation loss by 1e-5 (4 layers of width 64
        on text).

    Returns:
      A ``GradientTransformationExtraArgs`` for parameters that ``factoring`` factors; use
      ``optax.partition`` to give embeddings, biases and norms another transformation.

    Raises:
      ValueError: if an argument is not of its kind, or ``factoring`` does not factor a parameter.

    Example:
      Muon for the matrices of hidden layers, AdamW for all others:

      >>> import jax.numpy as jnp, optax, optax_ext, sharding as shd
      >>> query = {"kernel": jnp.ones((12, 64, 4, 16)), "bias": jnp.zeros((12, 4, 16))}
      >>> params = {"embed": jnp.ones((256, 64)), "layers": {"query": query}}
      >>> muon = shd.by_owner(optax.contrib.muon(0.02), factoring=optax_ext.flax_transformer())
      >>> tx = optax.partition({True: muon, False: optax.adamw(4e-3)}, optax_ext.hidden_matrices)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates["layers"]["query"]["kernel"].shape
      (12, 64, 4, 16)

    References:
      Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein: Muon, 2024,
      https://kellerjordan.github.io/posts/muon/. Shi, Lee, Iwasaki, Gallego-Posada, Li, Rangadurai,
      Mudigere, Rabbat: A Distributed Data-Parallel PyTorch Implementation of the Distributed
      Shampoo Optimizer, arXiv 2309.06497.
    """
    _check(tx, factoring)
    wire = _wire_dtype(wire_dtype)
    tx = optax.with_extra_args_support(tx)

    def form_of(rule: FactoringRule, path: Any, x: Any) -> MatrixForm:
        return MatrixForm.of(rule, parameter_path(path), tuple(jnp.shape(x)))

    def init(params: optax.Params) -> optax.OptState:
        rule = rule_for_tree(factoring, params)

        def init_leaf(path: Any, x: Any) -> Any:
            p = form_of(rule, path, x).to_matrices(x)
            state = _over_stack(tx.init, jnp.ndim(p) - 2)(p)
            return jax.tree.map(lambda s: _sharded_like(s, p), state)

        return jax.tree_util.tree_map_with_path(init_leaf, params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
        states = treedef.flatten_up_to(state)
        params_or_none = [None] * len(leaves) if params is None else treedef.flatten_up_to(params)
        context, rule = _ON_MESH.get(), rule_for_tree(factoring, updates)
        borders = [_Border(form_of(rule, path, g), path, context) for path, g in leaves]
        jobs = [
            _Job(tx, border.path, (border.enter(g), s, border.enter(p)), extra_args)
            for border, (_, g), s, p in zip(borders, leaves, states, params_or_none, strict=True)
        ]
        if context is None:
            results = [job.alone() for job in jobs]
        else:
            specs = {border.path: border.spec for border in borders if border.spec is not None}
            results = _spread(jobs, context[0], specs, wire)
        out = [
            border.leave(u, g)
            for border, (u, _), (_, g) in zip(borders, results, leaves, strict=True)
        ]
        return treedef.unflatten(out), treedef.unflatten([s for _, s in results])

    return optax.GradientTransformationExtraArgs(init, update)


def _check(tx: Any, factoring: Any) -> None:
    """Raises unless both arguments are of their kinds."""
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"by_owner: tx must be a transformation of one matrix, such as optax.contrib.muon(lr); "
            f"got {tx!r}."
        )
    if isinstance(factoring, type) or not isinstance(factoring, FactoringRule):
        raise ValueError(
            "by_owner: factoring must be a Factoring or a rule such as last_two_dims() or "
            f"flax_transformer(); got {factoring!r}."
        )


def _wire_dtype(dtype: Any) -> Any:
    """The dtype of an argument; None for None."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = jnp.dtype(bool)
    if found is not None and not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"by_owner: wire_dtype must be a floating dtype, such as jnp.bfloat16, or None; got "
            f"{dtype!r}."
        )
    if found is not None and jnp.finfo(found).nexp < jnp.finfo(jnp.float32).nexp:
        raise ValueError(
            f"by_owner: wire_dtype {found} has a smaller range than float32: small gradients would "
            "become 0, large ones infinite. Use jnp.bfloat16."
        )
    return found


class _Border:
    """Where one parameter's arrays enter and leave the matrix form.

    Attributes:
      path: of the parameter.
      spec: of the matrix form, on a mesh; None where it is not known.
    """

    def __init__(self, form: MatrixForm, path: Path, context: tuple[Layout, dict[Path, P]] | None):
        self._form, self.path = form, path
        self._shards: tuple[Layout, P] | None = None
        self.spec: P | None = None
        if context is not None and path in context[1]:
            layout, param_spec = context[0], context[1][path]
            self._shards, self.spec = (layout, param_spec), form.spec(param_spec, layout.mesh)

    def enter(self, x: Any) -> Any:
        """A gradient or a parameter as matrices; None for None."""
        if x is None:
            return None
        if self._shards is None:
            return self._form.to_matrices(x)
        return self._form.shards_to_matrices(*self._shards, x)

    def leave(self, update: Any, gradient: Any) -> Any:
        """The update of a gradient, from that of its matrices."""
        if self._shards is None:
            return self._form.from_matrices(update, gradient)
        return self._form.matrices_to_shards(*self._shards, update)


def _sharded_like(x: Any, param: Any) -> Any:
    """State of another shape, such as a statistic (n, n), sharded over the axes of its parameter.

    Only where types hold shardings, as where ``state_specs`` traces ``init``: there an array made
    from nothing is replicated.
    """
    here, there = (jax.typeof(a).sharding for a in (x, param))
    axes = tuple(axis for entry in there.spec for axis in axes_of(entry))
    if not axes or any(here.spec) or jnp.size(x) < _MIN_SIZE:
        return x
    num_shards = math.prod(there.mesh.shape[axis] for axis in axes)
    dim = choose_sharded_dim(x.shape, range(x.ndim), [num_shards])
    return x if dim is None else jax.sharding.reshard(x, P(*[None] * dim, entry_of(axes)))


def _over_stack(fn: Callable[..., Any], num_dims: int) -> Callable[..., Any]:
    """A function of one matrix as one of a stack of this many leading dims."""
    for _ in range(num_dims):
        fn = jax.vmap(fn)
    return fn


# --- One parameter --------------------------------------------------------------------------------


class _Job:
    """The update of one parameter, a stack of matrices.

    Attributes:
      path: of the parameter.
      stack: the leading dims.
      arrays: gradient, state and parameter, flat; all have the leading dims.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        path: Path,
        trees: tuple[Any, Any, Any],
        extra_args: dict[str, Any],
    ):
        self.path = path
        self.shape = tuple(trees[0].shape)
        self.stack = self.shape[:-2]
        self.arrays, self._treedef = jax.tree.flatten(trees)
        leaves, self._arguments_def = jax.tree.flatten(extra_args)
        self._static = [None if _is_number(x) else x for x in leaves]
        self._arguments = [x for x in leaves if _is_number(x)]
        self._tx = tx

    @property
    def kind(self) -> Any:
        """Equal for parameters whose matrices have the same update."""
        num = len(self.stack)
        types = tuple((tuple(x.shape[num:]), x.dtype) for x in self.arrays)
        return types, self._treedef

    @property
    def count(self) -> int:
        """The number of matrices."""
        return math.prod(self.stack)

    def _one(self, arrays: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, Any]:
        """The update of one matrix."""
        g, s, p = jax.tree.unflatten(self._treedef, arrays)
        numbers = iter(arguments)
        leaves = [next(numbers) if x is None else x for x in self._static]
        return self._tx.update(g, s, p, **jax.tree.unflatten(self._arguments_def, leaves))

    def alone(self) -> tuple[Any, Any]:
        """The update and the new state, without owners."""
        return _over_stack(lambda *x: self._one(x, self._arguments), len(self.stack))(*self.arrays)

    def split(self) -> "_Split":
        """The update of one matrix, traced in the current mesh."""
        num = len(self.stack)
        one = [jnp.zeros(x.shape[num:], x.dtype) for x in self.arrays]

        outputs = []

        def flat(inputs: list[Any]) -> list[Any]:
            leaves, treedef = jax.tree.flatten(self._one(inputs[: len(one)], inputs[len(one) :]))
            outputs.append(treedef)
            return leaves

        inputs = one + self._arguments
        graph = Graph(flat, inputs, [True] * len(inputs))
        num_state = len(jax.tree.leaves(jax.tree.unflatten(self._treedef, one)[1]))
        return _Split(graph, outputs[-1], num_state)

    def before(self, split: "_Split") -> list[jax.Array]:
        """The values that the core or the operations after it need."""
        run = _over_stack(lambda *x: split.before([*x, *self._arguments]), len(self.stack))
        return run(*self.arrays)

    def after(self, split: "_Split", kept: list[jax.Array], outs: list[jax.Array]) -> Any:
        """The update and the new state."""
        return _over_stack(split.after, len(self.stack))(kept, outs)


def _is_number(x: Any) -> bool:
    """Whether an extra argument can be traced: an array or a number."""
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


class _Split:
    """The traced update of one matrix in three parts: before, core and after.

    An equation is in the core if it is on the way from a first equation on a large array that is no
    operation on elements to a last matrix operation, or only changes the shape of what comes from
    there. So nothing in the core depends on what comes after it.

    Attributes:
      graph: the traced update.
      kept: the values of the first part that the others need; the core's among them.
      ins: the values that the core needs.
      outs: the values that it computes for what comes after.
      exact: those of both that are not rounded: state, and what the new state depends on.
    """

    def __init__(self, graph: Graph, out_treedef: Any, num_state: int):
        self.graph, self._out_treedef = graph, out_treedef
        equations = graph.equations
        users: dict[int, list[int]] = defaultdict(list)
        for i, eqn in enumerate(equations):
            for v in eqn.operands:
                users[v].append(i)

        leads = [self._is_matrix_operation(i) for i in range(len(equations))]
        for i in reversed(range(len(equations))):
            leads[i] = leads[i] or any(leads[u] for v in equations[i].results for u in users[v])
        core: set[int] = set()
        after: set[int] = set()
        for i, eqn in enumerate(equations):
            sources = {graph.producer.get(v) for v in eqn.operands}
            of_core, of_after = bool(sources & core), bool(sources & after)
            on_way = leads[i] and (of_core or self._starts_core(i))
            if on_way or (of_core and not of_after and eqn.primitive.name in _SHAPES):
                core.add(i)
            elif of_core or of_after:
                after.add(i)

        made = {v for i in core for v in equations[i].results}
        late = {v for i in after for v in equations[i].results}
        used = {v for i in core for v in equations[i].operands}
        used_late = {v for i in after for v in equations[i].operands} | set(graph.outputs)
        # A value that depends on no input is computed where it is used.
        self.ins = sorted(v for v in used - made if graph.reads[v])
        self.outs = sorted(made & used_late)
        self.kept = sorted({v for v in used_late - made - late if graph.reads[v]} | set(self.ins))
        state = range(1, 1 + num_state)  # inputs are gradient, state, parameter, arguments
        new_state = graph.outputs[1:]
        exact_outs = self._read(new_state, [*self.kept, *self.outs]) & set(self.outs)
        exact_ins = (self._read(exact_outs, self.ins) | set(state)) & set(self.ins)
        self.exact = exact_ins | exact_outs

    def _read(self, values: Iterable[int], known: Iterable[int]) -> set[int]:
        """These values, and all that they are computed from, no further than the known ones."""
        values, known = set(values), set(known)
        equations, inputs = self.graph.needed(values - known, known)
        return values | set(inputs) | {v for eqn in equations for v in eqn.operands}

    @property
    def types(self) -> tuple[list[str], list[str]]:
        """Shapes and dtypes of ``ins`` and ``outs``."""
        ins, outs = (
            [f"{self.graph.types[v].dtype}{list(self.graph.shape(v))}" for v in values]
            for values in (self.ins, self.outs)
        )
        return ins, outs

    def _is_large(self, value: int) -> bool:
        return math.prod(self.graph.shape(value)) >= _MIN_SIZE

    def _is_matrix_operation(self, equation: int) -> bool:
        eqn = self.graph.equations[equation]
        cheap = ELEMENTWISE | REDUCTIONS | _SHAPES | _PLACEMENT
        return eqn.primitive.name not in cheap and any(map(self._is_large, eqn.operands))

    def _starts_core(self, equation: int) -> bool:
        eqn = self.graph.equations[equation]
        simple = ELEMENTWISE | _PLACEMENT
        return eqn.primitive.name not in simple and any(map(self._is_large, eqn.operands))

    def _evaluate(self, known: dict[int, Any], wanted: Sequence[int]) -> list[Any]:
        values = self.graph.constants | known
        evaluate(self.graph.needed(wanted, values)[0], values)
        return [jnp.asarray(values[v]) for v in wanted]

    def before(self, inputs: Sequence[Any]) -> list[Any]:
        """``kept``, from the inputs."""
        return self._evaluate(dict(enumerate(inputs)), self.kept)

    def core(self, *ins: Any) -> list[Any]:
        """``outs``, from ``ins``."""
        return self._evaluate(dict(zip(self.ins, ins, strict=True)), self.outs)

    def after(self, kept: Sequence[Any], outs: Sequence[Any]) -> Any:
        """The update and the new state."""
        known = dict(zip(self.kept, kept, strict=True)) | dict(zip(self.outs, outs, strict=True))
        return jax.tree.unflatten(self._out_treedef, self._evaluate(known, self.graph.outputs))


# --- All parameters -------------------------------------------------------------------------------


class _Place(NamedTuple):
    """How a stack of matrices is sharded over the data axes.

    Attributes:
      axes: the mesh axes; none for a replicated one.
      dim: 0 if the stack is sharded; else the dim of the matrix, counted from 1.
    """

    axes: tuple[str, ...] = ()
    dim: int = 0


class _Owners(NamedTuple):
    """The devices that own the matrices of one shape.

    Attributes:
      axes: the mesh axes that they are along.
      num: how many they are.
      total: the number of matrices.
      stay: the stack itself is sharded, so that each device has the matrices that it owns.
    """

    axes: tuple[str, ...]
    num: int
    total: int
    stay: bool

    def to_owner(self, x: jax.Array, dim: int, wire: Any) -> jax.Array:
        """(matrices, ...), sharded along ``dim`` -> the owner's (matrices, ...), unsharded.

        What is sent has the dtype ``wire``.
        """
        if self.stay:
            return x
        each = -(-self.total // self.num)
        missing = each * self.num - self.total
        if missing:  # by a real matrix: on zeros, a loop until convergence might not end
            x = jnp.concatenate([x, jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))])
        if dim:
            sent = x.astype(wire)
            sent = lax.all_to_all(sent, self.axes, split_axis=0, concat_axis=dim, tiled=True)
            return sent.astype(x.dtype)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * each, each)

    def from_owner(self, x: jax.Array, dim: int, wire: Any) -> jax.Array:
        """Inverts ``to_owner``."""
        if self.stay:
            return x
        sent = x.astype(wire)
        if dim:
            sent = lax.all_to_all(sent, self.axes, split_axis=dim, concat_axis=0, tiled=True)
        else:
            sent = lax.all_gather(sent, self.axes, tiled=True)
        return sent.astype(x.dtype)[: self.total]


def _spread(
    jobs: list[_Job], layout: Layout, specs: dict[Path, P], wire: Any
) -> list[tuple[Any, Any]]:
    """The update and new state of every parameter, by owners where there are enough matrices."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        place = _place(layout, _spec(layout, specs, job, job.shape), job)
        groups[job.kind, place].append(i)
    results: dict[int, tuple[Any, Any]] = {}
    for (_, place), members in groups.items():
        group = [jobs[i] for i in members]
        axes = place.axes or layout.axes
        num = math.prod(layout.mesh.shape[axis] for axis in axes)
        total = sum(job.count for job in group)
        owners = _Owners(axes, num, total, stay=bool(place.axes) and not place.dim)
        split = group[0].split() if owners.stay or 2 * total >= num else None
        if split and split.outs:
            found = _run_group(group, split, layout, specs, owners, wire)
        else:
            found = [job.alone() for job in group]
        results |= zip(members, found, strict=True)
    return [results[i] for i in range(len(jobs))]


def _spec(layout: Layout, specs: dict[Path, P], job: _Job, shape: tuple[int, ...]) -> P:
    """The spec of an array of a parameter's update."""
    if shape == job.shape and job.path in specs:
        return specs[job.path]
    if math.prod(shape[len(job.stack) :]) < _MIN_SIZE:
        return P()
    return layout.shard_spec(jax.ShapeDtypeStruct(shape, jnp.float32))


def _place(layout: Layout, spec: P, job: _Job) -> _Place:
    """Where the data axes of a spec are."""
    for dim, entry in enumerate(layout.manual_spec(spec)):
        if entry is not None:
            return _Place(axes_of(entry), max(dim - len(job.stack) + 1, 0))
    return _Place()


def _run_group(
    group: list[_Job],
    split: _Split,
    layout: Layout,
    specs: dict[Path, P],
    owners: _Owners,
    wire: Any,
) -> list[tuple[Any, Any]]:
    """The update of parameters whose matrices have one shape.

    Args:
      group: the parameters.
      split: the update of one of their matrices.
      layout: the mesh.
      specs: of shards in matrix form, by path.
      owners: of their matrices.
      wire: the dtype to which all but ``split.exact`` is rounded where it is sent; None for none.
    """

    def wire_of(value: int) -> Any:
        dtype = split.graph.types[value].dtype
        narrower = (
            wire is not None
            and value not in split.exact
            and jnp.issubdtype(dtype, jnp.floating)
            and wire.itemsize < dtype.itemsize
        )
        return wire if narrower else dtype

    kept = [job.before(split) for job in group]
    ins = [[x for v, x in zip(split.kept, row, strict=True) if v in split.ins] for row in kept]

    def dims_of(arrays: Sequence[Any]) -> list[int]:
        """For arrays of the first parameter: the dim along which each is sharded, else 0."""
        job = group[0]
        num_stack = len(job.stack)
        dims = [_place(layout, _spec(layout, specs, job, x.shape), job).dim for x in arrays]
        return [
            dim if dim and x.shape[num_stack + dim - 1] % owners.num == 0 else 0
            for x, dim in zip(arrays, dims, strict=True)
        ]

    def spec_of(job: _Job, dim: int) -> P:
        """The spec on the data axes of any of a parameter's arrays."""
        if owners.stay:
            return P(*layout.manual_spec(_spec(layout, specs, job, job.shape))[: len(job.stack)])
        return P(*[None] * (len(job.stack) + dim - 1), entry_of(owners.axes)) if dim else P()

    in_dims = dims_of(ins[0])
    out_dims = dims_of(jax.eval_shape(_over_stack(split.core, len(group[0].stack)), *ins[0]))

    def on_device(rows: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Per parameter its ``ins`` -> per parameter its ``outs``, as this device has them."""
        stacks = [x[0].shape[: len(job.stack)] for job, x in zip(group, rows, strict=True)]
        columns = [
            [x.reshape(-1, *x.shape[len(stack) :]) for x, stack in zip(column, stacks, strict=True)]
            for column in zip(*rows, strict=True)
        ]  # (matrices, ...) of each parameter, for each of the ins
        own = [
            owners.to_owner(jnp.concatenate(column), dim, wire_of(v))
            for v, column, dim in zip(split.ins, columns, in_dims, strict=True)
        ]
        # Traced again: operations that were traced for the full mesh cannot run in a shard_map.
        local = group[0].split()
        if local.types != split.types:
            raise ValueError(
                f"by_owner: the update of {path_str(group[0].path)!r} depends on the mesh of its "
                "trace, so that it cannot run on one device: it needs "
                f"{local.types}, not {split.types}."
            )
        found = jax.vmap(local.core)(*own)
        found = [
            owners.from_owner(x, dim, wire_of(v))
            for v, x, dim in zip(split.outs, found, out_dims, strict=True)
        ]
        ends = list(itertools.accumulate(math.prod(stack) for stack in stacks))
        return [
            [x[end - math.prod(stack) : end].reshape(*stack, *x.shape[1:]) for x in found]
            for end, stack in zip(ends, stacks, strict=True)
        ]

    with jax.named_scope("by_owner"):
        in_specs = [[spec_of(job, dim) for dim in in_dims] for job in group]
        out_specs = [[spec_of(job, dim) for dim in out_dims] for job in group]
        outs = over_data_axes(layout, on_device, (in_specs,), out_specs)(ins)
    return [job.after(split, k, o) for job, k, o in zip(group, kept, outs, strict=True)]
