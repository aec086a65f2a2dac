"""Makes llama_smollm2.json: greedy tokens of the default model by an implementation that shares no code with this one.

Run by hand, in an environment of its own (transformers cannot live beside a package called `kernels`):
    python -m venv golden-env && golden-env/bin/pip install torch==2.13.0 'transformers==4.57.6' accelerate gguf
    golden-env/bin/python tests/golden/make_llama_golden.py MODEL.gguf tests/golden/llama_smollm2.json
It reads the same GGUF file through transformers' own loader, which dequantizes to float32 and undoes the row
permutation by itself. For each position it keeps the gap between the two largest logits: where another implementation
first differs, that gap says whether rounding explains it.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT_TOKENS = 32

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

TEXTS = [
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a haiku about the sea."),
    CHAT.format("List three prime numbers and say why they are prime."),
    CHAT.format("Translate 'good morning' to German and Spanish."),
    "The",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "In 1969, the first human being to walk on the Moon was",
    "Water boils at 100 degrees Celsius because",
    '{"name": "Ada", "born": 1815, "field": ',
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the largest planet of the solar system?\nA:",
    "La capitale de l'Allemagne est",
    "Die drei Grundfarben sind",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\nprint(",
    "<html>\n<head>\n<title>",
    "It was a bright cold day in April, and the clocks were",
    "The mitochondria is the",
    "Dear Sir or Madam,\n\nI am writing to",
    "😀 Emoji and accents: naïve café, Ångström, 東京",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y",
    "Chapter 1\n\nThe rain had not stopped for three days. Every gutter in the town ran full, and the river, which on "
    "ordinary days was a thin brown thread under the bridge, had climbed to the lowest steps of the market square. "
    "People put boards before their doors and waited. On the fourth morning",
]
# Lengths around a block of 16 tokens, cut from the last text.
CUT_LENGTHS = [15, 16, 17, 31, 32, 33]


def generate(model: torch.nn.Module, prompt: list[int]) -> dict[str, list[int] | list[float]]:
    output: list[int] = []
    gaps: list[float] = []
    ids, past = torch.tensor([prompt]), None
    for _ in range(OUTPUT_TOKENS):
        step = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = step.past_key_values
        logits = step.logits[0, -1]
        token = int((logits == logits.max()).nonzero()[0])
        top = torch.topk(logits, 2).values
        output.append(token)
        gaps.append(round(float(top[0] - top[1]), 6))
        ids = torch.tensor([[token]])
    return {"prompt": prompt, "output": output, "gaps": gaps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("json", type=Path)
    arguments = parser.parse_args()
    source = {"pretrained_model_name_or_path": str(arguments.gguf.parent), "gguf_file": arguments.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    prompts += [prompts[-1][:length] for length in CUT_LENGTHS]
    with torch.inference_mode():
        cases = [generate(model, prompt) for prompt in prompts]
    golden = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "sha256": hashlib.sha256(arguments.gguf.read_bytes()).hexdigest(),
        "cases": cases,
    }
    body = json.dumps(golden)
    for break_before in ('"sha256"', '"cases"', '{"prompt"', '"output"', '"gaps"'):
        body = body.replace(break_before, "\n" + break_before)
    arguments.json.write_text(body + "\n")


if __name__ == "__main__":
    main()
