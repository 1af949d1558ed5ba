"""Workspaces that cuBLAS keeps of a GPU.

Sizes are those of pytorch's aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize` and
`parseCUDABlasLtWorkspaceSize`; 32 MiB on Blackwell since https://github.com/pytorch/pytorch/pull/175344 (2.12).
"""

from __future__ import annotations

import os
import re

from memlab.runtime.dispatch import TORCH

_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024  # ":4096:2:16:8"
_LARGE_CUBLAS_BYTES = 8 * 4096 * 1024
_THREADS = 2  # the one that runs forward, and autograd's for the device


def workspaces(capability: tuple[int, int]) -> tuple[int, ...]:
    """Sizes of the cuBLAS workspaces that a training process keeps: one of forward's thread, one of backward's.

    `CUBLAS_WORKSPACE_CONFIG`, `TORCH_CUBLASLT_UNIFIED_WORKSPACE` and `CUBLASLT_WORKSPACE_SIZE` are honoured.
    """
    of_a_thread = (_cublas_bytes(capability), *_separate_lt_bytes())
    return tuple(size for size in of_a_thread if size) * _THREADS


def _cublas_bytes(capability: tuple[int, int]) -> int:
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * 1024 * int(count) for kib, count in pairs)  # nothing when it is ":0:0"
    large = capability[0] in (9, 10, 12) if TORCH >= (2, 12) else capability == (9, 0)
    return _LARGE_CUBLAS_BYTES if large else _CUBLAS_BYTES


def _separate_lt_bytes() -> tuple[int, ...]:
    """The workspace of cuBLASLt, which is the one of cuBLAS unless that is switched off."""
    if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1") not in ("0", "OFF", "off", "n", "no", "False", "false"):
        return ()
    size = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return ((int(size) if size.isdigit() else 1024) * 1024,)
