"""The GGUF reader: what it reads, and that whatever else it is given ends in a GgufError that names the fault."""

import itertools
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf_writer as w
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor.loading.ggml_types import BLOCKS, UNSERVED_TYPES, GgmlType
from executor.loading.gguf import GgufError, find, open_gguf, require, require_array
from executor.loading.gguf_header import (
    MAX_ARRAY_DEPTH,
    MAX_ARRAY_ELEMENTS,
    MAX_HEADER_BYTES,
    MAX_METADATA,
    MAX_STRING_BYTES,
    MAX_TENSORS,
    Header,
    parse_header,
)

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<s>", "héllo", "\N{ROCKET}", ""],
    "tokenizer.ggml.token_type": w.Typed(w.ARRAY, [3, 1, 1, 1], w.I32),
    "test.nested": [[1, 2], [3]],
    "test.bools": [True, False],
    "test.empty": [],
}
TENSORS = (
    w.Tensor("token_embd.weight", (3, 32), GgmlType.Q4_0, bytes(range(54))),
    w.Tensor("blk.0.attn_norm.weight", (5,), GgmlType.F32, bytes(range(20))),
    w.zeros("blk.0.ffn_gate.weight", (2, 2, 256), GgmlType.Q6_K),
)
VALID = w.gguf_bytes(METADATA, TENSORS)


def parse(data: bytes) -> Header:
    return parse_header(memoryview(data))


def refusal(data: bytes) -> str:
    with pytest.raises(GgufError) as caught:
        parse(data)
    return str(caught.value)


def header_of(tensor_count: int, pair_count: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, pair_count) + body


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model file.gguf"
    path.write_bytes(VALID)
    return path


# --- what is read ---


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(tmp_path: Path, version: int) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(w.gguf_bytes(METADATA, TENSORS, version=version))
    with open_gguf(path) as model:
        assert model.path == path
        assert model.size == path.stat().st_size
        assert dict(model.metadata) == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.tokens": ("<s>", "héllo", "\N{ROCKET}", ""),
            "tokenizer.ggml.token_type": (3, 1, 1, 1),
            "test.nested": ((1, 2), (3,)),
            "test.bools": (True, False),
            "test.empty": (),
        }
        assert list(model.tensors) == [tensor.name for tensor in TENSORS]
        for tensor in TENSORS:
            info = model.tensors[tensor.name]
            assert (info.shape, info.type, info.nbytes) == (tensor.shape, tensor.type, len(tensor.data))
            assert info.offset % 32 == 0
            assert bytes(model.raw(tensor.name)) == tensor.data
        assert model.tensors["blk.0.ffn_gate.weight"].rows == 4
        assert model.tensors["blk.0.ffn_gate.weight"].row_bytes == 210


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (w.U8, 255),
        (w.I8, -128),
        (w.U16, 65535),
        (w.I16, -32768),
        (w.U32, 2**32 - 1),
        (w.I32, -(2**31)),
        (w.U64, 2**64 - 1),
        (w.I64, -(2**63)),
        (w.F32, 0.5),
        (w.F64, 0.1),
        (w.BOOL, False),
        (w.STRING, "é"),
    ],
)
def test_every_scalar_type(kind: int, value: object) -> None:
    header = parse(w.gguf_bytes({"one": w.Typed(kind, value), "many": w.Typed(w.ARRAY, [value] * 3, kind)}))
    assert header.metadata == {"one": value, "many": (value,) * 3}
    assert type(header.metadata["one"]) is type(value)


@pytest.mark.parametrize("type", list(GgmlType))
def test_every_tensor_type_has_its_size(type: GgmlType) -> None:
    block = BLOCKS[type]
    header = parse(w.gguf_bytes({}, [w.zeros("t", (3, 2 * block.elements), type)]))
    assert header.tensors["t"].nbytes == 6 * block.bytes
    assert header.tensors["t"].row_bytes == 2 * block.bytes


def test_the_block_table_agrees_with_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for type, block in BLOCKS.items():
        assert (block.elements, block.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type.name]]
        assert gguf.GGMLQuantizationType[type.name] == int(type)


def test_alignment_of_the_file_is_used() -> None:
    header = parse(w.gguf_bytes({"general.alignment": 64}, TENSORS, alignment=64))
    assert [info.offset % 64 for info in header.tensors.values()] == [0, 0, 0]


def test_a_file_without_tensors_is_a_vocabulary() -> None:
    assert parse(w.gguf_bytes(METADATA)).tensors == {}


