"""The deliberate faults that `benchmarks/mutate_core.py` tries still apply to the code as it is."""

import ast
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_fault_applies_and_is_python() -> None:
    spec = importlib.util.spec_from_file_location("mutate_core", ROOT / "benchmarks" / "mutate_core.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules["mutate_core"] = tool
    try:
        spec.loader.exec_module(tool)
    finally:
        del sys.modules["mutate_core"]
    assert len({fault.name for fault in tool.FAULTS}) == len(tool.FAULTS) >= 10
    for fault in tool.FAULTS:
        text = (ROOT / "services" / "scheduler" / fault.file).read_text()
        wrong = tool.broken(text, fault)
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(text)), fault.name
