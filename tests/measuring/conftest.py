"""Guard of the measuring tests: none may leave a dispatch mode behind."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    # popped first, so that one test's failure is not the next one's
    left = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
    assert left == []
