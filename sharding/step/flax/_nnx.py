"""Flax nnx models and their ``nnx.Optimizer`` under ZeRO: updated in place, as under ``nnx.jit``.

A step splits the model into what is trained, its random state and all other variables; the last two
travel as the model state of ``Zero.train_step``. Only users of Flax need it.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

from sharding._types import Array, Batch, OptState, Tree
from sharding.loss._loss_options import NUMBERED, AnyLoss, Loss, as_loss, as_pair
from sharding.matmuls import Recipe
from sharding.matmuls._quantized_loss import quantized_matmuls
from sharding.placement._describe import Description
from sharding.placement._on_mesh import no_mesh
from sharding.placement._specs import resolve_param_specs, sharding_on
from sharding.step._checks import check_makes
from sharding.step._sync_state import sync_state_types
from sharding.step.flax._modules import check_found, gathered_module, matches


class NnxMethods:
    """What ``Zero`` does with nnx models."""

    def nnx_init(self: Any, make: Callable[..., Any], *args: Any, param_specs: Tree = None) -> Any:
        """Makes an nnx model and its optimizer, each device its own shard; values are those of one.

        Args:
          make: a function of ``args`` that returns ``(model, nnx.Optimizer(model, tx, wrt=...))``.
          *args: its arguments, such as a random key, which are traced.
          param_specs: specs of the parameters on the other mesh axes, ``PartitionSpec()`` for none;
            None takes their metadata, of which axes that the mesh lacks shard nothing.
        """
        check_makes("nnx_init", make, "a model that exists is placed by its first step")

        def arrays(*args: Any) -> Any:
            model, optimizer = make(*args)
            _, params, rest = nnx.split(model, optimizer.wrt, ...)
            return nnx.as_pure(((params, optimizer.opt_state), rest, optimizer.step))

        with no_mesh(keep=self.mesh):
            args = self._layout.replicate_foreign(args)
            with nnx.use_eager_sharding(False):  # placed below
                model, optimizer = nnx.eval_shape(make, *args)
                shardings = _shardings(self, model, optimizer, param_specs)
                replicated = self._layout.replicated
                run = jax.jit(arrays, out_shardings=(shardings, replicated, replicated))
                (params, opt_state), rest, step = run(*args)
            nnx.update(model, params, rest)
            set_opt_state(optimizer, opt_state)
            optimizer.step.set_value(step)
        return model, optimizer

    def nnx_train_step(
        self: Any,
        loss_fn: AnyLoss,
        *,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool = False,
        microbatches: int = 1,
        reductions: Mapping[type, str] = MappingProxyType({}),
        trainable: Tree = None,
        grad_norm: bool = False,
        donate: bool = True,
        update: str = "after",
        matmuls: str | Recipe | None = None,
        param_specs: Tree = None,
    ) -> "NnxStep":
        """A training step of an nnx model that updates it in place, as under ``nnx.jit``.

        Batch statistics, counters and all other variables come back into the model; those that the
        loss creates, as ``sow`` does, are dropped. ``nnx.Rngs`` of the model draw anew for each
        micro-batch and for each step. ``nnx.BatchNorm`` takes its statistics over the whole batch,
        without an ``axis_name``.

        Args:
          loss_fn: ``loss_fn(model, batch) -> loss``; it may change variables of the model. A
            ``Loss`` has the next three arguments in it, and no model state.
          has_aux: the loss is a pair ``(loss, aux)``; this, and others, as in ``train_step``.
          weighted: the loss is a pair ``(sum, weight)``.
          rngs: ``loss_fn`` takes a key as its last argument, such as for ``nnx.Rngs(key)``.
          microbatches: the number of micro-batches.
          reductions: with ``per_device=True``, how the variables of all devices are reduced, by
            their type, such as ``{Counter: "sum"}``; ``"mean"`` for all others.
          trainable: which of the parameters that the optimizer has are trained.
          grad_norm: add ``metrics["grad_norm"]``.
          donate: reuse the memory of parameters and optimizer state, which an ``nnx.clone`` shares.
          update: ``"after"`` the backward pass, or in it, ``"backward"``, where ``nnx.scan`` runs
            over layers that ``nnx.vmap`` made.
          matmuls: a recipe for ``quantized_matmuls``, as in ``train_step``.
          param_specs: specs, for a model that the first call places; as in ``nnx_init``.

        Returns:
          ``step(model, optimizer, batch, key=None) -> metrics``, with a ``lower`` of the same
          arguments, also of a model and optimizer by ``nnx.eval_shape``, for any mesh. Parameters
          are what the optimizer's ``wrt`` selects. The first call places a model that is on one
          device.

        Example:
          >>> import jax, jax.numpy as jnp, optax, sharding as shd
          >>> from flax import nnx
          >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=2)
          >>> def make():
          ...     model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
          ...     return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
          >>> model, optimizer = zero.nnx_init(make)
          >>> step = zero.nnx_train_step(lambda model, x: jnp.mean(model(x) ** 2))
          >>> metrics = step(model, optimizer, zero.put(jnp.ones((8 * jax.device_count(), 64))))
          >>> int(optimizer.step[...])
          1
        """
        loss = as_loss(loss_fn, has_aux, weighted, rngs, first="model")
        if matmuls is not None:
            loss = quantized_matmuls(loss, matmuls)
        options = {"microbatches": microbatches, "trainable": trainable, "grad_norm": grad_norm}
        options |= {"donate": donate, "update": update}
        return NnxStep(self, loss, reductions, param_specs, options)

    def nnx_eval_step(self: Any, fn: AnyLoss, *, wrt: Any = None) -> "NnxEvalStep":
        """A compiled function of an nnx model and a batch, ``evaluate(model, batch) -> tree``.

        It has a ``lower`` of the same arguments.

        Args:
          fn: ``fn(model, batch)``, as in ``eval_step``; the model is only read.
          wrt: what selects the parameters, as in ``nnx.Optimizer``; None for ``nnx.Param``.
        """
        return NnxEvalStep(self, fn, wrt)


# --- Steps ----------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A part of the structure of a tree, compared by value: it may have no hash."""

    value: Any

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _NnxState:
    """Parameters and optimizer of an nnx model, in the form of a Flax ``TrainState``."""

    step: jax.Array
    params: Any
    opt_state: Any
    tx: Any = dataclasses.field(metadata={"static": True})

    def replace(self, **fields: Any) -> "_NnxState":
        return dataclasses.replace(self, **fields)


