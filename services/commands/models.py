"""`tercet models`: the catalogue, and what of it is on this machine."""

import argparse
import os
from collections.abc import Sequence

from services.catalogue import MODELS, cache_directory, is_pulled


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="tercet models", allow_abbrev=False).parse_args(argv)
    cache = cache_directory(os.environ)
    for name, entry in MODELS.items():
        state = "pulled" if is_pulled(entry, cache) else f"tercet pull {name}"
        print(f"{name:<16} {entry.source.bytes / 1e6:7.1f} MB  {entry.licence:<12} {state:<26} {entry.description}")
    return 0
