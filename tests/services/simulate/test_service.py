"""Who was given how much while backlogged."""

import pytest

from services.simulate.fleet import Fleet
from services.simulate.load import Arrivals, LoadError, Tenant, generate, parse_lengths, parse_tenants
from services.simulate.options import CORE, LANE
from services.simulate.service import BIN_NS, WINDOW_BINS, Balance, Served, Service, balance
from services.simulate.simulation import Simulation

S = BIN_NS


def test_service_goes_to_the_second_in_which_it_was_given() -> None:
    service = Service()
    service.waits("a", 0, 1)
    service.prompt("a", S - 1, 100)
    service.drawn("a", (S - 1, S, S + 1, 3 * S))
    assert service.tenants(4 * S)["a"].given == (102, 4, 0, 2)


def test_a_second_in_which_nobody_waits_for_a_moment_is_not_backlogged() -> None:
    service = Service()
    for at, change in ((0, 1), (S + 5, 2), (2 * S + 7, -3), (2 * S + 8, 1), (4 * S, -1), (6 * S + 1, 1)):
        service.waits("a", at, change)
    assert service.tenants(9 * S)["a"].backlogged == (False, True, False, True, False, False, False, True, True)


def test_the_last_second_counts_only_if_it_was_whole() -> None:
    service = Service()
    service.waits("a", 0, 1)
    service.drawn("a", (2 * S + 1,))
    assert service.tenants(2 * S + 9)["a"] == Served((0, 0), (False, True))


def served(*given: int, idle: tuple[int, ...] = ()) -> Served:
    return Served(given, tuple(number not in idle for number in range(len(given))))


def test_balance_is_the_worst_window_by_weight() -> None:
    even = [10] * (WINDOW_BINS + 5)
    odd = [*even]
    odd[-1] = 10 * WINDOW_BINS  # the last second alone gives it twice as much
    found = balance({"a": served(*even), "b": served(*(3 * one for one in odd))}, {"b": 3.0})
    assert found == Balance(6, pytest.approx((2 - 1 / WINDOW_BINS - 1) / (2 - 1 / WINDOW_BINS)), 5 * S)


def test_windows_in_which_one_alone_is_backlogged_say_nothing() -> None:
    ones = [1] * (WINDOW_BINS + 2)
    found = balance({"a": served(*ones), "b": served(*([0] * len(ones)), idle=(WINDOW_BINS,))}, {})
    assert (found.windows, found.worst) == (1, 1.0)  # only the first, with nothing for b
    assert balance({"a": served(*ones)}, {}).worst is None
    assert balance({}, {}) == Balance(0, None, 0)


def test_fair_keeps_backlogged_tenants_together_and_fcfs_does_not() -> None:
    lane = Fleet(CORE, LANE).lane
    worst = {}
    for policy in ("fair", "fcfs"):
        core = CORE.__class__(policy=policy, max_queued_requests=10_000, max_queued_tokens=10**9)
        load = generate(
            1500,
            Arrivals(20),
            parse_lengths("uniform:20:200", "p"),
            parse_lengths("uniform:5:60", "o"),
            1,
            parse_tenants("big=10,small=1"),
        )
        run = Simulation(Fleet(core, lane), by_tenant=True).run(load)
        worst[policy] = balance(run.served, {})
    fair, fcfs = worst["fair"], worst["fcfs"]
    assert fair.windows > 40
    assert fair.worst is not None
    assert fcfs.worst is not None
    assert fair.worst < 0.2 < 0.5 < fcfs.worst


def test_tenants_may_have_weights() -> None:
    assert parse_tenants("a=10,b=1@5*2.5,c*3") == (
        Tenant("a", 10),
        Tenant("b", 1, 5, 2.5),
        Tenant("c*3", 1),  # a weight follows a share
    )
    for wrong in ("a=1*0", "a=1*x", "a=1*1001"):
        with pytest.raises(LoadError, match=r"weight|NAME=SHARE"):
            parse_tenants(wrong)
