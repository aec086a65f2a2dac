"""API keys: their form, their file, the command that makes them."""

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keys_support import make_key

from services import keys
from services.commands import keys as command
from services.errors import InvalidArgument
from services.keys import ApiKey, KeyFile, Role

ALICE, ALICE_KEY = make_key(1, "alice", max_priority=5)
BOB, BOB_KEY = make_key(2, "bob", "operator")
FILE = KeyFile({ALICE.id: ALICE, BOB.id: BOB}, {"alice": "requests:60"})


def test_a_key_finds_its_principal_and_no_other_does() -> None:
    assert FILE.find(ALICE_KEY) == ALICE
    assert FILE.find(BOB_KEY) == BOB
    principal = ALICE.principal
    assert (principal.role, principal.tenant, principal.max_priority) == (Role.USER, "alice", 5)
    for wrong in (
        "",
        "x",
        ALICE.id,
        ALICE_KEY[:-1],
        ALICE_KEY + "A",
        ALICE_KEY[:-1] + "z",
        BOB_KEY.replace(BOB.id, ALICE.id),
    ):
        assert FILE.find(wrong) is None, wrong


def test_the_file_holds_no_key() -> None:
    raw = keys.dump(FILE)
    assert keys.parse(raw) == FILE
    assert ALICE_KEY.encode() not in raw
    assert ALICE_KEY.rpartition("_")[2].encode() not in raw


@given(
    st.lists(
        st.builds(
            ApiKey,
            id=st.from_regex(r"\A[0-9a-f]{12}\Z"),
            sha256=st.from_regex(r"\A[0-9a-f]{64}\Z"),
            tenant=st.from_regex(r"\A[A-Za-z0-9._:-]{1,128}\Z"),
            role=st.sampled_from(["user", "operator"]),
            max_priority=st.integers(-100, 100),
            note=st.text(max_size=200),
        ),
        max_size=4,
        unique_by=lambda key: key.id,
    )
)
def test_what_is_written_is_read(made: list[ApiKey]) -> None:
    file = KeyFile({key.id: key for key in made}, {})
    assert keys.parse(keys.dump(file)) == file


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda s: (
            st.lists(s) | st.dictionaries(st.sampled_from(["version", "keys", "quotas", "id", "sha256", "tenant"]), s)
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_the_file_holds_it_is_read_or_refused(raw: bytes) -> None:
    try:
        keys.parse(raw)
    except InvalidArgument as error:
        assert error.reason == "BAD_KEYS_FILE"  # noqa: PT017 - any of the two is right


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"role": "root"}, "role"),
        ({"tenant": "a b"}, "tenant"),
        ({"max_priority": 101}, "max_priority"),
        ({"max_priority": True}, "max_priority"),
        ({"sha256": "aa"}, "sha256"),
        ({"color": "red"}, "color"),
        ({"note": "x" * 201}, "note"),
    ],
)
def test_bad_entries_are_named(change: dict[str, object], word: str) -> None:
    content = json.loads(keys.dump(KeyFile({ALICE.id: ALICE})))
    content["keys"][0] |= change
    with pytest.raises(InvalidArgument, match=word) as caught:
        keys.parse(json.dumps(content).encode())
    assert ALICE.sha256 not in caught.value.message


def test_a_key_twice_is_refused() -> None:
    content = json.loads(keys.dump(KeyFile({ALICE.id: ALICE})))
    content["keys"] *= 2
    with pytest.raises(InvalidArgument, match="twice"):
        keys.parse(json.dumps(content).encode())


def test_the_command_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    flags = ["--file", str(path)]
    quota = ["--quota", "requests:60+tokens:1000+concurrency:2"]
    assert command.main(["new", *flags, "--tenant", "acme", "--max-priority", "7", "--note", "ci", *quota]) == 0
    first = capsys.readouterr().out.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert command.main(["new", *flags, "--tenant", "ops", "--role", "operator"]) == 0
    second = capsys.readouterr().out.strip()
    file = keys.parse(path.read_bytes())
    made, ops = file.find(first), file.find(second)
    assert made is not None
    assert (made.tenant, made.max_priority, made.note) == ("acme", 7, "ci")
    assert ops is not None
    assert ops.principal.role is Role.OPERATOR
    assert file.quotas == {"acme": "requests:60+tokens:1000+concurrency:2"}

    assert command.main(["list", *flags]) == 0
    listed = capsys.readouterr().out
    assert made.id in listed
    assert "requests:60" in listed
    assert first.rpartition("_")[2] not in listed
    assert made.sha256 not in listed

    assert command.main(["revoke", *flags, first]) == 0
    assert keys.parse(path.read_bytes()).find(first) is None
    assert keys.parse(path.read_bytes()).find(second) == ops
    assert command.main(["revoke", *flags, made.id]) == 1
    assert "no key" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["keys.json"]


@pytest.mark.parametrize(
    "arguments",
    [["--tenant", "a b"], ["--tenant", "a", "--max-priority", "500"], ["--tenant", "a", "--quota", "speed:9"]],
)
def test_the_command_refuses_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert command.main(["new", "--file", str(tmp_path / "keys.json"), *arguments]) == 1
    assert capsys.readouterr().err.startswith("tercet keys: ")
    assert not list(tmp_path.iterdir())
