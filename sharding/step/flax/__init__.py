"""Flax models in a step: linen modules, nnx modules; imported where the user has Flax."""
