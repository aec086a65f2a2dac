"""Fixtures shared by every test: where the default model lies, and what a missing piece means."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported: before anything below

from pathlib import Path

import pytest

from services.catalogue import DEFAULT_MODEL, MODELS, cache_directory


def missing(what: str) -> None:
    """Skip visibly; `make test-all` sets TERCET_TESTS_REQUIRE_ALL=1 and turns every skip into a failure."""
    if os.environ.get("TERCET_TESTS_REQUIRE_ALL") == "1":
        pytest.fail(f"{what} is required here and is missing")
    pytest.skip(f"{what} is missing")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF in the user cache, put there by `tercet pull`."""
    path = MODELS[DEFAULT_MODEL].path(cache_directory(os.environ))
    if not path.exists():
        missing(f"the default model ({path})")
    return path
