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

from sharding.placement._on_mesh import no_mesh
from sharding.step._loss import as_pair, check_arguments
from sharding.step._rng import NUMBERED
from sharding.step._sync_state import sync_state_types
from sharding.step.flax._linen import is_bound, matches
from sharding.step.flax._modules import gathered_module


class NnxMethods:
    """What ``Zero`` does with nnx models."""

    def nnx_init(self: Any, make: Callable[..., Any], *args: Any, param_specs: Any = None) -> Any:
        """Makes an nnx model and its optimizer, each device its own shard of them.

        Args:
          make: a function of ``args`` that returns ``(model, nnx.Optimizer(model, tx, wrt=...))``.
          *args: its arguments, such as a random key; traced, so bind others with
            ``functools.partial``.
          param_specs: specs of the parameters on the other mesh axes; None takes their metadata.

        Returns:
          ``(model, optimizer)``; their values do not depend on the mesh.
        """
        with no_mesh(keep=self.mesh):
            return _init(self, make, self._layout.replicate_foreign(args), param_specs)

    def nnx_train_step(
        self: Any,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool = False,
        microbatches: int = 1,
        reductions: Mapping[type, str] = MappingProxyType({}),
        trainable: Any = None,
        grad_norm: bool = False,
        donate: bool = True,
    ) -> "NnxStep":
        """A training step of an nnx model that updates it in place, as under ``nnx.jit``.

        Batch statistics, counters and all other variables come back into the model. ``nnx.Rngs``
        that the model holds draw anew for each micro-batch of each device and for each step.
        ``nnx.BatchNorm`` takes its statistics over the micro-batch of all devices, without an
        ``axis_name``. Variables that the loss creates, as ``sow`` does, are dropped: return them in
        ``aux``.

        Args:
          loss_fn: ``loss_fn(model, batch) -> loss``; it may change variables of the model.
          has_aux: as all arguments not listed here: see ``train_step``.
          weighted: the loss is a pair ``(sum, weight)``.
          rngs: ``loss_fn`` takes a key as its last argument, such as for ``nnx.Rngs(key)``.
          microbatches: the number of micro-batches of each device.
          reductions: how the variables of all devices are reduced, by their type, such as
            ``{Counter: "sum"}``; ``"mean"`` for all others.
          trainable: which of the parameters that the optimizer has are trained.
          grad_norm: add ``metrics["grad_norm"]``.
          donate: reuse the memory of parameters and optimizer state for the new ones. An
            ``nnx.clone`` of the model shares that memory, and is deleted by the step.

        Returns:
          ``step(model, optimizer, batch, key=None) -> metrics``, with a ``lower`` of the same
          arguments. Parameters are what the optimizer's ``wrt`` selects. A model that is on one
          device is placed on the mesh by the first call; ``nnx_init`` makes it there.

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
        return NnxStep(
            self,
            loss_fn,
            rngs,
            reductions,
            has_aux=has_aux,
            weighted=weighted,
            microbatches=microbatches,
            trainable=trainable,
            grad_norm=grad_norm,
            donate=donate,
        )

    def nnx_eval_step(
        self: Any, fn: Callable[[Any, Any], Any], *, wrt: Any = None
    ) -> "NnxEvalStep":
        """A compiled function of an nnx model and a batch; the model is only read.

        Args:
          fn: ``fn(model, batch)``, as in ``eval_step``.
          wrt: what selects the parameters, as in ``nnx.Optimizer``; None for ``nnx.Param``.

        Returns:
          ``evaluate(model, batch) -> tree``.
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
        """The state with other values of these fields."""
        return dataclasses.replace(self, **fields)


