"""The GPU kernels in Triton's interpreter, on the CPU: the tests that every back end has, and the kernels' own.

bfloat16 arithmetic is wrong there, so products take float32; that is what these tests prove, and all that they prove.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# The interpreter takes milliseconds for each operation: of the tests that go through many shapes, some are left to the
# other back ends.
CONTRACT = (
    "not cpu_torch and not int4_is_exact and not unknown and not another and not many_sequences and not formats_that "
    "and not test_linear_of_a_real_width and not 4099 and not inf- and not -160 and not -200] "
    "and not (test_linear_in_every_format and (-1] or -64])) and not (paged_attention and (-1] or -16] or 72-))"
)
RUNS = {
    "contract": (["kernels/test_ops.py", "kernels/test_head.py"], CONTRACT, 60),
    "own": (["gpu/interpreted"], "", 50),
}


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", RUNS)
def test_in_the_interpreter(name: str) -> None:
    files, chosen, least = RUNS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "300", "-k", chosen]
    warnings = ("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning")
    done = subprocess.run(
        [*command, *(flag for each in warnings for flag in ("-W", each)), *(str(TESTS / file) for file in files)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
        timeout=410,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least