def test_raw_is_read_only_and_outlives_close(file: Path) -> None:
    model = open_gguf(file)
    view = model.raw("token_embd.weight")
    assert view.readonly
    model.close()
    model.close()
    assert bytes(view) == bytes(range(54))
    with pytest.raises(ValueError, match="released"):
        model.raw("token_embd.weight")


def test_raw_of_an_absent_tensor_is_named(file: Path) -> None:
    with open_gguf(file) as model, pytest.raises(GgufError, match=r"model file\.gguf: tensor 'output' is missing"):
        model.raw("output")


def test_reading_needs_neither_torch_nor_numpy(file: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom executor.loading.gguf import open_gguf\n"
        "open_gguf(Path(sys.argv[1])).close()\nassert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, file], check=True)


@pytest.mark.model
def test_the_default_model_reads_as_the_gguf_package_reads_it(default_model_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    theirs = gguf.GGUFReader(default_model_path)
    with open_gguf(default_model_path) as ours:
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
            assert (info.type, info.offset) == (int(tensor.tensor_type), tensor.data_offset)
            assert info.nbytes == tensor.n_bytes
        assert len(theirs.tensors) == len(ours.tensors)
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert fields.keys() == ours.metadata.keys()
        for name, field in fields.items():
            value = field.contents()
            assert ours.metadata[name] == (tuple(value) if isinstance(value, list) else value)


# --- accessors ---


def test_accessors_name_the_key_and_the_type() -> None:
    metadata = parse(VALID).metadata
    assert require(metadata, "llama.block_count", int) == 2
    assert find(metadata, "llama.block_count", int) == 2
    assert find(metadata, "absent", int) is None
    assert require_array(metadata, "tokenizer.ggml.token_type", int) == (3, 1, 1, 1)
    for read, message in (
        (lambda: require(metadata, "absent", int), "metadata key 'absent' is missing"),
        (lambda: require_array(metadata, "absent", int), "metadata key 'absent' is missing"),
        (lambda: require(metadata, "general.architecture", int), "'general.architecture' is of type str, expected int"),
        (lambda: require(metadata, "tokenizer.ggml.add_bos_token", int), "is of type bool, expected int"),
        (lambda: find(metadata, "llama.block_count", str), "is of type int, expected str"),
        (lambda: require_array(metadata, "llama.block_count", int), "is of type int, expected an array"),
        (lambda: require_array(metadata, "tokenizer.ggml.tokens", int), r"tokens'\[0\] is of type str, expected int"),
    ):
        with pytest.raises(GgufError, match=message):
            read()


# --- what is refused ---


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + VALID[4:], "magic is b'GGML'"),
        (b"GG", "magic is b'GG'"),
        (b"GGUF", "version: needs 4 bytes"),
        (b"GGUF" + struct.pack("<I", 1) + VALID[8:], "GGUF version 1 is not served"),
        (b"GGUF" + struct.pack(">I", 3) + VALID[8:], "big-endian"),
        (b"GGUF" + struct.pack("<I", 4) + VALID[8:], "GGUF version 4"),
        (header_of(MAX_TENSORS + 1, 0), f"tensor count {MAX_TENSORS + 1} is beyond the limit of {MAX_TENSORS}"),
        (header_of(0, 2**64 - 1), f"metadata count {2**64 - 1} is beyond the limit of {MAX_METADATA}"),
        (header_of(1000, 1000), "tensor and metadata counts: needs"),
    ],
)
def test_bad_preamble(data: bytes, message: str) -> None:
    assert message in refusal(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (struct.pack("<Q", 2**64 - 1) + bytes(8), "metadata key 0: string of"),
        (w.string("") + bytes(8), "metadata key 0: empty name"),
        (w.string(b"\xff\xfe") + bytes(8), "metadata key 0: not UTF-8"),
        (w.string("k") + struct.pack("<I", 13) + bytes(8), "'k': unknown value type 13"),
        (w.string("k") + struct.pack("<IB", w.BOOL, 2), "'k': bool with value 2"),
        (w.pair("k", b"\x80"), "'k': not UTF-8"),
        (w.string("k") + struct.pack("<IQ", w.STRING, MAX_STRING_BYTES + 1), f"the limit is {MAX_STRING_BYTES}"),
        (w.string("k") + struct.pack("<IQ", w.STRING, 1000), "'k': needs 1000 bytes"),
        (w.string("k") + struct.pack("<IIQ", w.ARRAY, 77, 0), "'k': unknown element type 77"),
        (w.string("k") + struct.pack("<IIQ", w.ARRAY, w.U8, 2**64 - 1), f"all together may have {MAX_ARRAY_ELEMENTS}"),
        (w.string("k") + struct.pack("<IIQ", w.ARRAY, w.U64, 100_000), "'k' array of 100000 elements: needs 800000"),
        (w.string("k") + struct.pack("<IIQ", w.ARRAY, w.STRING, 100_000), "needs 800000"),
        (w.string("k") + struct.pack("<IIQ", w.ARRAY, w.ARRAY, 100_000), "needs 1200000"),
        (
            w.string("k") + struct.pack("<IIQ", w.ARRAY, w.STRING, 2) + w.string("a") + bytes([1, *bytes(7)]),
            "'k'[1]: needs 1 bytes",
        ),
        (w.pair("k", ["a", "b", b"\xc3"]), "'k'[2]: not UTF-8"),
        (w.pair("k", "v") * 2, "'k' appears twice"),
        (w.pair("k" * 1000, "v") * 2, f"'{'k' * 100}...' appears twice"),
        (w.pair("general.alignment", 24), "'general.alignment' is 24"),
        (w.pair("general.alignment", 0), "'general.alignment' is 0"),
        (w.pair("general.alignment", 4), "'general.alignment' is 4"),
        (w.pair("general.alignment", 1 << 21), "'general.alignment' is 2097152"),
        (w.pair("general.alignment", "32"), "'general.alignment' is of type str"),
        (w.pair("general.alignment", True), "'general.alignment' is of type bool"),
    ],
)
def test_bad_metadata(body: bytes, message: str) -> None:
    pairs = 2 if "twice" in message else 1
    assert message in refusal(header_of(0, pairs, body))


