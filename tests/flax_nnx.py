"""``flax.nnx`` for tests: not every release of flax imports it with every release of jax."""

import jax
import pytest

try:
    from flax import nnx
except Exception as error:
    nnx, why = None, f"flax.nnx does not import with jax {jax.__version__}: {error}"
else:
    why = ""

needs_nnx = pytest.mark.skipif(nnx is None, reason=why)
