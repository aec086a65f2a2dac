"""Text to ids and back, for whoever asks: the gRPC door and the gateway give the same answers."""

from services.tokenizer.prompts import Prompts
from services.tokenizer.text import TextModel
from tercet.v1 import tokenizer_pb2


async def tokenize(
    model: TextModel, prompts: Prompts, request: tokenizer_pb2.TokenizerServiceTokenizeRequest
) -> tokenizer_pb2.TokenizerServiceTokenizeResponse:
    ids = await prompts.encode_text(request.text, add_special=request.add_special_tokens)
    pieces = [model.token_bytes(one) for one in ids] if request.return_pieces else ()
    return tokenizer_pb2.TokenizerServiceTokenizeResponse(token_ids=ids, pieces=pieces)


async def detokenize(
    prompts: Prompts, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest
) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
    text = await prompts.decode(request.token_ids, skip_special=not request.keep_special_tokens)
    return tokenizer_pb2.TokenizerServiceDetokenizeResponse(text=text)


async def render_chat(
    prompts: Prompts, request: tokenizer_pb2.TokenizerServiceRenderChatRequest
) -> tokenizer_pb2.TokenizerServiceRenderChatResponse:
    rendered, ids = await prompts.encode_chat(request.chat)
    return tokenizer_pb2.TokenizerServiceRenderChatResponse(text=rendered.text, token_ids=ids)
