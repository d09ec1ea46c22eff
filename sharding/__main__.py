"""``python -m sharding plan`` and ``python -m sharding audit``: the command ``optax-ext``.

A file ``sharding.py`` in the working folder hides this package from ``python -m sharding``, not
from ``optax-ext``.
"""

import sys

from sharding.cli import main

if __name__ == "__main__":
    sys.exit(main())
