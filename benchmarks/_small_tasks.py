"""Three small tasks: a decoder of bytes, and a ViT and an MLP that name rendered characters.

Batches are functions of (seed, step) alone. Layers are stacked and scanned.
"""

import functools
import pathlib
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import _transformer
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = string.ascii_letters + string.digits
SIDE, PATCH, NOISE = 24, 6, 0.4


class SmallTask(NamedTuple):
    """A loss, and how its parameters and batches are drawn."""

    loss: Callable[[Any, Any], jax.Array]
    init: Callable[[int], Any]  # of a seed
    batch: Callable[[int, int], Any]  # of a seed and a step


def decoder(corpus: Any, width: int) -> SmallTask:
    """The next byte of a text; a layer for 32 of the width, and a tied embedding."""
    config = _transformer.Config(layers=width // 32, width=width, vocabulary=256)

    def batch(seed: int, step: int) -> np.ndarray:
        return corpus.batch(seed, step, 16).astype(np.int32)

    return SmallTask(_transformer.make_loss(), lambda seed: drawn(config, seed), batch)


def vit(width: int) -> SmallTask:
    """A character from patches: blocks without a mask, the mean of what they end with, a head."""
    block = functools.partial(_transformer.apply_block, causal=False)

    def init(seed: int) -> Any:
        config = _transformer.Config(layers=width // 32, width=width, vocabulary=len(CHARACTERS))
        params = drawn(config, seed)
        rng = np.random.default_rng((seed, 1))
        shapes = {"patches": (PATCH**2, width), "positions": ((SIDE // PATCH) ** 2, width)}
        ends = {k: np.float32(0.1) * rng.standard_normal(s, np.float32) for k, s in shapes.items()}
        return {"blocks": params["blocks"], "head": params["embed"].T, **ends}

    def loss(params: Any, batch: Any) -> jax.Array:
        number = SIDE // PATCH
        x = batch["images"].reshape(-1, number, PATCH, number, PATCH).swapaxes(2, 3)
        x = x.reshape(-1, number**2, PATCH**2) @ params["patches"] + params["positions"][None]
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
        return cross_entropy(jnp.mean(x, 1) @ params["head"], batch["labels"])

    return SmallTask(loss, init, character_batch)


def mlp(width: int) -> SmallTask:
    """A character from all pixels: three layers that add to what they read, and a head."""

    def init(seed: int) -> Any:
        rng = np.random.default_rng((seed, 2))
        shapes = {"first": (SIDE**2, width), "layers": (3, width, width)}
        shapes["head"] = width, len(CHARACTERS)
        scales = {k: np.float32(s[-2] ** -0.5) for k, s in shapes.items()}
        return {k: scales[k] * rng.standard_normal(s, np.float32) for k, s in shapes.items()}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["images"].reshape(len(batch["images"]), -1) @ params["first"]
        x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.relu(x) @ w, None), x, params["layers"])
        return cross_entropy(jax.nn.relu(x) @ params["head"], batch["labels"])

    return SmallTask(loss, init, character_batch)


def drawn(config: _transformer.Config, seed: int) -> Any:
    """Parameters of a transformer whose layers differ."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    return jax.tree.map(
        lambda x: x if x.ndim < 3 else 0.05 * jax.random.normal(next(keys), x.shape),
        _transformer.init(config),
    )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# --- Images ---------------------------------------------------------------------------------------


@functools.cache
def rendered() -> tuple[np.ndarray, np.ndarray]:
    """Letters and digits in fonts that matplotlib has with it, three sizes each; their numbers."""
    images, labels = [], []
    folder = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf")
    paths = [*folder.glob("DejaVu*.ttf"), *folder.glob("STIXGeneral*.ttf")]
    for path in sorted(path for path in paths if "Display" not in path.stem):
        for size in (14, 17, 20):
            font = ImageFont.truetype(path, size)
            for label, character in enumerate(CHARACTERS):
                image = Image.new("L", (SIDE, SIDE))
                draw = ImageDraw.Draw(image)
                draw.text((SIDE // 2, SIDE // 2), character, fill=255, font=font, anchor="mm")
                images.append(np.asarray(image, np.float32) / 255)
                labels.append(label)
    return np.stack(images), np.array(labels, np.int32)


def character_batch(seed: int, step: int) -> dict[str, np.ndarray]:
    """64 characters, each shifted by up to 3 pixels, under noise."""
    images, labels = rendered()
    rng = np.random.default_rng((seed, step))
    chosen = rng.integers(len(labels), size=64)
    shifts = rng.integers(-3, 4, (64, 2))
    found = np.stack([np.roll(images[i], s, (0, 1)) for i, s in zip(chosen, shifts, strict=True)])
    found += NOISE * rng.standard_normal(found.shape, np.float32)
    return {"images": found - found.mean(), "labels": labels[chosen]}
