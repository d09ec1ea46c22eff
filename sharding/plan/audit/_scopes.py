"""The phases of a training step, by the scopes that jax leaves in its program."""

import re

_OF_JAX = re.compile(
    r"jit\(.*\)|shard_map|while|body|cond|closed_call|checkpoint|rematted_computation|jvp\(\)"
    r"|transpose\(jvp\(\)\)|branch_\d+_fun"
)
_OF_AUTODIFF = re.compile(r"\b(?:transpose|jvp|vmap)\(((?:[^()]|\([^()]*\))*)\)")
PHASES = ("gather", "forward", "backward", "gradient sync", "update", "other")


def phase_of(scope: str) -> str:
    """The phase of an operation, by the names of its scopes."""
    *names, operation = first_of(scope).split("/")
    inside = {part for name in names for part in re.findall(r"\w+", name)}
    if "update" in inside:
        return "update"
    # By the scopes of a step, or by the operation: autodiff turns a gather into a reduce-scatter.
    if inside & {"reduce_gradients", "reduce_scatter"} or operation == "reduce_scatter":
        return "gradient sync"
    if inside & {"gather", "gather_params"} or operation == "all_gather":
        return "gather"
    if inside & {"transpose", "rematted_computation"}:
        return "backward"
    return "forward" if "jvp" in inside else "other"


def shortened(scope: str) -> str:
    """The end of a scope, without the parts that jax adds to every loop and function."""
    text, before = first_of(scope), ""
    while text != before:  # a scope with a slash is inside, as in transpose(jvp(a/b))
        text, before = _OF_AUTODIFF.sub(r"\1", text), text
    own = [part for part in text.split("/") if part and not _OF_JAX.fullmatch(part)]
    two = "/".join(own[-2:])
    return two if len(two) <= 18 else own[-1][-18:]


def first_of(scope: str) -> str:
    """The first scope of an operation that XLA merged from several: ``a/(b/x:c/y)``."""
    match = re.fullmatch(r"(.*?/|)\((.*)\)", scope)
    if not match:
        return scope
    depth = 0
    for i, letter in enumerate(match[2]):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            return match[1] + match[2][:i]
    return match[1] + match[2]
