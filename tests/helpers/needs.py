"""What a test needs beyond torch on a CPU, and the reason it is skipped by where that is missing."""

from __future__ import annotations

import importlib.util

import pytest
import torch


def needs(*, gpu: int = 0, extra: str = "") -> pytest.MarkDecorator:
    """Skip a test, with the reason in words, unless there are so many GPUs and the extra package is installed.

    Example:
        @needs(gpu=1, extra="bitsandbytes")
        def test_paged_moments(): ...
    """
    missing = []
    if gpu and (torch.cuda.device_count() if torch.cuda.is_available() else 0) < gpu:
        missing.append(f"{gpu} CUDA GPU{'s' * (gpu > 1)}")
    if extra and importlib.util.find_spec(extra) is None:
        missing.append(f"the package {extra}")
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
