"""Networks as plain losses: ``NETWORKS[name](scale)`` is (loss, params, batch).

``scale`` divides widths and sizes, for a small one. With ``by_hand`` each block is in a
``jax.checkpoint``.
"""

import jax
import jax.numpy as jnp


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class Params:
    """Parameters by the order in which a network asks for them: their types are collected."""

    def __init__(self, given=None, by_hand=False):
        self.types, self._given, self._next = [], given, 0
        self.block = jax.checkpoint if by_hand else identity

    def __call__(self, *shape):
        self._next += 1
        if self._given is None:
            self.types.append(array(*shape))
            return jnp.zeros(shape)
        return self._given[self._next - 1]

    def run(self, block, x, *options):
        return self.block(lambda x: block(self, x, *options))(x)


def filtered(p, x, width, size=3, stride=1):
    kernel = p(size, size, x.shape[-1], width)
    dims = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=dims)


def conv(p, x, width, size=3, stride=1, act=jax.nn.relu):
    """With a batch norm."""
    x = filtered(p, x, width, size, stride)
    mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return act((x - mean) * jax.lax.rsqrt(var + 1e-5) * p(width) + p(width))


def pool(x, size=2, kind=jax.lax.max, start=-jnp.inf):
    window = (1, size, size, 1)
    return jax.lax.reduce_window(x, start, kind, window, window, "SAME")


def classes(p, x, count=1000):
    logits = jnp.mean(x, (1, 2)) @ p(x.shape[-1], count)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def identity(x):
    return x


def bottleneck(p, x, width, stride, first):
    y = conv(p, conv(p, conv(p, x, width, 1), width, 3, stride), 4 * width, 1, act=identity)
    return jax.nn.relu(y + (conv(p, x, 4 * width, 1, stride, identity) if first else x))


def resnet50(p, x, scale):
    width = 64 // scale
    x = pool(conv(p, x, width, 7, 2))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for i in range(blocks):
            x = p.run(bottleneck, x, width * 2**stage, 2 if stage and not i else 1, not i)
    return classes(p, x)