class NnxStep:
    """A training step of ``(model, optimizer, batch)``; see ``Zero.nnx_train_step``."""

    def __init__(self, zero: Any, loss: Loss, reductions: Any, param_specs: Tree, options: Any):
        _check_stateless(loss)
        if loss.rngs == "per_example":
            raise ValueError(
                "nnx_train_step has one key for a micro-batch, and none for each example: pass "
                "rngs=True."
            )
        self.loss, self.reductions, self.param_specs = loss, reductions, param_specs
        # The blocks of the model are gathered by prepare: the loss calls no linen modules.
        plain = dataclasses.replace(zero, gathered_blocks=())
        reduction = lambda parts: parts["static"].value[-1]  # noqa: E731
        own = {"rngs": NUMBERED, "model_state": True, "reduction": reduction}
        self._step = plain.train_step(dataclasses.replace(loss, fn=self._loss, **own), **options)
        self._step.blocks = zero.gathered_blocks
        self.zero = zero

    def __call__(self, model: Any, optimizer: Any, batch: Batch, key: Any = None) -> dict[str, Any]:
        """Updates model and optimizer; returns the metrics of ``train_step``."""
        with no_mesh():
            state, metrics = self._step(*self._arguments(model, optimizer, batch, key))
            new = metrics.pop("model_state")
            nnx.update(model, state.params, new["rest"], new["next_rng"])
            set_opt_state(optimizer, state.opt_state)
            optimizer.step.set_value(state.step)
        return metrics

    def lower(
        self, model: Any, optimizer: Any, batch: Batch, key: Any = None
    ) -> jax.stages.Lowered:
        with no_mesh():
            return self._step.lower(*self._arguments(model, optimizer, batch, key))

    def describe(self, model: Any, optimizer: Any) -> Description:
        """``Zero.describe`` of both, real or abstract, with gradients of what is trained."""
        found: Description = self.zero.describe(
            (model, optimizer), param_specs=self.param_specs, trainable=self._step.trainable
        )
        return found

    def _arguments(self, model: Any, optimizer: Any, batch: Batch, key: Any) -> tuple[Any, ...]:
        """``(state, batch, key, model state)`` of the step."""
        zero = self.zero
        if not is_placed((model, optimizer.opt_state), zero.mesh):
            place_model(zero, model, optimizer, self.param_specs)
        graph, params, rng, sown, rest = _split(model, optimizer.wrt)
        # An average of the parameters may begin as the very arrays that the step donates.
        donated = {id(x) for x in jax.tree.leaves((params, optimizer.opt_state))}
        rest = jax.tree.map(lambda x: zero.replicate(x) if id(x) in donated else x, rest)
        step: Any = nnx.as_pure(optimizer.step)
        if self.loss.rngs:
            key = zero._layout.replicate_foreign(key)
            key = _of_step(jax.random.key(0) if key is None else key, step)
        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        reduction = {
            "rest": jax.tree.map(self._reduction, rest, is_leaf=is_variable),
            **dict.fromkeys(("rng", "next_rng", "sown", "static"), "same"),
        }
        # The random state goes in twice: as it is for all micro-batches, and as it will be.
        rng, sown, rest = nnx.as_pure((rng, sown, rest))
        parts = {"rest": rest, "rng": rng, "next_rng": rng, "sown": sown}
        parts["static"] = _Static((graph, optimizer.wrt, reduction))
        params, opt_state = nnx.as_pure((params, optimizer.opt_state))
        return _NnxState(step, params, opt_state, optimizer.tx), batch, key, parts

    def _reduction(self, variable: Any) -> str:
        by_type = (kind for cls, kind in self.reductions.items() if isinstance(variable, cls))
        return next(by_type, "mean")

    def _loss(self, params: Tree, batch: Batch, parts: Any, numbered: Any) -> tuple[Any, Any]:
        """The loss of the model's parameters; ``parts`` are all else of the model."""
        number, key = numbered
        graph, wrt, _ = parts["static"].value
        rng = jax.tree.map(lambda x: _fold(x, number), parts["rng"])
        model = model_in_step(self.zero, graph, params, rng, parts["sown"], parts["rest"])
        out = self.loss(model, batch, key) if self.loss.rngs else self.loss(model, batch)
        _, _, rng, _, rest = _split(model, wrt)
        # Counts move on, keys are those of the run.
        counted = lambda old, new: old if _is_key(old) else new  # noqa: E731
        next_rng = jax.tree.map(counted, parts["rng"], values_at(parts["rng"], rng))
        new = parts | {"rest": values_at(parts["rest"], rest), "next_rng": next_rng}
        return _with_new(self.loss, out, new)


