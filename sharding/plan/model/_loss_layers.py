"""The layers of any loss, found in its trace, so that something else runs in their places.

They are the bodies of loops over stacked parameters, as ``find_loops`` finds them. Where there are
none, a layer is what uses the parameters of one number, such as ``block_3``, from one point at
which few bytes are live to the next one; layers that share parameters, or overlap, are one.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from optax_ext.traced_graph import bind_equation
from sharding._types import Tree
from sharding.placement._specs import path_str
from sharding.plan.machine._tiles import num_bytes
from sharding.step._layer_hooks import CALLS, MOVES, HookedParam
from sharding.step._looped_loss import LoopedLoss, find_loops, in_order, sliceable

# Of the parameters of a layer, and of all else that it reads: what it hands on.
Run = Callable[[list[Any], Any], list[Any]]


class Layer(NamedTuple):
    """A layer, and the parameters that it reads by their numbers: of loops, stacks of them."""

    run: Run
    params: tuple[int, ...]
    times: int  # how often it runs, each time with other parameters


class LossTrace:
    """A traced loss, to be run with other layers."""

    def __init__(self, fn: Callable[..., Any], params: Tree, *args: Any):
        treedef: Any
        named, treedef = jax.tree_util.tree_flatten_with_path(params)
        leaves, names = [x for _, x in named], [path_str(path) for path, _ in named]
        flat, structure = jax.tree.flatten(args)

        def on_leaves(leaves: list[Any], flat: list[Any]) -> Any:
            return fn(treedef.unflatten(leaves), *jax.tree.unflatten(structure, flat))

        self.closed, self.results = jax.make_jaxpr(on_leaves, return_shape=True)(leaves, flat)
        trained = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        loops = find_loops(self.closed, leaves, trained, flat)
        self.looped = {i for loop in loops for i in loop}
        self.num_layers = sum(leaves[loop[0]].shape[0] for loop in loops)
        own = self.looped
        if not own:
            inline = functools.partial(_inlined, self.closed.jaxpr, self.closed.consts)
            self.closed = jax.make_jaxpr(inline)([*leaves, *flat])
            self.numbered = _Numbered(self.closed.jaxpr, names)
            self.num_layers = len(self.numbered.layers)
            own = {i for each in self.numbered.layers for i in self.numbered.params_of(*each)}
        self.outside = [name for i, name in enumerate(names) if i not in own]  # of all layers

    def run(self, wrap: Callable[[Layer], Run], *args: Any) -> Any:
        """What the loss returns, with what ``wrap`` makes of its layers."""
        flat = jax.tree.leaves(args)
        if self.looped:
            given = [sliceable(i, x) if i in self.looped else x for i, x in enumerate(flat)]
            run_loop = functools.partial(_run_loop, wrap)
            outs = LoopedLoss(self.closed, run_loop, self.looped.discard).run(given)
        else:
            outs = self.numbered.run(self.closed.consts, flat, wrap)
        return jax.tree.unflatten(jax.tree.structure(self.results), outs)


def _run_loop(
    wrap: Callable[[Layer], Run],
    eqn: Any,
    consts: list[Any],
    carry: list[Any],
    own: dict[int, HookedParam],
    others: dict[int, Any],
) -> list[Any]:
    """A loop over layers; see ``RunLoop``."""
    if not own:
        return list(bind_equation(eqn, [*consts, *carry, *in_order(others)]))
    body = jaxpr_as_fun(eqn.params["jaxpr"])

    def run(params: list[Any], rest: Any) -> list[Any]:
        consts, carry, more = rest
        xs = dict(zip(own, params, strict=True)) | dict(zip(others, more, strict=True))
        return list(body(*consts, *carry, *in_order(xs)))

    layer = wrap(Layer(run, tuple(x.number for x in own.values()), eqn.params["length"]))

    def step(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
        params, more = x
        out = layer(params, (consts, carry, more))
        return out[: len(carry)], out[len(carry) :]

    stacks = [x.moved(x.held) for x in own.values()]
    options = {key: eqn.params[key] for key in ("reverse", "unroll")}
    carry, outs = lax.scan(step, carry, (stacks, list(others.values())), **options)
    return [*carry, *outs]


# --- Layers with numbers --------------------------------------------------------------------------


def _inlined(jaxpr: Jaxpr, consts: Any, args: Any) -> list[Any]:
    """The results of a jaxpr, without calls of inner ones."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)
    for eqn in jaxpr.eqns:
        operands = _values_of(env, eqn.invars)
        if eqn.primitive.name in CALLS:
            inner: Any = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            env |= zip(eqn.outvars, _inlined(inner.jaxpr, inner.consts, operands), strict=True)
        else:
            env |= zip(eqn.outvars, bind_equation(eqn, operands), strict=True)
    return _values_of(env, jaxpr.outvars)


def _values_of(env: dict[Any, Any], atoms: Any) -> list[Any]:
    return [x.val if isinstance(x, Literal) else env[x] for x in atoms]


