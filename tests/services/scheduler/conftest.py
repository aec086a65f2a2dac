"""Scheduler cores that are checked at the end of every test that makes one."""

from collections.abc import Iterator

import pytest
from scheduler_model import SPEC

from services.scheduler.core.calls import CoreConfig
from services.scheduler.core.core import SchedulerCore


@pytest.fixture
def cores() -> Iterator[list[SchedulerCore]]:
    """Every core that a test makes is checked at its end, whatever the test is about."""
    made: list[SchedulerCore] = []
    yield made
    for core in made:
        core.check()


@pytest.fixture
def core(cores: list[SchedulerCore]) -> SchedulerCore:
    cores.append(SchedulerCore(CoreConfig(prefill_chunk=8)))
    assert cores[0].attach("lane", SPEC, 0) == []
    return cores[0]
