"""The kernels in traced programs."""

from _pallas_bytes import calls as kernels_in

__all__ = ["kernels_in"]
