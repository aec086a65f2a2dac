"""The README's examples run as they stand, each in a process of its own, since each makes an event loop."""

import asyncio
import re
import sys
from pathlib import Path

from scripted_tokenizer import ScriptedTokenizer, accepted, delta, finished, plays, serving

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


async def _run(code: str) -> str:
    service = ScriptedTokenizer()
    answers = [accepted(), delta("Paris"), finished(0), delta("Rome", index=1), finished(1)]
    # The one example with n=2 reads both answers.
    service.scripts.append(plays(*(answers if "n=2" in code else answers[:3])))
    async with serving(service) as target:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "error",
            "-c",
            code.replace("localhost:50051", target),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_examples_run() -> None:
    assert len(EXAMPLES) == 5
    outputs = await asyncio.gather(*(_run(code) for code in EXAMPLES))
    for code, output in zip(EXAMPLES, outputs, strict=True):
        assert "localhost:50051" in code
        assert ("Paris" in output) is ("print(delta" in code or "text())" in code or "answer.text" in code), output
