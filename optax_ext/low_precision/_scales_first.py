"""The order of a step with stored state: new scales before the codes that depend on them."""

import math
from collections.abc import Container, Sequence
from typing import Any

from optax_ext import _matrix_passes
from optax_ext.leaf_by_leaf import ScheduledRun
from optax_ext.low_precision._one_pass import OnePassUpdates
from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Graph, called

# Primitives that cost little more than reading their operands; not loops or matrix products.
_CHEAP = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "pad", "reshape", "slice", "squeeze"}


class ScalesFirst(ScheduledRun):
    """Computes scales first, discards the moments, and computes these again for the codes."""

    def __init__(
        self,
        graph: Graph,  # the step
        inputs: Sequence[Any],  # gradients and state
        *,
        scales: Container[int],  # the ids of those inputs that are scales
        passes: OnePassUpdates | None = None,  # parameters that are updated in one pass instead
    ):
        super().__init__(graph, inputs)
        self._scales = {i for i, x in enumerate(inputs) if id(x) in scales}
        self._passes = passes

    # Codes need the scales of entire blocks: XLA would write the float32 moments in between.
    def run_group(self, outputs: list[int]) -> None:
        if self._passes is not None:
            for root in outputs:
                made = set(self._passes.outputs_of(root))
                if made and made <= set(outputs):
                    self.outputs |= self._passes.run(root)
                    outputs = [j for j in outputs if j not in made]
        if outputs:
            self._run_scales_first(outputs)
            super().run_group(outputs)

    def _run_scales_first(self, outputs: list[int]) -> None:
        """Computes new scales, then reads codes again, where the moments are cheap to compute."""
        graph = self.graph
        replaced = {j: graph.outputs[j] for j in outputs if self.replaces_deferred(j)}
        scales = [value for j, value in replaced.items() if j in self._scales]
        code_sizes = [
            math.prod(graph.shape(value)) for j, value in replaced.items() if j not in self._scales
        ]
        equations, _ = graph.needed(scales, self.values)
        twice = [eqn for eqn in equations if any(graph.reads[value] for value in eqn.results)]
        if scales and code_sizes and all(map(_is_cheap, twice)):
            known = set(self.values)
            self.compute(scales)
            # Discard what was dequantized; the inputs among it are read a second time.
            discarded = {
                value: self.values.pop(value)
                for value in self.values.keys() - known - set(scales)
                if graph.reads[value] and math.prod(graph.shape(value)) >= min(code_sizes)
            }
            inputs = {i: x for i, x in discarded.items() if i not in graph.producer}
            self.values |= _matrix_passes.reread(inputs, [self.values[value] for value in scales])


def _is_cheap(eqn: Any) -> bool:
    inner = called(eqn)
    if inner is None:
        return eqn.primitive.name in _CHEAP
    return all(map(_is_cheap, inner.eqns))
