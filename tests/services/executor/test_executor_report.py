"""Steps as metrics and spans: totals reconcile with what was run, links name the requests that were served."""

from dataclasses import replace

import pytest
from fake_stack import running_executor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.trace import format_trace_id
from prometheus_client import CollectorRegistry
from step_stream import first, further, label, owner_of

from executor.step import NewSequence, SamplingParams, Slice, Step, StepResult, StepTimings
from services import errors, names
from services.executor.fake import At, FakeRunner, Faults
from services.executor.observer import Sequence
from services.executor.report import ExecutorReport, gap_ns, phases, prompt_part
from services.executor.worker import StepDone
from services.metrics import ExecutorMetrics
from services.telemetry import LinkedSampler
from services.wire import RequestLabel, StepOrder

TRACES = ("0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c")
PROMPT = (5, 6, 7)


def traceparent(index: int, *, sampled: bool = True) -> str:
    return f"00-{TRACES[index]}-b7ad6b7169203331-0{int(sampled)}"


class Kept:
    """A report whose figures and spans can be read back."""

    def __init__(self, link_limit: int = 8) -> None:
        self.registry = CollectorRegistry()
        self._spans = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(LinkedSampler(1.0)), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.report = ExecutorReport(
            ExecutorMetrics.make(self.registry), provider.get_tracer("test"), link_limit, "instance-1"
        )

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tercet_{name}", labels)


async def test_figures_reconcile_with_what_was_run() -> None:
    kept = Kept()
    runner = FakeRunner(faults=Faults(nan_slots=frozenset({1}), nan_at=At(step_id=2)))
    async with running_executor(runner=runner, observer=kept.report) as executor, owner_of(executor) as owner:
        await owner.claim()
        async with owner_of(executor) as other:
            with pytest.raises(errors.FailedPrecondition):
                await other.claim("b")
        await owner.step(1, first(0, PROMPT, (0, 1)), first(1, (1, 2), (2, 3)))
        await owner.step(2, further(0, 3), further(1, 2))
        await owner.result()
        await owner.result()
        await owner.step(3, further(7, 3))
        await owner.end()
    assert kept.value("executor_steps_total", result="ok") == 2
    assert kept.value("executor_steps_total", result="failed") == 1
    assert kept.value("iteration_tokens_sum") == 7
    assert kept.value("iteration_sequences_sum") == 4
    assert kept.value("executor_prompt_tokens_total") == 5
    assert kept.value("executor_sampled_tokens_total") == 3
    assert kept.value("corrupted_sequences_total") == 1
    assert kept.value("executor_claims_total", result="granted") == 1
    assert kept.value("executor_claims_total", result="refused") == 1
    assert kept.value("executor_epoch") == 1
    assert kept.value("executor_step_duration_seconds_count") == 2
    assert kept.spans == []  # nobody was traced


async def test_takeover_and_stale_steps_are_counted() -> None:
    kept = Kept()
    async with (
        running_executor(observer=kept.report) as executor,
        owner_of(executor) as owner,
        owner_of(executor) as other,
    ):
        await owner.claim()
        await other.claim("b", takeover=True)
        await other.step(1, first(0, PROMPT, (0,)), epoch=1)
        await other.end()
    assert kept.value("executor_claims_total", result="taken_over") == 1
    assert kept.value("executor_epoch") == 2
    assert kept.value("executor_steps_total", result="stale") == 1
    assert kept.value("executor_steps_total", result="ok") == 0


async def test_a_step_links_to_the_requests_that_it_served() -> None:
    kept = Kept()
    async with running_executor(observer=kept.report) as executor, owner_of(executor) as owner:
        await owner.claim()
        labels = (label(0, "r0", traceparent(0)), label(1, "r1"), label(2, "r2", traceparent(1)))
        await owner.step(1, first(0, PROMPT, (0, 1)), first(1, PROMPT, (2, 3)), first(2, PROMPT, (4, 5)), labels=labels)
        await owner.step(2, further(2, 3), further(1, 3))
        await owner.step(3, further(1, 4))
        for _ in range(3):
            await owner.result()
    one, two = kept.spans  # the third step served only a request that nobody traces
    for span, step_id, requests in ((one, 1, ["r0", "r2"]), (two, 2, ["r2"])):
        assert span.name == names.SPAN_EXECUTOR_STEP
        assert span.parent is None
        assert [link.attributes[names.REQUEST_ID] for link in span.links if link.attributes] == requests
        assert span.attributes is not None
        assert span.attributes[names.STEP_ID] == step_id
        assert span.attributes[names.STEP_EPOCH] == 1
        assert span.attributes[names.EXECUTOR_INSTANCE] == "instance-1"
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time >= span.start_time
    assert [format_trace_id(link.context.trace_id) for link in one.links] == list(TRACES)
    assert one.attributes is not None
    assert (one.attributes[names.STEP_SEQUENCES], one.attributes[names.STEP_TOKENS]) == (3, 9)


