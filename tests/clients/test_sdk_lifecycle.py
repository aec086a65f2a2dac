"""Clients made and closed over and over give back what they took."""

import asyncio
import gc
import threading

import psutil
from scripted_tokenizer import CLIENTS, ScriptedTokenizer, accepted, delta, driving, finished, plays, serving

ROUNDS = 40


async def test_clients_leave_nothing_behind() -> None:
    service = ScriptedTokenizer()
    process = psutil.Process()
    async with serving(service) as target:

        async def rounds(count: int) -> None:
            for kind in CLIENTS:
                for _ in range(count):
                    service.scripts.append(plays(accepted(), delta("a"), finished()))
                    async with driving(kind, target) as driver:
                        assert await driver.on(await driver.call("generate", "x"), "text") == "a"

        async def settled(limit: int) -> int:
            # Sockets are closed by gRPC's own threads, a little later.
            for _ in range(100):
                gc.collect()
                if process.num_fds() <= limit:
                    break
                await asyncio.sleep(0.05)
            return process.num_fds()

        await rounds(3)
        await asyncio.sleep(0.3)
        gc.collect()
        fds, threads, tasks = process.num_fds(), threading.active_count(), len(asyncio.all_tasks())
        await rounds(ROUNDS)
        assert await settled(fds + 2) <= fds + 2
        assert threading.active_count() <= threads + 2
        assert len(asyncio.all_tasks()) <= tasks + 2