def test_nested_arrays_are_bounded() -> None:
    value: list[object] = [1]
    for _ in range(MAX_ARRAY_DEPTH - 1):
        value = [value]
    assert parse(w.gguf_bytes({"deep": value})).metadata["deep"] == ((((1,),),),)
    assert "arrays nested deeper" in refusal(w.gguf_bytes({"deep": [value]}))
    bottomless = w.string("deep") + struct.pack("<I", w.ARRAY) + struct.pack("<IQ", w.ARRAY, 1) * 100_000
    assert "arrays nested deeper" in refusal(header_of(0, 1, bottomless))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (w.Tensor("", (4,), GgmlType.F32, bytes(16)), "tensor 0 name: empty"),
        (w.Tensor("t" * 65, (4,), GgmlType.F32, bytes(16)), "tensor 0 name: string of 65 bytes, the limit is 64"),
        (w.Tensor("t", (), GgmlType.F32, bytes(64)), "'t': 0 dims"),
        (w.Tensor("t", (1,) * 5, GgmlType.F32, bytes(64)), "'t': 5 dims"),
        (w.Tensor("t", (4, 0), GgmlType.F32, bytes(64)), "'t': dims (0, 4) contain a zero"),
        (w.Tensor("t", (2**32, 2**32), GgmlType.F32, bytes(64)), "'t': dims"),
        (w.Tensor("t", (2**63, 2), GgmlType.F32, bytes(64)), "elements, the limit is"),
        (w.Tensor("t", (2**30, 2**30), GgmlType.F32, bytes(64)), "is it truncated"),
        (w.Tensor("t", (2, 48), GgmlType.Q4_0, bytes(64)), "'t': rows of 48 are no multiple of Q4_0's block 32"),
        (w.Tensor("t", (4,), GgmlType.F32, bytes(16), offset=8), "'t': offset 8 is not aligned to 32"),
        (w.Tensor("t", (4,), GgmlType.F32, bytes(16), offset=2**63), "'t': ends at byte"),
        (w.Tensor("t", (4,), GgmlType.F32, bytes(16), offset=32), "'t': ends at byte"),
        (w.Tensor("t", (256,), 11, bytes(110)), "'t': type Q3_K (11) is not served"),
        (w.Tensor("t", (256,), 1000, bytes(110)), "'t': type unknown (1000) is not served"),
    ],
)
def test_bad_tensor(tensor: w.Tensor, message: str) -> None:
    assert message in refusal(w.gguf_bytes({}, [tensor]))


