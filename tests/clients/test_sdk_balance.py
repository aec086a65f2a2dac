"""One channel over several tokenizers: each gets its share of the calls, also where one of them came later."""

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack

from opentelemetry.trace import NoOpTracer

import tercet
from services.rpc import ServerOptions, bind, make_server
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc

CALLS = 300


class Named(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, number: int) -> None:
        self.number = number

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizerServiceTokenizeRequest, context: object
    ) -> tokenizer_pb2.TokenizerServiceTokenizeResponse:
        return tokenizer_pb2.TokenizerServiceTokenizeResponse(token_ids=[self.number])


async def test_calls_are_spread_over_all_and_over_one_that_comes_later() -> None:
    async with AsyncExitStack() as stack:

        async def start(number: int, listen: str = "127.0.0.1:0") -> str:
            server = make_server(NoOpTracer(), options=ServerOptions())
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(Named(number), server)
            address = bind(server, listen)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            return address

        addresses = [await start(number) for number in range(3)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            fourth = f"127.0.0.1:{free.getsockname()[1]}"  # nobody is there yet
        client = await stack.enter_async_context(tercet.AsyncClient("ipv4:" + ",".join([*addresses, fourth])))

        async def counted() -> Counter[int]:
            return Counter([(await client.tokenize("a"))[0] for _ in range(CALLS)])

        async def all_of(numbers: set[int]) -> None:
            """Until it is connected to all of them."""
            for _ in range(200):
                if set(await counted()) == numbers:
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(numbers)

        for count in (3, 4):
            if count == 4:
                await start(3, fourth)
            await all_of(set(range(count)))
            shares = await counted()
            assert all(0.9 * CALLS / count <= shares[one] <= 1.1 * CALLS / count for one in range(count)), shares
