"""Tensors that memlab makes are where it means them to be, also where the user has set a default device."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
import torch.nn.functional as F

import memlab
from memlab import Workload, measure, predict
from memlab.plan import Tier
from memlab.techniques.offload.spill import Spill

_ROOT = Path(memlab.__file__).parent
_FACTORIES = frozenset(
    {"arange", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn", "randperm"}
    | {"range", "scalar_tensor", "tensor", "zeros"}
)  # fmt: skip


def test_every_factory_names_its_device() -> None:
    unnamed = [
        f"{path.relative_to(_ROOT)}:{node.lineno}"
        for path in sorted(_ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in _FACTORIES
        and not {keyword.arg for keyword in node.keywords} & {"device", None}
    ]
    assert unnamed == []


def test_what_is_spilled_is_off_the_default_device() -> None:
    with torch.device("meta"):
        assert Spill(Tier.HOST).empty_like(torch.empty(4, device="cpu")).device.type == "cpu"


def test_steps_are_measured_and_predicted_as_ever() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=F.mse_loss)
    expected = [each(workload).peak_allocated_bytes for each in (predict, measure)]
    with torch.device("meta"):
        found = [each(workload).peak_allocated_bytes for each in (predict, measure)]
    assert found == expected
