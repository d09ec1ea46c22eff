"""Published times of training steps, with their plans: what predictions are compared with.

Constants of the model fit half of the tables that ``sources`` names, every second model of each;
all else is held out.
"""

import csv
import dataclasses
import math
import pathlib

from sharding.plan import kind_of
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._step_time import StepSeconds, step_seconds
from sharding.plan.machine._collective_time import Machine
from sharding.plan.model._experts import Experts
from sharding.plan.model._layer_costs import Implementation
from sharding.plan.model._models import MODELS, Decoder

_HERE = pathlib.Path(__file__).parent
_VTRAIN = _HERE.parent / "tests" / "sharding" / "vtrain"
# Megatron-LM of 2022: fused kernels, scores in memory, dropout; nothing overlaps.
MEGATRON = Implementation(attention="materialized", dropout=True, lockstep=False)
# Its small steps wait for the host: seconds of a kernel as ``layer_work`` counts them, fewer than
# there are. Of multiples of 5 us, the one with the least error on every tenth step of the single
# nodes of vTrain.
EAGER = dataclasses.replace(MEGATRON, launch=60e-6)
FUSED = Implementation(attention="fused")
# Collectives of tensor parallelism run beside products: NeMo, and XLA for TPUs.
OVERLAPPED = dataclasses.replace(FUSED, collective_matmul=True)
# Eager PyTorch reads and writes values twice as often as fused kernels: the factor that fits
# llm-foundry on both GPUs.
UNFUSED = 2.0
# The kernel of Triton that llm-foundry used, the first FlashAttention, relative to matrix products;
# fitted there: a third of the present kernel's speed on H100, whose tensor cores it does not reach.
TRITON = {"a100-40": 0.40, "a100-80": 0.40, "h100": 0.27}


@dataclasses.dataclass(frozen=True)
class Published:
    """A step whose time is published.

    Attributes:
      name: of the model, with what else tells it from others.
      model: its dims.
      plan: how it was shared.
      machine: the devices.
      implementation: how the program computed a layer.
      seconds: of a step.
      overlap: whether the program overlaps collectives of data parallelism with computing.
      fitted: whether constants fit it.
      odd: whether its source contradicts it by a neighbouring row.
      grad: bytes of a gradient as it is summed.
    """

    name: str
    model: Decoder
    plan: ParallelPlan
    machine: Machine
    implementation: Implementation
    seconds: float
    overlap: bool
    fitted: bool = False
    odd: bool = False
    grad: float = 2.0

    def predicted(self) -> StepSeconds:
        """The prediction, by what it waits for."""
        each = 2.0, self.grad, 12.0
        return step_seconds(
            self.model, self.plan, self.machine, implementation=self.implementation, each=each
        )

    def prediction(self) -> float:
        """Seconds, with the overlap that the program has."""
        found = self.predicted()
        return found.seconds if self.overlap else found.no_overlap

    @property
    def ratio(self) -> float:
        """Predicted seconds by published ones."""
        return self.prediction() / self.seconds


def gpt(
    layers: int, width: int, heads: int, length: int = 2048, vocabulary: int = 51200
) -> Decoder:
    """A model of GPT-3's form."""
    return Decoder(
        *(layers, width, heads, heads, 4 * width, vocabulary, length),
        gated=False,
        tied=True,
        biased=True,
    )


# --- Korthikanti et al. ---------------------------------------------------------------------------

