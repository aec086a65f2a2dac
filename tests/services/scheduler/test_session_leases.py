"""Chats that pause keep their blocks while others come and go: what a lease protects from, and what it never does."""

import itertools

import pytest
from scheduler_model import answer

from services.scheduler.core.calls import CoreConfig, LaneSpec, Reason, Submission
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.limits import SessionLease
from services.scheduler.core.prefix import PrefixCache
from services.scheduler.core.reclaim import IdleBlocks, Line

SIZE = 16
SECOND = 1_000_000_000
SPEC = LaneSpec(block_size=SIZE, total_blocks=200, max_batched_tokens=512, max_sequences=8, max_model_len=2048)


class Site:
    """One lane, requests one after another, each with keys for all that it computes."""

    def __init__(self, spec: LaneSpec = SPEC, *, lease_s: float = 300, **config: object) -> None:
        made = {"steps_in_flight": 1, "session_lease_ns": int(lease_s * SECOND), "watermark": 0.0, **config}
        self.core = SchedulerCore(CoreConfig(**made))  # type: ignore[arg-type]
        self.core.attach("lane", spec, 0)
        self.now = 0
        self.serial = itertools.count()

    def serve(self, story: str, blocks: int, tenant: str = "tenant", output: int = 1) -> int:
        """A request whose prompt is `blocks` blocks of a story and one token more. Tokens found in the cache."""
        name = f"r{next(self.serial)}"
        keys = tuple(f"{tenant} {story} {index}".encode() for index in range(blocks))
        prompt = blocks * SIZE + 1
        submission = Submission(name, tenant, prompt, output, block_keys=keys, key_block_size=SIZE)
        self.core.submit(submission, self.now)
        while (plan := self.core.plan("lane", self.now)) is not None:
            self.core.check()
            [ended] = [one for one in self.core.apply("lane", answer(plan), self.now) if hasattr(one, "usage")] or [
                None
            ]
            self.core.check()
            if ended is not None:
                assert ended.reason is Reason.LENGTH
                return int(ended.usage.cached_tokens)
        raise AssertionError("it never ended")

    @property
    def leased(self) -> int:
        return self.core.load().lanes["lane"].blocks_leased


class Chat:
    """Grows by four blocks at every turn."""

    def __init__(self, site: Site, name: str, tenant: str = "tenant") -> None:
        self.site, self.name, self.tenant = site, name, tenant
        self.blocks = 4

    def turn(self) -> bool:
        """Whether all that was said before was found."""
        found = self.site.serve(self.name, self.blocks, self.tenant)
        known = (self.blocks - 4) * SIZE
        self.blocks += 4
        return found >= known > 0


def hit_ratio(lease_s: float, chats: int = 6, turns: int = 5, strangers: int = 12) -> float:
    """Of later turns, between which strangers fill the cache more than once."""
    site = Site(lease_s=lease_s)
    talks = [Chat(site, f"chat {number}") for number in range(chats)]
    hits = asked = 0
    for turn in range(turns):
        for talk in talks:
            hit = talk.turn()
            if turn > 1:  # from the second on it is a session
                hits, asked = hits + hit, asked + 1
        for _ in range(strangers if turn else 0):
            site.now += SECOND
            site.serve(f"stranger {next(site.serial)}", 20)
    return hits / asked


def test_chats_that_come_back_hit_though_strangers_flood_the_cache() -> None:
    assert hit_ratio(lease_s=300) == 1.0
    assert hit_ratio(lease_s=0) == 0.0, "least recently used: the flood washes all chats away"


def test_a_lease_ends_with_its_time() -> None:
    site = Site(lease_s=10)
    chat = Chat(site, "chat")
    assert [chat.turn(), chat.turn()] == [False, True]
    assert site.leased == 8
    site.now += 10 * SECOND - 1
    site.core.plan("lane", site.now)
    assert site.leased == 8
    site.now += 1
    site.core.plan("lane", site.now)
    assert site.leased == 0
    site.core.check()


def test_who_found_little_of_its_prompt_is_no_session() -> None:
    site = Site()
    site.serve("common", 4)
    site.serve("common", 4)
    assert site.leased == 4
    site.core.pin((b"tenant common 0",), SIZE, "tenant", 0, 0)
    # Only its first three blocks are those of the others: the rest is one's own.
    keys = (
        *(f"tenant common {index}".encode() for index in range(3)),
        *(f"own {index}".encode() for index in range(6)),
    )
    site.core.submit(Submission("x", "tenant", 9 * SIZE + 1, 1, block_keys=keys, key_block_size=SIZE), site.now)
    site.core.apply("lane", answer(site.core.plan("lane", site.now)), site.now)
    site.core.check()
    assert site.leased == 4


