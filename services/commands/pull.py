"""`tercet pull NAME`: a model of the catalogue into the user's cache."""

import argparse
import os
import sys
from collections.abc import Sequence

from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, pull
from services.progress import TerminalProgress


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet pull", allow_abbrev=False)
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    name = parser.parse_args(argv).name
    try:
        with TerminalProgress(sys.stderr) as progress:
            path = pull(name, cache_directory(os.environ), progress)
    except CatalogueError as error:
        print(f"tercet pull: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0
