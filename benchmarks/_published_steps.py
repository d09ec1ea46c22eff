"""Published times of training steps, with their plans: what predictions are compared with."""

import csv
import dataclasses
import pathlib

from sharding.plan import kind_of
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._step_time import StepSeconds, step_seconds
from sharding.plan.machine._collective_time import Machine
from sharding.plan.model._layer_time import Implementation
from sharding.plan.model._models import MODELS, Decoder

_VTRAIN = pathlib.Path(__file__).parents[1] / "tests" / "sharding" / "vtrain"
# Megatron-LM of 2022: fused kernels, scores in memory, dropout; nothing overlaps.
MEGATRON = Implementation(attention="materialized", dropout=True, lockstep=False)
# Its small steps wait for the host: seconds of a kernel as ``layer_work`` counts them, fewer than
# there are. Of multiples of 5 us, the one with the least error on every tenth step of the single
# nodes of vTrain; nothing else here is fitted.
EAGER = dataclasses.replace(MEGATRON, launch=55e-6)
FUSED = Implementation(attention="fused")
# FSDP of 2023 runs eagerly: layers are computed again as a whole.
FUSED_EAGER = Implementation(attention="fused", lockstep=False)


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
    """

    name: str
    model: Decoder
    plan: ParallelPlan
    machine: Machine
    implementation: Implementation
    seconds: float
    overlap: bool

    def predicted(self) -> StepSeconds:
        """The prediction, by what it waits for."""
        return step_seconds(self.model, self.plan, self.machine, implementation=self.implementation)

    def prediction(self) -> float:
        """Seconds, with the overlap that the program has."""
        found = self.predicted()
        return found.seconds if self.overlap else found.no_overlap


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


# --- FSDP on GPUs ---------------------------------------------------------------------------------

# Model, length, devices, sequences of a micro-batch, micro-batches, recomputation, tokens per
# second and device. llm-foundry of MosaicML, scripts/train/benchmarking/README.md.
MPT = {
    "1b": gpt(24, 2048, 16, vocabulary=50368),
    "3b": gpt(32, 2560, 20, vocabulary=50368),
    "7b": gpt(32, 4096, 32, vocabulary=50368),
    "13b": gpt(40, 5120, 40, vocabulary=50368),
    "30b": gpt(48, 7168, 56, vocabulary=50368),
    "70b": gpt(80, 8192, 64, vocabulary=50368),
}
_FSDP = [
    ("h100", "7b", 2048, 8, 6, 1, "none", 10643),
    ("h100", "7b", 2048, 512, 6, 1, "none", 9670),
    ("h100", "7b", 4096, 8, 16, 2, "full", 8611),
    ("h100", "7b", 8192, 8, 8, 2, "full", 6935),
    ("h100", "1b", 2048, 8, 14, 1, "none", 45455),
    ("h100", "1b", 2048, 64, 20, 1, "none", 44402),
    ("h100", "3b", 2048, 64, 6, 3, "none", 22525),
    ("h100", "13b", 2048, 8, 2, 1, "none", 4792),
    ("h100", "13b", 2048, 64, 2, 1, "none", 4800),
    ("h100", "13b", 4096, 8, 10, 3, "full", 4717),
    ("h100", "30b", 2048, 8, 3, 21, "full", 2002),
    ("h100", "30b", 2048, 32, 14, 3, "full", 2308),
    ("h100", "70b", 2048, 32, 2, 16, "full", 882),
    ("h100", "70b", 2048, 64, 8, 4, "full", 1039),
    ("a100-80", "7b", 2048, 8, 6, 2, "none", 4641),
    ("a100-80", "30b", 2048, 8, 3, 21, "full", 916),
]


def fsdp() -> list[Published]:
    """Steps of MPT models at stage 3 of ZeRO."""
    rows = []
    for kind, name, length, devices, micro, count, recompute, rate in _FSDP:
        model = dataclasses.replace(MPT[name], length=length)
        plan = ParallelPlan(
            data=devices, microbatch=micro, microbatches=count, stage=3, recompute=recompute
        )
        rows.append(
            Published(
                f"MPT-{name}, length {length}",
                *(model, plan, Machine(kind_of(kind), devices), FUSED_EAGER),
                *(plan.sequences * length / devices / rate, True),
            )
        )
    return rows


# --- MaxText --------------------------------------------------------------------------------------


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


def maxtext() -> list[Published]:
    """Steps of MaxText on TPUs and GPUs; its operations count attention in full.

    src/maxtext/configs/tpu/{v5p,v5e}/*.sh and MaxText/configs/{v5p,v5e,a3/llama_2_7b}/README.md.
    What "minimal" policies compute again is element-wise; it counts as nothing here. Nor does the
    transfer of offloaded queries, keys and values.
    """
    b16, b32, b128 = map(maxtext_model, (16, 32, 128))
    v5p, v5e = (kind_of(name) for name in ("v5p", "v5e"))
    h100 = kind_of("h100")
    llama = dataclasses.replace(MODELS["llama2-7b"], length=4096)
    none, full, qkv = "none", "full", "save_qkv_proj"
    table = [
        ("32B", b32, Machine(v5p, 64, (4, 4, 4)), 16, 4, 1, 6 * 4, none, 328e12),
        ("16B", b16, Machine(v5e, 256, (16, 16)), 256, 1, 1, 6, full, 120e12),
        ("128B", b128, Machine(v5e, 256, (16, 16)), 16, 16, 1, 16, qkv, 110e12),
        ("Llama2-7B", llama, Machine(h100, 8), 8, 1, 1, 4, none, 492e12),
        ("Llama2-7B", llama, Machine(h100, 128), 128, 1, 16, 4, none, 375e12),
    ]
    rows = []
    for name, model, machine, data, tensor, replicas, micro, recompute, rate in table:
        plan = ParallelPlan(
            data=data,
            tensor=tensor,
            microbatch=micro,
            stage=3,
            replicas=replicas,
            recompute=recompute,
            sequence_parallel=tensor > 1,
        )
        flops = model.flops(plan.sequences * model.length, model.length) / machine.num_devices
        rows.append(Published(f"MaxText {name}", model, plan, machine, FUSED, flops / rate, True))
    return rows