class NnxEvalStep:
    """A compiled function of an nnx model and a batch; see ``Zero.nnx_eval_step``."""

    def __init__(self, zero: Any, fn: AnyLoss, wrt: Any):
        self.loss, self.wrt = as_loss(fn, first="model"), nnx.Param if wrt is None else wrt
        _check_stateless(self.loss)
        if self.loss.fn is fn:
            self._step = zero.eval_step(self._run, model_state=True)
        else:
            own = dataclasses.replace(self.loss, fn=self._run_loss, model_state=True)
            self._step = zero.eval_step(own)
        self.zero = self._step.zero

    def __call__(self, model: Any, batch: Batch) -> Any:
        return self._step(*self._arguments(model, batch))

    def lower(self, model: Any, batch: Batch) -> jax.stages.Lowered:
        return self._step.lower(*self._arguments(model, batch))

    def _arguments(self, model: Any, batch: Batch) -> tuple[Any, ...]:
        if not is_placed(nnx.state(model, self.wrt), self.zero.mesh):
            raise ValueError(
                "the model is not on the mesh. Make it with zero.nnx_init, or train a step: the "
                "first one places it."
            )
        graph, params, rest = nnx.split(model, self.wrt, ...)
        params, rest = nnx.as_pure((params, rest))
        return (params, ()), batch, None, (_Static(graph), rest)

    def _run(self, params: Tree, batch: Batch, parts: Any) -> Any:
        graph, rest = parts
        return self.loss(model_in_step(self.zero, graph.value, params, rest), batch)

    def _run_loss(self, *args: Any) -> tuple[Any, Any]:
        return _with_new(self.loss, self._run(*args), ())


