"""What the numbers of ``update="backward"`` number: a type for each, which mypy keeps apart.

| type | numbers | also numbers |
|---|---|---|
| ``Value`` | the values of a graph: of the loss's in its pieces, of the update's elsewhere | |
| ``Slot`` | parameters and, behind them, leaves of the optimizer state | as a ``Value``: the first inputs of the update, whose outputs replace them in this order |
| ``Param`` | parameters, in the order of their tree | as a ``Value``: the first inputs of the loss |
| ``Operand`` | the operands of a stack's loop | the inputs of its body |
| ``Result`` | the results of a stack's loop | the outputs of its body |
"""  # noqa: E501

from typing import NewType

from optax_ext.traced_graph import Value

Slot = NewType("Slot", Value)
Param = NewType("Param", Slot)
Operand = NewType("Operand", int)
Result = NewType("Result", int)


def param_numbers(count: int) -> list[Param]:
    return [Param(Slot(Value(i))) for i in range(count)]
