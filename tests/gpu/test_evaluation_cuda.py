"""Validation, saving and resuming on a GPU that is nearly full."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.plan import Plan
from memlab.units import MIB
from tests.gpu.test_rescue import capped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

_WIDTH = 512


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    wide = [nn.Linear(_WIDTH, 16 * _WIDTH), nn.ReLU(), nn.Linear(16 * _WIDTH, _WIDTH)]
    return nn.Sequential(*wide).cuda()


def test_a_validation_that_does_not_fit_is_run_in_parts() -> None:
    model, x = _model(), torch.randn(1024, _WIDTH, device="cuda")  # 32 MiB of activations, twice
    with torch.no_grad():
        expected = model(x)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session:
        with capped(x.device, 44 * MIB), torch.no_grad():
            found = model(x)
        assert session.plan == Plan()
        assert [rescue.place for rescue in session.rescuer.rescues] == ["a call without gradients"]  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.memory
@pytest.mark.parametrize("kept", ["logits", "means on the host"])
def test_predictions_that_stay_on_the_device_are_said_once(kept: str) -> None:
    model, x = _model().eval(), torch.randn(512, _WIDTH, device="cuda")  # 1 MiB of outputs
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session:
        with torch.no_grad():
            model(x)
        with capped(x.device, 256 * MIB), torch.no_grad():
            predictions = [model(x) if kept == "logits" else model(x).mean(1).cpu() for _ in range(70)]
        said = [entry.text for entry in session.log]
    assert len(predictions) == 70
    assert len(said) == (kept == "logits")
    if said:
        assert said[0].endswith(
            "1.0 MiB more with each: move what it keeps to the host (.cpu(), or argmax first), with Trainer by eval_accumulation_steps=8"
        )


@pytest.mark.memory
@pytest.mark.parametrize("plan", ["--adam8bit", "--offload optimizer", "--precision pure-bf16"])
def test_moments_of_a_checkpoint_come_one_parameter_at_a_time(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(16))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with fit(Workload(model, optimizer), plan):
        model(torch.randn(4, _WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        entries = {key: {n: v.cpu() for n, v in entry.items()} for key, entry in saved["state"].items()}
        del saved["state"]
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.load_state_dict({**saved, "state": entries})
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 0.3 * 2 * 16 * _WIDTH * _WIDTH * 4
