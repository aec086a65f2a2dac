"""Answers under 20 schemas, sampled from the real model: whether each is of its schema, and what the form costs.

`python benchmarks/structured_output.py`. Real processes, as `tercet up` starts them; the SDK asks for chat answers at
temperature 1, eight at a time. Each answer that ends by itself is parsed and validated with `jsonschema`. The same
prompts are then asked without a grammar, each for as many tokens as its answer had, in turns with the others, so that
time per token is compared on like work. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jsonschema

import tercet
from services.catalogue import DEFAULT_MODEL
from services.stack import Stack, StackOptions

STREAMS: Final = 8
READY_S: Final = 240.0


def text(length: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": length, **more}


def whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def record(optional: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def some(items: Any, most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "a person": record(name=text(30), age=whole(0, 120), married={"type": "boolean"}),
    "a city": record(name=text(30), country=text(30), people=whole(0, 40_000_000)),
    "a book": record(title=text(60), author=text(40), year=whole(1400, 2100), genres=some(text(20), 4)),
    "a recipe": record(dish=text(40), minutes=whole(1, 600), ingredients=some(text(30), 8, 2)),
    "today's weather": record(sky={"enum": ["clear", "cloudy", "rain", "snow"]}, celsius=whole(-60, 60), note=text(80)),
    "a film review": record(film=text(40), stars=whole(1, 5), review=text(160), tags=some(text(15), 3)),
    "an order": record(
        number=text(12, pattern="^[A-Z]{2}-[0-9]{4,8}$"),
        lines=some(record(item=text(30), count=whole(1, 99)), 4, 1),
    ),
    "a date": record(date=text(10, pattern="^(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"), event=text(60)),
    "a colour": record(name=text(20), hex=text(7, pattern="^#[0-9a-f]{6}$")),
    "a shape": {
        "anyOf": [
            record(kind={"const": "circle"}, radius=whole(1, 100)),
            record(kind={"const": "box"}, width=whole(1, 100), height=whole(1, 100)),
        ]
    },
    "a family": {
        **record(head={"$ref": "#/$defs/member"}, children=some({"$ref": "#/$defs/member"}, 3)),
        "$defs": {"member": record(name=text(20), born=whole(1900, 2030))},
    },
    "three facts": some(text(80), 3, 3),
    "a yes or no": record(answer={"enum": ["yes", "no"]}, why=text(120)),
    "a contact": record(("phone",), email=text(40, pattern="^[a-z]{1,10}@[a-z]{1,10}\\.(com|org)$"), phone=text(16)),
    "a point": record(x={"type": "number", "minimum": -1, "maximum": 1}, y={"type": "number", "maximum": 9}),
    "a to-do list": record(title=text(30), items=some(record(task=text(40), done={"type": "boolean"}), 5, 1)),
    "a translation": record(source=text(40), target=text(60), language={"enum": ["de", "fr", "es", "ja"]}),
    "a score": record(home=whole(0, 20), away=whole(0, 20), players=some(text(24), 5)),
    "an animal": record(name=text(24), legs={"enum": [0, 2, 4, 6, 8]}, food=some({"enum": ["meat", "plants"]}, 2, 1)),
    "nothing or a word": {"anyOf": [{"type": "null"}, record(word=text(20))]},
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    text: str
    tokens: int
    stopped: bool
    decode_s: float  # from the first token to the last


async def ask(client: tercet.AsyncClient, what: str, **options: Any) -> Told:
    messages = [{"role": "user", "content": f"Describe {what}. Answer in JSON."}]
    pieces, tokens, first, last = [], 0, 0.0, 0.0
    async with client.chat(messages, temperature=1.0, **options) as stream:
        async for delta in stream:
            last = time.perf_counter()
            first = first or last
            pieces.append(delta.text)
            tokens += len(delta.token_ids)
    return Told("".join(pieces), tokens, stream.finish_reason is tercet.FinishReason.STOP, last - first)


async def all_at_once(asked: Sequence[Callable[[], Coroutine[None, None, Told]]]) -> list[Told]:
    """STREAMS of them at any time."""
    room = asyncio.Semaphore(STREAMS)

    async def one(make: Callable[[], Coroutine[None, None, Told]]) -> Told:
        async with room:
            return await make()

    return list(await asyncio.gather(*map(one, asked)))


def per_token_ms(told: Sequence[Told]) -> float:
    several = [one for one in told if one.tokens > 1]
    return 1e3 * sum(one.decode_s for one in several) / sum(one.tokens - 1 for one in several)


def formed_request(schema: dict[str, Any], seed: int, max_tokens: int) -> dict[str, Any]:
    grammar = tercet.Grammar(tercet.GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return {"grammar": grammar, "seed": seed, "max_tokens": max_tokens}


async def measure(target: str, rounds: int, max_tokens: int) -> dict[str, Any]:
    formed: list[Told] = []
    free: list[Told] = []
    wrong: list[str] = []
    async with tercet.AsyncClient(target) as client:
        for seed in range(rounds):
            came = await all_at_once(
                [
                    partial(ask, client, what, **formed_request(schema, seed, max_tokens))
                    for what, schema in SCHEMAS.items()
                ]
            )
            formed += came
            pairs = list(zip(SCHEMAS.items(), came, strict=True))
            wrong += [one.text for (_, schema), one in pairs if one.stopped and not fits(one, schema)]
            free += await all_at_once(
                [
                    partial(ask, client, what, seed=seed, max_tokens=one.tokens, ignore_eos=True)
                    for (what, _), one in pairs
                ]
            )
            print(f"{len(formed)} answers, {sum(one.stopped for one in formed)} ended by themselves", flush=True)
    ratio = per_token_ms(formed) / per_token_ms(free)
    return {
        "schemas": len(SCHEMAS),
        "answers": len(formed),
        "stopped": sum(one.stopped for one in formed),
        "of_their_schema": sum(one.stopped for one in formed) - len(wrong),
        "wrong": wrong,
        "tokens": sum(one.tokens for one in formed),
        "ms_per_token": {"formed": round(per_token_ms(formed), 3), "free": round(per_token_ms(free), 3)},
        "ratio": round(ratio, 3),
    }


def fits(told: Told, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(told.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def run(model: str, rounds: int, max_tokens: int) -> dict[str, Any]:
    async with Stack(StackOptions(model, log_level="warning"), os.environ) as stack:
        await stack.ready(READY_S)
        return await measure(stack.target, rounds, max_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=10, help="answers of each schema")
    parser.add_argument("--max-tokens", type=int, default=512)
    chosen = parser.parse_args(argv)
    result = asyncio.run(run(chosen.model, chosen.rounds, chosen.max_tokens))
    print(json.dumps(result))
    return 0 if not result["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
