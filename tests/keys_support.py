"""Keys and certificates for tests: made anew each time, nothing of them stays."""

from pathlib import Path

import trustme

from services import keys
from services.keys import ApiKey, KeyFile

SERVICE_KEY = "s" * 40


def make_key(number: int, tenant: str, role: str = "user", max_priority: int = 0) -> tuple[ApiKey, str]:
    """The same key for the same number."""
    secret = bytes([number]) * keys.SECRET_BYTES
    name, whole = keys.new_key(bytes([number]) * keys.ID_BYTES, secret, chr(ord("A") + number) * 43)
    return ApiKey(name, keys.digest(whole), tenant, role, max_priority), whole


def write_keys(path: Path, *made: ApiKey, quotas: dict[str, str] | None = None) -> Path:
    path.write_bytes(keys.dump(KeyFile({key.id: key for key in made}, quotas or {})))
    return path


def write_service_key(path: Path) -> Path:
    path.write_text(SERVICE_KEY + "\n")
    path.chmod(0o600)
    return path


class Authority:
    """A certificate authority. ca: its PEM file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._made = trustme.CA()
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._made.cert_pem.write_to_path(str(self.ca))

    def certificate(self, name: str) -> tuple[Path, Path]:
        """PEM files of a certificate for this machine, and of its key."""
        made = self._made.issue_cert("localhost", "127.0.0.1")
        cert, key = self._folder / f"{name}-cert.pem", self._folder / f"{name}-key.pem"
        cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return cert, key