# Layers, width, heads, stages, sequences of a micro-batch, micro-batches, chunks, and seconds with
# full recomputation, and with sequence parallelism and selective recomputation. Korthikanti et al.:
# Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, tables 3 and 5.
_KORTHIKANTI = {
    "22B": (48, 6144, 64, 1, 4, 1, 1, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 1, 64, 3, 18.13, 13.75),
    "530B": (105, 20480, 128, 35, 1, 280, 3, 49.05, 37.83),
    "1T": (128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
}


def korthikanti() -> list[Published]:
    """The eight steps of Megatron-LM on A100."""
    rows = []
    for name, (
        layers,
        width,
        heads,
        pipe,
        micro,
        count,
        chunks,
        full,
        fast,
    ) in _KORTHIKANTI.items():
        for recompute, seconds in (("full", full), ("selective", fast)):
            plan = ParallelPlan(
                tensor=8,
                pipe=pipe,
                microbatch=micro,
                microbatches=count,
                sequence_parallel=recompute == "selective",
                schedule="interleaved" if chunks > 1 else "aligned",
                chunks=chunks,
                recompute=recompute,
            )
            machine = Machine(kind_of("a100-80"), 8 * pipe)
            model = gpt(layers, width, heads)
            rows.append(
                Published(f"{name}, {recompute}", model, plan, machine, MEGATRON, seconds, False)
            )
    return rows


# --- vTrain ---------------------------------------------------------------------------------------


def vtrain(name: str, implementation: Implementation = EAGER) -> list[Published]:
    """The measured steps of vTrain: ``"single"`` nodes, or ``"multi"``.

    Nodes of 8 A100 have a network of 800 Gb/s.
    """
    device = dataclasses.replace(kind_of("a100-80"), network=800e9 / 8 / 8)
    rows = []
    with (_VTRAIN / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            milliseconds = float(row.pop("milliseconds"))
            it = {key: int(value) for key, value in row.items()}
            plan = ParallelPlan(
                data=it["data"],
                tensor=it["tensor"],
                pipe=it["pipe"],
                microbatch=it["microbatch"],
                microbatches=it["batch"] // it["data"] // it["microbatch"],
            )
            model = gpt(it["layers"], it["width"], it["heads"], it["length"])
            machine = Machine(device, plan.num_devices)
            rows.append(
                Published(
                    f"{model.layers} x {model.width}",
                    *(model, plan, machine, implementation, milliseconds / 1e3, False),
                )
            )
    return rows


# --- FSDP of llm-foundry --------------------------------------------------------------------------

_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
MPT = {name: gpt(*dims, vocabulary=50368) for name, dims in _MPT.items()}


# Rows that their neighbours contradict: fewer tokens per second than for longer sequences (760m);
# a fifth to a quarter fewer on half as many devices (70b, 1b); a third fewer than at half the
# length, where 13b loses an eighth (30b, whose micro-batch is the least).
_ODD = {
    ("a100-80", "760m", 512, 8),
    ("a100-80", "760m", 1024, 8),
    ("a100-40", "70b", 2048, 64),
    ("a100-40", "1b", 2048, 32),
    ("a100-80", "30b", 8192, 8),
    ("h100", "30b", 8192, 8),
}


def llm_foundry(*kinds: str) -> list[Published]:
    """Steps of MPT models at stages 2 and 3 of ZeRO, on these kinds of GPU.

    All rows in 16 bits of scripts/train/benchmarking/README.md of mosaicml/llm-foundry, January
    2024. "default" reduces gradients in 32 bits, by PyTorch 2.1, whose checkpoints stop once all
    values are there; "pure" in 16 bits, before that, and computes whole layers again.
    """
    rows = []
    with (_HERE / "published" / "llm_foundry.csv").open() as file:
        for it in csv.DictReader(file):
            if it["device"] not in kinds:
                continue
            device = kind_of(it["device"])
            if it["device"] != "h100":
                device = dataclasses.replace(device, network=1600e9 / 8 / 8)
            devices, length = int(it["devices"]), int(it["length"])
            recent = it["precision"] == "default"
            model = dataclasses.replace(MPT[it["model"]], length=length)
            plan = ParallelPlan(
                data=devices,
                microbatch=int(it["microbatch"]),
                microbatches=int(it["microbatches"]),
                stage=int(it["stage"]),
                recompute=it["recompute"],
            )
            implementation = Implementation(
                attention="fused",
                attention_share=TRITON[it["device"]],
                unfused=UNFUSED,
                lockstep=recent,
            )
            seconds = plan.sequences * length / devices / int(it["rate"])
            row = Published(
                *(f"MPT-{it['model']}", model, plan, Machine(device, devices)),
                *(implementation, seconds, True),
                odd=(it["device"], it["model"], length, devices) in _ODD,
                grad=4.0 if recent else 2.0,
            )
            rows.append(row)
    return rows


# --- NVIDIA's and PyTorch's, on GPUs --------------------------------------------------------------

_H100 = kind_of("h100")


def _llama(name: str, length: int) -> Decoder:
    return dataclasses.replace(MODELS[name], length=length)


def dgx_cloud() -> list[Published]:
    """NVIDIA/dgxc-benchmarking 25.04, June 2025: NeMo on H100, in 16 bits."""
    gpt3 = gpt(96, 12288, 96)
    nemotron = [
        Decoder(layers, width, heads, 8, 4 * width, 256000, 4096, gated=False)
        for layers, width, heads in ((32, 6144, 48), (96, 18432, 96))
    ]
    table = [
        ("GPT-3 175B", gpt3, 4, 8, 6, 1, 64, {4: 8.309, 8: 8.408, 16: 8.42, 32: 8.453, 64: 8.49}),
        (
            *("Nemotron-4 15B", nemotron[0], 2, 1, 1, 2, 4),
            {8: 2.66, 16: 2.66, 32: 2.67, 64: 2.67, 128: 2.68, 256: 2.71, 512: 2.74, 1024: 2.78},
        ),
        ("Nemotron-4 340B", nemotron[1], 8, 8, 12, 1, 16, {4: 4.36, 8: 4.39, 16: 4.41, 32: 4.43}),
    ]
    rows = []
    for name, model, tensor, pipe, chunks, micro, count, times in table:
        for data, seconds in times.items():
            plan = ParallelPlan(
                data=data,
                tensor=tensor,
                pipe=pipe,
                microbatch=micro,
                microbatches=count,
                stage=1,
                sequence_parallel=True,
                schedule="interleaved" if chunks > 1 else "aligned",
                chunks=chunks,
                recompute="none",
            )
            implementation = dataclasses.replace(OVERLAPPED, lockstep=False)
            machine = Machine(_H100, plan.num_devices)
            row = Published(name, model, plan, machine, implementation, seconds, True)
            rows.append(dataclasses.replace(row, grad=4.0 if "Nemo" in name else 2.0))
    return rows


def megatron() -> list[Published]:
    """The H100 table of Megatron-LM's README, July 2024: the models without a pipeline.

    Micro-batches are not published; here they have one sequence.
    """
    table = [
        (24, 2048, 16, 1, 408.8e12),
        (30, 4096, 32, 2, 465.9e12),
        (32, 6144, 48, 4, 489.1e12),
        (48, 7168, 56, 8, 459.6e12),
    ]
    rows = []
    for layers, width, heads, tensor, rate in table:
        model = gpt(layers, width, heads, 4096, 131072)
        plan = ParallelPlan(
            data=48,
            tensor=tensor,
            microbatches=4,
            stage=1,
            sequence_parallel=tensor > 1,
            recompute="none",
        )
        machine = Machine(_H100, plan.num_devices)
        seconds = model.flops(192 * 4096, 4096) / plan.num_devices / rate
        rows.append(
            Published(f"{layers} x {width}", model, plan, machine, OVERLAPPED, seconds, True)
        )
    return rows


def maxtext_gpu() -> list[Published]:
    """MaxText on H100: its own table of 2024 on A3 High, 800 Gb/s a node, and NVIDIA's of 2025."""
    a3 = dataclasses.replace(_H100, network=800e9 / 8 / 8)
    llama, llama3 = _llama("llama2-7b", 4096), _llama("llama3-70b", 8192)
    rows = []
    for nodes, rate in {1: 492e12, 2: 422e12, 4: 407e12, 8: 409e12, 16: 375e12}.items():
        plan = ParallelPlan(
            data=8 * nodes,
            replicas=nodes,
            microbatch=4,
            stage=3,
            recompute="minimal_with_context",
        )
        seconds = llama.flops(4 * 4096, 4096) / rate
        rows.append(
            Published(
                *("Llama2-7B", llama, plan, Machine(a3, 8 * nodes), FUSED, seconds, True),
                grad=4.0,
            )
        )
    plan = ParallelPlan(data=8, microbatch=2, stage=3, recompute="minimal_with_context")
    rows.append(Published("Llama2-7B", llama, plan, Machine(_H100, 8), FUSED, 0.721, True))
    times = {(128, 1): 15.563, (256, 1): 15.444, (128, 4): 15.519, (128, 8): 15.603}
    for (shards, replicas), seconds in (times | {(128, 16): 15.898}).items():
        data = shards * replicas
        plan = ParallelPlan(
            data=data, replicas=replicas, microbatch=2, stage=3, recompute="save_qkv_proj"
        )
        rows.append(
            Published("Llama3-70B", llama3, plan, Machine(_H100, data), FUSED, seconds, True)
        )
    return rows


def torchtitan() -> list[Published]:
    """FSDP2 of torchtitan: docs/performance.md of April 2024, A100; benchmarks/ of 2024 and 2025.

    Its H100 are limited to 500 W, have 2.4 TB/s and so a peak that the source does not know:
    between the SXM and the NVL modules, which have 989e12 and 835e12; here, 835e12.
    """
    a100 = kind_of("a100-80")
    limited = dataclasses.replace(_H100, flops=835e12, bandwidth=2400e9)
    eager = dataclasses.replace(FUSED, unfused=UNFUSED)
    table = [
        ("Llama3-8B", "llama3-8b", a100, 64, 1, 1, "selective", 8192, eager, 2973),
        ("Llama3-70B", "llama3-70b", a100, 64, 1, 1, "full", 8192, eager, 331),
        ("Llama2-13B", "llama2-13b", a100, 64, 1, 2, "none", 4096, eager, 2162),
        ("Llama2-70B", "llama2-70b", a100, 64, 1, 2, "full", 4096, eager, 353),
        ("Llama3-8B eager", "llama3-8b", limited, 8, 1, 2, "selective", 8192, eager, 5762),
        ("Llama3-8B", "llama3-8b", limited, 8, 1, 2, "selective", 8192, FUSED, 6667),
        ("Llama3-8B eager", "llama3-8b", limited, 128, 1, 2, "selective", 8192, eager, 5605),
        ("Llama3-8B", "llama3-8b", limited, 128, 1, 2, "selective", 8192, FUSED, 6514),
        ("Llama3-8B", "llama3-8b", limited, 64, 8, 12, "selective", 8192, FUSED, 4378),
        ("Llama3-70B", "llama3-70b", limited, 256, 8, 16, "full", 8192, FUSED, 597.3),
    ]
    rows = []
    for name, model, device, devices, tensor, micro, recompute, length, how, rate in table:
        plan = ParallelPlan(
            data=devices // tensor,
            tensor=tensor,
            microbatch=micro,
            stage=3,
            sequence_parallel=tensor > 1,
            recompute={"selective": "save_dot_except_mlp"}.get(recompute, recompute),
        )
        if device is limited:
            how = dataclasses.replace(how, attention_share=0.5)  # FlashAttention-2
        seconds = plan.sequences * length / devices / rate
        machine = Machine(device, devices)
        rows.append(
            Published(name, _llama(model, length), plan, machine, how, seconds, True, grad=4.0)
        )
    return rows


# --- TPUs -----------------------------------------------------------------------------------------


def maxtext_model(scale: int) -> Decoder:
    """MaxText's model of this ``global_parameter_scale``, a power of two: so many billions.

    Of src/maxtext/configs/base.yml: powers go to the heads and the MLP, to the width and to the
    layers in turn, and heads stay 128 wide. Where heads have one power more, all heads together are
    twice as wide as the model.
    """
    turns, rest = divmod(scale.bit_length() - 1, 3)
    layers, width, heads = (2 ** (turns + more) for more in (0, rest > 1, rest > 0))
    heads *= 16
    return Decoder(16 * layers, 2048 * width, heads, heads, 448 * heads, 32000, head_dim=128)


def maxtext(*kinds: str) -> list[Published]:
    """MaxText's own tables of 2023 on TPUs; its operations count attention in full.

    src/maxtext/configs/tpu/{v4,v5e,v5p}/{README.md,*.sh}. What "minimal" policies compute again is
    element-wise; it counts as nothing here. Nor does the transfer of offloaded queries, keys and
    values. Tori are those of the type of a slice, where there are several, the nearest to a cube.
    """
    v4_22b = Decoder(48, 6144, 24, 24, 24576, 32000, gated=False, head_dim=256)
    v4_52b = Decoder(32, 12288, 32, 32, 49152, 32000, gated=False, head_dim=256)
    full, qkv, minimal = "full", "save_qkv_proj", "minimal"
    table = [
        ("v4", "22B", v4_22b, (4, 4, 4), 1, 13, full, {1: 156, 2: 152, 4: 149, 8: 146}),
        ("v4", "52B", v4_52b, (4, 4, 12), 1, 7, full, {1: 154, 2: 162}),
        (
            "v5e",
            "16B",
            16,
            (16, 16),
            1,
            6,
            full,
            {1: 120, 2: 117, 4: 117, 8: 115, 16: 111, 32: 108},
        ),
        (
            "v5e",
            "32B",
            32,
            (16, 16),
            1,
            4,
            full,
            {1: 132, 2: 128, 4: 126, 8: 125, 16: 123, 32: 119},
        ),
        ("v5e", "64B", 64, (16, 16), 1, 2, full, {1: 118, 2: 112, 4: 110, 8: 108, 16: 105, 32: 99}),
        (
            "v5e",
            "128B",
            128,
            (16, 16),
            16,
            1,
            qkv,
            {1: 110, 2: 110, 4: 108, 8: 104, 16: 100, 32: 91},
        ),
        ("v5p", "32B", 32, (4, 4, 4), 4, 6, minimal, {1: 328, 2: 319}),
        ("v5p", "64B", 64, (4, 4, 4), 4, 3, minimal, {1: 323, 2: 309}),
        ("v5p", "128B", 128, (4, 4, 8), 8, 1, minimal, {1: 315, 2: 305}),
        ("v5p", "128B", 128, (4, 8, 8), 8, 1, minimal, {1: 316, 2: 274}),
        ("v5p", "256B", 256, (8, 8, 8), 8, 1, minimal, {1: 308, 2: 289}),
        ("v5p", "512B", 512, (8, 8, 8), 8, 2, full, {1: 294, 2: 282}),
        ("v5p", "1024B", 1024, (8, 8, 16), 16, 2, full, {1: 254, 2: 237}),
        ("v5p", "1024B", 1024, (8, 16, 16), 16, 2, full, {1: 297, 2: 279}),
    ]
    rows = []
    for kind, name, scale, torus, tensor, each, recompute, rates in table:
        if kind not in kinds:
            continue
        model = maxtext_model(scale) if isinstance(scale, int) else scale
        chips = math.prod(torus)
        for slices, rate in rates.items():
            plan = ParallelPlan(
                data=slices * chips // tensor,
                replicas=slices,
                tensor=tensor,
                microbatch=each * tensor,
                stage=3,
                recompute=recompute,
                sequence_parallel=tensor > 1,
            )
            machine = Machine(kind_of(kind), slices * chips, torus, slices)
            seconds = model.flops(each * model.length, model.length) / (rate * 1e12)
            rows.append(
                Published(f"MaxText {name}", model, plan, machine, OVERLAPPED, seconds, True)
            )
    return rows


def tpu_recipes() -> list[Published]:
    """AI-Hypercomputer/tpu-recipes, 2025 and 2026: v6e, v5p and tpu7x, all at stage 3 of ZeRO.

    Policies are the presets that save the same products; of those that save the result of attention
    without the product after it, one that saves both.
    """
    models = {name: _llama(name, 8192) for name in ("llama3-8b", "llama3-70b", "llama3-405b")}
    models["llama2-70b"] = _llama("llama2-70b", 4096)
    models["mistral-7b"] = dataclasses.replace(models["llama3-8b"], vocabulary=32000)
    models["gpt3-175b"] = gpt(96, 12288, 96, vocabulary=50304)
    small, qkv, full = "save_dot_except_mlp", "save_qkv_proj", "full"
    context = "save_dot_with_context_except_mlp"
    table = [
        ("v6e", "llama3-8b", (2, 4), 1, 3, small, 3.443),
        ("v6e", "llama3-8b", (4, 4), 1, 3, small, 3.393),
        ("v6e", "llama3-8b", (4, 8), 1, 3, small, 3.495),
        ("v6e", "llama3-8b", (8, 8), 1, 5, small, 5.652),
        ("v6e", "llama3-8b", (8, 16), 1, 4, small, 4.602),
        ("v6e", "llama3-8b", (16, 16), 1, 4, small, 4.546),
        ("v6e", "mistral-7b", (2, 4), 1, 6, small, 6.320),
        ("v6e", "llama3-70b", (4, 8), 1, 2, qkv, 17.790),
        ("v6e", "llama3-70b", (8, 8), 1, 2, qkv, 18.688),
        ("v6e", "llama3-70b", (8, 16), 1, 4, qkv, 34.786),
        ("v6e", "llama3-70b", (16, 16), 1, 5, qkv, 42.656),
        ("v6e", "llama2-70b", (16, 16), 1, 3, qkv, 13.577),
        ("v6e", "llama3-405b", (16, 16), 2, 1, full, 54.803),
        ("v6e", "gpt3-175b", (16, 16), 1, 3, full, 17.182),
        ("v5p", "llama3-405b", (8, 8, 8), 1, 2, context, 131.474),
        ("tpu7x", "llama3-70b", (4, 4, 4), 1, 2, context, 12.20),
        ("tpu7x", "llama3-70b", (4, 8, 8), 1, 2, context, 12.27),
        ("tpu7x", "llama3-405b", (4, 8, 8), 1, 3, "save_qkv_proj", 98.34),
    ]
    return [
        _gathered(kind, name, models[name], torus, each, recompute, seconds, slices=slices)
        for kind, name, torus, slices, each, recompute, seconds in table
    ]


def _gathered(
    kind: str,
    name: str,
    model: Decoder,
    torus: tuple[int, ...],
    each: int,
    recompute: str,
    seconds: float,
    *,
    slices: int = 1,
    matmuls: str | None = None,
) -> Published:
    """A step at stage 3 of ZeRO over all devices of tori, of ``each`` sequences a device."""
    devices = math.prod(torus) * slices * (2 if kind == "tpu7x" else 1)
    plan = ParallelPlan(
        data=devices, microbatch=each, stage=3, recompute=recompute, matmuls=matmuls
    )
    machine = Machine(kind_of(kind), devices, torus, slices)
    return Published(name, model, plan, machine, FUSED, seconds, True)


def tpu_recipes_fp8() -> list[Published]:
    """Llama 3.1 with ``quantization=fp8_full``: tpu-recipes/training/ironwood/README.md.

    Of 405B the layers' inputs alone are kept, in host memory.
    """
    large, larger = _llama("llama3-70b", 8192), _llama("llama3-405b", 8192)
    table = [
        ("llama3-70b", large, (4, 4, 4), 2, "save_dot_with_context_except_mlp", 7.93),
        ("llama3-70b", large, (4, 8, 8), 2, "save_dot_with_context_except_mlp", 7.95),
        ("llama3-405b", larger, (4, 8, 8), 3, "full", 64.37),
    ]
    return [_gathered("tpu7x", *row, matmuls="fp8") for row in table]


def experts() -> list[Published]:
    """Mixtures of experts of MaxText, all at stage 3 of ZeRO, whose experts are gathered whole.

    Mixtral 8x7B: tpu-recipes/training/trillium, with slots for 1.25 of the tokens, which keeps
    products of attention (in host memory); and MaxText's Run_Mixtral.md, v5p-128, of which the rate
    is published. DeepSeek-V3 and Qwen3-235B-A22B, with products in 16 bits and in fp8:
    tpu-recipes/training/ironwood, README.md and run_recipe.sh: layers' inputs alone are kept, in
    host memory. All but the first drop no token, and have no empty slots.
    """

    def dropless(model: Decoder) -> Decoder:
        assert model.experts
        return dataclasses.replace(model, experts=dataclasses.replace(model.experts, capacity=1.0))

    with_slots, deepseek = _llama("mixtral-8x7b", 4096), dropless(_llama("deepseek-v3", 4096))
    mixtral = dropless(with_slots)
    qwen = Decoder(
        *(94, 4096, 64, 4, 8 * 1536, 151936, 4096),
        head_dim=128,
        experts=Experts(128, 8, capacity=1.0),
    )
    of_rate = mixtral.flops(36 * 4096, 4096) / 251.94e12
    rows = [
        ("v6e", "Mixtral 8x7B", with_slots, (16, 16), 12, "save_dot_except_mlp", 13.484),
        ("v5p", "Mixtral 8x7B", mixtral, (4, 4, 4), 36, "full", of_rate),
    ]
    many = [
        ("DeepSeek-V3", deepseek, (4, 4, 8), 8, {None: 27.02, "fp8": 22.47}),
        ("DeepSeek-V3", deepseek, (4, 8, 8), 8, {None: 26.79, "fp8": 22.08}),
        ("Qwen3 235B", qwen, (4, 8, 8), 16, {None: 30.87, "fp8": 27.67}),
    ]
    return [_gathered(*row) for row in rows] + [
        _gathered("tpu7x", name, model, torus, each, "full", seconds, matmuls=matmuls)
        for name, model, torus, each, times in many
        for matmuls, seconds in times.items()
    ]


# --- All ------------------------------------------------------------------------------------------


def _half(rows: list[Published]) -> list[Published]:
    """Every second model of a table is fitted."""
    names = list(dict.fromkeys(row.name for row in rows))
    return [dataclasses.replace(row, fitted=row.name in names[::2]) for row in rows]


def sources() -> dict[str, list[Published]]:
    """All rows by source, the date of which is in the name."""
    single = [
        dataclasses.replace(row, fitted=place % 10 == 0)
        for place, row in enumerate(vtrain("single"))
    ]
    recipes: dict[str, list[Published]] = {}
    for row in tpu_recipes():
        recipes.setdefault(row.machine.device.name, []).append(row)
    return {
        "llm-foundry, A100 of 80 GB, 2024-01": _half(llm_foundry("a100-80")),
        "llm-foundry, A100 of 40 GB, 2023-06": llm_foundry("a100-40"),
        "llm-foundry, H100, 2024-01": _half(llm_foundry("h100")),
        "NVIDIA dgxc-benchmarking, NeMo, H100, 2025-06": _half(dgx_cloud()),
        "Megatron-LM README, H100, 2024-07": megatron(),
        "MaxText, JAX-Toolbox and dgxc-benchmarking, H100, 2024-05 to 2025-06": maxtext_gpu(),
        "torchtitan, A100 and H100 of 500 W, 2024-04 to 2025-06": torchtitan(),
        "Korthikanti et al., Megatron-LM, A100, 2022-05": korthikanti(),
        "vTrain, one node of A100, 2024": single,
        "vTrain, several nodes of A100, 2024": vtrain("multi"),
        "MaxText, v4, 2023-12": maxtext("v4"),
        "MaxText, v5e, 2023-12": _half(maxtext("v5e")),
        "MaxText, v5p, 2024-06": _half(maxtext("v5p")),
        "tpu-recipes, v6e, 2025-10": _half(recipes["v6e"]),
        "tpu-recipes, v5p, 2025-10": recipes["v5p"],
        "tpu-recipes, tpu7x, 2026-08": _half(recipes["tpu7x"]),
        "tpu-recipes, tpu7x, products in fp8, 2026-08": tpu_recipes_fp8(),
        "MaxText and tpu-recipes, experts on v5p, v6e and tpu7x, 2024 to 2026": experts(),
    }
