"""What can be set about the gateway: its limits wherever it is hosted, and the process that hosts nothing else."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from services.address import parse_address
from services.config import TelemetryConfig
from services.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class HttpLimits(Settings):
    """How much, and for how long, one HTTP request may take of this process."""

    max_body_bytes: int = setting(16 << 20, "largest HTTP body", unit="bytes", minimum=1024, maximum=1 << 30)
    body_timeout_s: float = setting(30.0, "how long a body may take to arrive", unit="s", minimum=0.01, maximum=3600)
    write_timeout_s: float = setting(
        30.0, "how long a client may leave one write unread", unit="s", minimum=0.01, maximum=3600
    )
    request_timeout_s: float = setting(
        3600.0, "deadline of the call behind a request", unit="s", minimum=0.1, maximum=86400
    )


def _target(text: str) -> None:
    if not text.startswith("dns:"):
        parse_address(text)


@dataclass(frozen=True, slots=True)
class GatewayConfig(Settings):
    process: ClassVar[str] = "gateway"

    http: str = setting("127.0.0.1:8000", "HTTP address: host:port or unix:/path", check=parse_address)
    tokenizer: str = setting("127.0.0.1:50051", "tokenizer that requests go to", check=_target)
    drain_s: float = setting(
        30.0, "after SIGTERM, how long running requests may go on", unit="s", minimum=0, maximum=3600, shared=True
    )
    limits: HttpLimits = dataclasses.field(default_factory=HttpLimits)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
