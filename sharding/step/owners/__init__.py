"""Optimizers of matrices under ZeRO: every matrix is updated by one device, its owner."""
