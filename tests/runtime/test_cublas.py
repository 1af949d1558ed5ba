"""What cuBLAS keeps of a GPU."""

from __future__ import annotations

import pytest

from memlab.runtime import cublas
from memlab.runtime.cublas import workspaces
from memlab.units import MIB

A100, H100 = (8, 0), (9, 0)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("capability", "expected"), [(A100, 8_519_680), ((7, 5), 8_519_680), ((8, 9), 8_519_680), (H100, 32 * MIB)]
)
def test_forward_and_backward_have_a_workspace_each(capability: tuple[int, int], expected: int) -> None:
    assert workspaces(capability) == (expected, expected)


def test_blackwell_has_the_large_workspace_since_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in (((2, 11), 8_519_680), ((2, 12), 32 * MIB)):
        monkeypatch.setattr(cublas, "TORCH", version)
        assert workspaces((10, 0)) == (expected, expected)


def test_settings_of_the_workspaces_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert workspaces(A100) == (32 * MIB,) * 2
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert workspaces(H100) == (16 * 1024 * 8,) * 2
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert workspaces(A100) == ()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "nonsense")
    assert workspaces(A100) == (8_519_680,) * 2
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert workspaces(A100) == (8_519_680, MIB) * 2
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert workspaces(A100) == (8_519_680, 2 * MIB) * 2