@pytest.mark.parametrize("type", sorted(UNSERVED_TYPES))
def test_types_that_are_not_served_are_named(type: int) -> None:
    assert UNSERVED_TYPES[type] in refusal(w.gguf_bytes({}, [w.Tensor("t", (256,), type, bytes(512))]))


def test_tensors_may_not_share_a_name_or_bytes() -> None:
    one = w.Tensor("one", (16,), GgmlType.F32, bytes(64))
    assert "tensor 'one' appears twice" in refusal(w.gguf_bytes({}, [one, one]))
    two = w.Tensor("two", (16,), GgmlType.F32, bytes(64), offset=32)
    assert "tensor 'two' overlaps tensor 'one'" in refusal(w.gguf_bytes({}, [one, two]))


DATA_END = max(info.offset + info.nbytes for info in parse(VALID).tensors.values())


@pytest.mark.parametrize("length", [*range(0, 200), DATA_END - 1024, DATA_END - 1])
def test_a_cut_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(VALID[:length])
    with pytest.raises(GgufError, match=r"cut\.gguf: "):
        open_gguf(path)


def test_padding_after_the_last_tensor_may_be_absent() -> None:
    assert len(VALID) > DATA_END
    assert parse(VALID[:DATA_END]) == parse(VALID)


@pytest.mark.model
def test_the_default_model_without_its_last_mebibyte_is_refused(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(default_model_path.read_bytes()[: -(1 << 20)])
    with pytest.raises(GgufError, match=r"cut\.gguf: tensor '.*': ends at byte .* truncated"):
        open_gguf(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(GgufError, match="not a regular file"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GgufError, match="not a regular file"):
        open_gguf(tmp_path / "fifo")


def test_the_header_as_a_whole_is_bounded(tmp_path: Path) -> None:
    # A sparse file: five strings, each within its own limit, that together are beyond the header's.
    path = tmp_path / "vast.gguf"
    with path.open("wb") as file:
        file.write(header_of(0, 5))
        for index in range(5):
            file.write(w.string(f"k{index}") + struct.pack("<IQ", w.STRING, MAX_STRING_BYTES))
            file.seek(MAX_STRING_BYTES, os.SEEK_CUR)
        file.truncate(file.tell())
    with pytest.raises(GgufError, match=rf"'k3': needs .* beyond the header limit of {MAX_HEADER_BYTES} bytes"):
        open_gguf(path)


# --- fuzz ---

HEADER_BYTES = min(info.offset for info in parse(VALID).tensors.values())
EXTREMES = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, len(VALID), 1 << 22, 1 << 24)
position = st.integers(0, HEADER_BYTES - 1)
edit = st.one_of(
    st.tuples(position, st.binary(min_size=1, max_size=3)),
    st.tuples(position, st.sampled_from(EXTREMES).map(lambda value: struct.pack("<Q", value))),
    st.tuples(position, st.sampled_from(EXTREMES).map(lambda value: struct.pack("<I", value & 0xFFFFFFFF))),
)


def loads_or_refuses(data: bytes) -> None:
    tracemalloc.start()
    try:
        try:
            header = parse(data)
        except GgufError:
            header = None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000
    if header is not None:
        places = sorted((info.offset, info.offset + info.nbytes) for info in header.tensors.values())
        assert all(end <= len(data) for _, end in places)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@settings(max_examples=1500, deadline=None, derandomize=True, database=None)
@given(edits=st.lists(edit, min_size=1, max_size=4), cut=st.none() | st.integers(0, len(VALID)))
@example(edits=[(8, struct.pack("<Q", 2**64 - 1))], cut=None)
@example(edits=[(16, struct.pack("<Q", 2**40))], cut=None)
def test_mutated_headers_load_or_are_refused(edits: list[tuple[int, bytes]], cut: int | None) -> None:
    data = bytearray(VALID)
    for start, patch in edits:
        data[start : start + len(patch)] = patch
    loads_or_refuses(bytes(data[:cut]))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(body=st.binary(max_size=300), tensors=st.integers(0, 4), pairs=st.integers(0, 4))
def test_random_bodies_load_or_are_refused(body: bytes, tensors: int, pairs: int) -> None:
    loads_or_refuses(header_of(tensors, pairs, body))


def test_every_field_of_the_header_survives_every_extreme() -> None:
    for start in range(4, HEADER_BYTES):
        for value in EXTREMES:
            data = bytearray(VALID)
            data[start : start + 8] = struct.pack("<Q", value)
            try:
                parse(bytes(data))
            except GgufError:
                continue
