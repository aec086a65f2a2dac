"""The script for a machine with a GPU, run without one: the same sections on tiny sizes, in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_the_dry_run_checks_everything_and_claims_no_speed(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "benchmarks/gpu_check.sh"), "--tiny", "--out", str(tmp_path)],
        env=os.environ | {"PYTHON": sys.executable, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads((tmp_path / "gpu_check.json").read_text())
    assert (told["failures"], told["not_reached"], told["device"]) == ([], [], "no GPU (interpreter)")
    assert {row["section"] for row in told["rows"]} == {"ceiling", "warm-up", "decode", "prefill", "kernel"}
    for row in told["rows"]:
        figures = {name: value for name, value in row.items() if name not in ("section", "name", "compiled", "buckets")}
        assert figures
        assert set(figures.values()) == {None}
    assert (tmp_path / "gpu_check.md").read_text().startswith("Measured by `benchmarks/gpu_check.sh` on no GPU")


def test_it_needs_no_more_than_torch_triton_and_numpy() -> None:
    """Nothing of gRPC, grammars or telemetry: a machine with a GPU has none of them."""
    code = (
        "import sys; sys.argv = ['gpu_check.py']; sys.path[:0] = ['benchmarks', 'tests']; import gpu_check;"
        "print([name for name in ('grpc', 'llguidance', 'opentelemetry', 'tokenizers', 'google.protobuf', 'pytest')"
        " if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.strip() == "[]"
