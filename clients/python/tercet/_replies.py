"""Replies of the unary calls, as the values that users get. Pure."""

from tercet.types import RenderedChat, ServerDescription
from tercet.v1 import tokenizer_pb2


def rendered_chat(reply: tokenizer_pb2.TokenizerServiceRenderChatResponse) -> RenderedChat:
    """What the model reads."""
    return RenderedChat(text=reply.text, token_ids=tuple(reply.token_ids))


def description(reply: tokenizer_pb2.TokenizerServiceDescribeResponse) -> ServerDescription:
    """What is served."""
    model = reply.model
    return ServerDescription(
        model=model.name,
        model_hash=model.model_hash,
        tokenizer_hash=model.tokenizer_hash,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        numerics=reply.numerics,
        has_chat_template=reply.has_chat_template,
        schema_revision=reply.schema_revision,
        config_hash=reply.config_hash,
    )