def _check_stateless(loss: Loss) -> None:
    if loss.model_state:
        raise ValueError(
            f"an nnx model has its state in the model, and model_state={loss.model_state!r} was "
            "given: leave that out."
        )


def _with_new(loss: Loss, out: Any, new: Any) -> tuple[Any, Any]:
    """What a loss returned, and beside it the new values of what is not trained."""
    value, aux = as_pair(out, "(loss, aux), as has_aux says") if loss.has_aux else (out, None)
    return value, ((new, aux) if loss.has_aux else new)


def _split(model: Any, wrt: Any) -> Any:
    """What a step splits a model into: graph, parameters, random state, what was sown, all else."""
    return nnx.split(model, wrt, nnx.RngState, nnx.Intermediate, ...)


def train_state(zero: Any, state: Tree, param_specs: Tree = None) -> tuple[Any, Any]:
    """An nnx model, alone or with its optimizer, as a train state, and specs of its parameters.

    Any other state, and specs that are given, are returned as they are.
    """
    model, *rest = state if type(state) is tuple else (state,)
    if not is_module(model):
        return state, param_specs
    optimizer = rest[0] if rest else nnx.Optimizer(model, optax.identity(), wrt=nnx.Param)
    params = nnx.state(model, optimizer.wrt)
    if param_specs is None and not is_placed(params, zero.mesh):
        param_specs = nnx.as_pure(resolve_param_specs(params, None, zero.mesh))
    step: Any = nnx.as_pure(optimizer.step)
    params, opt_state = nnx.as_pure((params, optimizer.opt_state))
    return _NnxState(step, params, opt_state, optimizer.tx), param_specs


