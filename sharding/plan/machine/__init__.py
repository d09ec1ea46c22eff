"""Accelerators: their figures, how they are joined, and how long collectives take."""