class _Numbered:
    """The equations of a loss between those of one number and those of the next."""

    def __init__(self, jaxpr: Jaxpr, names: list[str]):
        self.jaxpr = jaxpr
        # Parameters, also where they are cast or moved, which is done before everything else.
        self.params = dict(zip(jaxpr.invars, range(len(names)), strict=False))
        self.moves, self.eqns = [], []
        for eqn in jaxpr.eqns:
            moved = [self.params.get(x) for x in eqn.invars if not isinstance(x, Literal)]
            if eqn.primitive.name in MOVES and len(moved) == 1 and moved[0] is not None:
                self.params[eqn.outvars[0]] = moved[0]
                self.moves.append(eqn)
            else:
                self.eqns.append(eqn)
        self.layers = self._layers(names)

    def run(self, consts: Any, args: list[Any], wrap: Callable[[Layer], Run]) -> list[Any]:
        """What the loss returns."""
        env: dict[Any, Any] = dict(zip(self.jaxpr.constvars, consts, strict=True))
        env |= zip(self.jaxpr.invars, args, strict=True)
        for eqn in self.moves:
            env |= zip(eqn.outvars, bind_equation(eqn, _values_of(env, eqn.invars)), strict=True)
        done = 0
        for begin, end in [*self.layers, (len(self.eqns), len(self.eqns))]:
            _evaluate(self.eqns[done:begin], env)
            if begin < end:
                self._run_layer(begin, end, env, wrap)
            done = end
        return _values_of(env, self.jaxpr.outvars)

    def params_of(self, begin: int, end: int) -> set[int]:
        """The parameters of a layer."""
        reads = (x for eqn in self.eqns[begin:end] for x in _vars(eqn.invars))
        return {self.params[x] for x in reads if x in self.params}

    def _run_layer(
        self, begin: int, end: int, env: dict[Any, Any], wrap: Callable[[Layer], Run]
    ) -> None:
        eqns = self.eqns[begin:end]
        made = {x for eqn in eqns for x in eqn.outvars}
        reads = dict.fromkeys(x for eqn in eqns for x in _vars(eqn.invars) if x not in made)
        own = [x for x in reads if x in self.params]
        others = [x for x in reads if x not in self.params]
        after = {x for eqn in self.eqns[end:] for x in _vars(eqn.invars)}
        after |= set(_vars(self.jaxpr.outvars))
        outs = [x for x in dict.fromkeys(x for eqn in eqns for x in eqn.outvars) if x in after]

        def run(params: list[Any], rest: list[Any]) -> list[Any]:
            env = dict(zip([*own, *others], [*params, *rest], strict=True))
            _evaluate(eqns, env)
            return _values_of(env, outs)

        layer = wrap(Layer(run, tuple(self.params[x] for x in own), 1))
        env |= zip(outs, layer(_values_of(env, own), _values_of(env, others)), strict=True)

    def _layers(self, names: list[str]) -> list[tuple[int, int]]:
        """The first equation of each layer, and the one after its last."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        others = [0]  # the equations that use other parameters
        for i, eqn in enumerate(self.eqns):
            for x in _vars(eqn.invars):
                if x in self.params:
                    found = re.match(r".*?\d+(?=/|$)", names[self.params[x]])
                    if found:
                        first.setdefault(found[0], i)
                        last[found[0]] = i
                    else:
                        others.append(i)
        # Layers that overlap are one.
        uses: list[tuple[int, int]] = []
        for name in sorted(first, key=first.__getitem__):
            if uses and first[name] <= uses[-1][1]:
                uses[-1] = uses[-1][0], max(uses[-1][1], last[name])
            else:
                uses.append((first[name], last[name]))
        if not uses:
            return []
        live = self._live_bytes()
        before = max((i + 1 for i in others[1:] if i < uses[0][0]), default=0)
        after = min((i for i in others if i > uses[-1][1]), default=len(self.eqns))
        ends = [(before, uses[0][0]), *((a[1] + 1, b[0]) for a, b in itertools.pairwise(uses))]
        cuts = [
            min(range(begin, end + 1), key=lambda i: (live[i], -i))
            for begin, end in [*ends, (uses[-1][1] + 1, after)]
        ]
        return list(itertools.pairwise(cuts))

    def _live_bytes(self) -> list[float]:
        """Bytes of values that are computed before each equation, and read from it on."""
        live = [0.0] * (len(self.eqns) + 1)
        made = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.outvars}
        read = {x: i for i, eqn in enumerate(self.eqns) for x in _vars(eqn.invars)}  # the last one
        for x in made.keys() & read.keys():
            for i in range(made[x] + 1, read[x] + 1):
                live[i] += num_bytes(x.aval)
        return live


def _vars(atoms: Any) -> list[Any]:
    return [x for x in atoms if not isinstance(x, Literal)]


def _evaluate(eqns: list[Any], env: dict[Any, Any]) -> None:
    for eqn in eqns:
        env |= zip(eqn.outvars, bind_equation(eqn, _values_of(env, eqn.invars)), strict=True)
