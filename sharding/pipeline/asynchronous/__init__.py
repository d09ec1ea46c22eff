"""Asynchronous pipelines: updates without flushes, versions of the parameters, their schedules."""
