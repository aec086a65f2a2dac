"""What each tenant may have: live sequences, requests and tokens a minute.

Knows tenants as names and sequences as keys; time is an argument. Requests and tokens are token buckets that hold one
minute's worth and fill evenly. A request is charged up front with all it may take, and what it did not take is
refunded at its end. Invariant: what is refused is charged nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.scheduler.core.calls import DoesNotFit, InvariantError, SequenceKey, SubmitError
from services.scheduler.core.limits import TenantQuota

_MINUTE: Final = 60_000_000_000  # ns
_MEMORY: Final = 1024  # tenants without live sequences that are remembered, even with full buckets


class QuotaExceeded(SubmitError):
    """Its tenant has used up what it may. RESOURCE_EXHAUSTED; `wait_ns` is when trying again can help, if known."""

    def __init__(self, field_name: str, message: str, wait_ns: int | None = None) -> None:
        super().__init__(field_name, message)
        self.wait_ns = wait_ns


class Bucket:
    """`rate` a minute, at most a minute's worth at once. Counts in units of 1 / minute-in-ns, so that it is exact."""

    def __init__(self, rate: int, now: int) -> None:
        self.rate = rate
        self._level = rate * _MINUTE
        self._at = now

    def wait_ns(self, amount: int, now: int) -> int:
        """How long until `amount` is there; 0: it is."""
        self._fill(now)
        return max(0, -(-(amount * _MINUTE - self._level) // self.rate))

    def take(self, amount: int) -> None:
        self._level -= amount * _MINUTE

    def give_back(self, amount: int, now: int) -> None:
        self._fill(now)
        self._level = min(self.rate * _MINUTE, self._level + amount * _MINUTE)

    def full(self, now: int) -> bool:
        self._fill(now)
        return self._level == self.rate * _MINUTE

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._level = min(self.rate * _MINUTE, self._level + (now - self._at) * self.rate)
            self._at = now


@dataclass(slots=True)
class _Account:
    quota: TenantQuota
    requests: Bucket | None
    tokens: Bucket | None
    live: int = 0


class Quotas:
    def __init__(self, default: TenantQuota, quotas: Mapping[str, TenantQuota]) -> None:
        self._default = default
        self._quotas = dict(quotas)
        self._accounts: dict[str, _Account] = {}
        self._charged: dict[SequenceKey, tuple[str, int]] = {}  # tenant, tokens; of live sequences

    def live(self) -> Mapping[str, int]:
        """Live sequences of the tenants that have any."""
        return {tenant: account.live for tenant, account in self._accounts.items() if account.live}

    def check(self, tenant: str, tokens: int, now: int, answers: int = 1) -> None:
        """Raises QuotaExceeded, or DoesNotFit where the tenant never may have so much. Charges nothing.

        answers: sequences that a request is made of; each counts. tokens: of all of them.
        """
        account = self._account(tenant, now)
        quota = account.quota
        for what, most in (("at once", quota.concurrency), ("in a minute", quota.requests_per_minute)):
            if most is not None and answers > most and answers > 1:
                raise DoesNotFit("answers", f"{answers} answers; tenant {tenant} may have {most} requests {what}")
        if quota.concurrency is not None and account.live + answers > quota.concurrency:
            raise QuotaExceeded(
                "concurrency",
                f"tenant {tenant} has {account.live} requests running or waiting; its limit is {quota.concurrency}",
            )
        if account.tokens is not None:
            if tokens > account.tokens.rate:
                raise DoesNotFit(
                    "max_tokens",
                    f"{tokens} tokens, prompt and output, are more than tenant {tenant} may have in a minute, "
                    f"{account.tokens.rate}",
                )
            self._wait("tokens_per_minute", tenant, account.tokens, tokens, now)
        if account.requests is not None:
            self._wait("requests_per_minute", tenant, account.requests, answers, now)

    def charge(self, tenant: str, key: SequenceKey, tokens: int, now: int) -> None:
        """One sequence. After `check` passed."""
        account = self._account(tenant, now)
        account.live += 1
        if account.requests is not None:
            account.requests.take(1)
        if account.tokens is not None:
            account.tokens.take(tokens)
        self._charged[key] = (tenant, tokens)

    def settle(self, key: SequenceKey, used: int, now: int) -> None:
        """The sequence ended and took `used` tokens."""
        tenant, charged = self._charged.pop(key)
        account = self._accounts[tenant]
        account.live -= 1
        if account.tokens is not None:
            account.tokens.give_back(charged - used, now)  # less than 0 where it took more than was expected
        if len(self._accounts) > 2 * _MEMORY:
            self._forget(now)

    def verify(self, keys: Mapping[SequenceKey, object]) -> None:
        """`keys`: of all live sequences. Raises InvariantError."""
        if self._charged.keys() != keys.keys():
            raise InvariantError("the sequences charged are not those that live")
        live: dict[str, int] = {}
        for tenant, _ in self._charged.values():
            live[tenant] = live.get(tenant, 0) + 1
        if live != self.live():
            raise InvariantError(f"tenants are counted {self.live()}, and have {live} live sequences")

    def _account(self, tenant: str, now: int) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            quota = self._quotas.get(tenant, self._default)
            account = self._accounts[tenant] = _Account(
                quota,
                None if quota.requests_per_minute is None else Bucket(quota.requests_per_minute, now),
                None if quota.tokens_per_minute is None else Bucket(quota.tokens_per_minute, now),
            )
        return account

    def _wait(self, field_name: str, tenant: str, bucket: Bucket, amount: int, now: int) -> None:
        wait = bucket.wait_ns(amount, now)
        if wait:
            raise QuotaExceeded(
                field_name, f"tenant {tenant} has used up its {bucket.rate} {field_name.replace('_', ' ')}", wait
            )

    def _forget(self, now: int) -> None:
        """Those whose account is as good as new."""
        for tenant, account in list(self._accounts.items()):
            full = all(bucket is None or bucket.full(now) for bucket in (account.requests, account.tokens))
            if not account.live and full:
                del self._accounts[tenant]
