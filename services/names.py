"""Every name that telemetry gives away: spans, events, span attributes, metadata keys.

Owns the spelling and nothing else (metric names are one-to-one with the holders in `services.metrics`).
Sources: OpenTelemetry RPC and HTTP conventions v1.44 (`rpc.*`, `http.*`, `url.*`), GenAI conventions v0.1.0
(`gen_ai.*`), and, for `gen_ai.latency.*`, the names that vLLM emits, so that existing dashboards read ours. Our own
start with `tercet.`. Invariant: the list is pinned by a test, since dashboards and alerts depend on each name.
"""

from typing import Final

# Metadata keys (gRPC wants them in lower case)
MD_REQUEST_ID: Final = "tercet-request-id"
MD_TENANT: Final = "tercet-tenant"
MD_PRIORITY: Final = "tercet-priority"
MD_AUTHORIZATION: Final = "authorization"
MD_TRACEPARENT: Final = "traceparent"
MD_TRACESTATE: Final = "tracestate"

# Spans; an RPC's span is called after its method, `tercet.v1.SchedulerService/Generate`
SPAN_TOKENIZE: Final = "tokenize"
SPAN_GRAMMAR: Final = "grammar"
SPAN_QUEUE: Final = "queue"
SPAN_PREFILL: Final = "prefill"
SPAN_DECODE: Final = "decode"
SPAN_DETOKENIZE: Final = "detokenize"
SPAN_EXECUTOR_STEP: Final = "executor.step"

# Span events
EVENT_PREEMPTED: Final = "preempted"
EVENT_RESUMED: Final = "resumed"
EVENT_STALLED: Final = "stalled"
EVENT_STOPPED: Final = "stopped"
EVENT_EXECUTOR_LOST: Final = "executor_lost"
EVENT_SCHEDULER_LOST: Final = "scheduler_lost"
EVENT_TOKENIZER_LOST: Final = "tokenizer_lost"

# RPC conventions. On the conventions' main branch the status is becoming `rpc.status_code`: change it here.
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS_CODE: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

# HTTP conventions
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"

# GenAI conventions
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_ID: Final = "gen_ai.request.id"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

# vLLM's request latencies, seconds
GEN_AI_LATENCY_QUEUE: Final = "gen_ai.latency.time_in_queue"
GEN_AI_LATENCY_TTFT: Final = "gen_ai.latency.time_to_first_token"
GEN_AI_LATENCY_E2E: Final = "gen_ai.latency.e2e"
GEN_AI_LATENCY_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
GEN_AI_LATENCY_DECODE: Final = "gen_ai.latency.time_in_model_decode"
GEN_AI_LATENCY_INFERENCE: Final = "gen_ai.latency.time_in_model_inference"

# Ours
REQUEST_ID: Final = "tercet.request.id"
ORIGINAL_REQUEST_ID: Final = "tercet.request.original_id"  # where ours had to be made of it
TENANT: Final = "tercet.tenant"
PRIORITY: Final = "tercet.priority"
OUTCOME: Final = "outcome"
REASON: Final = "tercet.reason"
PROMPT_TOKENS: Final = "tercet.prompt_tokens"
OUTPUT_TOKENS: Final = "tercet.output_tokens"
SAMPLED_TOKENS: Final = "tercet.sampled_tokens"
DISCARDED_TOKENS: Final = "tercet.discarded_tokens"
CACHED_TOKENS: Final = "tercet.cached_tokens"
CHUNKS: Final = "tercet.chunks"
ANSWER_INDEX: Final = "tercet.answer.index"
PREEMPTIONS: Final = "tercet.preemptions"
ATTEMPT: Final = "tercet.attempt"
QUEUE_POSITION: Final = "tercet.queue.position"
TEXT_CHARACTERS: Final = "tercet.text.characters"
STEP_ID: Final = "tercet.step.id"
STEP_FIRST: Final = "tercet.step.first"
STEP_LAST: Final = "tercet.step.last"
STEP_EPOCH: Final = "tercet.step.epoch"
STEP_SEQUENCES: Final = "tercet.step.sequences"
STEP_TOKENS: Final = "tercet.step.tokens"
STEP_LINKS_CUT: Final = "tercet.step.links_cut"
STEP_PHASE: Final = "tercet.step.phase"
SCHEDULER: Final = "tercet.scheduler"
EXECUTOR_INSTANCE: Final = "tercet.executor.instance"

PROVIDER: Final = "tercet"
