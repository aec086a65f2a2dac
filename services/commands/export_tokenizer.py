"""`tercet export-tokenizer DIR`: the tokenizer as files for other tools, of a model file or of a running server."""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc

from services.catalogue import DEFAULT_MODEL
from services.commands import calling
from services.process import StartError
from services.rpc import Outgoing, make_channel
from services.settings import ConfigError
from services.tokenizer.export import FILES, tokenizer_files, unpack
from services.tokenizer.loading import load_text
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc

MOST_BYTES: Final = 200 * 1024 * 1024


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet export-tokenizer", allow_abbrev=False, description=__doc__)
    parser.add_argument("directory", type=Path, help="made if missing; files of the same names must not be there yet")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default=DEFAULT_MODEL, help=f"name of the catalogue or GGUF file; {DEFAULT_MODEL}")
    source.add_argument("--target", help="host:port or unix:/path of a tokenizer that serves")
    calling.add_flags(parser)
    given = parser.parse_args(argv)
    try:
        files = (
            _of_model(given.model)
            if given.target is None
            else asyncio.run(_of_server(given.target, calling.outgoing(given, os.environ)))
        )
        _write(given.directory, files)
    except (ConfigError, StartError, OSError, ValueError) as error:
        print(f"tercet export-tokenizer: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"tercet export-tokenizer: {given.target}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    for name in files:
        print(given.directory / name)
    return 0


def _of_model(source: str) -> dict[str, bytes]:
    loaded = load_text(source)
    return tokenizer_files(loaded.model, loaded.template, loaded.context_length)


async def _of_server(target: str, outgoing: Outgoing) -> dict[str, bytes]:
    async with make_channel(target, outgoing=outgoing) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        data, told = bytearray(), None
        async for piece in stub.GetTokenizer(tokenizer_pb2.TokenizerServiceGetTokenizerRequest(), timeout=60):
            data += piece.chunk
            told = piece.sha256 if piece.HasField("sha256") else told
            if len(data) > MOST_BYTES:
                raise ValueError(f"{target} sends more than {MOST_BYTES} bytes")
    if hashlib.sha256(data).hexdigest() != told:
        raise ValueError(f"what {target} sent is not what its SHA-256 says")
    return unpack(bytes(data), FILES)


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        if os.path.lexists(directory / name):
            raise FileExistsError(f"{directory / name} is there already")
    for name, content in files.items():
        (directory / name).write_bytes(content)
