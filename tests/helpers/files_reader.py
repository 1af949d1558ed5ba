"""Whether DeepSpeed's reader and writer of files is built for this environment; building it takes minutes of both cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension


def is_built() -> bool:
    """Whether the operator is there, for the torch that is running."""
    folder = Path(cpp_extension._get_build_directory("async_io", verbose=False))
    recipe = folder / "build.ninja"
    return (folder / "async_io.so").exists() and str(Path(torch.__file__).parent) in recipe.read_text()


needs_files_reader = pytest.mark.skipif(
    not (os.environ.get("MEMLAB_LONG") or is_built()),
    reason="DeepSpeed's reader of files is not built for this environment: MEMLAB_LONG=1 builds it first, for minutes",
)
