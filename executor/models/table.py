"""The architectures by the name that files give them, each loaded when it is asked for."""

from collections.abc import Callable, Mapping

from executor.loading.gguf import MetadataValue, require
from executor.models.model import ModelConfig, ModelError


def _llama(metadata: Mapping[str, MetadataValue]) -> ModelConfig:
    from executor.models.llama import read_config

    return read_config(metadata)


MODELS: dict[str, Callable[[Mapping[str, MetadataValue]], ModelConfig]] = {"llama": _llama}


def read_model_config(metadata: Mapping[str, MetadataValue]) -> ModelConfig:
    """Raises ModelError for an architecture that is not served, GgufError for metadata that is not whole."""
    architecture = require(metadata, "general.architecture", str)
    if architecture not in MODELS:
        raise ModelError(f"general.architecture {architecture!r} is not supported; {', '.join(MODELS)} is")
    return MODELS[architecture](metadata)
