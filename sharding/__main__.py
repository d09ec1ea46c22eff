"""``python -m sharding``: the command ``optax-ext``, whose ``--help`` says what may hide it."""

import sys

from sharding.cli import main

if __name__ == "__main__":
    sys.exit(main())