def vgg16(p, x, scale):
    """Without batch norms, and without dropout."""
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = jax.nn.relu(filtered(p, x, width // scale) + p(width // scale))
        x = pool(x)
    x = x.reshape(len(x), -1)
    for width in (4096 // scale, 4096 // scale):
        x = jax.nn.relu(x @ p(x.shape[-1], width) + p(width))
    return -jnp.mean(jax.nn.log_softmax(x @ p(x.shape[-1], 1000))[:, 0])


def plain_unet(p, x, scale):
    """Of five resolutions, without attention; the lowest is as wide as the one above it."""
    widths, skips, out = [64 // scale * k for k in (1, 2, 4, 8, 8)], [], x
    for i, width in enumerate(widths):
        x = conv(p, conv(p, pool(x) if i else x, width), width)
        skips.append(x)
    skips.pop()
    for width in (256, 128, 64, 64):
        x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        x = jnp.concatenate([skips.pop(), x], -1)
        x = conv(p, conv(p, x, x.shape[-1] // 2), width // scale)
    return jnp.mean((filtered(p, x, 3, 1) - out) ** 2)


def dense_layer(p, x, growth):
    return jnp.concatenate([x, conv(p, conv(p, x, 4 * growth, 1), growth)], -1)


def densenet121(p, x, scale):
    growth = 32 // scale
    x = pool(conv(p, x, 2 * growth, 7, 2))
    for stage, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            x = p.run(dense_layer, x, growth)
        if stage < 3:
            x = pool(conv(p, x, x.shape[-1] // 2, 1), 2, jax.lax.add, 0.0)
    return classes(p, x)


def attend(p, x, memory=None, heads=8, causal=False):
    memory, width = x if memory is None else memory, x.shape[-1]
    q, k, v = ((y @ p(width, width)).reshape(*y.shape[:2], heads, -1) for y in (x, memory, memory))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return y.reshape(x.shape) @ p(width, width)


def norm(p, x):
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p(x.shape[-1])


def feed(p, x):
    width = x.shape[-1]
    return jax.nn.gelu(x @ p(width, 4 * width)) @ p(4 * width, width)


def unet(p, x, scale):
    """With attention at the lowest of four resolutions."""
    widths, skips, out = [64 // scale * k for k in (1, 2, 4, 8)], [], x
    x = conv(p, x, widths[0])
    for width in widths:
        for _ in range(2):
            x = p.run(conv, x, width)
            skips.append(x)
        x = pool(x) if width != widths[-1] else x
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    x = (flat + attend(p, norm(p, flat))).reshape(x.shape)
    for width in reversed(widths):
        if width != widths[-1]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        for _ in range(2):
            x = p.run(conv, jnp.concatenate([x, skips.pop()], -1), width)
    return jnp.mean((x @ p(x.shape[-1], 3) - out) ** 2)


def tokens_loss(x, table, tokens):
    logits = jax.nn.log_softmax(x @ table.T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))


def layer(p, x, causal=True, memory=None):
    x = x + attend(p, norm(p, x), causal=causal)
    if memory is not None:
        x = x + attend(p, norm(p, x), memory)
    return x + feed(p, norm(p, x))


def gpt2(p, tokens, scale):
    """Twelve layers, unrolled."""
    width = 768 // scale
    table = p(50304 // scale, width)
    x = table[tokens] + p(tokens.shape[1], width)
    for _ in range(12):
        x = p.run(layer, x)
    return tokens_loss(norm(p, x), table, tokens)


def t5(p, tokens, scale):
    """Six layers of an encoder, whose result all six of the decoder read."""
    table = p(32128 // scale, 512 // scale)
    memory, x = table[tokens], table[tokens[:, ::-1]]
    for _ in range(6):
        memory = p.run(layer, memory, False)
    memory = norm(p, memory)
    for _ in range(6):
        x = p.run(layer, x, True, memory)
    return tokens_loss(norm(p, x), table, tokens)


def lstm(p, x, scale):
    """Two layers, a scan over time each."""
    for _ in range(2):
        width = x.shape[-1]
        w, u = p(width, 4 * width), p(width, 4 * width)

        def step(carry, x, w=w, u=u):
            h, c = carry
            i, f, g, o = jnp.split(x @ w + h @ u, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros(x.shape[1:])
        x = jax.lax.scan(p.block(step), (zero, zero), x)[1]
    return jnp.mean(x**2)


def network(fn, batch):
    def make(scale=1, by_hand=False):
        own = batch(scale)
        types = Params()
        jax.eval_shape(lambda batch: fn(types, batch, scale), own)
        return lambda params, batch: fn(Params(params, by_hand), batch, scale), types.types, own

    return make


def images(count, size):
    return lambda scale: array(count // scale, size // scale, size // scale, 3)


def tokens(count, length):
    return lambda scale: array(count // scale, length // scale, dtype=jnp.int32)


# What MONeT's authors publish for these and their batches: GB in all, and overhead; first without.
# github.com/utsaslab/MONeT, README.md, of ICLR 2021, on a P100.
MONET = {
    "VGG-16": (
        network(vgg16, images(176, 224)),
        (14.12, {9.71: -5.30, 6.82: 1.99, 5.51: 9.11}),
    ),
    "ResNet-50": (
        network(resnet50, images(184, 224)),
        (15.06, {10.01: 3.22, 6.99: 7.28, 4.99: 11.95}),
    ),
    "U-Net": (
        network(plain_unet, lambda scale: array(11, 416 // scale, 608 // scale, 3)),
        (14.32, {10.01: -4.10, 7.00: 1.39, 5.01: 11.51}),
    ),
}
NETWORKS = {
    "ResNet-50": network(resnet50, images(64, 224)),
    "U-Net with attention": network(unet, images(16, 128)),
    "DenseNet-121": network(densenet121, images(64, 224)),
    "T5-like": network(t5, tokens(16, 512)),
    "GPT-2, unrolled": network(gpt2, tokens(8, 1024)),
    "LSTM": network(lstm, lambda scale: array(512 // scale, 64, 1024 // scale)),
}
