"""Words for what an argument holds, where Python's types cannot say it."""

from typing import Any

Tree = Any  # a pytree, of arrays where nothing else is said
OptState = Any  # the state of a gradient transformation
Array = Any  # an array, its shape and dtype, or a number
DType = Any  # what jnp.dtype takes
