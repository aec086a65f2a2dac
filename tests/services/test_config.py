"""One declaration, four uses: flags, variables, checks, documentation."""

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from services.config import (
    PROCESSES,
    ExecutorConfig,
    ListenConfig,
    SchedulerConfig,
    TelemetryConfig,
    TimeLimits,
    TokenizerConfig,
)
from services.settings import (
    ConfigError,
    Row,
    Settings,
    add_arguments,
    as_dict,
    describe,
    effective_hash,
    load,
    markdown_table,
    parse,
    setting,
)


def test_precedence_default_environment_flag() -> None:
    environ = {
        "TERCET_EXECUTOR_BLOCK_SIZE": "32",
        "TERCET_EXECUTOR_KV_MEMORY_MIB": "64",
        "TERCET_MODEL": "shared",
        "TERCET_DRAIN_S": "5",
        "TERCET_EXECUTOR_DRAIN_S": "6",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "PATH": "/bin",
    }
    made = parse(ExecutorConfig, ["--block-size", "8", "--listen=unix:/run/t/e.sock"], environ)
    assert (made.block_size, made.kv_memory_mib, made.max_sequences) == (8, 64, 64)
    assert made.net.listen == "unix:/run/t/e.sock"
    assert made.net.drain_s == 6
    assert made.model == "shared"
    assert made.telemetry.otlp_endpoint == "http://collector:4317"
    assert load(ExecutorConfig, {}, {}) == ExecutorConfig()


def test_our_variable_wins_over_the_standard_one_and_empty_means_absent() -> None:
    environ = {
        "TERCET_OTLP_ENDPOINT": "http://ours:1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://theirs:1",
        "TERCET_TOKENIZER_HTTP": "",
    }
    made = load(TokenizerConfig, environ, {})
    assert made.telemetry.otlp_endpoint == "http://ours:1"
    assert made.http is None
    assert load(TokenizerConfig, environ, {"otlp_endpoint": ""}).telemetry.otlp_endpoint is None


def test_lists_and_optional_values() -> None:
    made = parse(SchedulerConfig, ["--executors", "a:1, unix:/tmp/x ,dns:///e:3", "--prefill-chunk", "64"], {})
    assert made.executors == ("a:1", "unix:/tmp/x", "dns:///e:3")
    assert made.prefill_chunk == 64
    assert ExecutorConfig().threads is None


@pytest.mark.parametrize(
    ("config", "environ", "argv", "field", "says"),
    [
        (ExecutorConfig, {}, ["--block-size", "0"], "--block-size", "0 tokens, allowed is 1 to 256"),
        (ExecutorConfig, {}, ["--block-size", "1_6"], "--block-size", "'1_6', which is not a whole number"),
        (ExecutorConfig, {}, ["--block-size", "16.0"], "--block-size", "not a whole number"),
        (ExecutorConfig, {}, ["--lease-ttl-s", "nan"], "--lease-ttl-s", "not a finite number"),
        (
            ExecutorConfig,
            {},
            ["--backend", "tpu"],
            "--backend",
            "'tpu', allowed is cpu or cpu-torch or gpu or reference",
        ),
        (ExecutorConfig, {}, ["--heartbeat-s", "1", "--lease-ttl-s", "1"], "--heartbeat-s", "at most half of"),
        (ExecutorConfig, {}, ["--max-batched-tokens", "8"], "--max-sequences", "at most --max-batched-tokens"),
        (ExecutorConfig, {"TERCET_EXECUTOR_THREADS": "-1"}, [], "TERCET_EXECUTOR_THREADS", "1 to 1024"),
        (ExecutorConfig, {"TERCET_MODEL": "x", "TERCET_LOG_LEVEL": "loud"}, [], "TERCET_LOG_LEVEL", "'loud'"),
        (ExecutorConfig, {}, ["--listen", "nowhere"], "--listen", "'nowhere' is no address"),
        (ExecutorConfig, {}, ["--listen", "unix:/" + "x" * 107], "--listen", "has 108 bytes, the limit is 107"),
        (ExecutorConfig, {}, ["--listen", ""], "--listen", "no address"),
        (SchedulerConfig, {}, ["--executors", ","], "--executors", "at least 1"),
        (SchedulerConfig, {}, ["--executors", "a:1,b"], "--executors", "'b' is no address"),
        (SchedulerConfig, {}, ["--steps-in-flight", "3"], "--steps-in-flight", "1 to 2"),
        (SchedulerConfig, {}, ["--steps-in-flight", "0"], "--steps-in-flight", "1 to 2"),
        (SchedulerConfig, {}, ["--total-limit-s", "9999"], "--total-limit-s", "more than --total-limit-max-s"),
        (TokenizerConfig, {}, ["--trace-sample-ratio", "1.5"], "--trace-sample-ratio", "0 to 1"),
        (TokenizerConfig, {}, ["--otlp-endpoint", "collector:4317"], "--otlp-endpoint", "http://"),
        (TokenizerConfig, {}, ["--model", ""], "--model", "at least 1"),
    ],
)
def test_errors_name_source_value_and_limit(
    config: type[Settings], environ: dict[str, str], argv: list[str], field: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config, argv, environ)
    assert caught.value.field == field
    assert says in caught.value.message
    assert field.lstrip("-") in caught.value.message


