"""``python -m sharding plan`` and ``python -m sharding audit``."""

import sys

from sharding.plan._cli import main

if __name__ == "__main__":
    sys.exit(main())
