"""The command line: ``optax-ext``, or ``python -m sharding``."""

from sharding.cli._main import main as main
