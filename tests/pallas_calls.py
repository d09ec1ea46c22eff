"""The kernels in traced programs."""

import jax
from jax.extend.core import jaxprs_in_params

from optax_ext import kernels


def kernels_in(fn, *args):
    """The calls of kernels, traced to be interpreted, in the program that ``fn`` becomes."""

    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in jaxprs_in_params(eqn.params):
                yield from equations(inner)

    with kernels.interpreted():
        closed = jax.make_jaxpr(fn)(*args)
    return [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "pallas_call"]
