"""Who owns the executor, without streams, threads or clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services import errors
from services.executor.lease import Grant, Holder, Lease, lease_lost

SECOND = 1_000_000_000


def test_first_claim_is_granted() -> None:
    lease = Lease()
    assert lease.claim("a", takeover=False, now_ns=5) == Grant(Holder("a", 1, 5), ousted=None)
    assert lease.holder == Holder("a", 1, 5)


def test_held_lease_refuses_whoever_asks_and_says_for_how_long() -> None:
    lease = Lease()
    lease.claim("a", takeover=False, now_ns=0)
    for scheduler_id in ("a", "b"):  # the same name is no proof of being the same process
        with pytest.raises(errors.FailedPrecondition) as caught:
            lease.claim(scheduler_id, takeover=False, now_ns=3 * SECOND)
        assert caught.value.reason == "LEASE_HELD"
        assert caught.value.metadata == {"holder": "a", "epoch": "1"}
        assert "since 3.0 s" in caught.value.message
    assert lease.holder == Holder("a", 1, 0)


def test_release_frees_and_the_next_epoch_is_higher() -> None:
    lease = Lease()
    lease.claim("a", takeover=False, now_ns=0)
    lease.release(1)
    assert lease.holder is None
    assert lease.claim("b", takeover=False, now_ns=9) == Grant(Holder("b", 2, 9), ousted=None)


def test_takeover_tells_who_is_ousted() -> None:
    lease = Lease()
    lease.claim("a", takeover=True, now_ns=0)
    grant = lease.claim("b", takeover=True, now_ns=7)
    assert grant == Grant(Holder("b", 2, 7), ousted=Holder("a", 1, 0))
    assert grant.ousted is not None
    lost = lease_lost(grant.ousted, grant.holder)
    assert (lost.reason, dict(lost.metadata)) == ("LEASE_LOST", {"holder": "b", "epoch": "2"})


def test_late_release_of_an_ousted_epoch_changes_nothing() -> None:
    lease = Lease()
    lease.claim("a", takeover=False, now_ns=0)
    lease.claim("b", takeover=True, now_ns=1)
    lease.release(1)
    assert lease.holder == Holder("b", 2, 1)


def test_draining_keeps_the_holder_and_refuses_everybody_else() -> None:
    lease = Lease()
    lease.claim("a", takeover=False, now_ns=0)
    lease.drain()
    with pytest.raises(errors.Unavailable):
        lease.claim("b", takeover=True, now_ns=1)
    assert lease.holder == Holder("a", 1, 0)
    lease.release(1)
    with pytest.raises(errors.Unavailable):
        lease.claim("a", takeover=False, now_ns=2)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129])
def test_malformed_name_takes_nothing(name: str) -> None:
    lease = Lease()
    with pytest.raises(errors.InvalidArgument) as caught:
        lease.claim(name, takeover=True, now_ns=0)
    assert caught.value.field == "claim.scheduler_id"
    assert lease.holder is None


@given(st.lists(st.tuples(st.sampled_from(["claim", "takeover", "release", "late release"]), st.integers(0, 3))))
def test_epochs_only_grow_and_one_is_current(calls: list[tuple[str, int]]) -> None:
    lease = Lease()
    granted: list[int] = []
    for now_ns, (call, who) in enumerate(calls):
        before = lease.holder
        if call == "release" and before is not None:
            lease.release(before.epoch)
            assert lease.holder is None
        elif call == "late release":
            old = [epoch for epoch in granted if before is None or epoch != before.epoch]
            if old:
                lease.release(old[who % len(old)])
            assert lease.holder == before
        elif call in ("claim", "takeover"):
            try:
                grant = lease.claim(f"s{who}", takeover=call == "takeover", now_ns=now_ns)
            except errors.FailedPrecondition:
                assert before is not None
                assert call == "claim"
                assert lease.holder == before
                continue
            assert grant.ousted == before
            assert lease.holder == grant.holder
            granted.append(grant.holder.epoch)
    assert granted == list(range(1, len(granted) + 1))
