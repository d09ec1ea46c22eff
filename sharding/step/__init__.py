"""The training step: micro-batches, gathering, reduction, update, Flax."""