def _is_key(x: Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _of_step(key: Any, step: Any) -> Any:
    fold: Any = jax.random.fold_in
    is_type = isinstance(step, jax.ShapeDtypeStruct)
    return jax.eval_shape(fold, key, step) if is_type else fold(key, step)


def _fold(x: jax.Array, number: jax.Array) -> jax.Array:
    """Keys of any shape, folded by a number; counts as they are."""
    if not _is_key(x):
        return x
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return fold(x.reshape(-1), number).reshape(x.shape)


# --- A model and its optimizer on a mesh: their placement, and the model in a loss ----------------


class _Nnx:
    """``flax.nnx``, imported where it is used."""

    def __getattr__(self, name: str) -> Any:
        from flax import nnx

        return getattr(nnx, name)


nnx: Any = _Nnx()


def place_model(zero: Any, model: Any, optimizer: Any, param_specs: Tree) -> None:
    """Moves a model and its optimizer, real or abstract, onto the mesh, in place."""
    _, params, rest = nnx.split(model, optimizer.wrt, ...)
    shardings = _shardings(zero, model, optimizer, param_specs)
    state = zero._layout.copy(nnx.as_pure((params, optimizer.opt_state)), shardings)
    nnx.update(model, state[0], zero._layout.copy(nnx.as_pure(rest), zero._layout.replicated))
    set_opt_state(optimizer, state[1])


def _shardings(zero: Any, model: Any, optimizer: Any, param_specs: Tree) -> Any:
    params = nnx.state(model, optimizer.wrt)
    if param_specs is None:
        param_specs = nnx.as_pure(resolve_param_specs(params, None, zero.mesh))
    state = nnx.as_pure((params, optimizer.opt_state))
    if zero.sync is not None:
        placed = zero._layout.place(state[0], param_specs)
        if sync_state_types(zero._layout, zero.sync, state[0], placed) is not None:
            raise ValueError(
                "sync: this gradient sync has a state, which an nnx.Optimizer cannot store. "
                "Use train_step with the pair (params, opt_state) of nnx.split, or a sync without "
                "a state."
            )
    return zero.shardings(state, tx=optimizer.tx, param_specs=param_specs)


def is_placed(tree: Tree, mesh: Any) -> bool:
    """Whether every array but scalars, real or abstract, is on all devices of the mesh."""

    def is_there(x: Any) -> bool:
        if isinstance(x, jax.Array):
            return bool(x.sharding.device_set == set(mesh.devices.flat))
        return sharding_on(x, mesh) is not None

    arrays = jax.Array | jax.ShapeDtypeStruct
    return all(is_there(x) for x in jax.tree.leaves(tree) if isinstance(x, arrays) and x.ndim)


def set_opt_state(optimizer: Any, opt_state: OptState) -> None:
    treedef = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = nnx.data(treedef.unflatten(jax.tree.leaves(opt_state)))


def prepare(zero: Any, model: Any) -> None:
    """Makes modules act on a sharded batch, and call ``gather`` on their parameters."""
    blocks = zero.gathered_blocks
    gathered: list[tuple[Any, ...]] = []
    found: set[str] = set()
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))  # outermost first
    named = [(path, type(m).__name__, "/".join(map(str, path)), m) for path, m in modules]
    for path, cls, name, module in named:
        own = {pattern for pattern in blocks if matches(pattern, cls, name)}
        found |= own
        if own and not any(path[: len(outer)] == outer for outer in gathered):
            gathered.append(path)
            module.__class__ = gathered_module(type(module), None, zero._layout.recomputes)
    seen = [(cls, name) for _, cls, name, _ in named[1:]]
    check_found(blocks, found, "a module of the model. It has", seen)


def model_in_step(zero: Any, graph: Any, *states: Any) -> Any:
    model = nnx.merge(graph, *states, copy=True)
    prepare(zero, model)
    return model


def values_at(old: Tree, new: Tree) -> Any:
    """The pure values of ``new`` at the paths of ``old``; what a loss sows is dropped."""
    values = dict(nnx.to_flat_state(new))
    paths = [path for path, _ in nnx.to_flat_state(old)]
    for path in paths:
        if path not in values:
            name = "/".join(map(str, path))
            raise ValueError(
                f"the loss removed the variable {name!r} of the model, which a step requires. "
                "Reset its value instead."
            )
    return nnx.as_pure(nnx.from_flat_state([(path, values[path]) for path in paths]))


def is_module(x: Any) -> bool:
    """Whether it is an nnx model; without Flax there are none."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def pure_loss(zero: Any, loss: Loss, model: Any) -> tuple[Loss, Any, Any]:
    """The loss of a model as one of ``(params, batch, rest)``, with a state, and the rest."""
    _check_stateless(loss)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def fn(params: Tree, batch: Batch, rest: Any, *key: Any) -> Any:
        model = model_in_step(zero, graph, params, rest)
        out = loss(model, batch, *key)
        return _with_new(loss, out, values_at(rest, nnx.split(model, nnx.Param, ...)[2]))

    params, rest = nnx.as_pure((params, rest))
    return dataclasses.replace(loss, fn=fn, model_state=True), (params, None), rest
