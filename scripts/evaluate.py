#!/usr/bin/env python3
"""Evaluate a model from a checkout; the same as `jaxserve eval`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxserve.evaluation import main

if __name__ == "__main__":
    sys.exit(main())
