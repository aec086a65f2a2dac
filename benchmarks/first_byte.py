"""What tokenizer and gateway add to the time of the first byte, for a chat of 100 tokens.

`python benchmarks/first_byte.py`. Real processes over Unix sockets, as `tercet up` starts them, with the default
model's tokenizer and chat template; the executor is the fake one, without delay. In turn, one at a time: the chat over
HTTP to the first chunk, on a connection that is kept; and the same number of token ids straight to the scheduler over
gRPC, to the first delta. What the first takes longer is spent in gateway and tokenizer, and on the way to them.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chain_cost import ready, start

from services.catalogue import DEFAULT_MODEL
from services.rpc import make_channel
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

TEXT: Final = (
    "Please tell me in a few words how a sailing ship can make way against the wind, and why it cannot sail straight "
    "into it. Then say what the keel has to do with it, and who found that out."
    " I have a small boat myself and sail it on a lake."
)
NEW_TOKENS: Final = 4
WARM: Final = 20


class Http:
    """One connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def first_byte_s(self, number: int) -> float:
        message = {"role": "user", "content": f"{number:06}. {TEXT}"}
        asked = {"model": DEFAULT_MODEL, "messages": [message], "max_tokens": NEW_TOKENS, "stream": True}
        body = json.dumps(asked).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        began = time.perf_counter()
        self._writer.write(head.encode() + f"{len(body)}\r\n\r\n".encode() + body)
        first = None
        async for line in self._reader:
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise SystemExit(f"refused: {line!r}")
            if first is None and line.startswith(b"data: {"):
                first = time.perf_counter() - began
            if line.startswith(b"data: [DONE]"):
                break
        await self._reader.readuntil(b"0\r\n\r\n")
        assert first is not None
        return first


async def first_delta_s(
    stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub", prompt_ids: Sequence[int], number: int
) -> float:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        context=common_pb2.RequestContext(request_id=f"direct-{number}"),
        prompt_ids=[*prompt_ids[:8], 1000 + number, *prompt_ids[9:]],
        sampling=common_pb2.SamplingParams(max_tokens=NEW_TOKENS),
    )
    began = time.perf_counter()
    first = None
    async for event in stub.Generate(request, timeout=30.0):
        if first is None and event.WhichOneof("event") == "delta":
            first = time.perf_counter() - began
    assert first is not None
    return first


async def measure(times: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="tercet-first-") as name:
        directory = Path(name)
        running = []
        try:
            fake = ("--model", DEFAULT_MODEL, "--fake", "hash", "--max-model-len", "8192", "--total-blocks", "4096")
            running.append(await start("executor", directory, *fake))
            running.append(await start("scheduler", directory, "--executors", f"unix:{directory}/executor.sock"))
            edge = ("--model", DEFAULT_MODEL, "--scheduler", f"unix:{directory}/scheduler.sock")
            running.append(await start("tokenizer", directory, *edge, "--http", f"unix:{directory}/http.sock"))
            await ready(f"unix:{directory}/tokenizer.sock")
            return await compare(directory, times)
        finally:
            for one in reversed(running):
                one.process.terminate()
                await one.process.wait()


async def compare(directory: Path, times: int) -> dict[str, float]:
    http = Http(*await asyncio.open_unix_connection(f"{directory}/http.sock"))
    async with (
        make_channel(f"unix:{directory}/scheduler.sock") as scheduler,
        make_channel(f"unix:{directory}/tokenizer.sock") as tokenizer,
    ):
        edge = tokenizer_pb2_grpc.TokenizerServiceStub(tokenizer)
        chat = tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="user", content=f"{0:06}. {TEXT}")])
        rendered = await edge.RenderChat(tokenizer_pb2.TokenizerServiceRenderChatRequest(chat=chat))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        whole, direct = [], []
        for number in range(WARM + times):
            whole.append(await http.first_byte_s(number))
            direct.append(await first_delta_s(stub, rendered.token_ids, number))
        whole, direct = whole[WARM:], direct[WARM:]
    middle, below = statistics.median(whole), statistics.median(direct)
    return {
        "prompt_tokens": float(len(rendered.token_ids)),
        "http_p50_ms": round(middle * 1e3, 2),
        "scheduler_p50_ms": round(below * 1e3, 2),
        "tokenizer_and_gateway_p50_ms": round((middle - below) * 1e3, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=300)
    chosen = parser.parse_args(argv)
    print(json.dumps(asyncio.run(measure(chosen.times))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
