"""What the options of a command say: target, device, mesh, dtypes, and a ``Setup`` of them all."""

import dataclasses
import functools
import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding._zero import Zero
from sharding.cli._load import model_of, optimizer_of
from sharding.plan.audit._find_batch import largest
from sharding.plan.cost._estimate import Plan, estimate
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._plan_costs import PlanCosts, coded_in, transformation_of
from sharding.plan.cost._stage_plan import Coded, StagePlan, variants_of
from sharding.plan.cost._step_time import StepSeconds
from sharding.plan.machine import targets
from sharding.plan.machine._devices import HEADROOM, DeviceKind, kind_of
from sharding.plan.machine._measured_rates import MeasuredRates
from sharding.plan.model._layer_costs import Activations
from sharding.plan.model._models import Decoder
from sharding.plan.search._plan_space import SEARCHED, allows
from sharding.plan.search._search import check_dtype, costs_of, machine_of
from sharding.plan.search._traced_model import AnyModel, TracedModel
from sharding.step._precision import Precision
from sharding.stored._forms import is_form

# The options that make an unknown device known.
FIGURES = "--memory GIB, and for times --tflops, --bandwidth and --link"


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, its optimizer and its ``Zero``, as the options say."""

    params: Any  # abstract parameters
    model: AnyModel | None  # the model, where its layers are known
    optimizer: optax.GradientTransformation  # the transformation, without ``--state``, ``--master``
    zero: Zero  # stage 3 on an abstract mesh; hybrid where the mesh has several axes
    device: DeviceKind | None  # its figures, where they are known
    costs: PlanCosts | None  # of the model on the target, where its layers and figures are known
    timed: bool  # whether a search times steps of the ``Zero``
    is_number: bool  # whether the parameters are those of a decoder, of which a number is known
    batch: int  # sequences of one device in a micro-batch
    microbatches: int  # the number of micro-batches
    length: int  # tokens of a sequence; 0 where that is unknown
    activations: float | None = None  # bytes of one device, where they are planned
    extra_time: float = 0.0  # of recomputation, as a share of the step's time, where it is planned
    master: bool = False  # whether there are master weights
    recompute: bool = True  # whether layers are computed again, where they are not
    update: str = "after"  # where: after the backward pass, or in it
    matmuls: str | None = None  # the recipe of quantized products of layers
    local_steps: int = 0  # of replicas, between two averages of their parameters

    @property
    def is_fine_tuned(self) -> bool:
        """Whether adapters alone are trained."""
        return self.model is not None and self.model.trainable is not None

    def tx(self, state_format: str | None = None) -> optax.GradientTransformation:
        """The transformation, with a format of its state."""
        weights = "master" if self.master else "plain"
        return transformation_of(state_format, weights, self.optimizer)

    @property
    def gathered_once(self) -> str | None:
        """That of ``estimate``; of a number where its layers have updates of their own."""
        if self.is_number and self.update == "backward":
            return Decoder.gathered_once
        return self.model.gathered_once if self.model else None

    @property
    def flops_of_parameter(self) -> float:
        """Operations for each parameter and token; frozen ones have no product for a gradient."""
        return 4.0 if self.is_fine_tuned else 6.0

    @property
    def sequences(self) -> int:
        return self.batch * self.microbatches

    def plan(
        self,
        zero: Zero,
        tx: optax.GradientTransformation | None = None,
        state_format: str | None = None,
        fastest: Mapping[str, ParallelPlan] | None = None,
    ) -> Plan:
        """The plan of a ``Zero``, with another transformation or a format of its state.

        ``fastest`` are the steps of its stages, where these are timed.
        """
        fastest = fastest or {}
        tokens = float(self.sequences * self.length)
        batch = 4.0 * self.sequences * (self.length + 1) if self.length else 0.0
        leaves = jax.tree.leaves(self.params, is_leaf=is_form)
        flops = self.flops_of_parameter * sum(math.prod(x.shape) for x in leaves) * tokens
        activations: Mapping[str, Activations] | Activations | float | None = self.activations
        coded: Coded = {}
        if self.costs:
            shared = ParallelPlan(
                data=self.costs.machine.num_devices,
                microbatch=self.batch,
                microbatches=self.microbatches,
                recompute="none",
                matmuls=self.matmuls,
            )
            batch = self.costs.batch(shared)
            flops = self.costs.flops(self.sequences * self.costs.machine.num_devices)
            if self.matmuls:  # as many operations in 16 bits as take their time
                least = self.costs.passes(shared, ideal=True).work.matmul
                flops = least * self.costs.machine.device.flops
            coded = coded_in(dataclasses.replace(shared, stage=3), self.model, self.costs.dtype)
        if self.costs and activations is None and fastest:
            activations = {name: self.costs.activations(fastest[name]) for name in fastest}
        elif activations is None:
            activations = self._estimated(self.batch)
        return estimate(
            *(self.params, tx or self.tx(state_format), zero),
            trainable=self.model.trainable if self.model else None,
            microbatches=self.microbatches,
            batch=batch,
            device=self.device,
            gathered_once=self.gathered_once,
            temporaries=not self.is_number,
            update=self.update,
            tokens=tokens * zero.num_devices,
            flops=flops,
            predicted={name: self.seconds(fastest[name]) for name in fastest},
            activations=activations,
            coded=coded,
            local_steps=self.local_steps,
        )

    def compared_stages(self, state_format: str | None) -> tuple[Plan, dict[str, ParallelPlan]]:
        """The plan of all stages, with predicted times and the sequences that fit.

        And how the step of each stage is shared: layers store what is fastest, as ``search`` has
        it, of what fits.
        """
        variants = variants_of(self.zero)
        shared = {name: self.parallel_plan(variants[name], state_format) for name in variants}
        timed = bool(self.costs and self.timed and not self.local_steps)
        if timed and self.activations is None:
            held = self.plan(self.zero, state_format=state_format).stages
            shared = {stage.name: self._fastest(shared[stage.name], stage) for stage in held}
        fastest = shared if timed else None
        plan = self.plan(self.zero, state_format=state_format, fastest=fastest)
        return dataclasses.replace(plan, most_sequences=self._most_sequences(plan.stages)), shared

    def _fastest(self, plan: ParallelPlan, held: StagePlan) -> ParallelPlan:
        """The plan of a stage with the form of recomputation that is fastest of those that fit."""
        costs = self.costs
        device = self.device
        model = self.model
        if not costs or not device or not model:
            return plan
        usable = (1 - HEADROOM) * device.memory
        fitting = []
        for recompute in costs.forms(SEARCHED):
            form = dataclasses.replace(plan, recompute=recompute)
            peak = held.with_activations(costs.activations(form)).peak
            if peak <= usable and allows(form, model, form.stage, form.update_in_backward):
                fitting.append(form)
        return min(fitting, key=lambda form: self.seconds(form).seconds, default=plan)

    def seconds(self, plan: ParallelPlan) -> StepSeconds:
        """What a step takes, as ``search`` has it; with what ``--remat`` computes again."""
        assert self.costs is not None
        if self.activations is not None:  # what is computed again is in ``extra_time``
            plan = dataclasses.replace(plan, recompute="none")
        passes = self.costs.passes(plan)
        passes = dataclasses.replace(passes, work=passes.work * (1 + self.extra_time))
        # Gradients may be summed in another dtype.
        assert self.model is not None
        precision = self.zero.precision
        trained = jax.tree.leaves(self.model.trained(self.params))
        sums = [x.size * precision.of_sum(precision.of_loss(x.dtype)).itemsize for x in trained]
        grad = sum(sums) / sum(x.size for x in jax.tree.leaves(self.params))
        param, _, state = self.costs.each(plan)
        return self.costs.seconds(plan, passes, each=(param, grad, state))

    def parallel_plan(self, zero: Zero, state_format: str | None = None) -> ParallelPlan:
        """How a step of a ``Zero`` is shared, as ``search`` has it."""
        shards = zero.num_shards if zero.stage else zero.num_devices
        return ParallelPlan(
            data=zero.num_devices,
            microbatch=self.batch,
            microbatches=self.microbatches,
            stage=zero.stage,
            replicas=zero.num_devices // shards,
            spread=zero.shard_state_over_replicas,
            recompute="full" if self.recompute else "none",
            offload="update" if zero.update_on == "host" else zero.offload is not None,
            state_format=state_format,
            weights="master" if self.master else "plain",
            update_in_backward=self.update == "backward",
            matmuls=self.matmuls,
        )

    def _most_sequences(self, stages: Sequence[StagePlan]) -> dict[str, int]:
        """Sequences of all devices in a step with which each stage leaves the headroom free.

        Empty where activations are not estimated. These grow alike with every sequence.
        """
        one = self._estimated(1)
        two = self._estimated(2)
        if self.device is None or one is None or two is None or self.activations is not None:
            return {}
        usable = (1 - HEADROOM) * self.device.memory
        unit = self.zero.num_devices * self.microbatches

        def peak(stage: StagePlan, batch: int) -> float:
            """Bytes of a device with so many sequences in a micro-batch."""
            pairs = zip(one, two, strict=True)
            activations = Activations(*(a + (batch - 1) * (b - a) for a, b in pairs))
            more = (batch / self.batch - 1) * stage.batch
            return stage.with_activations(activations).peak + more

        most = {x.name: largest(functools.partial(peak, x), usable) for x in stages}
        return {name: unit * count for name, count in most.items()}

    def _estimated(self, batch: int) -> Activations | None:
        """The activations of so many sequences, where the layers of the model are known."""
        form = "full" if self.recompute else "none"
        plan = ParallelPlan(microbatch=batch, recompute=form, matmuls=self.matmuls)
        return self.costs.activations(plan) if self.costs else None


def setup_of(options: Namespace) -> Setup:
    mesh = abstract_mesh(mesh_axes_of(options, target_of(options)))
    params, model = model_of(options.model, dtype_of(options), options.length)
    by_layer = getattr(options, "update_in_backward", False)
    tx = optimizer_of(options.optimizer, by_layer)
    axis = tuple(options.axis.split(",")) if options.axis else mesh.axis_names
    replica = tuple(options.replica_axis.split(",")) if options.replica_axis else axis[:-1][:1]
    offload = getattr(options, "offload", False)
    zero = Zero(
        *(mesh, 3),
        offload=("all" if by_layer else "optimizer") if offload else None,
        update_on="host" if getattr(options, "update_on_host", False) else "device",
        axis=tuple(name for name in axis if name not in replica),
        replica_axis=replica or None,
        precision=Precision(
            compute=_floating_dtype("--compute-dtype", options.compute_dtype),
            reduce=_floating_dtype("--reduce-dtype", options.reduce_dtype),
        ),
    )
    length = options.length or (model.length if model else 0)
    microbatches = options.microbatches
    unit = zero.num_devices * microbatches
    device = device_of(options)
    costs = None
    bits, rank = fine_tuning_of(options, model)
    if rank:
        model, tx = TracedModel.fine_tuned(model, tx, frozen=bits, lora=rank)
        params = model.abstract(dtype_of(options))
    if model and device:
        of_loss = zero.precision.of_loss(dtype_of(options))
        costs = costs_of(model, tx, machine_of(options.target, device), length, of_loss)
    matmuls = getattr(options, "matmuls", None)
    if matmuls and not isinstance(model, AnyModel):
        raise ValueError("--matmuls needs a model whose layers are known: a name, or MODULE:NAME.")
    if matmuls and device:
        device.rate(matmuls)  # raises where there is none
    return Setup(
        params=params,
        model=model,
        optimizer=tx,
        zero=zero,
        device=device,
        costs=costs,
        timed=_is_timed(options, zero, model),
        is_number=model is None and ":" not in options.model,
        batch=sequences_of(options.batch, length, unit) // unit if options.batch else 1,
        microbatches=microbatches,
        length=length,
        master=options.master,
        update="backward" if by_layer else "after",
        matmuls=matmuls,
        local_steps=getattr(options, "local_steps", None) or 0,
    )


def fine_tuning_of(options: Namespace, model: AnyModel | None) -> tuple[int, int]:
    """Bits of frozen matrices and the rank of their adapters, for ``TracedModel.fine_tuned``."""
    given = [name for name in ("frozen", "lora") if getattr(options, name, None)]
    if not given:
        return 0, 0
    asked = " and ".join(f"--{name}" for name in given)
    if not options.lora:
        raise ValueError(f"{asked} trains nothing without adapters: give --lora RANK, too.")
    if not isinstance(model, Decoder):
        raise ValueError(f"{asked} needs a model whose layers are known: a name, or a Decoder.")
    excluded = [x for x in ("master", "remat", "matmuls") if getattr(options, x, None)]
    if excluded:
        raise ValueError(f"{asked} is without --{excluded[0]}: leave one of them out.")
    return int(options.frozen[0]) if options.frozen else 0, options.lora


def sequences_of(text: str, length: int, unit: int = 1) -> int:
    """Sequences of all devices in a step, by ``--batch``: multiples of ``unit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)(-tokens)?", text)
    if not match or (match[2] and not match[3]) or not float(match[1]):
        meant = re.fullmatch(r"([\d.]*[1-9][\d.]*) ?([kmg]?)(?:[-_ ]*t.*)?", text.lower())
        word = f"; nearest is {meant[1]}{meant[2].upper()}-tokens" if meant else ""
        word = word.replace("K-", "k-")
        raise ValueError(f"--batch must look like 1024 or 4M-tokens, got {text!r}{word}.")
    if not length:
        raise ValueError(
            "--batch counts sequences, and --model does not say how long they are: give --length "
            "TOKENS, too."
        )
    number = float(match[1]) * {"": 1, "k": 2**10, "M": 2**20, "G": 2**30}[match[2]]
    sequences = int(number // length) if match[3] else int(number)
    if not match[3] and sequences != number:
        raise ValueError(f"--batch {text} is no whole number of sequences.")
    if sequences > 1e9:
        raise ValueError(f"--batch must be at most 1e9 sequences, got {sequences}.")
    if sequences < 1:
        raise ValueError(f"--batch {text} is less than one sequence of {length:,} tokens.")
    if sequences % unit:
        raise ValueError(
            f"--batch counts the sequences of all devices in a step, which share them equally in "
            f"all micro-batches: it must be a multiple of {unit:,}, got {sequences:,}; "
            f"{sequences * unit:,} are {sequences:,} on each device in each micro-batch."
        )
    return sequences


def abstract_mesh(mesh_axes: dict[str, int]) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(tuple(mesh_axes.values()), tuple(mesh_axes))


def target_of(options: Namespace) -> targets.Target:
    """The target; GPUs of any name where their figures are given."""
    try:
        return targets.parse(options.target, other_gpus=bool(options.memory or options.machine))
    except ValueError as error:
        if not str(error).startswith("unknown target"):
            raise
        raise ValueError(
            f"{error} Any other can be planned as NAMExNUMBER with its figures: {FIGURES}."
        ) from None


def compile_on_cpu(target: targets.Target) -> None:
    """Makes as many CPU devices of this machine as a target of CPUs names."""
    if target.kind == "cpu":
        jax.config.update("jax_num_cpu_devices", target.num_devices)


def mesh_axes_of(options: Namespace, target: targets.Target) -> dict[str, int]:
    """The sizes of the mesh's axes: of ``--mesh``, else those that suit the target."""
    if not options.mesh:
        return target.mesh_axes
    axes: dict[str, int] = {}
    for part in options.mesh.split(","):
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", part)
        if not match:
            raise ValueError(f"--mesh must look like x=4,y=8, got {options.mesh!r}.")
        if match[1] in axes:
            raise ValueError(f"--mesh {options.mesh}: axis {match[1]!r} is named twice.")
        axes[match[1]] = int(match[2])
    if math.prod(axes.values()) != target.num_devices:
        sizes = " * ".join(map(str, axes.values()))
        raise ValueError(
            f"--mesh {options.mesh}: {sizes} = {math.prod(axes.values())} devices requested, but "
            f"{options.target} has {target.num_devices}."
        )
    return axes


def dtype_of(options: Namespace) -> Any:
    # XLA:CPU widens the sums of bfloat16.
    default = "float32" if options.target.startswith("cpu") else "bfloat16"
    return _floating_dtype("--dtype", options.dtype or default)


def _floating_dtype(option: str, name: str | None) -> Any:
    if name is None:
        return None
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{option} {name!r} is no dtype; bfloat16 and float32 are.") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{option} must be a floating dtype, got {dtype}.")
    return dtype


