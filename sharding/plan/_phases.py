"""The parts of a training step, by the scopes that jax leaves in its program."""

import re

_OF_JAX = re.compile(
    r"jit\(.*\)|shard_map|while|body|cond|closed_call|checkpoint|rematted_computation|jvp\(\)"
    r"|transpose\(jvp\(\)\)|branch_\d+_fun"
)
PHASES = ("gather", "forward", "backward", "gradient exchange", "update", "other")


def phase_of(scope: str) -> str:
    """The part of a step that an operation belongs to, by the names of its scopes."""
    *names, operation = scope.split("/")
    inside = {part for name in names for part in re.findall(r"\w+", name)}
    if "update" in inside:
        return "update"
    # By our scopes, or by the operation: autodiff makes a reduce-scatter of a gather.
    if inside & {"reduce_gradients", "reduce_scatter"} or operation == "reduce_scatter":
        return "gradient exchange"
    if inside & {"gather", "gather_params"} or operation == "all_gather":
        return "gather"
    if inside & {"transpose", "rematted_computation"}:
        return "backward"
    return "forward" if "jvp" in inside else "other"


def shortened(scope: str) -> str:
    """The end of a scope, without what jax itself adds to every loop and function."""
    own = [part for part in scope.split("/") if not _OF_JAX.fullmatch(part)]
    two = "/".join(own[-2:])
    return two if len(two) <= 18 else own[-1][-18:]