def test_misspelt_variables_and_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean TERCET_EXECUTOR_BLOCK_SIZE"):
        load(ExecutorConfig, {"TERCET_EXECUTOR_BLOK_SIZE": "1"}, {})
    # Another process's variables, and the project's other ones, are none of its business.
    load(ExecutorConfig, {"TERCET_SCHEDULER_NONSENSE": "1", "TERCET_CACHE": "/c"}, {})
    with pytest.raises(ConfigError, match="--blocksize"):
        parse(ExecutorConfig, ["--blocksize", "1"], {})
    with pytest.raises(ConfigError, match="--block"):
        parse(ExecutorConfig, ["--block", "1"], {})


def test_code_cannot_make_a_bad_configuration_either() -> None:
    with pytest.raises(ConfigError, match="--block-size"):
        ExecutorConfig(block_size=0)
    with pytest.raises(ConfigError, match="not of type int"):
        dataclasses.replace(ExecutorConfig(), block_size="16")
    with pytest.raises(ConfigError, match="not of type int"):
        ExecutorConfig(block_size=True)
    with pytest.raises(ConfigError, match="finite"):
        TimeLimits(total_limit_s=math.inf)
    assert ListenConfig(drain_s=1).drain_s == 1


def candidates(row: Row) -> Iterator[str]:
    """Values that a setting may have, as text, most of them not its default."""
    yield from row.setting.choices
    yield from ("h:1", "http://h:1", "true", "false", "name=tokens:1")
    for number in (row.setting.maximum, row.setting.minimum):
        if number is not None:
            yield str(row.kind(number) if row.kind in (int, float) else number)
    if row.kind in (int, float):
        yield from (str(row.default + 1), str(row.default / 2)) if row.default is not None else ("2",)


def changed(config: type[Settings], row: Row) -> tuple[str, Settings]:
    """A text that changes this setting alone to another valid value, and the result."""
    for text in candidates(row):
        with contextlib.suppress(ConfigError):
            made = load(config, {}, {row.path[-1]: text})
            if made != config():
                return text, made
    raise AssertionError(f"{row.flag} cannot be changed")


@pytest.mark.parametrize("config", PROCESSES)
def test_every_setting_is_reachable_by_flag_and_variable(config: type[Settings]) -> None:
    rows = describe(config)
    assert len({row.flag for row in rows}) == len(rows)
    for row in rows:
        if len(row.setting.choices) == 1:  # nothing else is allowed: that the source is read shows in the refusal
            for variable in row.variables:
                with pytest.raises(ConfigError, match=variable):
                    load(config, {variable: "x"}, {})
            continue
        text, made = changed(config, row)
        for variable in row.variables:
            assert load(config, {variable: text}, {}) == made
        before, after = as_dict(config()), as_dict(made)
        assert [name for name in before if before[name] != after[name]] == [row.path[-1]]


@dataclass(frozen=True, slots=True)
class Keys(Settings):
    process: ClassVar[str] = "keys"
    api_key: str | None = setting(None, "the key", secret=True, maximum=8)
    strict: bool = setting(False, "refuse more")


def test_secrets_are_neither_hashed_nor_shown() -> None:
    one = load(Keys, {"TERCET_KEYS_API_KEY": "hunter2"}, {})
    two = load(Keys, {"TERCET_KEYS_API_KEY": "other"}, {})
    assert effective_hash(one) == effective_hash(two) == effective_hash(Keys())
    assert as_dict(one) == {"api_key": True, "strict": False}
    with pytest.raises(ConfigError) as caught:
        load(Keys, {"TERCET_KEYS_API_KEY": "hunter2hunter2"}, {})
    assert "hunter2" not in caught.value.message


def test_booleans() -> None:
    assert load(Keys, {"TERCET_KEYS_STRICT": "YES"}, {}).strict is True
    assert parse(Keys, ["--strict", "0"], {"TERCET_KEYS_STRICT": "true"}).strict is False
    with pytest.raises(ConfigError, match="not true or false"):
        parse(Keys, ["--strict", "maybe"], {})


def test_hash_follows_the_effective_values_only() -> None:
    base = effective_hash(SchedulerConfig())
    assert len(base) == 12
    assert effective_hash(load(SchedulerConfig, {"TERCET_SCHEDULER_WATERMARK": "0.01"}, {})) == base
    assert effective_hash(load(SchedulerConfig, {"TERCET_SCHEDULER_WATERMARK": "0.02"}, {})) != base
    assert effective_hash(SchedulerConfig(telemetry=TelemetryConfig(log_level="debug"))) != base


def test_table_and_help_show_every_setting() -> None:
    table = markdown_table(*PROCESSES)
    for config in PROCESSES:
        parser = argparse.ArgumentParser()
        add_arguments(parser, config)
        text = parser.format_help()
        for row in describe(config):
            assert f"| `{row.flag}` | `{row.variables[0]}`" in table
            assert row.flag in text
    assert "`127.0.0.1:50052`" in table
    assert "| `--block-size` | `TERCET_EXECUTOR_BLOCK_SIZE` | `16` tokens | 1 to 256 | tokens in a KV block |" in table


def test_two_settings_of_one_name_are_a_defect() -> None:
    @dataclass(frozen=True, slots=True)
    class Twice(Settings):
        process: ClassVar[str] = "twice"
        drain_s: float = setting(1.0, "x")
        net: ListenConfig = dataclasses.field(default_factory=ListenConfig)

    with pytest.raises(TypeError, match="drain_s"):
        describe(Twice)
