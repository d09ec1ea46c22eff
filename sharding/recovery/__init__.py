"""Checkpoints in the host memory of peers: survives lost machines at the cost of seconds."""