def device_of(options: Namespace) -> DeviceKind | None:
    """The figures of the target, replaced by those that are given."""
    units = {"memory": 2**30, "bandwidth": 1e9, "tflops": 1e12, "link": 1e9, "network": 1e9}
    figures: dict[str, Any] = {name: getattr(options, name) for name in units}
    given = {name.removeprefix("t"): x * units[name] for name, x in figures.items() if x}
    known = _measured(options) if options.machine else kind_of(options.target)
    if known is not None:
        return dataclasses.replace(known, **given)
    if "memory" not in given:
        if given:
            raise ValueError(
                f"nothing is known of {options.target}: beside --bandwidth, --tflops, --link and "
                "--network a device needs --memory GIB."
            )
        return None
    figures = {"name": target_of(options).kind, "network": None, "source": "given"}
    figures |= dict.fromkeys(("bandwidth", "flops", "link"), math.inf)
    return DeviceKind(**(figures | given))


def _measured(options: Namespace) -> DeviceKind:
    """Of a device of ``--machine``, which must be of the target's kind."""
    computed = _floating_dtype("--compute-dtype", getattr(options, "compute_dtype", None))
    dtype = (computed or dtype_of(options)).name
    rates = MeasuredRates.read(options.machine)
    if targets.parse(rates.target, other_gpus=True).kind != target_of(options).kind:
        raise ValueError(
            f"--machine {options.machine} was measured on {rates.target}, --target is "
            f"{options.target}: give the figures of a machine of that kind."
        )
    return rates.device(dtype)


def known_device(options: Namespace) -> DeviceKind:
    """The figures of the target, which a search needs all."""
    device = device_of(options)
    names = {"flops": "tflops"}
    several = ("network",) if target_of(options).groups > 1 else ()
    unknown = [
        f"--{names.get(name, name)}"
        for name in ("memory", "bandwidth", "flops", "link", *several)
        if device is None or getattr(device, name) in (None, math.inf)
    ]
    if device is None or unknown:
        raise ValueError(f"a search needs {', '.join(unknown)} of a device of {options.target}.")
    return device


def _is_timed(options: Namespace, zero: Zero, model: AnyModel | None) -> bool:
    """Whether a search can time the step of a ``Zero``."""
    dtype = dtype_of(options)
    try:
        device = known_device(options)
        if isinstance(model, Decoder):
            check_dtype(options.target, dtype)
    except ValueError:
        return False
    as_stored = zero.precision.of_loss(dtype) == dtype
    linked = not zero.offload or None not in (device.host_link, device.host_bandwidth)
    own_mesh = isinstance(model, TracedModel) and model.zero is not None
    all_devices = zero.num_devices == target_of(options).num_devices
    return as_stored and linked and all_devices and not own_mesh
