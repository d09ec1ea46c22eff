"""How large models, batches and runs are."""

import dataclasses
from typing import Any

import _models
from _tasks import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Size:
    """One scale of the comparison.

    Attributes:
      layers: of the model.
      width: of the model.
      heads: of the model.
      context: bytes of a window.
      batch: windows.
      steps: of a run.
      curve_windows: held-out windows of the points of a curve.
      final_windows: held-out windows at the end.
      slice: windows that are evaluated at once.
      dtype: of activations; parameters are float32.
      vocabulary: of the model; what is above the tokens of the text is never a target.
      remat: whether blocks are run again in the backward pass.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    curve_windows: int = 32
    final_windows: int = 512
    slice: int = 8
    dtype: str = "float32"
    vocabulary: int = VOCABULARY
    remat: bool = False


SIZES = {
    "smoke": Size(2, 32, 2, 32, 4, 40, curve_windows=8, final_windows=16),
    "cpu": Size(4, 160, 5, 128, 8, 300),
    # The study of batch sizes: 64 times the batch in 200 steps.
    "smoke_batch": Size(2, 32, 2, 32, 1, 1280, curve_windows=8, final_windows=16),
    "cpu_batch": Size(3, 96, 3, 64, 2, 12800, curve_windows=64, final_windows=512, slice=16),
    # The study of lengths: 0.25M parameters, of which 10,000 steps have 20 bytes each.
    "smoke_long": Size(2, 32, 2, 32, 4, 40, curve_windows=8, final_windows=16),
    "cpu_long": Size(2, 96, 3, 64, 8, 300, curve_windows=64, final_windows=1024, slice=16),
    # GPT-2 small: its vocabulary padded to a multiple of 64, 123.6M parameters; 16M bytes.
    "smoke_gpt2": Size(2, 32, 2, 32, 4, 40, 8, 16, dtype="bfloat16", vocabulary=512, remat=True),
    "gpt2_small": Size(
        layers=12,
        width=768,
        heads=12,
        context=1024,
        batch=16,
        steps=1000,
        slice=16,
        dtype="bfloat16",
        vocabulary=50304,
        remat=True,
    ),
}


def config(
    size: str, task: str, contender: str, seed: int, hyper: dict[str, float], times: int = 1
) -> dict[str, Any]:
    """The configuration of a run of this size; all that its result depends on.

    With ``times`` the batch there are as many fewer steps, so that tokens are equal.
    """
    of = SIZES[size]
    return {
        "size": size,
        "task": task,
        "contender": contender,
        "layers": of.layers,
        "width": of.width,
        "heads": of.heads,
        "context": of.context,
        "batch": of.batch * times,
        "steps": of.steps // times,
        "warmup": of.steps // times // 10,
        "seed": seed,
        "hyper": dict(hyper),
    }


def model(config: dict[str, Any]) -> _models.Config:
    """The model of a configuration."""
    size = SIZES[config["size"]]
    return _models.Config(
        layers=config["layers"],
        width=config["width"],
        heads=config["heads"],
        vocabulary=size.vocabulary,
        dtype=size.dtype,
        remat=size.remat,
    )
