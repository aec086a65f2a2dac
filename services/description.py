"""What an executor holds, as everybody must agree on it, and its way over the wire.

Owns the values behind `ExecutorService.Describe`. Must not know who asks. Invariant: both directions lie side by
side and lose nothing.
"""

from dataclasses import dataclass

from executor.step import Capacity
from tercet.v1 import common_pb2, executor_pb2


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model as everybody must agree on it. Hashes are SHA-256 in hex; max_model_len counts tokens."""

    name: str
    model_hash: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """What `ExecutorService.Describe` tells.

    numerics: equal here means equal tokens. capabilities, schema_revision: the contract's enum numbers.
    instance_id: random per process. weight_bytes, kv_bytes: resident sizes. kv_format: of
    the pages; empty where there are none, and of executors that do not tell.
    """

    model: ModelIdentity
    capacity: Capacity
    numerics: str
    backend: str
    instance_id: str
    config_hash: str
    capabilities: tuple[int, ...] = (
        executor_pb2.EXECUTOR_CAPABILITY_LOGPROBS,
        executor_pb2.EXECUTOR_CAPABILITY_PROMPT_LOGPROBS,
    )
    weight_bytes: int = 0
    kv_bytes: int = 0
    kv_format: str = ""
    schema_revision: int = common_pb2.SCHEMA_REVISION_ONE


def model_to_proto(model: ModelIdentity) -> common_pb2.ModelDescription:
    return common_pb2.ModelDescription(
        name=model.name,
        model_hash=model.model_hash,
        tokenizer_hash=model.tokenizer_hash,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def model_from_proto(message: common_pb2.ModelDescription) -> ModelIdentity:
    return ModelIdentity(
        name=message.name,
        model_hash=message.model_hash,
        tokenizer_hash=message.tokenizer_hash,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
    )


def description_to_proto(description: ExecutorDescription) -> executor_pb2.ExecutorServiceDescribeResponse:
    return executor_pb2.ExecutorServiceDescribeResponse(
        model=model_to_proto(description.model),
        schema_revision=common_pb2.SchemaRevision.ValueType(description.schema_revision),
        numerics=description.numerics,
        block_size=description.capacity.block_size,
        total_blocks=description.capacity.total_blocks,
        max_batched_tokens=description.capacity.max_batched_tokens,
        max_sequences=description.capacity.max_sequences,
        capabilities=[executor_pb2.ExecutorCapability.ValueType(value) for value in description.capabilities],
        backend=description.backend,
        instance_id=description.instance_id,
        weight_bytes=description.weight_bytes,
        kv_bytes=description.kv_bytes,
        config_hash=description.config_hash,
        kv_format=description.kv_format,
    )


def description_from_proto(message: executor_pb2.ExecutorServiceDescribeResponse) -> ExecutorDescription:
    model = model_from_proto(message.model)
    return ExecutorDescription(
        model=model,
        capacity=Capacity(
            block_size=message.block_size,
            total_blocks=message.total_blocks,
            max_batched_tokens=message.max_batched_tokens,
            max_sequences=message.max_sequences,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        ),
        numerics=message.numerics,
        backend=message.backend,
        instance_id=message.instance_id,
        config_hash=message.config_hash,
        capabilities=tuple(int(value) for value in message.capabilities),
        weight_bytes=message.weight_bytes,
        kv_bytes=message.kv_bytes,
        kv_format=message.kv_format,
        schema_revision=int(message.schema_revision),
    )
