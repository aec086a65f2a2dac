"""`--vllm-grpc-port` where the package of its messages is missing."""

import subprocess
import sys


def test_without_the_package_the_option_is_refused_by_name() -> None:
    code = (
        "import sys; sys.modules['smg_grpc_proto'] = None; from services.tokenizer.__main__ import main; "
        "sys.exit(main(['--vllm-grpc-port', '0', '--listen', '127.0.0.1:0']))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "--vllm-grpc-port needs the extra vllm-grpc" in answer.stderr
