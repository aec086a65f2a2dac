"""`tercet`: one command for everything. Owns the table of commands; each command is a function elsewhere.

A command's module is imported when it runs, so that `tercet tokenizer` never pays for torch.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    """module: has `main(argv) -> int`. is_service: it ends as `python -m module` does, by `process.leave`."""

    help: str
    module: str
    is_service: bool = False


COMMANDS: Final = {
    "up": Command("run the whole chain on this machine, with the OpenAI gateway", "services.commands.up"),
    "run": Command("send one prompt and print the answer", "services.commands.run"),
    "pull": Command("fetch a model of the catalogue", "services.commands.pull"),
    "models": Command("list the catalogue", "services.commands.models"),
    "plan": Command("what a model takes of a device, and how fast it could be", "services.commands.plan"),
    "export-tokenizer": Command("write the tokenizer as files for other tools", "services.commands.export_tokenizer"),
    "eval": Command("measure a model's quality: perplexity", "services.evaluate.__main__"),
    "ps": Command("list the requests of a scheduler, and what each waits for", "services.commands.ps"),
    "top": Command("watch a scheduler: queue, batch, blocks, tokens per second", "services.commands.top"),
    "replay": Command("run a recording of `scheduler --record` through the core", "services.commands.replay"),
    "bench": Command("load-test a server: latencies, throughput, goodput; compare, vary", "services.bench.__main__"),
    "simulate": Command("run the scheduler against a model of executors", "services.simulate.__main__"),
    "demo": Command("pull, run, ask one question, show its trace, drain", "services.commands.demo"),
    "tokenizer": Command("run the tokenizer service", "services.tokenizer.__main__", is_service=True),
    "scheduler": Command("run the scheduler service", "services.scheduler.__main__", is_service=True),
    "executor": Command("run the executor service", "services.executor.__main__", is_service=True),
    "gateway": Command("run the OpenAI gateway alone", "services.gateway.__main__", is_service=True),
    "keys": Command("make, list and revoke API keys", "services.commands.keys"),
    "conform": Command("check a service of any make against the contract", "services.conform.__main__"),
    "config": Command("print every setting as a table", "services.commands.config"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tercet",
        description="Serves large language models as three programs over gRPC.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<16} {command.help}" for name, command in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    chosen = parser.parse_args(arguments[:1])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported; its INFO lines are no news to users
    module = importlib.import_module(COMMANDS[chosen.command].module)
    try:
        code: int = module.main(arguments[1:])
        if COMMANDS[chosen.command].is_service:
            importlib.import_module("services.process").leave(code)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: don't complain at exit
        code = 141
    return code


if __name__ == "__main__":
    sys.exit(main())
