"""Makes tests/services/tokenizer/golden_smollm2.json with an implementation that shares no code with ours.

Ids come from the pure-Python GPT-2 tokenizer of `transformers` (its slow class, with its own byte alphabet,
expression and merge loop), fed piece by piece after every digit was split off, as this family does. Chat
prompts come from `apply_chat_template` of the same package. Run it in an environment of its own:

    python -m venv golden-env
    golden-env/bin/pip install 'transformers==4.57.6' 'gguf==0.19.0' 'regex'
    golden-env/bin/python tests/golden/make_tokenizer_golden.py MODEL.gguf tests/services/tokenizer/golden_smollm2.json
"""

import json
import sys
import tempfile
from pathlib import Path

import regex
from gguf import GGUFReader
from transformers import GPT2Tokenizer

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "hello world",
    " leading and trailing ",
    "The capital of France is Paris.",
    "I'm you're he'll she'd we've it's don't I'M YOU'RE",
    "’tis ‘quoted’ “text” — with dashes – and…",
    "don''t '' ' s 's'",
    "1",
    "1234567890",
    "3.14159 1,000,000 0x1F 1e-9 2024-02-29 v1.2.3",
    "abc123def456",
    "½ ² ³ Ⅷ ௧ ١٢٣ ⑩ 〇",
    "    indented by four",
    "\tindented by tab\n\t\ttwice",
    "a  b   c    d     e",
    "line\nline\r\nline\rline\n\n\n\nline",
    "trailing newline\n",
    "trailing spaces   ",
    "trailing spaces   \n   \n",
    " " * 100 + "x",
    "\n" * 40,
    "\t \n \t\n  \n",
    "def fib(n: int) -> int:\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; } // done",
    "SELECT * FROM t WHERE x >= 10 AND y IS NOT NULL;",
    '{"key": ["value", 1, 2.5, null, true], "nested": {"a": {}}}',
    "<html><body class='x'>&amp; <!-- note --></body></html>",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "$\\frac{a}{b} = \\sqrt{x^2 + y_1}$ ≤ ∞ ∑ ∫",
    "https://example.com/path?q=a%20b&c=d#frag user@example.org",
    "#include <stdio.h>\nint main(void) { return 0; }",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "!!!???...,,,;;;:::---___***",
    "(((((([[[[[[{{{{{{<<<<<<",
    "漢字とひらがなとカタカナ。",
    "中文分词测试，标点符号！",
    "한국어 문장입니다.",
    "𠀀𠀁𠀂 extension B",
    "ภาษาไทยไม่มีช่องว่าง",
    "हिन्दी में एक वाक्य",
    "العربية من اليمين إلى اليسار",
    "עברית ‏RTL‎ mark",
    "Ελληνικά και Кириллица",
    "naïve café Ångström ﬁnance ﬀ",
    "e\u0301 n\u0303 a\u0308 combining vs é ñ ä",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "😀😃😄",
    "👨‍👩‍👧‍👦 family 👩🏽‍💻 coder 🏳️‍🌈 flag 🇫🇷🇯🇵",
    "❤️ vs ❤ and ☎︎",
    "\ufeffBOM first",
    "zero\u200bwidth\u200djoin\u2060er\u00adsoft",
    "non\u00a0breaking\u2003em\u3000ideographic",
    "control \x00\x01\x07\x08\x0b\x0c\x1b\x7f\x80\x9f chars",
    "\u2028line sep\u2029para sep\x85nel",
    "private \ue000 \U000f0000 use",
    "replacement \ufffd char",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "dGhpcyBpcyBhIGJhc2U2NCBibG9iIHdpdGhvdXQgc3BhY2Vz",
    "<|im_end|> and <|im_start|>system\n typed by a user <|endoftext|>",
    "<repo_name>x<file_sep>y<|im_end",
    "ĠĊ â Ģ Ń",
    "Mixed 混合 mélange смесь 123 <b>bold</b>\n\n- list\n  - item\n",
]

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": "  1 + 1?  "},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "日本語で。 👩🏽‍💻"},
    ],
    [{"role": "user", "content": ""}],
]


def main(model: Path, out: Path) -> None:
    fields = {name: field.contents() for name, field in GGUFReader(model).fields.items() if name.startswith("tok")}
    tokens = fields["tokenizer.ggml.tokens"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps({text: i for i, text in enumerate(tokens)}), encoding="utf-8")
        merges.write_text("#version: 0.2\n" + "\n".join(fields["tokenizer.ggml.merges"]), encoding="utf-8")
        reference = GPT2Tokenizer(str(vocabulary), str(merges))
    ids = {text: i for i, text in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        return [ids[token] for piece in pieces for token in reference._tokenize(piece)]

    template = fields["tokenizer.chat_template"]
    chats = []
    for messages in CHATS:
        prompt = reference.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        control = regex.split(r"(<\|im_start\|>|<\|im_end\|>)", prompt)
        chat_ids = [i for part in control for i in ([ids[part]] if part.startswith("<|im_") else encode(part))]
        chats.append({"messages": messages, "prompt": prompt, "ids": chat_ids})
    golden = {"texts": [{"text": text, "ids": encode(text)} for text in TEXTS], "chats": chats}
    rows = {name: ",\n".join(json.dumps(row) for row in part) for name, part in golden.items()}
    out.write_text(
        "{\n" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in rows.items()) + "\n}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
