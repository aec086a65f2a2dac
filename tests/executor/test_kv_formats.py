"""What keys and values are kept in: one list of names, and what a back end does not have is refused by name."""

from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from executor.loading.load import load_runner
from executor.sizing.formats import CACHE_FORMATS
from kernels.backends import BACKENDS, KV_FORMATS, BackendSettings, load
from kernels.gpu.pages import PAGE_FORMATS
from services import config


def test_the_tables_have_the_same_names() -> None:
    assert set(KV_FORMATS) == set(BACKENDS)
    assert set(KV_FORMATS["gpu"]) == set(PAGE_FORMATS) == set(CACHE_FORMATS) == set(config.KV_FORMATS)
    for name, own in CACHE_FORMATS.items():
        pages = PAGE_FORMATS[name]
        assert pages.name == name
        assert pages.block_bytes(16, 3, 64) == 16 * 3 * (64 * own.bytes + own.scale_bytes)


@pytest.mark.parametrize("backend", ["reference", "cpu", "cpu-torch"])
def test_none_takes_the_back_ends_own(tmp_path: Path, backend: str) -> None:
    assert load(backend).kv_format == KV_FORMATS[backend][0]
    path = write_tiny_model(tmp_path / "m.gguf")

    def runner(kv: str | None) -> tuple[str, str]:
        made = load_runner(
            path, backend=backend, block_size=8, total_blocks=4, max_batched_tokens=8, max_sequences=1, kv=kv
        )
        return made.kv_format, made.numerics

    assert runner(None) == runner(KV_FORMATS[backend][0])


@pytest.mark.parametrize(
    ("backend", "kv", "message"),
    [
        ("cpu", "fp8", "the back end cpu keeps keys and values in bf16, not in fp8"),
        ("cpu-torch", "int8", "the back end cpu-torch keeps keys and values in bf16, not in int8"),
        ("reference", "bf16", "the back end reference keeps keys and values in fp32, not in bf16"),
        ("gpu", "int4", "the back end gpu keeps keys and values in bf16, fp16, fp32, fp8, int8, not in int4"),
    ],
)
def test_others_are_refused_by_name(backend: str, kv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(backend, BackendSettings(kv=kv))


def test_pages_whose_scales_would_lie_askew_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"int8 pages of 1 tokens x 3 heads x 6 bytes .*: block_size must be a multiple"
    ):
        PAGE_FORMATS["int8"].page(1, 3, 6)
    assert PAGE_FORMATS["bf16"].page(1, 3, 6) == (1, 3, 6)
