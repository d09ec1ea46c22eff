"""The auditor: memory, traffic and a bound on time of one step, read from its compiled program."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from sharding.placement._specs import AnyMesh
from sharding.plan._format import (
    Printed,
    Table,
    count,
    seconds,
    size,
    with_article,
)
from sharding.plan.audit._hlo import PHASES, Program, phase_of, shortened
from sharding.plan.audit._program_collectives import Collective, axes_of_groups, collectives
from sharding.plan.audit._program_costs import costs
from sharding.plan.audit._program_memory import (
    PARTS,
    arguments_of,
    at_peak,
    by_use,
    temporary_bytes,
)
from sharding.plan.audit._warnings import computed_again, warnings_of, widened
from sharding.plan.cost._ledger import (
    Difference,
    HeldRow,
    Ledger,
    StepRows,
    WorkRow,
    differences,
    table_of_differences,
)
from sharding.plan.cost._parallel_plan import MATMULS
from sharding.plan.cost._step_time import StepSeconds
from sharding.plan.machine._devices import HEADROOM, KINDS, DeviceKind, kind_of


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind."""

    phase: str  # one of ``PHASES``
    op: str  # such as ``reduce-scatter`` or ``collective-permute``
    axes: tuple[str, ...]  # the mesh axes that they run over; empty where no mesh is known
    dtype: str  # the dtype that is sent
    count: int  # how often they run in a step
    wire_bytes: float  # bytes that one device sends
    across_slices: bool  # whether they leave a TPU slice
    scope: str  # the operation that the dearest one was compiled from


