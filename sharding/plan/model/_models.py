"""Language models by name: parameters, a loss, and the names of what their layers may save."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sharding._types import DType
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.plan.model._experts import EXPERT_AXIS, Experts, apply_experts, on_expert_axis


class Matrices(NamedTuple):
    """Equal matrices that read the same values."""

    number: int
    rows: int  # of each
    columns: int
    experts: int = 1  # that have as many each
    share: float = 1.0  # of the tokens that each expert gets
    padding: float = 1.0  # its slots, relative to these

    @property
    def elements(self) -> int:
        return self.number * self.rows * self.columns * self.experts

    @property
    def per_token(self) -> float:
        """Elements that a token is multiplied with."""
        return self.elements * self.share


class Latent(NamedTuple):
    """Attention whose queries, keys and values are made of two narrow vectors of a token.

    Each head has ``head_dim`` values without positions in queries and keys, and ``rotary_dim`` with
    them, which all heads have in common in the keys.

    References:
      DeepSeek-AI: DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1 (multi-head latent attention).
    """

    query_rank: int
    kv_rank: int
    rotary_dim: int


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer."""

    layers: int  #: their number
    width: int  #: of the residual stream
    heads: int  #: of the queries
    kv_heads: int  #: of keys and values
    hidden: int  #: width of the MLP; of experts, of all that a token passes
    vocabulary: int  #: number of tokens
    length: int = 2048  #: of a sequence
    gated: bool = True  #: whether the MLP has a gate (SwiGLU), or is GELU
    tied: bool = False  #: whether the embedding is the output matrix, too
    biased: bool = False  #: whether there are biases and learned positions, as GPT-2's
    scan: bool = True  #: whether the layers are stacked and scanned
    head_dim: int | None = None  #: width of a head; None: ``width // heads``
    experts: Experts | None = None  #: in the place of the MLP
    latent: Latent | None = None  #: of which attention is made, with as many heads of keys

    # Stage 3 gathers parameters outside the layers once; see ``estimate``.
    gathered_once: ClassVar[str] = r"^(?!(dense_)?layers/)"
    trainable: ClassVar[None] = None  # all parameters are trained

    def trained(self, params: Any) -> Any:
        return params

    @property
    def queries(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim if self.head_dim else self.width

    @property
    def keys(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.queries // self.heads * self.kv_heads

    def init(self, dtype: DType = jnp.float32) -> dict[str, Any]:
        """Parameters of one dtype."""

        def draw(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
            name = str(path[-1].key)
            is_scale = name == "scale" or name.endswith("_norm")
            if is_scale or name.endswith("bias"):
                return jnp.full(x.shape, float(is_scale), dtype)
            return 0.02 * jax.random.normal(jax.random.key(0), x.shape, dtype)

        return jax.tree_util.tree_map_with_path(draw, self.abstract(dtype))

    @property
    def alone(self) -> "Decoder":
        """One layer of it, of those with experts where there are any."""
        experts = self.experts and dataclasses.replace(self.experts, dense_layers=0)
        return dataclasses.replace(self, scan=False, layers=1, experts=experts)

    @property
    def dense_layers(self) -> int:
        """The first layers, without experts, where others have some."""
        return self.experts.dense_layers if self.experts else 0

    @property
    def of_expert(self) -> int:
        """Width of the MLP of one expert."""
        return self.hidden // (self.experts.active + self.experts.shared) if self.experts else 0

    @property
    def score_dim(self) -> int:
        """Width of a head in products of queries and keys."""
        return self.queries // self.heads + (self.latent.rotary_dim if self.latent else 0)

    def _shapes(self) -> dict[str, Any]:
        width = self.width
        biased = self.biased
        norm = {"scale": (width,)} | ({"bias": (width,)} if biased else {})

        def stacked(count: int, mlp: dict[str, tuple[int, ...]]) -> Any:
            matrices = self._attention_shapes() | mlp
            biases = {f"{name}_bias": shape[1:] for name, shape in matrices.items() if biased}
            layer: Any = {"attention_norm": norm, "mlp_norm": norm, **matrices, **biases}
            if not self.scan:
                return [layer] * count
            return jax.tree.map(lambda s: (count, *s), layer, is_leaf=_is_shape)

        dense = self._mlp_shapes(self.hidden)
        experts = self._expert_shapes()
        first = self.dense_layers
        return {
            "embed": (self.vocabulary, width),
            **({"dense_layers": stacked(first, dense)} if first else {}),
            "layers": stacked(self.layers - first, experts or dense),
            "norm": norm,
            **({"positions": (self.length, width)} if biased else {}),
            **({} if self.tied else {"unembed": (width, self.vocabulary)}),
        }

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        out: dict[str, tuple[int, ...]] = {"out": (self.queries, self.width)}
        if not (latent := self.latent):
            names = {"query": self.queries, "key": self.keys, "value": self.keys}
            return {name: (self.width, columns) for name, columns in names.items()} | out
        return out | {
            "query_down": (self.width, latent.query_rank),
            "query_norm": (latent.query_rank,),
            "query": (latent.query_rank, self.heads * self.score_dim),
            "kv_down": (self.width, latent.kv_rank + latent.rotary_dim),
            "kv_norm": (latent.kv_rank,),
            "key": (latent.kv_rank, self.queries),
            "value": (latent.kv_rank, self.queries),
        }

    def _mlp_shapes(self, hidden: int, *experts: int) -> dict[str, tuple[int, ...]]:
        into = (*experts, self.width, hidden)
        gate = {"gate": into} if self.gated else {}
        return {"up": into, "down": (*experts, hidden, self.width), **gate}

    def _expert_shapes(self) -> dict[str, tuple[int, ...]]:
        if not (experts := self.experts):
            return {}
        shared = self._mlp_shapes(experts.shared * self.of_expert) if experts.shared else {}
        return {
            "router": (self.width, experts.number),
            **self._mlp_shapes(self.of_expert, experts.number),
            **{f"shared_{name}": shape for name, shape in shared.items()},
        }

    def abstract(
        self, dtype: DType = jnp.float32, shards: int = 1, experts: int = 1
    ) -> dict[str, Any]:
        """The parameters' shapes and dtypes; those of one of the devices, as ``specs`` says.

        >>> from sharding.plan import MODELS
        >>> MODELS["llama2-7b"].abstract(shards=8)["layers"]["query"].shape
        (32, 4096, 512)
        """
        params: dict[str, Any] = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, dtype), self._shapes(), is_leaf=_is_shape
        )

        def of_device(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            sizes = {None: 1, EXPERT_AXIS: experts}
            entries = itertools.zip_longest(x.shape, spec)
            return x.update(shape=tuple(n // sizes.get(entry, shards) for n, entry in entries))

        if shards * experts == 1:
            return params
        return jax.tree.map(of_device, params, self.specs(shards=shards, experts=experts))

    def specs(self, axis: str = "model", shards: int = 1, experts: int = 1) -> dict[str, Any]:
        """Partition specs of the parameters, for devices that share each layer as in Megatron-LM.

        Queries, keys and values are sharded by heads, the MLP by its hidden values, the embedding
        and the output matrix by tokens, if the ``shards`` devices of the axis divide these. The
        rest is replicated, and so is the residual stream: the products with ``out`` and ``down``
        are summed over the devices. Experts are shared by the ``experts`` devices of the axis
        ``"expert"``, which have other sequences.

        Raises:
          ValueError: the devices cannot share heads, hidden values or experts equally.

        >>> from sharding.plan import MODELS
        >>> specs = MODELS["llama2-7b"].specs("model", 8)
        >>> [tuple(spec) for spec in (specs["embed"], specs["unembed"], specs["layers"]["down"])]
        [('model',), (None, 'model'), (None, 'model')]

        References:
          Shoeybi et al.: Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
          Parallelism, 2019, arXiv 1909.08053, section 3.
        """
        for name in ("heads", "kv_heads", "hidden"):
            if getattr(self, name) % shards:
                raise ValueError(
                    f"{shards} devices cannot share a model with {name}={getattr(self, name)}: "
                    "they must divide heads, kv_heads and hidden."
                )
        self.check_experts(experts, shards)
        columns = ("query", "key", "value", "up", "gate")
        table = () if self.vocabulary % shards else (axis,)
        of_layer: dict[str, tuple[Any, ...]] = {"out": (axis,), "down": (axis,)}
        of_layer |= dict.fromkeys(columns, (None, axis))
        of_layer |= {f"{name}_bias": (axis,) for name in columns}
        outside = {"embed": table, "unembed": (None, *table)}

        if experts > 1:
            of_layer = dict.fromkeys(("up", "gate", "down"), (EXPERT_AXIS,))
            outside = {}

        def spec(path: Any, _: Any) -> PartitionSpec:
            if path[0].key == "layers":
                stacked = (None,) * self.scan
                return PartitionSpec(*stacked, *of_layer.get(path[-1].key, ()))
            return PartitionSpec(*outside.get(path[-1].key, ()))

        return jax.tree_util.tree_map_with_path(spec, self.abstract())

    def check_experts(self, devices: int, tensor: int = 1) -> None:
        """Raises a ``ValueError`` unless so many devices can share the experts, or each layer."""
        number = self.experts.number if self.experts else 1
        if number % devices:
            raise ValueError(f"{devices} devices cannot share {number} experts of a layer equally.")
        if tensor > 1 and (self.experts or self.latent):
            raise ValueError(
                "a model with experts, or with latent attention, is not shared as in Megatron-LM: "
                f"use an expert axis, got tensor={tensor}."
            )

    def shards_of_tokens(self, devices: int) -> int:
        """Shards of the embedding, the output matrix and the logits: 1 if tokens do not divide."""
        return devices if self.vocabulary % devices == 0 else 1

    def batch(self, size: int) -> jax.ShapeDtypeStruct:
        """The type of a batch of some sequences: what they are read from, and the last target."""
        return jax.ShapeDtypeStruct((size, self.length + 1), jnp.int32)

    @property
    def matrices(self) -> dict[str, tuple[Matrices, ...]]:
        """The matrices of a layer, by the part of the layer that they make.

        Devices that share a layer divide the columns of ``qkv`` and ``up``, the rows of the others.
        """
        into = 2 if self.gated else 1
        qkv: tuple[Matrices, ...] = (Matrices(1, self.width, self.queries + 2 * self.keys),)
        if latent := self.latent:
            made = {name: self._attention_shapes()[name] for name in ("query", "key", "value")}
            down = latent.query_rank + latent.kv_rank + latent.rotary_dim
            both = (Matrices(1, *made["query"]), Matrices(2, *made["key"]))
            qkv = Matrices(1, self.width, down), *both
        found = {"qkv": qkv, "out": (Matrices(1, self.queries, self.width),)}
        if not (experts := self.experts):
            up = (Matrices(into, self.width, self.hidden),)
            return found | {"up": up, "down": (Matrices(1, self.hidden, self.width),)}
        of_each = (experts.number, experts.share, experts.capacity)
        hidden = experts.shared * self.of_expert
        return found | {
            "router": (Matrices(1, self.width, experts.number),),
            "up": (
                Matrices(into, self.width, self.of_expert, *of_each),
                *([Matrices(into, self.width, hidden)] if hidden else []),
            ),
            "down": (
                Matrices(1, self.of_expert, self.width, *of_each),
                *([Matrices(1, hidden, self.width)] if hidden else []),
            ),
        }

    @property
    def expert_elements(self) -> float:
        """Elements of all experts of a layer, on average of all layers."""
        every = [x for several in self.matrices.values() for x in several if x.experts > 1]
        return (1 - self.dense_layers / self.layers) * sum(x.elements for x in every)

    @property
    def layer_elements(self) -> float:
        """Elements of the matrices of a layer, likewise."""
        return self.elements_of_device(1)

    def elements_of_device(self, experts: int) -> float:
        """The same of one of ``experts`` devices, which have other experts."""
        common = {
            part: sum(x.elements for x in several if x.experts == 1)
            for part, several in self.matrices.items()
        }
        dense = self.dense_layers / self.layers
        attention = common.pop("qkv") + common.pop("out")
        single = (3 if self.gated else 2) * self.width * self.hidden
        mlp = (1 - dense) * sum(common.values()) + dense * single
        return attention + mlp + self.expert_elements / experts

    def flops(self, num_tokens: float, length: int) -> float:
        """Floating-point operations of a training step: no layer is computed twice.

        Six a token for each element of a matrix that it is multiplied with, and attention, which
        is computed in full and masked: 12 x length x the width of all heads, a token and layer.
        """
        per_token = sum(x.per_token for several in self.matrices.values() for x in several)
        matrices = self.layers * per_token + self.width * self.vocabulary
        scores = self.heads * (self.score_dim + self.queries // self.heads)
        return num_tokens * (6.0 * matrices + 6.0 * self.layers * scores * length)

    def apply_layer(self, params: dict[str, Any], x: jax.Array) -> jax.Array:
        """Causal attention, then an MLP; ``x`` is (batch, length, width).

        With parameters of one of several devices, it computes the heads and the hidden values that
        these have, and the device's term of the sums. Names for ``jax.checkpoint`` are MaxText's.
        """
        x = checkpoint_name(x, "decoder_layer_input")
        y = self._norm(params["attention_norm"], x)
        q, k, v = self._latent_qkv(params, y) if self.latent else self._qkv(params, y)
        scores = jnp.einsum("btkgd,bskd->bktgs", q, k) * q.shape[-1] ** -0.5
        # Scores in the order of the product, (batch, kv_heads, length, group, length), which spares
        # a copy. The mask is added, for which the backward pass stores nothing.
        later = jnp.triu(jnp.full((x.shape[1], x.shape[1]), -1e30, jnp.float32), k=1)
        weights = jax.nn.softmax(to_sum_dtype(scores) + later[None, None, :, None]).astype(x.dtype)
        y = jnp.einsum("bktgs,bskd->btkgd", weights, v).reshape(*x.shape[:2], -1)
        y = self._linear(params, "out", checkpoint_name(y, "context"))
        x = x + checkpoint_name(y, "out_proj")
        y = self._norm(params["mlp_norm"], x)
        if self.experts is None or "router" not in params:  # of the first layers
            return x + self._mlp(params, y)
        names = ("up", "down", "gate") if self.gated else ("up", "down")
        matrices = {name: params[name] for name in names}
        made = apply_experts(self.experts, self._mlp, y, params["router"], matrices)
        if self.experts.shared:
            made += self._mlp({name: params[f"shared_{name}"] for name in names}, y)
        return x + made

    def _qkv(self, params: dict[str, Any], y: jax.Array) -> tuple[jax.Array, ...]:
        """Queries (batch, length, kv_heads, group, head), keys and values without a group."""
        head = self.queries // self.heads
        made = [(name, self._linear(params, name, y)) for name in ("query", "key", "value")]
        q, k, v = (checkpoint_name(values, f"{name}_proj") for name, values in made)
        q = q.reshape(*y.shape[:2], k.shape[-1] // head, -1, head)
        k, v = (part.reshape(*y.shape[:2], -1, head) for part in (k, v))
        return (q, k, v) if self.biased else (_rotate(q), _rotate(k), v)

    def _latent_qkv(self, params: dict[str, Any], y: jax.Array) -> tuple[jax.Array, ...]:
        """The same of narrow vectors; the last ``rotary_dim`` values of a head have positions."""
        assert self.latent
        plain = self.queries // self.heads
        heads = (*y.shape[:2], self.heads)
        narrow = _rms_norm(params["query_norm"], y @ params["query_down"], y.dtype)
        q = checkpoint_name(narrow @ params["query"], "query_proj").reshape(*heads, 1, -1)
        q = jnp.concatenate([q[..., :plain], _rotate(q[..., plain:])], axis=-1)
        narrow, position = jnp.split(y @ params["kv_down"], [self.latent.kv_rank], axis=-1)
        narrow = _rms_norm(params["kv_norm"], narrow, y.dtype)
        k = checkpoint_name(narrow @ params["key"], "key_proj").reshape(*heads, plain)
        v = checkpoint_name(narrow @ params["value"], "value_proj").reshape(*heads, plain)
        position = _rotate(position)[:, :, None]
        position = jnp.broadcast_to(position, (*heads, self.latent.rotary_dim))
        return q, jnp.concatenate([k, position], axis=-1), v

    def _mlp(self, params: dict[str, Any], y: jax.Array) -> jax.Array:
        """Of all tokens, or of those of each expert, whose matrices are stacked."""
        up = checkpoint_name(self._linear(params, "up", y), "mlpwi_1" if self.gated else "mlpwi")
        if self.gated:
            up = jax.nn.silu(checkpoint_name(self._linear(params, "gate", y), "mlpwi_0")) * up
        else:
            up = jax.nn.gelu(up)
        return checkpoint_name(self._linear(params, "down", up), "mlpwo")

    # --- The parts of a loss, as ``Pipeline`` takes them ------------------------------------------

    def embed(self, shared: dict[str, Any], tokens: jax.Array) -> jax.Array:
        """What enters the first layer, (batch, length, width); tokens are (batch, length + 1)."""
        x = shared["embed"][tokens[:, :-1]]
        return x + shared["positions"][None, : x.shape[1]] if self.biased else x

    def block(self, layer: dict[str, Any], x: jax.Array, tokens: jax.Array) -> jax.Array:
        """``apply_layer``, which reads no tokens."""
        del tokens
        return self.apply_layer(layer, x)

    def head(
        self, shared: dict[str, Any], x: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of the cross entropies of the next tokens, and the number of these."""
        x = self._norm(shared["norm"], x)
        logits = x @ (shared["embed"].T if self.tied else shared["unembed"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            to_sum_dtype(logits), tokens[:, 1:]
        )
        return losses.sum(), jnp.float32(losses.size)

    def make_loss(self, layer: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The mean cross entropy of the next token, ``loss(params, tokens)``.

        ``layer`` replaces ``apply_layer``, such as ``zero.gathered(model.apply_layer)``.
        """
        layer = layer or self.apply_layer

        def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
            tokens = on_expert_axis(tokens)
            x = self.embed(params, tokens)
            for name in ("dense_layers", "layers"):
                if name not in params:
                    continue
                if self.scan:
                    x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params[name])
                else:
                    for p in params[name]:
                        x = layer(p, x)
            total, weight = self.head(params, x, tokens)
            return total / weight

        return loss_fn

    def _norm(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y = to_sum_dtype(x)
        if self.biased:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = _rms_norm(params["scale"], y, x.dtype)
        return y + params["bias"][None, None] if self.biased else y

    def _linear(self, params: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
        y = x @ params[name]
        return y + params[f"{name}_bias"][None, None] if self.biased else y


def _rms_norm(scale: jax.Array, x: jax.Array, dtype: DType) -> jax.Array:
    y = to_sum_dtype(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return y.astype(dtype) * scale[None, None]


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions; ``x`` is (batch, length, ..., head)."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rate[None]
    angle = angle.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = jnp.split(to_sum_dtype(x), 2, axis=-1)
    rotated = (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def gpt2(layers: int, width: int, heads: int) -> Decoder:
    sizes = (layers, width, heads, heads, 4 * width, 50257, 1024)
    return Decoder(*sizes, gated=False, tied=True, biased=True)


MODELS = {
    "gpt2-small": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "llama2-7b": Decoder(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": Decoder(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": Decoder(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": Decoder(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Decoder(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": Decoder(126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": Decoder(32, 4096, 32, 8, 2 * 14336, 32000, experts=Experts(8, 2)),
    "deepseek-v3": Decoder(
        *(61, 7168, 128, 128, 18432, 129280),
        head_dim=128,
        experts=Experts(256, 8, shared=1, dense_layers=3),
        latent=Latent(query_rank=1536, kv_rank=512, rotary_dim=64),
    ),
}


def count_to_params(count: int, dtype: DType = jnp.bfloat16) -> Any:
    """Abstract parameters of a given number, as of a decoder; the embedding is what layers leave.

    A layer has 12 width**2, and there are about width / 128 of them, as in GPT-3 and Llama.
    """
    width = round((128 / 12 * count) ** (1 / 3)) or 1
    width -= width % 2 ** max(0, width.bit_length() - 3)  # which many devices divide
    layers, others = divmod(count, 12 * width**2)
    rows, last = divmod(others, width)
    names = {"attention": (width, 4 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    stacks = {name: jax.ShapeDtypeStruct((layers, *names[name]), dtype) for name in names}
    shapes = {"embed": (rows, width), "rest": (last,)}
    outside = {k: jax.ShapeDtypeStruct(shape, dtype) for k, shape in shapes.items() if shape[0]}
    return ({"layers": stacks} if layers else {}) | outside


_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1")
_MINIMAL = (*_QKV, "kv_proj", "out_proj", *_MLP_IN, "mlpwo")

# By the name of a preset of MaxText, what is saved.
PRESETS: dict[str, tuple[str, ...]] = {
    "full": (),
    "save_out_proj": ("out_proj",),
    "save_qkv_proj": _QKV,
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlpwo"),
    "minimal": _MINIMAL,
    "minimal_with_context": (*_MINIMAL, "context"),
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
    return tuple(part for part, name in SAVED_PARTS.items() if name in PRESETS[recompute])


def saved_elements(model: Decoder, recompute: str, tensor: int = 1) -> float:
    """Elements that a layer stores beside its input, for a token, on one of ``tensor`` devices."""
    # The output of attention is summed over the devices, and each has all of it.
    elements = {
        part: sum(x.number * x.columns * x.experts * x.share * x.padding for x in several)
        for part, several in model.matrices.items()
    }
    if model.latent:
        elements["qkv"] = model.heads * model.score_dim + 2 * model.queries
    elements["context"] = model.queries
    return sum(elements[p] / (1 if p == "out" else tensor) for p in saved_parts(recompute))
