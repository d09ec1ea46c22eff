"""Layers to the stages of a pipeline: PipeDream, 2BW, HetPipe and 1F1B*."""
