"""python server.py MODEL [flags]: the same as `jaxserve serve`."""

from __future__ import annotations

import argparse
import sys

from jaxserve.cli import add_serve_flags, run_server


def main() -> int:
    parser = argparse.ArgumentParser("server.py", description="serve a model over HTTP with OpenAI's API", allow_abbrev=False)
    add_serve_flags(parser)
    return run_server(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