async def test_a_reused_slot_links_to_its_new_request() -> None:
    kept = Kept()
    async with running_executor(observer=kept.report) as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0, 1)), labels=(label(0, "old", traceparent(0)),))
        await owner.step(2, first(0, PROMPT, (0, 1)), labels=(label(0, "new", traceparent(1)),))
        await owner.result()
        await owner.result()
    assert [[link.context.trace_id for link in span.links] for span in kept.spans] == [
        [int(TRACES[0], 16)],
        [int(TRACES[1], 16)],
    ]


def done(own_traceparent: str | None = None) -> StepDone:
    piece = Slice(0, 0, 3, PROMPT, (0,), True, NewSequence(SamplingParams(), 3))
    order = StepOrder(Step(1, (piece,)), epoch=1, traceparent=own_traceparent)
    outcome = StepResult(1, (), StepTimings(wait_ns=10, prepare_ns=20, forward_ns=30, sample_ns=40))
    return StepDone(order, outcome, arrived_ns=1000, started_ns=1010, ended_ns=1150)


def test_phases_add_up() -> None:
    step = done()
    assert isinstance(step.outcome, StepResult)
    parts = phases(step, step.outcome)
    assert parts == {"wait": 10, "prepare": 20, "forward": 30, "sample": 40, "finish": 50}
    assert sum(parts.values()) == step.ended_ns - step.arrived_ns


def test_a_gap_counts_where_a_sequence_goes_on() -> None:
    def at(piece: Slice, epoch: int, started_ns: int, ended_ns: int) -> StepDone:
        return replace(
            done(), order=StepOrder(Step(1, (piece,)), epoch), started_ns=started_ns, ended_ns=ended_ns, arrived_ns=0
        )

    new = Slice(0, 0, 3, PROMPT, (0,), True, NewSequence(SamplingParams(), 3))
    on = Slice(0, 3, 1, (), (), True)
    first_step = at(new, 1, 100, 200)
    assert gap_ns(None, first_step) == 0
    assert gap_ns(first_step, at(on, 1, 230, 300)) == 30
    assert gap_ns(first_step, at(new, 1, 230, 300)) == 0
    assert gap_ns(first_step, at(on, 2, 230, 300)) == 0


@pytest.mark.parametrize(
    ("start", "count", "prompt_len", "part"), [(0, 3, 5, 3), (3, 3, 5, 2), (5, 1, 5, 0), (9, 1, 5, 0), (0, 5, 5, 5)]
)
def test_prompt_part_of_a_slice(start: int, count: int, prompt_len: int, part: int) -> None:
    piece = Slice(0, start, count, (), (), True)
    assert prompt_part(piece, Sequence(RequestLabel(), prompt_len)) == part


def test_unsampled_request_gives_no_span_and_links_are_capped() -> None:
    kept = Kept(link_limit=1)
    kept.report.step(done(), (Sequence(RequestLabel("r", traceparent(0, sampled=False)), 3),))
    assert kept.spans == []
    both = tuple(Sequence(RequestLabel(f"r{index}", traceparent(index)), 3) for index in (0, 1))
    kept.report.step(done(), both)
    (span,) = kept.spans
    assert len(span.links) == 1
    assert span.attributes is not None
    assert span.attributes[names.STEP_LINKS_CUT] == 1
    assert span.attributes[f"{names.STEP_PHASE}.forward_ns"] == 30


def test_the_owners_own_context_is_the_parent() -> None:
    kept = Kept()
    kept.report.step(done(traceparent(1)), (Sequence(RequestLabel("r", traceparent(0)), 3),))
    (span,) = kept.spans
    assert span.parent is not None
    assert format_trace_id(span.parent.trace_id) == TRACES[1]


def test_what_is_held_is_told() -> None:
    kept = Kept()
    kept.report.loaded(weight_bytes=7, kv_bytes=9)
    assert (kept.value("weights_bytes"), kept.value("kv_pool_bytes")) == (7, 9)


def test_kernels_that_are_compiled_late_are_counted_once() -> None:
    kept, late = Kept(), [0]
    kept.report.loaded(7, 9, lambda: late[0])
    for count in (0, 2, 2, 3):
        late[0] = count
        kept.report.step(done(traceparent(0)), (Sequence(RequestLabel("r", None), 3),))
        assert kept.value("executor_late_kernels_total") == count
