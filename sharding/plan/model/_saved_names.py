"""What a decoder layer stores, by the names of what is saved."""

from sharding.plan.model._models import Decoder

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1")
_MINIMAL = (*_QKV, "kv_proj", "out_proj", *_MLP_IN, "mlpwo")

# By the name of a preset of MaxText: what is saved on the device, and what in host memory.
PRESETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "save_out_proj": (("out_proj",), ()),
    "save_qkv_proj": (_QKV, ()),
    "save_dot_except_mlp": ((*_QKV, "out_proj"), ()),
    "save_dot_with_context_except_mlp": ((*_QKV, "context", "out_proj"), ()),
    "save_dot_except_mlpwi": ((*_QKV, "out_proj", "mlpwo"), ()),
    "minimal": (_MINIMAL, ()),
    "minimal_with_context": ((*_MINIMAL, "context"), ()),
    "qkv_proj_offloaded": ((), ("query_proj", "key_proj", "value_proj")),
    "minimal_offloaded": ((), _MINIMAL),
}
# The results of products that a layer may save, by one of their names.
SAVED_PARTS = {"qkv": "query_proj", "context": "context", "out": "out_proj", "up": "mlpwi"}
# Presets that store something else than all others, from the fewest bytes to the most.
PARTLY = (
    *("save_out_proj", "save_qkv_proj", "save_dot_except_mlp"),
    *("save_dot_with_context_except_mlp", "minimal", "minimal_with_context"),
)


def saved_parts(recompute: str) -> tuple[str, ...]:
    """The keys of ``SAVED_PARTS`` whose results are saved."""
    return tuple(part for part, name in SAVED_PARTS.items() if name in PRESETS[recompute][0])


def saved_elements(model: Decoder, recompute: str, tensor: int = 1) -> float:
    """Elements that a layer stores beside its input, for a token, on one of ``tensor`` devices."""
    # The output of attention is summed over the devices, and each has all of it.
    elements = {part: x.number * x.columns for part, x in model.matrices.items()}
    elements["context"] = model.queries
    return sum(elements[p] / (1 if p == "out" else tensor) for p in saved_parts(recompute))
