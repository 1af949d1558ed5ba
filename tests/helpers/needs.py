"""What a test needs beyond torch on a CPU, and the reason it is skipped by where that is missing."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from memlab.scaleout import async_io


def needs(*, gpu: int = 0, extra: str = "", file_operators: bool = False) -> pytest.MarkDecorator:
    """Skip a test, with the reason in words, unless there are so many GPUs and the extra package is
    installed, and what DeepSpeed builds its file operators from.

    Example:
        @needs(gpu=1, extra="bitsandbytes")
        def test_paged_moments(): ...
    """
    missing = []
    if gpu and (torch.cuda.device_count() if torch.cuda.is_available() else 0) < gpu:
        missing.append(f"{gpu} CUDA GPU{'s' * (gpu > 1)}")
    if extra and importlib.util.find_spec(extra) is None:
        missing.append(f"the package {extra}")
    elif file_operators and (reason := async_io.missing(torch.device("cpu"))):
        missing.append(f"DeepSpeed's file operators, and {reason}")
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
