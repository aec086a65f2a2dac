"""What can be set about each process: one frozen dataclass per process.

Owns names, defaults, limits and wording of the settings. `services.settings` turns them into flags, variables,
checks and tables. Must not read the environment.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from services.address import parse_address
from services.errors import InvalidArgument
from services.scheduler.core.limits import TOP_PRIORITY
from services.scheduler.core.policies.policy import POLICIES
from services.scheduler.quota_settings import parse_quota
from services.settings import ConfigError, Settings, setting
from services.trust_settings import CallTrust, HttpTrust, ServerTrust, UserKeys

MODEL = "smollm2-135m"
BACKENDS = ("cpu", "cpu-torch", "gpu", "reference")
WEIGHTS = ("native", "int8", "bf16")
ACTIVATIONS = ("16bit", "8bit")
KV_FORMATS = ("bf16", "fp16", "fp32", "fp8", "int8")
LEVELS = ("debug", "info", "warning", "error")


def _target(text: str) -> None:
    if not text.startswith("dns:"):
        parse_address(text)


def _otlp(text: str) -> None:
    if not text.startswith(("http://", "https://")):
        raise InvalidArgument(f"{text!r} must start with http:// or https:// (OTLP over gRPC, port 4317)")


@dataclass(frozen=True, slots=True)
class TelemetryConfig(Settings):
    """Where traces go, and how much is said."""

    otlp_endpoint: str | None = setting(
        None,
        "OTLP/gRPC collector that receives the spans; without one nothing is traced",
        shared=True,
        aliases=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        check=_otlp,
    )
    trace_sample_ratio: float = setting(
        1.0, "share of traces kept, where the caller has not decided", minimum=0, maximum=1, shared=True
    )
    otlp_timeout_s: float = setting(
        5.0, "longest wait for the collector", unit="s", minimum=0.1, maximum=60, shared=True
    )
    log_level: str = setting("info", "least level that is logged", choices=LEVELS, shared=True)


@dataclass(frozen=True, slots=True)
class ListenConfig(Settings):
    """Where a process is reached, and how it leaves."""

    listen: str = setting("127.0.0.1:0", "gRPC address: host:port or unix:/path", check=parse_address)
    metrics_listen: str | None = setting(
        None, "HTTP address of /metrics, /health and /ready; none serves none", check=parse_address
    )
    drain_s: float = setting(
        30.0, "after SIGTERM, how long running requests may go on", unit="s", minimum=0, maximum=3600, shared=True
    )
    max_connection_age_s: float | None = setting(
        None,
        "age at which clients are asked to connect anew, so that new replicas get their share",
        unit="s",
        minimum=1,
        shared=True,
    )


@dataclass(frozen=True, slots=True)
class TimeLimits(Settings):
    """The four layered limits of a request: what holds when it names none, and the most it may name."""

    queue_limit_s: float = setting(60.0, "default limit of waiting in the queue", unit="s", minimum=0.001)
    queue_limit_max_s: float = setting(600.0, "largest queue limit", unit="s", minimum=0.001)
    first_token_limit_s: float = setting(120.0, "default limit to the first token", unit="s", minimum=0.001)
    first_token_limit_max_s: float = setting(600.0, "largest first token limit", unit="s", minimum=0.001)
    between_tokens_limit_s: float = setting(60.0, "default limit between two tokens", unit="s", minimum=0.001)
    between_tokens_limit_max_s: float = setting(300.0, "largest limit between two tokens", unit="s", minimum=0.001)
    total_limit_s: float = setting(600.0, "default limit of a whole request", unit="s", minimum=0.001)
    total_limit_max_s: float = setting(3600.0, "largest limit of a whole request", unit="s", minimum=0.001)

    def validate(self) -> None:
        for name in ("queue_limit", "first_token_limit", "between_tokens_limit", "total_limit"):
            default, most = getattr(self, f"{name}_s"), getattr(self, f"{name}_max_s")
            if default > most:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag}-s is {default:g} s, more than {flag}-max-s, {most:g} s", field=f"{flag}-s", limit=most
                )


@dataclass(frozen=True, slots=True)
class ExecutorConfig(Settings):
    process: ClassVar[str] = "executor"

    net: ListenConfig = dataclasses.field(default_factory=lambda: ListenConfig(listen="127.0.0.1:50053"))
    model: str = setting(MODEL, "catalogue name or path of a GGUF file", minimum=1, shared=True)
    backend: str = setting("cpu", "which kernels run", choices=BACKENDS)
    weights: str = setting(
        "native", "native keeps the file's numbers, int8 and bf16 round them when a model is loaded", choices=WEIGHTS
    )
    activations: str = setting(
        "16bit", "what the back end cpu rounds activations to where weights are integers", choices=ACTIVATIONS
    )
    block_size: int = setting(16, "tokens in a KV block", unit="tokens", minimum=1, maximum=256)
    kv: str | None = setting(
        None,
        "what keys and values are kept in: the back end gpu has all, the others their own, which none takes",
        choices=KV_FORMATS,
    )
    kv_memory_mib: int = setting(512, "memory for KV blocks", unit="MiB", minimum=1)
    total_blocks: int | None = setting(None, "number of KV blocks, instead of kv-memory-mib", minimum=1)
    max_batched_tokens: int = setting(512, "most tokens computed in a step", unit="tokens", minimum=1, maximum=1 << 20)
    max_sequences: int = setting(64, "most sequences in a step", minimum=1, maximum=65536)
    max_model_len: int | None = setting(None, "longest sequence; none takes the model's own", unit="tokens", minimum=1)
    threads: int | None = setting(None, "threads that compute; none takes all cores", minimum=1, maximum=1024)
    pin_threads: bool = setting(False, "whether each computing thread of the back end cpu stays on a core of its own")
    lease_ttl_s: float = setting(
        5.0, "silence after which another scheduler may claim", unit="s", minimum=0.1, maximum=600
    )
    heartbeat_s: float = setting(1.0, "time between heartbeats", unit="s", minimum=0.01, maximum=2)
    trust: ServerTrust = dataclasses.field(default_factory=ServerTrust)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)

    def validate(self) -> None:
        if self.heartbeat_s * 2 > self.lease_ttl_s:
            raise ConfigError(
                f"--heartbeat-s is {self.heartbeat_s:g} s, allowed is at most half of --lease-ttl-s, "
                f"{self.lease_ttl_s:g} s",
                field="--heartbeat-s",
                limit=self.lease_ttl_s / 2,
            )
        if self.max_sequences > self.max_batched_tokens:
            raise ConfigError(
                f"--max-sequences is {self.max_sequences}, allowed is at most --max-batched-tokens, "
                f"{self.max_batched_tokens}: each sequence needs a token in a step",
                field="--max-sequences",
                limit=self.max_batched_tokens,
            )


@dataclass(frozen=True, slots=True)
class DegradeConfig(Settings):
    """What low classes lose while the queue stays nearly full."""

    degrade: bool = setting(False, "whether low priorities lose service, step by step, while the queue stays full")
    degrade_protects: int = setting(
        0, "priorities from here up lose nothing", minimum=-TOP_PRIORITY, maximum=TOP_PRIORITY + 1
    )
    degrade_enter_at: float = setting(0.8, "share of a queue limit from which pressure counts", minimum=0, maximum=1)
    degrade_enter_s: float = setting(5.0, "pressure that long takes a rung", unit="s", minimum=0.001)
    degrade_leave_at: float = setting(0.5, "share of all queue limits up to which relief counts", minimum=0, maximum=1)
    degrade_leave_s: float = setting(15.0, "relief that long gives a rung back", unit="s", minimum=0.001)
    degrade_prefill_share: float = setting(
        0.25, "first rung: share of each step's prompt tokens for low priorities together", minimum=0.01, maximum=1
    )
    degrade_max_tokens: int = setting(256, "third rung: most output tokens", unit="tokens", minimum=1)

    def validate(self) -> None:
        if self.degrade_leave_at > self.degrade_enter_at:
            raise ConfigError(
                f"--degrade-leave-at is {self.degrade_leave_at:g}, more than --degrade-enter-at, "
                f"{self.degrade_enter_at:g}",
                field="--degrade-leave-at",
                limit=self.degrade_enter_at,
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Settings):
    process: ClassVar[str] = "scheduler"

    net: ListenConfig = dataclasses.field(default_factory=lambda: ListenConfig(listen="127.0.0.1:50052"))
    executors: tuple[str, ...] = setting(
        ("127.0.0.1:50053",), "executors, separated by commas", minimum=1, check=_target
    )
    policy: str = setting("fcfs", "order of the waiting queue", choices=tuple(POLICIES))
    aging_s: float = setting(15.0, "wait after which a request's class gets better", unit="s", minimum=0.001)
    max_passes: int = setting(
        16, "most requests that go by a waiting one which can't be afforded, or has little cached", minimum=0
    )
    steps_in_flight: int = setting(2, "steps sent before the first is answered", minimum=1, maximum=2)
    max_queued_requests: int = setting(1024, "most requests waiting", minimum=1)
    max_queued_tokens: int = setting(1_000_000, "most prompt tokens waiting", unit="tokens", minimum=1)
    max_queued_bytes: int = setting(1 << 30, "most memory of waiting requests' messages", unit="bytes", minimum=1)
    tenant_quotas: tuple[str, ...] = setting(
        (),
        "what tenants may have, as NAME=requests:60+tokens:100000+concurrency:4+weight:2 (a minute, but for the last "
        "two), separated by commas; NAME * is all others",
        check=parse_quota,
    )
    learn_output: bool = setting(False, "expect of answers without max_tokens what 9 of 10 of their tenant's kept to")
    long_prompt_tokens: int = setting(2048, "prompts with more to compute are long", unit="tokens", minimum=1)
    long_prompt_share: float = setting(
        0.5, "share of each step's prompt tokens that long prompts get together", minimum=0.01, maximum=1
    )
    degrade: DegradeConfig = dataclasses.field(default_factory=DegradeConfig)
    prefill_chunk: int = setting(
        256, "most prompt tokens of one request in a step while others wait or run", unit="tokens", minimum=1
    )
    watermark: float = setting(0.01, "share of blocks kept free at admission", minimum=0, maximum=0.5)
    prefix_cache: bool = setting(True, "whether prompts reuse the KV blocks of earlier ones with the same start")
    tenant_cache_share: float = setting(
        1.0, "share of blocks that one tenant's prefixes may keep while unused, or pin", minimum=0, maximum=1
    )
    pin_max_s: float = setting(3600.0, "longest time for which a prefix is pinned", unit="s", minimum=0)
    session_lease_s: float = setting(
        300.0, "longest time for which a chat that pauses keeps its blocks; 0: none", unit="s", minimum=0, maximum=86400
    )
    session_lease_full_below: float = setting(
        0.5, "share of blocks in use or leased from which on leases get shorter", minimum=0, maximum=0.99
    )
    default_max_tokens: int | None = setting(
        None, "output limit of requests that name none; none means the context", unit="tokens", minimum=1
    )
    limits: TimeLimits = dataclasses.field(default_factory=TimeLimits)
    executor_grace_s: float = setting(
        60.0, "how long work waits for a lost executor", unit="s", minimum=0, maximum=3600
    )
    stream_buffer_tokens: int = setting(
        256, "tokens buffered for a slow reader before deltas are merged", unit="tokens", minimum=1
    )
    slow_reader_s: float = setting(30.0, "how long a reader may be slow before its stream ends", unit="s", minimum=0.1)
    slow_request_s: float = setting(30.0, "requests that take longer are logged in detail", unit="s", minimum=0)
    record: str | None = setting(
        None,
        "file that every call of the scheduling core is recorded in, for `tercet replay`; *.gz is packed",
        minimum=1,
    )
    trust: ServerTrust = dataclasses.field(default_factory=ServerTrust)
    calls: CallTrust = dataclasses.field(default_factory=CallTrust)
    keys: UserKeys = dataclasses.field(default_factory=UserKeys)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)


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


@dataclass(frozen=True, slots=True)
class TokenizerConfig(Settings):
    process: ClassVar[str] = "tokenizer"

    net: ListenConfig = dataclasses.field(default_factory=lambda: ListenConfig(listen="127.0.0.1:50051"))
    scheduler: tuple[str, ...] = setting(
        ("127.0.0.1:50052",),
        "schedulers that requests go to, separated by commas, spelled alike at all edges",
        minimum=1,
        check=_target,
    )
    model: str = setting(MODEL, "catalogue name or path of a GGUF file", minimum=1, shared=True)
    http: str | None = setting(None, "HTTP address of the OpenAI gateway; none serves none", check=parse_address)
    http_limits: HttpLimits = dataclasses.field(default_factory=HttpLimits)
    vllm_grpc_port: int | None = setting(
        None, "port on which vllm.grpc.engine.VllmEngine is served as well; none serves none", minimum=0, maximum=65535
    )
    vllm_grpc_host: str = setting("127.0.0.1", "host name or address of that port", minimum=1)
    max_prompt_bytes: int = setting(8 << 20, "largest prompt text", unit="bytes", minimum=1, maximum=64 << 20)
    resume_grace_s: float = setting(
        60.0, "how long an answer that has begun waits for a lost scheduler", unit="s", minimum=0, maximum=3600
    )
    max_requests: int = setting(
        4096, "most requests at once, over gRPC and HTTP together; more are refused", minimum=1, maximum=1 << 20
    )
    slow_reader_s: float = setting(
        30.0, "how long a gRPC client may leave one message unread before its stream ends", unit="s", minimum=0.1
    )
    slow_request_s: float = setting(30.0, "requests that take longer are logged in detail", unit="s", minimum=0)
    tool_format: str = setting(
        "auto",
        "how the model writes calls of tools; auto looks at its chat template",
        choices=("auto", "none", "hermes", "llama3", "mistral"),
    )
    reasoning_format: str = setting(
        "auto",
        "how the model writes its reasoning; auto looks at its chat template",
        choices=("auto", "none", "think", "think-open"),
    )
    trust: ServerTrust = dataclasses.field(default_factory=ServerTrust)
    calls: CallTrust = dataclasses.field(default_factory=CallTrust)
    keys: UserKeys = dataclasses.field(default_factory=UserKeys)
    http_trust: HttpTrust = dataclasses.field(default_factory=HttpTrust)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)


@dataclass(frozen=True, slots=True)
class GatewayConfig(Settings):
    process: ClassVar[str] = "gateway"

    http: str = setting("127.0.0.1:8000", "HTTP address: host:port or unix:/path", check=parse_address)
    tokenizer: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "tokenizers that requests go to, separated by commas", minimum=1, check=_target
    )
    drain_s: float = setting(
        30.0, "after SIGTERM, how long running requests may go on", unit="s", minimum=0, maximum=3600, shared=True
    )
    resume_grace_s: float = setting(
        60.0, "how long an answer that has begun waits for a lost tokenizer", unit="s", minimum=0, maximum=3600
    )
    limits: HttpLimits = dataclasses.field(default_factory=HttpLimits)
    trust: ServerTrust = dataclasses.field(default_factory=ServerTrust)
    calls: CallTrust = dataclasses.field(default_factory=CallTrust)
    keys: UserKeys = dataclasses.field(default_factory=UserKeys)
    http_trust: HttpTrust = dataclasses.field(default_factory=HttpTrust)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)


PROCESSES: tuple[type[Settings], ...] = (TokenizerConfig, SchedulerConfig, ExecutorConfig, GatewayConfig)
