from collections.abc import Iterator

import pytest
import torch

from kernels.backends import BACKENDS, load
from kernels.ops import Ops


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=list(BACKENDS))
def ops(request: pytest.FixtureRequest) -> Ops:
    return load(request.param)