def test_under_pressure_the_sessions_idle_longest_go_first() -> None:
    site = Site(lease_s=100)
    talks = [Chat(site, f"chat {number}") for number in range(8)]
    for talk in talks:
        talk.turn()
        talk.turn()
        site.now += SECOND
    assert site.leased == 64  # pressure 0.32: nothing shrinks
    for talk in talks[4:]:
        for _ in range(5):
            talk.turn()
        site.now += 5 * SECOND
    # Those that went on hold more than half the pool by now, so what a lease lives has shrunk; theirs are the youngest.
    site.now += 63 * SECOND
    site.core.plan("lane", site.now)
    site.core.check()
    assert site.leased == 112
    site.serve("work", 60)  # takes what is free, and the expired
    assert [talk.turn() for talk in talks[4:]] == [True] * 4
    assert not any(talk.turn() for talk in talks[:4])


def test_the_time_to_live_shrinks_evenly_to_nothing() -> None:
    lease = SessionLease(100, full_below=0.5)
    assert [lease.ttl_ns(pressure) for pressure in (0, 0.25, 0.5, 0.75, 0.875, 1)] == [100, 100, 100, 50, 25, 0]
    steps = [lease.ttl_ns(number / 1000) for number in range(1001)]
    assert all(0 <= one - other <= 1 for one, other in itertools.pairwise(steps))
    assert SessionLease().ttl_ns(0.0) == 0


def test_leases_of_a_crowd_end_before_the_pool_is_full_of_them() -> None:
    """More sessions than the pool holds: each new lease shortens all."""
    site = Site(lease_s=1000)
    for number in range(60):
        chat = Chat(site, f"chat {number}")
        chat.turn()
        chat.turn()
        site.now += 10 * SECOND
        assert site.leased <= 184  # where the oldest of so many, one chat in 10 s, is as old as they may get
    assert site.leased >= 170


def test_no_lease_stops_a_running_sequence_or_keeps_one_out() -> None:
    site = Site(LaneSpec(SIZE, 40, 512, 8, 2048), lease_s=1000)
    for number in range(3):
        chat = Chat(site, f"chat {number}")
        chat.turn()
        chat.turn()
    assert site.leased == 24
    site.core.submit(Submission("big", "tenant", 39 * SIZE, 16), site.now)
    for _ in range(60):
        plan = site.core.plan("lane", site.now)
        if plan is None:
            break
        site.core.apply("lane", answer(plan), site.now)
        site.core.check()
    assert site.core.sequences() == ()
    assert site.core.totals().preemptions == 0


def test_one_tenants_leases_are_bounded_by_its_share() -> None:
    site = Site(tenant_cache_share=0.1)
    greedy, other = Chat(site, "greedy", "greedy"), Chat(site, "other", "other")
    other.turn(), other.turn()
    for _ in range(8):
        greedy.turn()
        site.core.check()
    assert site.leased <= 20 + 8
    assert other.turn()


def test_cancelled_turns_are_leased_and_failed_ones_are_not() -> None:
    for fail in (False, True):
        site = Site()
        site.serve("chat", 4)
        keys = tuple(f"tenant chat {index}".encode() for index in range(4))
        site.core.submit(Submission("x", "tenant", 70, 50, block_keys=keys, key_block_size=SIZE), site.now)
        plan = site.core.plan("lane", site.now)
        if fail:
            site.core.apply("lane", answer(plan, failed="x"), site.now)
        else:
            site.core.apply("lane", answer(plan), site.now)
            site.core.cancel("x", site.now)
        site.core.check()
        assert site.leased == (0 if fail else 4)


def test_loose_first_then_leased_then_pinned_and_expired_ones_stand_where_they_were() -> None:
    idle = IdleBlocks()
    for block, line, since in (
        (1, Line.LEASED, 10),
        (2, Line.LOOSE, 20),
        (3, Line.PINNED, 5),
        (4, Line.LEASED, 25),
        (5, Line.LOOSE, 30),
        (6, Line.LEASED, 40),
    ):
        idle.add(block, line, since)
    assert list(idle) == [2, 5, 1, 4, 6, 3]
    idle.expire(1)
    idle.expire(4)
    assert list(idle) == [1, 2, 4, 5, 6, 3]
    assert idle.first(3) == [1, 2, 4]
    assert idle.discard(2)
    assert not idle.discard(2)
    assert (len(idle), list(idle)) == (5, [1, 4, 5, 6, 3])


@pytest.mark.parametrize("pinned", [True, False])
def test_of_a_leased_block_a_pin_counts_more(pinned: bool) -> None:
    cache = PrefixCache("lane", LaneSpec(1, 2, 8, 4, 8), 2, session=SessionLease(100, 0.9))
    for key in (b"a", b"b"):
        blocks = cache.allocate(1)
        cache.publish(b"", [key], blocks, "tenant")
        cache.release(blocks, 0, session=True)
    if pinned:
        cache.lease([b"a"], "tenant", 1000, 0)
    cache.allocate(1)
    cache.check([[0 if not pinned else 1]])
    assert bool(cache.find([b"a"], 1)) == pinned
