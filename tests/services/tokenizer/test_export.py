"""The tokenizer as other tools read it: the same ids, over files and over the wire."""

import asyncio
import io
import zipfile
from pathlib import Path

import pytest
from chain import scheduler
from fake_stack import running_executor, until
from resumable import running_edge, text_model
from tiny_tokenizer import tiny_metadata, tiny_model
from tokenizers import Tokenizer

from services import cli
from services.tokenizer.export import CHUNK_BYTES, FILES, TokenizerZip, pack, tokenizer_files, unpack
from services.tokenizer.templates import load_chat_template
from services.tokenizer.text import load_tokenizer

TEXTS = [
    "",
    "Hello 2024, world!",
    "<|im_start|>user\nhello<|im_end|>\n",
    "def f(x):\n\treturn  x ** 2\r\n\r\n    # 3.14159",
    "你好，世界 — äöü ß e\u0301 👩‍👩‍👧‍👦 🇩🇪",
    "   leading,   runs   and trailing   ",
]


def test_other_tools_get_the_same_ids(default_model_path: Path) -> None:
    model = text_model(default_model_path)
    files = tokenizer_files(model, None, 8192)
    theirs = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS:
        assert theirs.encode(text).ids == model.encode(text, add_special=True, parse_control=True), text


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_bos_and_eos_come_as_the_model_wants_them(bos: bool, eos: bool) -> None:
    model = tiny_model(add_bos_token=bos, add_eos_token=eos)
    theirs = Tokenizer.from_str(tokenizer_files(model, None, None)["tokenizer.json"].decode())
    assert theirs.encode("hello <tool> 12").ids == model.encode("hello <tool> 12", add_special=True, parse_control=True)


def test_the_template_and_the_ends_are_told() -> None:
    metadata = {**tiny_metadata(), "tokenizer.chat_template": "{{ messages[0].content }}"}
    model = load_tokenizer(metadata)
    files = tokenizer_files(model, load_chat_template(metadata, model), 512)
    assert set(files) == FILES
    config = files["tokenizer_config.json"].decode()
    assert '"chat_template": "{{ messages[0].content }}"' in config
    assert '"model_max_length": 512' in config
    assert '"eos_token": "<|im_end|>"' in config


def test_equal_models_give_equal_zips_of_nothing_but_the_files() -> None:
    files = tokenizer_files(tiny_model(), None, None)
    packed = pack(files)
    assert packed == pack(dict(reversed(files.items())))
    assert unpack(packed.data, FILES) == files
    with pytest.raises(ValueError, match="not a zip file"):
        unpack(b"nothing", FILES)
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("../evil", b"")
    with pytest.raises(ValueError, match="evil"):
        unpack(other.getvalue(), FILES)


def test_chunks_are_bounded_and_whole() -> None:
    data = bytes(range(256)) * 2500
    chunks = list(TokenizerZip(data, "").chunks())
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) <= CHUNK_BYTES


async def test_a_server_gives_what_its_model_file_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    async with (
        running_executor(tokenizer_hash=model.hash) as fake,
        scheduler(fake.target) as back,
    ):
        await until(lambda: not back.lease.state.reason, "the lease")
        async with running_edge(model, back.target) as edge:
            command = ["export-tokenizer", str(tmp_path / "new"), "--target", edge.target]
            assert await asyncio.to_thread(cli.main, command) == 0
            assert await asyncio.to_thread(cli.main, command) == 1
    assert "is there already" in capsys.readouterr().err
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert files == tokenizer_files(model, None, None)


def test_of_a_model_file(tmp_path: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export-tokenizer", str(tmp_path / "out"), "--model", str(default_model_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "out" / name) for name in
        ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")]  # fmt: skip
    assert cli.main(["export-tokenizer", str(tmp_path / "out2"), "--model", "nothing-like-it"]) == 1
    assert not (tmp_path / "out2").exists()
