"""Temporaries of compiled programs: on TPUs what is live, not what is said to be allocated."""

from types import SimpleNamespace

import pytest

from sharding.plan.audit._liveness import temporary_bytes

# Layers, sequences of a micro-batch, micro-batches and recomputation; argument_size, temp_size and
# peak_memory, and where the addresses of temporaries end in the compiler's dump of the program, in
# GiB: 7B on v5e:2x4 at stage 3, 2,048 tokens, libtpu 0.0.42.1.
PROGRAMS = [
    (4, 1, 2, "full", 0.749, 3.302, 3.022, 2.405),
    (24, 1, 2, "full", 3.576, 8.891, 9.223, 5.778),
    (24, 4, 2, "full", 3.576, 14.918, 13.438, 9.867),
    (24, 1, 1, "minimal_with_context", 3.576, 9.386, 10.367, 6.946),
]


def memory(argument=0, temp=0, peak=0, **others):
    """As ``memory_analysis`` gives it; all results take over the memory of arguments."""
    names = ("host_argument", "host_temp", "argument", "temp", "output", "alias")
    sizes = {f"{name}_size_in_bytes": 0 for name in names}
    sizes |= {"argument_size_in_bytes": argument, "output_size_in_bytes": argument}
    sizes |= {"alias_size_in_bytes": argument, "temp_size_in_bytes": temp}
    return SimpleNamespace(**sizes | others, peak_memory_in_bytes=peak)


@pytest.mark.parametrize("program", PROGRAMS)
def test_of_a_tpu_they_are_those_of_its_addresses(program):
    argument, temp, peak, end = program[4:]
    found = temporary_bytes(memory(argument, temp, peak), tiled=True)
    assert 0.94 * end < found <= end
    assert temp > 1.3 * end


@pytest.mark.parametrize(
    ("found", "nbytes"),
    [
        (memory(100, 20, 130), 20),  # 10 bytes are in the memory of the chip
        (memory(100, 50, 0), 50),  # a compiler that does not tell
        (memory(100, 50, 142, host_argument_size_in_bytes=8, host_temp_size_in_bytes=4), 30),
        (memory(100, 50, 140, output_size_in_bytes=110), 30),  # ten bytes of new results
    ],
)
def test_what_is_live(found, nbytes):
    assert temporary_bytes(found, tiled=True) == nbytes
    assert temporary_bytes(memory(4, 9, 7), tiled=False) == 9  # what is allocated
