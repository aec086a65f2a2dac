"""`tercet keys new|list|revoke`: the file of API keys that servers read. A running server sees the change by itself."""

import argparse
import base64
import fcntl
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from services import keys
from services.errors import InvalidArgument
from services.keys import ApiKey, KeyFile
from services.scheduler.core.limits import TOP_PRIORITY
from services.scheduler.quota_settings import parse_quota

VARIABLE: Final = "TERCET_API_KEYS"
MODE: Final = 0o600


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet keys", allow_abbrev=False, description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--file", default=os.environ.get(VARIABLE), help=f"the file; absent: the variable {VARIABLE}")
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", parents=[common], help="make a key and print it, this once", allow_abbrev=False)
    new.add_argument("--tenant", required=True, help="on whose behalf it calls: 1 to 128 of A-Z a-z 0-9 . _ : -")
    new.add_argument("--role", choices=("user", "operator"), default="user", help="operators also watch and steer")
    new.add_argument("--max-priority", type=int, default=0, help=f"-{TOP_PRIORITY} to {TOP_PRIORITY}; default 0")
    new.add_argument("--note", default="", help="for people")
    new.add_argument("--quota", help="of the whole tenant, as requests:60+tokens:100000+concurrency:4+weight:2")
    commands.add_parser("list", parents=[common], help="show keys, without their secrets", allow_abbrev=False)
    revoke = commands.add_parser("revoke", parents=[common], help="remove a key", allow_abbrev=False)
    revoke.add_argument("id", help="as `list` shows it, or the key itself")
    chosen = parser.parse_args(argv)
    if not chosen.file:
        parser.error(f"--file, or the variable {VARIABLE}, must name the file")
    try:
        return COMMANDS[chosen.command](Path(chosen.file), chosen)
    except (InvalidArgument, OSError) as error:
        print(f"tercet keys: {error}", file=sys.stderr)
        return 1


def _new(path: Path, chosen: argparse.Namespace) -> int:
    if chosen.quota is not None:
        parse_quota(f"{chosen.tenant}={chosen.quota}")
    id_bytes, secret = secrets.token_bytes(keys.ID_BYTES), secrets.token_bytes(keys.SECRET_BYTES)
    encoded = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    name, whole = keys.new_key(id_bytes, secret, encoded)
    made = ApiKey(
        id=name,
        sha256=keys.digest(whole),
        tenant=chosen.tenant,
        role=chosen.role,
        max_priority=chosen.max_priority,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note=chosen.note,
    )
    with _locked(path):
        file = _read(path)
        quotas = dict(file.quotas)
        if chosen.quota is not None:
            quotas[chosen.tenant] = chosen.quota
        _write(path, KeyFile({**file.keys, name: made}, quotas))
    print(whole)
    print(f"key {name} of tenant {chosen.tenant}; it is shown this once, {path} holds its hash", file=sys.stderr)
    if chosen.quota is not None:
        print("schedulers read quotas when they start", file=sys.stderr)
    return 0


def _list(path: Path, chosen: argparse.Namespace) -> int:
    file = keys.parse(path.read_bytes())
    rows = [("KEY", "TENANT", "ROLE", "MAX PRIORITY", "CREATED", "QUOTA OF THE TENANT", "NOTE")]
    for key in file.keys.values():
        quota = file.quotas.get(key.tenant, "-")
        rows.append((key.id, key.tenant, key.role, str(key.max_priority), key.created, quota, key.note))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(path: Path, chosen: argparse.Namespace) -> int:
    form = keys.KEY.fullmatch(chosen.id)
    name = chosen.id if form is None else form[1]
    with _locked(path):
        file = keys.parse(path.read_bytes())
        if name not in file.keys:
            raise InvalidArgument(f"there is no key {name} in {path}")
        _write(path, replace(file, keys={id_: key for id_, key in file.keys.items() if id_ != name}))
    print(f"key {name} is no longer valid")
    return 0


COMMANDS: Final[Mapping[str, Callable[[Path, argparse.Namespace], int]]] = {
    "new": _new,
    "list": _list,
    "revoke": _revoke,
}


def _read(path: Path) -> KeyFile:
    return keys.parse(path.read_bytes()) if path.exists() else KeyFile()


def _write(path: Path, file: KeyFile) -> None:
    """Whole or not at all: a server may read at any time."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(descriptor, MODE)
        if path.exists():
            seen = path.stat()
            os.fchmod(descriptor, seen.st_mode & 0o777)
            if (seen.st_uid, seen.st_gid) != (os.getuid(), os.getgid()):
                os.fchown(descriptor, seen.st_uid, seen.st_gid)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(keys.dump(file))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two commands at once don't lose a key: the folder is what both can lock."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
