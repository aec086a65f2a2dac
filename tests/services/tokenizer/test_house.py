"""How many requests an edge takes, and when it says to come again."""

import asyncio
from contextlib import ExitStack

import pytest

from services.errors import ResourceExhausted
from services.tokenizer.house import House


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(house: House) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught, house.guest():
        pass
    return caught.value


async def test_so_many_and_no_more_and_room_once_one_leaves() -> None:
    house = House(2)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(house.guest())
        second.enter_context(house.guest())
        error = refusal(house)
        assert (error.reason, error.limit, error.retry_after_s) == ("EDGE_FULL", "2", 1.0)
        first.close()
        with house.guest():
            refusal(house)


async def test_who_is_refused_does_not_count_and_the_last_to_leave_is_noticed() -> None:
    house = House(1)
    await house.empty()
    with house.guest():
        refusal(house)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(house.empty(), 0.01)
    await house.empty()


async def test_the_advice_is_the_pace_of_the_ends_times_those_before() -> None:
    clock = Clock()
    house = House(1, clock)
    for clock.now in (1.0, 3.0, 5.0):
        with house.guest():
            pass
    with house.guest():
        assert [refusal(house).retry_after_s for _ in range(3)] == [2.0, 4.0, 6.0]
        for _ in range(100):
            last = refusal(house).retry_after_s
        assert last == 30.0
    with house.guest():
        assert refusal(house).retry_after_s == pytest.approx(1.8)  # the latest gap was 0


async def test_however_a_request_ends_it_has_left() -> None:
    house = House(1)
    for error in (ValueError, asyncio.CancelledError, GeneratorExit):
        with pytest.raises(error), house.guest():
            raise error
    with house.guest():
        pass
