"""Stages of pipelines: how layers are shared, and what each stage holds and sends."""
