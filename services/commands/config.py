"""`tercet config`: every setting of every process, as the tables of the README."""

import argparse
from collections.abc import Sequence

from services.config import PROCESSES
from services.settings import markdown_table


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="tercet config", allow_abbrev=False).parse_args(argv)
    print(markdown_table(*PROCESSES), end="")
    return 0