class NnxStep:
    """A training step of ``(model, optimizer, batch)`` that updates both in place.

    Attributes:
      zero: the placement of the state.
      loss_fn: of the model, a batch, and a key if ``rngs`` says so.
      rngs: whether it takes a key.
      reductions: how the variables of all devices are reduced, by their type.
      has_aux: whether the loss returns aux.
    """

    def __init__(
        self,
        zero: Any,
        loss_fn: Callable[..., Any],
        rngs: bool,
        reductions: Mapping[type, str],
        *,
        has_aux: bool,
        **options: Any,
    ):
        check_arguments(loss_fn, "model", "batch", key=rngs)
        self.zero, self.loss_fn, self.rngs = zero, loss_fn, rngs
        self.reductions, self.has_aux = reductions, has_aux
        # The blocks of the model are gathered by prepare: the loss calls no linen modules.
        plain = dataclasses.replace(zero, gathered_blocks=())
        self._step = plain.train_step(
            self._loss,
            has_aux=has_aux,
            rngs=NUMBERED,
            model_state=True,
            model_state_reduction=lambda parts: parts["static"].value[-1],
            **options,
        )

    def __call__(self, model: Any, optimizer: Any, batch: Any, key: Any = None) -> dict[str, Any]:
        """Updates model and optimizer; returns the metrics of ``train_step``."""
        from flax import nnx

        with no_mesh():
            state, metrics = self._step(*self._arguments(model, optimizer, batch, key))
            new = metrics.pop("model_state")
            nnx.update(model, state.params, new["rest"], new["next_rng"])
            _set_opt_state(optimizer, state.opt_state)
            optimizer.step.set_value(state.step)
        return metrics

    def lower(self, model: Any, optimizer: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        """Lowers the step, as ``jax.jit(f).lower``."""
        with no_mesh():
            return self._step.lower(*self._arguments(model, optimizer, batch, key))

    def _arguments(self, model: Any, optimizer: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        """``(state, batch, key, model state)`` of the step."""
        from flax import nnx

        zero = self.zero
        if not _is_placed((model, optimizer.opt_state), zero.mesh):
            _place_model(zero, model, optimizer)
        graph, params, rng, sown, rest = _split(model, *_filters(optimizer.wrt))
        # An average of the parameters may begin as the very arrays that the step donates.
        donated = {id(x) for x in jax.tree.leaves((params, optimizer.opt_state))}
        rest = jax.tree.map(lambda x: zero.replicate(x) if id(x) in donated else x, rest)
        step = optimizer.step[...]
        if self.rngs:
            key = zero._layout.replicate_foreign(key)
            key = jax.random.fold_in(jax.random.key(0) if key is None else key, step)
        reduction = {
            "rest": jax.tree.map(self._reduction, rest, is_leaf=_is_variable),
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

    def _loss(self, params: Any, batch: Any, parts: Any, numbered: Any) -> tuple[Any, Any]:
        """The loss of the model's parameters; ``parts`` are all else of the model."""
        from flax import nnx

        number, key = numbered
        graph, wrt, _ = parts["static"].value
        rng = jax.tree.map(lambda x: _fold(x, number), parts["rng"])
        model = nnx.merge(graph, params, rng, parts["sown"], parts["rest"], copy=True)
        prepare(self.zero, model)
        out = self.loss_fn(model, batch, key) if self.rngs else self.loss_fn(model, batch)
        value, aux = as_pair(out, "(loss, aux), as has_aux says") if self.has_aux else (out, None)
        _, _, rng, _, rest = _split(model, *_filters(wrt))
        new = parts | {
            "rest": _like(parts["rest"], rest),
            "next_rng": jax.tree.map(_counted, parts["rng"], _like(parts["rng"], rng)),
        }
        return value, ((new, aux) if self.has_aux else new)


class NnxEvalStep:
    """A compiled function of an nnx model and a batch; see ``Zero.nnx_eval_step``.

    Attributes:
      zero: the placement of the model.
      fn: of the model and a batch.
      wrt: what selects the parameters.
    """

    def __init__(self, zero: Any, fn: Callable[[Any, Any], Any], wrt: Any):
        from flax import nnx

        self.zero, self.fn, self.wrt = zero, fn, nnx.Param if wrt is None else wrt
        self._step = zero.eval_step(self._run, model_state=True)

    def __call__(self, model: Any, batch: Any) -> Any:
        """Evaluates the function; the model is only read."""
        from flax import nnx

        if not _is_placed(nnx.state(model, self.wrt), self.zero.mesh):
            raise ValueError(
                "the model is not on the mesh. Make it with zero.nnx_init, or train a step: the "
                "first one places it."
            )
        graph, params, rest = _split(model, self.wrt, ...)
        params, rest = nnx.as_pure((params, rest))
        return self._step((params, ()), batch, model_state=(_Static(graph), rest))

    def _run(self, params: Any, batch: Any, parts: Any) -> Any:
        from flax import nnx

        graph, rest = parts
        model = nnx.merge(graph.value, params, rest, copy=True)
        prepare(self.zero, model)
        return self.fn(model, batch)


def is_module(x: Any) -> bool:
    """Whether it is an nnx model; without Flax there are none."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def train_state(zero: Any, state: Any, param_specs: Any = None) -> tuple[Any, Any]:
    """An nnx model, alone or with its optimizer, as a train state, and specs of its parameters.

    Any other state, and specs that are given, are returned as they are.
    """
    model, *rest = state if type(state) is tuple else (state,)
    if not is_module(model):
        return state, param_specs
    from flax import nnx

    optimizer = rest[0] if rest else nnx.Optimizer(model, optax.identity(), wrt=nnx.Param)
    params = nnx.state(model, optimizer.wrt)
    is_real = all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    if param_specs is None and not (is_real and _is_placed(params, zero.mesh)):
        param_specs = nnx.as_pure(nnx.get_partition_spec(params))
    step: Any = nnx.as_pure(optimizer.step)
    params, opt_state = nnx.as_pure((params, optimizer.opt_state))
    return _NnxState(step, params, opt_state, optimizer.tx), param_specs


def pure_loss(
    zero: Any, loss_fn: Callable[..., Any], model: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """The loss of a model as one of ``(params, batch, rest)``, with a state, and the rest."""
    from flax import nnx

    graph, params, rest = _split(model, nnx.Param, ...)

    def loss(params: Any, batch: Any, rest: Any, *key: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        prepare(zero, model)
        out = loss_fn(model, batch, *key)
        value, aux = out if options.get("has_aux") else (out, None)
        new = _like(rest, _split(model, nnx.Param, ...)[2])
        return value, ((new, aux) if options.get("has_aux") else new)

    params, rest = nnx.as_pure((params, rest))
    return loss, (params, None), rest


# --- Where models are placed ----------------------------------------------------------------------


def _init(zero: Any, make: Callable[..., Any], args: tuple[Any, ...], param_specs: Any) -> Any:
    """Model and optimizer as ``make(*args)`` makes them, each device its own shard."""
    from flax import nnx

    def arrays(*args: Any) -> Any:
        model, optimizer = make(*args)
        _, params, rest = _split(model, optimizer.wrt, ...)
        return nnx.as_pure(((params, optimizer.opt_state), rest, optimizer.step))

    with nnx.use_eager_sharding(False):  # placed below
        model, optimizer = nnx.eval_shape(make, *args)
        shardings = _shardings(zero, model, optimizer, param_specs)
        replicated = zero._layout.replicated
        run = jax.jit(arrays, out_shardings=(shardings, replicated, replicated))
        (params, opt_state), rest, step = run(*args)
    nnx.update(model, params, rest)
    _set_opt_state(optimizer, opt_state)
    optimizer.step.set_value(step)
    return model, optimizer


def _place_model(zero: Any, model: Any, optimizer: Any) -> None:
    """Moves a model and its optimizer onto the mesh, in place."""
    from flax import nnx

    _, params, rest = _split(model, optimizer.wrt, ...)
    shardings = _shardings(zero, model, optimizer, None)
    state = zero._layout.copy(nnx.as_pure((params, optimizer.opt_state)), shardings)
    nnx.update(model, state[0], zero._layout.copy(nnx.as_pure(rest), zero._layout.replicated))
    _set_opt_state(optimizer, state[1])


def _shardings(zero: Any, model: Any, optimizer: Any, param_specs: Any) -> Any:
    """Of the parameters and the optimizer's state."""
    from flax import nnx

    params = nnx.state(model, optimizer.wrt)
    if param_specs is None:
        param_specs = nnx.as_pure(nnx.get_partition_spec(params))
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


def _is_placed(tree: Any, mesh: Any) -> bool:
    """Whether every array is on all devices of the mesh; scalars are placed in each step."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.ndim]
    return all(x.sharding.device_set == set(mesh.devices.flat) for x in leaves)


def _set_opt_state(optimizer: Any, opt_state: Any) -> None:
    from flax import nnx

    treedef: Any = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = nnx.data(treedef.unflatten(jax.tree.leaves(opt_state)))


# --- Inside the loss ------------------------------------------------------------------------------


def prepare(zero: Any, model: Any) -> None:
    """Makes modules act on a sharded batch, and call ``gather`` on their parameters."""
    from flax import nnx

    blocks = zero.gathered_blocks if zero.stage >= 2 else ()
    gathered: list[tuple[Any, ...]] = []
    found: set[str] = set()
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))  # outermost first
    for path, module in modules:
        if isinstance(module, nnx.BatchNorm) and not is_bound(module.axis_name):
            module.axis_name = zero._layout.data_axes
        name = "/".join(map(str, path))
        own = {p for p in blocks if matches(p, type(module).__name__, name)}
        found |= own
        if own and not any(path[: len(outer)] == outer for outer in gathered):
            gathered.append(path)
            module.__class__ = gathered_module(type(module), None, zero._recomputes)
    missing = [p for p in blocks if p not in found]
    if missing:
        named = (f"{type(m).__name__} ({'/'.join(map(str, path))})" for path, m in modules[1:])
        raise ValueError(
            f"gathered_blocks: {missing[0]!r} is neither the class nor in the path of a module of "
            f"the model. It has {', '.join(named)}."
        )


def _like(old: Any, new: Any) -> Any:
    """The pure values of ``new`` at the paths of ``old``; what a loss sows is dropped."""
    from flax import nnx

    values = dict(nnx.to_flat_state(new))
    paths = [path for path, _ in nnx.to_flat_state(old)]
    for path in paths:
        if path not in values:
            name = "/".join(map(str, path))
            raise ValueError(
                f"the loss removed the variable {name!r} of the model, which a step requires. "
                "Reset its value instead."
            )
    same_paths = [(path, values[path]) for path in paths]
    return nnx.as_pure(nnx.from_flat_state(same_paths))


def _filters(wrt: Any) -> tuple[Any, ...]:
    """What a step splits a model by: parameters, random state, what was sown, all else."""
    from flax import nnx

    return wrt, nnx.RngState, nnx.Intermediate, ...


def _split(model: Any, *filters: Any) -> tuple[Any, ...]:
    """The graph, and a state for each filter."""
    from flax import nnx

    return tuple(nnx.split(model, *filters))


def _is_variable(x: Any) -> bool:
    from flax import nnx

    return isinstance(x, nnx.Variable)


def _is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _counted(old: Any, new: Any) -> Any:
    """Random state after a step: counts have moved on, keys are those of the run."""
    return old if _is_key(old) else new


def _fold(x: jax.Array, number: jax.Array) -> jax.Array:
    """Keys of any shape, folded by a number; counts as they are."""
    if not _is_key(x):
        return x
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return fold(x.reshape(-1), number).reshape(x.shape)
