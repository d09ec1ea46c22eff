"""A plan of one training step: how devices share model, batch and state; the same in words."""

import dataclasses

from sharding.plan._format import check_choice
from sharding.plan.cost._pipeline_schedules import ASYNC_SCHEDULES, SPLIT_SCHEDULES, check_schedule
from sharding.plan.model._models import PARTLY, Decoder, saved_parts

WEIGHTS = ("plain", "master", "stochastic")
MATMULS = ("fp8", "int8")  # recipes of ``quantized_matmuls`` that devices multiply in
RECOMPUTE = ("none", "selective", *PARTLY, "full")
# Of a traced loss: its share of the bytes of ``"none"``, planned by ``sharding.remat``.
PLANNED = {"planned_half": 1 / 2, "planned_third": 1 / 3, "planned_least": 0.0}
# What forward and backward passes do not depend on.
OF_STATE = (
    *("stage", "replicas", "spread", "offload", "state_format", "weights", "sync"),
    "update_in_backward",
)


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """How a step is shared among ``tensor * experts * data * pipe`` devices."""

    data: int = 1  #: devices that have the same layers and other sequences
    tensor: int = 1  #: devices that share each layer, as in Megatron-LM
    pipe: int = 1  #: stages of a pipeline
    microbatch: int = 1  #: sequences of one device in a micro-batch
    microbatches: int = 1  #: of one pipeline in a step
    stage: int = 0  #: of ZeRO, 0 to 3, over ``data / replicas`` devices
    replicas: int = 1  #: of hybrid sharding
    spread: bool = False  #: whether replicas share gradients and optimizer state, too
    sequence_parallel: bool = False  #: whether ``tensor`` devices share norms and residuals
    #: of the pipeline: ``"gpipe"``, ``"1f1b"``, ``"aligned"``, ``"interleaved"``; ``"zb-h1"`` or
    #: ``"zb-v"``, which compute nothing again; or ``"2bw"``, one update late, which is lossy
    schedule: str = "aligned"
    chunks: int = 1  #: of layers on each device of a pipeline
    even: bool = False  #: whether chunks are as equal as possible, for memory, or else fastest
    #: what the backward pass computes again: ``"none"``; ``"selective"``, scores and their product
    #: with values; ``"full"``, each layer; what a preset of MaxText does not save; or, of a
    #: ``TracedModel``, what a plan for a half or a third of the bytes does: ``"planned_half"``
    recompute: str = "full"
    tiles: int = 1  #: in how many large values of a ``TracedModel`` exist, as by ``shd.tiled``
    #: the recipe of ``quantized_matmuls`` of the products of layers, which is lossy
    matmuls: str | None = None
    #: whether optimizer state is in host memory; layers, too, with ``update_in_backward``;
    #: ``"update"``: where the CPU updates it, ``Zero(update_on="host")``
    offload: bool | str = False
    state_format: str | None = None  #: of optimizer state, a lossy one of ``STATE_FORMATS``
    #: what updates parameters of 16 bits: ``"plain"``; ``"master"``, ``optax_ext.master_weights``;
    #: or ``"stochastic"``, ``optax_ext.stochastic_rounding``, which is lossy
    weights: str = "plain"
    #: a lossy sync such as ``"powersgd(4)"`` or ``"qsgd(8)"``, over replicas if there are
    sync: str | None = None
    #: whether each layer is updated in the backward pass, by the partitioner
    update_in_backward: bool = False
    experts: int = 1  #: devices that have other experts of each layer, and other sequences

    @property
    def lossy(self) -> bool:
        """Whether it approximates the step of the transformation."""
        rounded = self.state_format or self.sync or self.matmuls or self.weights == "stochastic"
        return bool(rounded or self.asynchronous)

    @property
    def asynchronous(self) -> bool:
        """Whether stages of a pipeline update their parameters without waiting for each other."""
        return self.pipe > 1 and self.schedule in ASYNC_SCHEDULES

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are operations of their own in a pipeline."""
        return self.pipe > 1 and self.schedule in SPLIT_SCHEDULES

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.data * self.experts * self.tensor * self.pipe

    @property
    def shards(self) -> int:
        """Devices over which ZeRO shards."""
        return self.data // self.replicas

    @property
    def shards_of_state(self) -> int:
        """Devices over which ZeRO shards gradients and optimizer state, once they are reduced."""
        return 1 if self.stage == 0 else self.data if self.spread else self.shards

    @property
    def synced_devices(self) -> int:
        """Devices over which a compressed sync runs: replicas, if there are."""
        return self.replicas if self.replicas > 1 else self.data

    @property
    def sequences(self) -> int:
        """Sequences of all devices in a step."""
        return self.data * self.experts * self.microbatch * self.microbatches

    @property
    def can_update_in_backward(self) -> bool:
        """Whether ``update_in_backward`` is possible: it computes each layer again."""
        alone = self.pipe * self.tensor * self.experts == 1
        return alone and self.recompute == "full" and not self.sync

    @property
    def checkpoints_layers(self) -> bool:
        """Whether layers need ``jax.checkpoint``; those that gather their parameters have it."""
        gathered = self.stage == 3 and self.pipe == 1 and self.shards > 1
        itself = gathered or self.update_in_backward
        return self.recompute not in ("none", "selective") and not itself

    def check(self, model: Decoder) -> None:
        """Raises a ``ValueError`` unless sizes and names are known and the model can be shared."""
        sizes = ("data", "experts", "tensor", "pipe", "microbatch", "microbatches", "replicas")
        for name in (*sizes, "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}.")
        check_choice("recompute", self.recompute, RECOMPUTE)
        if self.data % self.replicas:
            raise ValueError(
                f"{self.replicas} replicas do not divide {self.data} data-parallel devices."
            )
        self._check_update()
        if model.heads % self.tensor:
            raise ValueError(f"{self.tensor} devices cannot share {model.heads} heads equally.")
        model.check_experts(self.experts, self.tensor)
        if self.pipe > 1 and (self.experts > 1 or model.dense_layers):
            raise ValueError(
                "experts over several devices, and layers of which some have none, are planned "
                f"without a pipeline, got pipe={self.pipe}."
            )
        check_schedule(self.schedule, self.pipe, self.microbatches, self.chunks, model.layers)
        if self.splits_backward and self.recompute != "none":
            raise ValueError(
                f"schedule {self.schedule!r} splits backward passes: what a layer computes again "
                f"would be in the first half whole. Use recompute='none', got {self.recompute!r}."
            )
        if not self.asynchronous:
            return
        # Stages update their parameters without waiting for each other.
        if model.layers % self.pipe:
            raise ValueError(
                f"schedule {self.schedule!r} needs as many layers on each of its {self.pipe} "
                f"stages; the model has {model.layers}."
            )
        if self.data * self.tensor > 1:
            raise ValueError(
                f"schedule {self.schedule!r} needs all {self.num_devices} devices as stages, got "
                f"data={self.data} and tensor={self.tensor}."
            )
        if self.offload or self.weights != "plain":
            raise ValueError(
                f"schedule {self.schedule!r} has neither offload nor other weights than 'plain', "
                f"got offload={self.offload} and weights={self.weights!r}."
            )
        if model.tied:
            raise ValueError(
                f"schedule {self.schedule!r} needs a model whose embedding is not its output "
                "matrix: the first and the last stage would update it independently."
            )

    def _check_update(self) -> None:
        """Raises a ``ValueError`` unless what is done with gradients and state goes together."""
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("offload", self.offload, (False, True, "update"))
        if self.update_in_backward and self.offload == "update":
            raise ValueError(
                "update_in_backward is on the device, and offload='update' on the CPU."
            )
        if self.update_in_backward and not self.can_update_in_backward:
            raise ValueError(
                "update_in_backward is for plans without pipe, tensor and sync, and with "
                "recompute='full'."
            )
        check_choice("matmuls", self.matmuls, (None, *MATMULS))
        if self.matmuls and self.tensor * self.experts > 1:
            raise ValueError("products in few bits are of plans without tensor and experts.")
        if self.sync and (self.pipe * self.tensor * self.experts > 1 or self.spread):
            raise ValueError(
                "a compressed sync needs plans without pipe, tensor and spread, or experts."
            )
        if self.sync and self.stage == 3 and self.replicas == 1:
            raise ValueError("a compressed sync at stage 3 is that of replicas: it needs several.")
        if self.spread and (self.replicas == 1 or self.stage == 0):
            raise ValueError("spread needs several replicas, and stage 1, 2 or 3.")


PLAN_COLUMNS = ("ZeRO", "tensor", "pipeline", "micro", "stored")


def cells(plan: ParallelPlan) -> tuple[str, ...]:
    """A plan in the cells of a table, under ``PLAN_COLUMNS``."""
    zero = f"{plan.stage}: {plan.shards}" if plan.data > 1 else "-"
    zero += f" x {plan.replicas}" if plan.replicas > 1 else ""
    zero += ", spread" if plan.spread else ""
    zero += {False: "", True: ", host", "update": ", host updates"}[plan.offload]
    zero += ", in backward" if plan.update_in_backward else ""
    zero += ", master" if plan.weights == "master" else ""
    lossy = [plan.state_format or "", "rounded" * (plan.weights == "stochastic"), plan.sync or ""]
    lossy += [f"{plan.matmuls} products" if plan.matmuls else ""]
    zero += "".join(f", {word} (lossy)" for word in lossy if word)
    chunks = f" x {plan.chunks}" if plan.chunks > 1 else ""
    pipeline = f"{plan.pipe}{chunks} {plan.schedule}" if plan.pipe > 1 else "-"
    pipeline += ", even" * plan.even + " (lossy)" * plan.asynchronous
    stored = {"none": "all", "full": "input"}.get(plan.recompute, plan.recompute)
    if plan.recompute in PARTLY:
        stored = ", ".join(saved_parts(plan.recompute))
    stored += f", {plan.tiles} tiles" if plan.tiles > 1 else ""
    tensor = str(plan.tensor) if plan.tensor > 1 else "-"
    tensor = f"{plan.experts} experts" if plan.experts > 1 else tensor
    return zero, tensor, pipeline, f"{plan.microbatches} of {plan.microbatch}", stored


def short(plan: ParallelPlan) -> str:
    """A plan in one line."""
    words = []
    if plan.pipe > 1:
        chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
        late = ", gradients one update late" if plan.asynchronous else ""
        even = ", equal" * plan.even
        words.append(f"{plan.pipe} pipeline stages ({plan.schedule}{chunks}{even}{late})")
    if plan.tensor > 1:
        words.append(f"{plan.tensor} devices a layer")
    if plan.experts > 1:
        words.append(f"experts over {plan.experts}")
    if plan.data > 1:
        replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
        replicas += " that share the state" if plan.spread else ""
        words.append(f"stage {plan.stage} over {plan.shards}{replicas}")
    noun = "micro-batch" if plan.microbatches == 1 else "micro-batches"
    words += [f"{plan.microbatches} {noun} of {plan.microbatch}", f"recompute {plan.recompute}"]
    weights = {"master": "master weights", "stochastic": "stochastic rounding"}
    words += [
        {False: "", True: "offload", "update": "update on the host"}[plan.offload],
        f"{plan.tiles} tiles" if plan.tiles > 1 else "",
        "update in the backward pass" * plan.update_in_backward,
        f"state in {plan.state_format}" if plan.state_format else "",
        weights.get(plan.weights, ""),
        f"gradients by {plan.sync}" if plan.sync else "",
        f"products in {plan.matmuls}" if plan.matmuls else "",
    ]
    return "; ".join(filter(None, words))
