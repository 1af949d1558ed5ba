"""Frozen weights beside adapters in fewer bits, on a GPU."""

from __future__ import annotations

import pytest
import torch

from memlab import Workload, fit, measure, predict
from tests.techniques.models import gpt2

for package in ("peft", "bitsandbytes"):
    pytest.importorskip(package, reason=f"needs {package}")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _workload() -> Workload:
    model = gpt2(vocabulary=512, layers=3, width=256).cuda()
    ids = torch.randint(0, 512, (8, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch={"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("base", ["bf16", "int8"])
@pytest.mark.parametrize("others", ["", "--checkpoint", "--bf16"])
def test_they_train_and_come_back(base: str, others: str) -> None:
    load = _workload()
    model, before = load.model, [p.clone() for p in load.model.parameters()]
    plain = measure(load, f"--lora r=4 {others}".strip(), 2).losses
    found = measure(load, f"--lora r=4 --base {base} {others}".strip(), 2).losses
    assert found == pytest.approx(plain, rel=0.01)
    with fit(load, f"--lora r=4 --base {base}"):
        weight = model.transformer.h[0].mlp.c_fc.base_layer.weight  # type: ignore[union-attr, index]
        assert weight.device.type == "cuda"  # to the loop
        assert torch.equal(
            weight * 1,
            before[
                [n.replace(".base_layer", "") for n, _ in model.named_parameters() if "lora" not in n].index(
                    "transformer.h.0.mlp.c_fc.weight"
                )
            ],
        )
        average = [p.detach().clone().lerp_(p, 0.5) for p in model.parameters()]
        assert all(each.is_cuda for each in average)
    assert all(p.is_cuda and torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.memory
@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_predicted_peaks_are_the_measured_ones(base: str) -> None:
    load = _workload()
    flags = f"--lora r=4 --base {base}"
    measured = measure(load, flags, 2)
    assert predict(load, flags).peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)
    assert measured.peak_allocated_bytes < measure(load, "--lora r=4", 2).peak_allocated_bytes


@pytest.mark.hardware("kernels of bitsandbytes")
def test_nf4() -> None:
    load = _workload()
    before = [p.clone() for p in load.model.parameters()]
    plain, found = (measure(load, f"--lora r=4 {base}".strip(), 2) for base in ("", "--base nf4"))
    assert found.losses == pytest.approx(plain.losses, rel=0.01)
    assert found.peak_allocated_bytes < plain.peak_allocated_bytes
    assert all(map(torch.equal, load.model.parameters(), before))