@dataclasses.dataclass(frozen=True)
class Audit(Printed):
    """The cost of one step for one device; ``str()`` makes tables of it, ``to_dict()`` JSON."""

    devices: int  #: the number of devices that run the program
    kind: DeviceKind | None  #: their figures, where they are known
    arguments: dict[str, float]  #: bytes of each part: parameters, optimizer state, and so on
    results: float  #: bytes of results that do not take over the memory of an argument
    #: bytes, by the compiler; on TPUs those that are live at once; None for text
    temporaries: float | None
    at_peak: dict[str, float]  #: bytes of temporaries at their peak by use, estimated
    host: float  #: bytes in host memory
    traffic: tuple[Traffic, ...]  #: the collectives, dearest first
    flops: dict[str, float]  #: floating-point operations by phase
    products: dict[str, float]  #: the part of them in matrix products
    nbytes: dict[str, float]  #: bytes read from and written to main memory, by phase
    #: the ledger of the plan, or bytes that it sends; None where none was given
    expected: Ledger | float | None
    warnings: tuple[str, ...]  #: likely mistakes, in words
    notes: tuple[str, ...] = ()  #: how to read the figures, in words
    tokens: float = 0.0  #: of all devices in a step; 0 where that was not given
    #: bytes sent by the cheapest branches, a sparse sync's unless its lists overflow
    least_wire: float = 0.0
    predicted: StepSeconds | None = None  #: what a step takes, by a plan; None where none was given
    #: of ``warnings``, those on what the compiler chose and what its program does not say
    of_compiler: tuple[str, ...] = ()
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  #: sizes of the mesh's axes
    #: of ``products``, operations of 8-bit operands by phase: ``"fp8"`` and ``"int8"``
    low: Mapping[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    derived = (
        *("memory", "fits", "headroom", "wire_bytes", "matmul_flops", "seconds"),
        *("tokens_per_second", "expected_wire", "expected_memory", "differences"),
    )

    def ledger(self) -> StepRows:
        """The same as the rows of a plan: what is sent and computed by phases, and what is held.

        The rows of a plan and those of its program differ by ``differences``.
        """
        sent = [
            WorkRow(row.phase, row.op, row.wire_bytes, row.axes, is_sent=True)
            for row in self.traffic
        ]
        products = []
        for phase, amount in self.products.items():
            low = {unit: by_phase.get(phase, 0.0) for unit, by_phase in self.low.items()}
            units = {"flops": amount - sum(low.values())} | low
            products += [WorkRow(phase, "products", x, (unit,)) for unit, x in units.items() if x]
        passes = [
            WorkRow(phase, "passes", nbytes, ("memory",)) for phase, nbytes in self.nbytes.items()
        ]
        params = self.arguments.get("parameters", 0.0)
        state = sum(self.arguments.get(x, 0.0) for x in ("optimizer state", "master weights"))
        arguments = sum(self.arguments.values())
        grads = self.at_peak.get("gradients", 0.0)
        held = (
            HeldRow("params", params),
            HeldRow("state", state),
            HeldRow("batch", arguments - params - state),
            HeldRow("host", self.host, memory="host"),
            HeldRow("gradients", grads, "peak"),
            HeldRow("activations", self.memory - arguments - grads, "peak"),
        )
        return StepRows((*sent, *products, *passes), self.mesh, held)

    @property
    def expected_wire(self) -> float | None:
        """Bytes that the plan sends; None where none was given."""
        return self.expected.wire if isinstance(self.expected, Ledger) else self.expected

    @property
    def expected_memory(self) -> float | None:
        """Bytes that the plan holds; None where none was given that has activations."""
        expected = self.expected
        return expected.peak if isinstance(expected, Ledger) and expected.is_whole else None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Rows in which the program differs from the plan by more than 3 %."""
        if not isinstance(self.expected, Ledger):
            return ()
        return differences(self.expected, self.ledger())

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        figures = dataclasses.replace(self, expected=None)
        found = dataclasses.asdict(figures) | {name: getattr(self, name) for name in self.derived}
        found["differences"] = [row._asdict() for row in self.differences]
        del found["expected"], found["mesh"]
        return found

    @property
    def memory(self) -> float:
        """Bytes that one device needs for the step: arguments, new results, temporaries."""
        temporaries = sum(self.at_peak.values()) if self.temporaries is None else self.temporaries
        return sum(self.arguments.values()) + self.results + temporaries

    @property
    def by_part(self) -> dict[str, float]:
        """``memory`` by what it is; gradients are those that are live at its peak, estimated."""
        return self.ledger().by_part()

    @property
    def matmul_flops(self) -> float:
        """Operations of matrix products of all phases."""
        return sum(self.products.values())

    @property
    def fits(self) -> bool | None:
        """Whether ``memory`` fits the device; None where its kind is unknown."""
        return None if self.kind is None else self.memory <= self.kind.memory

    @property
    def headroom(self) -> float | None:
        """The share of the device's memory that is left; negative where the step does not fit."""
        return None if self.kind is None else 1 - self.memory / self.kind.memory

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(row.wire_bytes for row in self.traffic)

    @property
    def seconds(self) -> dict[str, float]:
        """The least time of a step by its bounds; empty where the device is unknown."""
        if self.kind is None:
            return {}
        slow = sum(row.wire_bytes for row in self.traffic if row.across_slices)
        moved = sum(self.nbytes.values())
        flops = sum(self.flops.values())
        for unit, by_phase in self.low.items():  # at their own rate, where there is one
            faster = self.kind.flops / (getattr(self.kind, unit) or self.kind.flops)
            flops -= sum(by_phase.values()) * (1 - faster)
        return self.kind.at_least(flops, moved, self.wire_bytes, slow)

    @property
    def tokens_per_second(self) -> float | None:
        """An upper bound for all devices, at their peak: all overlaps completely."""
        slowest = max(self.seconds.values(), default=0.0)
        return self.tokens / slowest if self.tokens and slowest else None

    def tables(self) -> list[Table]:
        tables = [self._memory_table(), self._traffic_table(), self._work_table()]
        tables += table_of_differences({"": self.differences})
        return [table for table in tables if table.rows]

    @property
    def sentences(self) -> list[str]:
        warnings = [f"warning: {text}" for text in self.warnings]
        return warnings + [f"note: {text}" for text in self.notes]

    def _memory_table(self) -> Table:
        # Arguments, results, and temporaries with estimates of their uses, if above 1 %.
        rows = [(name, size(value)) for name, value in self.arguments.items() if value]
        if self.results:
            rows.append(("new results", size(self.results)))
        peak = sum(self.at_peak.values())
        if self.temporaries is not None:
            rows.append(("temporaries, by the compiler", size(self.temporaries)))
        for name, value in sorted(self.at_peak.items(), key=lambda item: -item[1]):
            if value > 0.01 * peak:
                rows.append((f"  of which about: {name}", size(value)))
        rows.append(("total", size(self.memory)))
        if self.expected_memory:
            ratio = f"{self.memory / self.expected_memory:.3f} of planned"
            rows.append((ratio, size(self.expected_memory)))
        if self.host:
            rows.append(("in host memory", size(self.host)))
        if self.kind is not None:
            tight = (self.headroom or 0) < HEADROOM
            verdict = ("fits, barely" if tight else "fits") if self.fits else "DOES NOT FIT"
            rows.append((f"{with_article(self.kind.name)} has: {verdict}", size(self.kind.memory)))
        return Table("Memory of one device", ("", "bytes"), rows)

    def _traffic_table(self) -> Table:
        rows: list[tuple[str, ...]] = [
            (
                *(row.phase, row.op, "slices" if row.across_slices else "+".join(row.axes)),
                *(row.dtype, str(row.count), size(row.wire_bytes), shortened(row.scope)),
            )
            for row in self.traffic
            if row.wire_bytes > 1e-3 * self.wire_bytes
        ]
        # The sum of all, and the plan's.
        if rows:
            rows.append(("total", "", "", "", "", size(self.wire_bytes), ""))
        if self.least_wire < self.wire_bytes:
            rows.append(("by the branches that send least", *[""] * 4, size(self.least_wire), ""))
        if self.expected_wire:
            ratio = f"{self.wire_bytes / self.expected_wire:.3f} of theory"
            rows.append((ratio, *[""] * 4, size(self.expected_wire), ""))
        columns = ("phase", "op", "axes", "dtype", "runs", "bytes", "mostly")
        return Table("Sent by one device", columns, rows)

    def _work_table(self) -> Table:
        total = sum(self.flops.values())
        moved = sum(self.nbytes.values())
        rows = [
            (phase, f"{self.flops.get(phase, 0) / 1e9:,.1f}", size(self.nbytes.get(phase, 0)))
            for phase in PHASES
            if self.flops.get(phase, 0) > 1e-3 * total or self.nbytes.get(phase, 0) > 1e-3 * moved
        ]
        rows.append(("total", f"{total / 1e9:,.1f}", size(moved)))
        for unit, by_phase in self.low.items():
            rows.append((f"  products in {unit}", f"{sum(by_phase.values()) / 1e9:,.1f}", ""))
        # Lower bounds of the time, the largest first, and how much of it the others are.
        bounds = sorted(self.seconds.items(), key=lambda item: -item[1])
        for name, value in bounds:
            share = f"{100 * value / (bounds[0][1] or 1):.0f} %"
            rows.append((f"not faster than, by {name}", seconds(value), share))
        if self.predicted:
            rows.append(("step, predicted", seconds(self.predicted.seconds), ""))
        if self.predicted and self.tokens:
            rate = count(self.tokens / self.predicted.seconds)
            rows.append(("tokens/s of all, predicted", rate, ""))
        if self.tokens_per_second:
            measured = self.kind is not None and self.kind.reached is not None
            bound = "  bound as measured" if measured else "  bound at the peak"
            rows.append((bound, count(self.tokens_per_second), ""))
        return Table("Work of one device", ("phase", "GFLOP", "memory traffic"), rows)


def audit(
    compiled: Any,
    *,
    mesh: AnyMesh | None = None,
    device: DeviceKind | str | None = None,
    expected: Ledger | float | None = None,
    predicted: StepSeconds | None = None,
    parts: Mapping[str, str] = PARTS,
    tokens: float = 0.0,
    loss_program: object = None,
) -> Audit:
    """Reads a compiled step: memory, collectives, work, a bound on its time, warnings.

    Works on any jitted function, and on programs for compile-only ``targets``. Nothing is run.

    Args:
      compiled: the result of ``jax.jit(f).lower(...)`` or ``nnx.jit(f).lower(...)``; or of its
        ``compile()``, without products of float32 matrices; or the text of that, without
        temporaries and host memory.
      mesh: names the axes of collectives; by default the mesh of the arguments.
      device: figures, or the name of a target; by default those of the arguments' devices.
      expected: the ledger of a plan, such as a stage that ``estimate`` returns, whose rows are
        compared with those of the program; or bytes that one device should send, such as those of a
        stage and of ``pipeline_wire``.
      predicted: what a step takes, such as ``step_seconds`` of its plan.
      parts: a regular expression of argument names for each part; the first match counts. By
        default, arguments that no name matches but that come back from a training step are
        parameters if the loss reads them, else optimizer state, and a note names them.
      tokens: of all devices in a step, for an upper bound of the tokens per second.
      loss_program: ``step.loss_program(state, batch)``, for a note on what runs per device and why.

    Raises:
      ValueError: ``compiled`` is no program, or ``device`` names no known kind.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> step = jax.jit(lambda params, x: params @ x)
      >>> found = shd.audit(step.lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile())
      >>> found.matmul_flops, found.arguments["parameters"]
      (1024.0, 512.0)
    """
    # The program: its StableHLO where it is at hand, its text, its buffers by the compiler.
    source = ""
    if hasattr(compiled, "compile"):  # of jax.jit or of nnx.jit
        source = compiled.as_text()
        compiled = compiled.compile()
    if not isinstance(compiled, str) and not hasattr(compiled, "as_text"):
        kind = type(compiled).__name__
        raise ValueError(f"audit reads a program, got a {kind}: pass step.lower(*arguments).")
    program = Program(compiled)
    memory = None
    placed = []
    if not isinstance(compiled, str):
        memory = compiled.memory_analysis()
        placed = jax.tree.leaves(compiled.input_shardings)
    if mesh is None:
        mesh = next((x.mesh for x in placed if isinstance(x, NamedSharding)), None)

    # Traffic, work by phase, and memory.
    sent = collectives(program, once=True)
    work, unknown = costs(program)
    buffers = at_peak(program)
    by_phase = [(phase_of(cost.scope), cost) for cost in work]
    arguments, about = arguments_of(program, parts, placed)
    about += widened(arguments, sent, placed)
    about += [f"the loss runs {loss_program}"] if loss_program is not None else []
    temporaries = temporary_bytes(memory, tiled=program.tiled) if memory else None

    warnings = warnings_of(program, sent, buffers, arguments, source)
    of_compiler = [f"how often the loop %{x} runs is unknown: counted once" for x in unknown]
    result = Audit(
        devices=program.num_devices,
        kind=_device_kind(device, mesh),
        arguments=dict.fromkeys(parts, 0.0)
        | _sums((x.part, x.nbytes) for x in arguments if x.part),
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes if memory else 0.0,
        temporaries=temporaries,
        at_peak=by_use(buffers, temporaries),
        host=(memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes) if memory else 0,
        traffic=_traffic(sent, mesh),
        least_wire=sum(each.wire_bytes for each in collectives(program, "cheapest", once=True)),
        flops=_sums((phase, cost.flops) for phase, cost in by_phase),
        products=_sums((phase, cost.matmul_flops) for phase, cost in by_phase),
        nbytes=_sums((phase, cost.nbytes) for phase, cost in by_phase),
        low=_products_in_few_bits(by_phase),
        expected=expected,
        predicted=predicted,
        warnings=(),
        notes=tuple(about),
        tokens=tokens,
        mesh=dict(mesh.shape) if mesh is not None else {},
    )
    held = size(result.memory)
    if result.kind:
        held += f" of {size(result.kind.memory)} of {with_article(result.kind.name)}"
    of_compiler += computed_again(work, held)
    warnings += of_compiler
    if result.headroom is not None and result.headroom < HEADROOM:
        warnings.insert(0, _tight(result))
    chosen = tuple(of_compiler)
    return dataclasses.replace(result, warnings=tuple(warnings), of_compiler=chosen)


def _products_in_few_bits(by_phase: Sequence[tuple[str, Any]]) -> dict[str, dict[str, float]]:
    """Operations of such products by their unit, where there are any, and phase."""
    return {
        unit: _sums((phase, getattr(cost, unit)) for phase, cost in by_phase)
        for unit in MATMULS
        if any(getattr(cost, unit) for _, cost in by_phase)
    }


def _sums(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, value in values:
        total[name] = total.get(name, 0.0) + value
    return total


def _device_kind(device: DeviceKind | str | None, mesh: AnyMesh | None) -> DeviceKind | None:
    if isinstance(device, str):
        kind = kind_of(device)
        if kind is None:
            raise ValueError(
                f"the figures of device {device!r} are not known; known are {', '.join(KINDS)}. "
                "Give those of another as a sharding.DeviceKind, or leave device out: there is no "
                "bound on the time then."
            )
        return kind
    if device is None and isinstance(mesh, jax.sharding.Mesh):
        return kind_of(mesh.devices.flat[0].device_kind)
    return device


def _traffic(collectives: list[Collective], mesh: AnyMesh | None) -> tuple[Traffic, ...]:
    """Collectives by phase, operation, axes and dtype; the dearest first."""
    groups: dict[tuple, list[Collective]] = {}
    for sent in collectives:
        axes = () if sent.across_slices else axes_of_groups(sent.groups, mesh)
        key = (phase_of(sent.scope), sent.op, axes, sent.dtype, sent.across_slices)
        groups.setdefault(key, []).append(sent)
    rows = [
        Traffic(
            *(phase, op, axes, dtype),
            count=sum(sent.runs for sent in group),
            wire_bytes=sum(sent.wire_bytes for sent in group),
            across_slices=across,
            scope=max(group, key=lambda sent: sent.wire_bytes).scope,
        )
        for (phase, op, axes, dtype, across), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _tight(result: Audit) -> str:
    assert result.kind is not None
    name = with_article(result.kind.name)
    left = result.kind.memory - result.memory
    if result.fits:
        spare = f"{size(left)} ({result.headroom:.0%}) to spare"
        return f"the step fits {name} with only {spare}: allocators and libraries need some of it"
    needs = f"{size(result.memory)} on each device"
    return f"the step needs {needs}, {size(-left)} more than {name} has"
