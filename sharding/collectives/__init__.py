"""Reduce-scatter, all-gather and sparse rows between devices, and their codecs."""
