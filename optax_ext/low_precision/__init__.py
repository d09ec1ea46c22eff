"""Optimizer state in low precision: formats, rounding, and the wrapper for any transformation."""
