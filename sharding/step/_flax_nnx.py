"""Flax nnx models and their ``nnx.Optimizer`` under ZeRO: updated in place, as under ``nnx.jit``.

A step splits the model into what is trained, its random state and all other variables; the last two
travel as the model state of ``Zero.train_step``. Only users of Flax need it.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sharding.placement._on_mesh import no_mesh
from sharding.step import _sync_state
from sharding.step._compiled_step import CompiledStep
from sharding.step._loss import as_pair, check_arguments
from sharding.step._rng import NUMBERED
from sharding.step.flax._linen import is_bound, matches
from sharding.step.flax._modules import gathered_module


class NnxStep:
    """A training step of ``(model, optimizer, batch)`` that updates both in place.

    Attributes:
      zero: the placement of the state.
      loss_fn: of the model, a batch, and a key if ``rngs`` says so.
      rngs: whether it takes a key.
      reductions: how the variables of all devices are reduced, by their type.
      options: further arguments of ``train_step``.
    """

    def __init__(
        self,
        zero: Any,
        loss_fn: Callable[..., Any],
        rngs: bool,
        reductions: Mapping[type, str],
        options: dict[str, Any],
    ):
        check_arguments(loss_fn, "model", "batch", key=rngs)
        self.zero, self.loss_fn, self.rngs = zero, loss_fn, rngs
        self.reductions, self.options = reductions, options
        self._steps: list[tuple[Any, CompiledStep]] = []

    def __call__(self, model: Any, optimizer: Any, batch: Any, key: Any = None) -> dict[str, Any]:
        """Updates model and optimizer; returns the metrics of ``train_step``."""
        from flax import nnx

        with no_mesh():
            step, state, args = self._arguments(model, optimizer, batch, key)
            (params, opt_state), metrics = step(state, *args)
            new = metrics.pop("model_state")
            nnx.update(model, params, new["rest"], new["next_rng"])
            _set_opt_state(optimizer, opt_state)
            optimizer.step[...] += 1
        return metrics

    def lower(self, model: Any, optimizer: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        """Lowers the step, as ``jax.jit(f).lower``."""
        with no_mesh():
            step, state, args = self._arguments(model, optimizer, batch, key)
            return step.lower(state, *args)

    def _arguments(
        self, model: Any, optimizer: Any, batch: Any, key: Any
    ) -> tuple[CompiledStep, Any, tuple[Any, Any, Any]]:
        """The compiled step, its state, and ``(batch, key, model state)``."""
        from flax import nnx

        zero = self.zero
        if not _is_placed((model, optimizer.opt_state), zero.mesh):
            place(zero, model, optimizer)
        graph, params, rng, sown, rest = _split(model, *_filters(optimizer.wrt))
        # An average of the parameters may begin as the very arrays that the step donates.
        donated = {id(x) for x in jax.tree.leaves((params, optimizer.opt_state))}
        rest = jax.tree.map(lambda x: zero.replicate(x) if id(x) in donated else x, rest)
        if self.rngs:
            key = zero._layout.replicate_foreign(key)
            key = jax.random.fold_in(jax.random.key(0) if key is None else key, optimizer.step[...])
        # The random state goes in twice: as it is for all micro-batches, and as it will be.
        parts = {"rest": nnx.as_pure(rest), "rng": nnx.as_pure(rng), "next_rng": nnx.as_pure(rng)}
        parts["sown"] = nnx.as_pure(sown)
        signature = (graph, optimizer.wrt, id(optimizer.tx))
        step = _find(self._steps, signature)
        if step is None:
            reduction = {
                "rest": jax.tree.map(self._reduction, rest, is_leaf=_is_variable),
                **dict.fromkeys(("rng", "next_rng", "sown"), "same"),
            }
            # The blocks of the model are gathered by prepare: the loss calls no linen modules.
            plain = dataclasses.replace(zero, gathered_blocks=())
            step = plain.train_step(
                self._loss(graph, optimizer.wrt),
                tx=optimizer.tx,
                rngs=NUMBERED,
                model_state=True,
                model_state_reduction=reduction,
                **self.options,
            )
            self._steps.append((signature, step))
        state = nnx.as_pure((params, optimizer.opt_state))
        return step, state, (batch, key, parts)

    def _reduction(self, variable: Any) -> str:
        found = (kind for cls, kind in self.reductions.items() if isinstance(variable, cls))
        return next(found, "mean")

    def _loss(self, graph: Any, wrt: Any) -> Callable[..., Any]:
        from flax import nnx

        def loss(params: Any, batch: Any, parts: Any, numbered: Any) -> tuple[Any, Any]:
            number, key = numbered
            rng = jax.tree.map(lambda x: _fold(x, number), parts["rng"])
            model = nnx.merge(graph, params, rng, parts["sown"], parts["rest"], copy=True)
            prepare(self.zero, model)
            out = self.loss_fn(model, batch, key) if self.rngs else self.loss_fn(model, batch)
            has_aux = self.options.get("has_aux")
            value, aux = as_pair(out, "(loss, aux), as has_aux says") if has_aux else (out, None)
            _, _, rng, _, rest = _split(model, *_filters(wrt))
            new = {
                "rest": _like(parts["rest"], rest),
                "rng": parts["rng"],
                "sown": parts["sown"],
                "next_rng": jax.tree.map(_counted, parts["rng"], _like(parts["rng"], rng)),
            }
            return value, ((new, aux) if has_aux else new)

        return loss


def eval_step(zero: Any, fn: Callable[[Any, Any], Any], wrt: Any) -> Callable[[Any, Any], Any]:
    """``evaluate(model, batch)`` of ``fn(model, batch)``; see ``Zero.nnx_eval_step``."""
    from flax import nnx

    wrt = nnx.Param if wrt is None else wrt
    compiled: list[tuple[Any, CompiledStep]] = []

    def evaluate(model: Any, batch: Any) -> Any:
        if not _is_placed(nnx.state(model, wrt), zero.mesh):
            raise ValueError(
                "the model is not on the mesh. Make it with zero.nnx_init, or train a step: the "
                "first one places it."
            )
        graph, params, rest = _split(model, wrt, ...)

        def run(params: Any, batch: Any, rest: Any) -> Any:
            model = nnx.merge(graph, params, rest, copy=True)
            prepare(zero, model)
            return fn(model, batch)

        step = _find(compiled, graph)
        if step is None:
            step = zero.eval_step(run, model_state=True)
            compiled.append((graph, step))
        params, rest = nnx.as_pure((params, rest))
        return step((params, ()), batch, model_state=rest)

    return evaluate


def is_module(x: Any) -> bool:
    """Whether it is an nnx model; without Flax there are none."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


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


def init(zero: Any, make: Callable[..., Any], args: tuple[Any, ...], param_specs: Any) -> Any:
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


def place(zero: Any, model: Any, optimizer: Any) -> None:
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
        if _sync_state.sync_state_types(zero._layout, zero.sync, state[0], placed) is not None:
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


def _find(steps: list[tuple[Any, CompiledStep]], signature: Any) -> CompiledStep | None:
    """The step of an equal signature: static attributes, such as dicts, may have no hash."""
    return next((step for known, step in steps if known == signature), None)


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
