"""Flax modules whose calls gather their own parameters; only their users need Flax."""

import sys
from collections.abc import Callable
from typing import Any

from sharding._gather import gather, gathered, has_shards, split_arrays, together


def gathered_module(cls: type, policy: Callable[..., bool] | None, reshard: bool) -> type:
    """A subclass of a Flax module, linen or nnx, whose ``__call__`` gathers its parameters.

    Raises:
      ValueError: if the class is neither.
    """
    for name, wrap in (("flax.linen", _linen_call), ("flax.nnx", _nnx_call)):
        flax = sys.modules.get(name)
        if flax is not None and issubclass(cls, flax.Module):
            call = wrap(flax, cls, policy, reshard)
            # Linen names parameters after the class.
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            return type(cls)(cls.__name__, (cls,), {"__call__": call, **names})
    raise ValueError(
        f"zero.gathered takes a function of parameters, or a module class of flax.linen or "
        f"flax.nnx, got {cls}. For modules that are pytrees wrap the method: "
        "zero.gathered(Block.__call__)(block, x)."
    )


def _linen_call(nn: Any, cls: Any, policy: Any, reshard: bool) -> Callable[..., Any]:
    # Only functional transforms: those of classes rename the modules within.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_initializing():
            return cls.__call__(self, *args, **kwargs)
        if not (reshard and has_shards(self.variables.get("params", {}))):

            def plain(module: Any) -> Any:
                return cls.__call__(module, *args, **kwargs)

            return nn.map_variables(plain, "params", trans_in_fn=gather)(self)
        arrays, join = split_arrays((args, kwargs))

        def run(module: Any, arrays: list[Any]) -> Any:
            moved: list[Any] = []

            def whole(params: Any) -> Any:
                params, moved[:] = together(params, arrays)
                return gather(params)

            def inner(module: Any) -> Any:
                args, kwargs = join(moved)
                return cls.__call__(module, *args, **kwargs)

            return nn.map_variables(inner, "params", trans_in_fn=whole)(module)

        return nn.remat(run, policy=policy)(self, arrays)

    return __call__


def _nnx_call(nnx: Any, cls: Any, policy: Any, reshard: bool) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph, params, rest = nnx.split(self, nnx.Param, ...)

        def run(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
            module = nnx.merge(graph, params, rest)
            out = cls.__call__(module, *args, **kwargs)
            return out, nnx.state(module, nnx.Not(nnx.Param))

        out, rest = gathered(run, policy, reshard)(params, rest, *args, **kwargs)
        nnx.update(self, rest)
        return out

    return __call__
