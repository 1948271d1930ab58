"""python -m jaxserve: the `jaxserve` command."""

import sys

from jaxserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
