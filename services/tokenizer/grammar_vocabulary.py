"""A tokenizer as grammars see it. Pure. Invariant: edge and executor make the same of the same model file."""

from executor.grammar.engine import GrammarVocabulary
from services.tokenizer.text import TextModel


def grammar_vocabulary(model: TextModel) -> GrammarVocabulary:
    """Raises ValueError where no id ends an output."""
    ids = range(model.vocab_size)
    return GrammarVocabulary(
        tokens=tuple(map(model.token_bytes, ids)),
        special_ids=tuple(filter(model.is_special, ids)),
        end_ids=tuple(model.eos_ids),
        encode=lambda text: model.encode(text, add_special=False),
    )
