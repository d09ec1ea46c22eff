"""Temporaries of a compiled program, by what its compiler says."""

from typing import Any


def temporaries_of(compiled: Any) -> int:
    """Bytes of device memory that a program needs beside its arguments and results."""
    return int(temporary_bytes(compiled.memory_analysis(), tiled=is_tiled(compiled.as_text())))


def is_tiled(text: str) -> bool:
    """Whether a program has the layouts of TPUs, whose memory consists of tiles."""
    return ":T(" in text


def temporary_bytes(memory: Any, *, tiled: bool) -> float:
    """The same, of what the compiler says.

    For CPUs and GPUs that is ``temp_size_in_bytes``, the block that they allocate. For TPUs it is
    more than the addresses of the program take, by up to a half. Their ``peak_memory_in_bytes`` is
    what is live at once: arguments and results, too, what is on the host, and buffers in the
    memory of the chip, 16 to 128 MiB. The addresses end 0 to 6 % above what it leaves for
    temporaries, where no block is free that is large enough.

    Args:
      memory: of ``compiled.memory_analysis()``.
      tiled: whether the program is one for TPUs.
    """
    allocated = float(memory.temp_size_in_bytes)
    if not tiled or not memory.peak_memory_in_bytes:
        return allocated
    live = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    live -= memory.host_temp_size_in_bytes + memory.argument_size_in_bytes
    live -= memory.output_size_in_bytes - memory.alias_size_in_bytes
    return min(allocated, max(0.0, float(live)))
