"""What the numbers of ``update="backward"`` number: a type for each, which mypy keeps apart.

| type | numbers | is also |
|---|---|---|
| ``Value`` | values of a graph: of the loss in ``LossPieces``, elsewhere of the update | |
| ``Slot`` | parameters, and behind them leaves of the optimizer state | an input of the update |
| ``ParamNumber`` | parameters, in the order of their tree | a ``Slot``; an input of the loss |
| ``Operand`` | operands of a stack's loop | an input of its body |
| ``Result`` | results of a stack's loop | an output of its body |

The outputs of the update replace its slots, in their order. What is carried by a loop is an operand
and a result, whose numbers differ by the number of constants before it.
"""

from typing import NewType

from optax_ext.traced_graph import Value

Slot = NewType("Slot", Value)
ParamNumber = NewType("ParamNumber", Slot)
Operand = NewType("Operand", int)
Result = NewType("Result", int)


def param_numbers(count: int) -> list[ParamNumber]:
    return [ParamNumber(Slot(Value(i))) for i in range(count)]
