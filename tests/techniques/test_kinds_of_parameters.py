"""Parameters of a class of the user's own, and with attributes, which a forward asks for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError, Workload, fit, predict
from memlab.rescue.evidence import Evidence
from memlab.rescue.rescuer import Rescuer
from tests.techniques.models import distance, gradients


class Scaled(nn.Parameter):
    """A parameter of a kind."""


class Layer(nn.Module):
    def __init__(self, kind: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight = kind(torch.randn(16, 16))
        self.weight.gain = 0.5
        self.shift = kind(torch.randn(16), requires_grad=False)
        self.shift.sign = -1.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # code may make a parameter of what is one already, as PEFT does
        shift = nn.Parameter(self.shift * 2) if isinstance(self.shift, nn.Parameter) else self.shift
        return rows + F.linear(rows, self.weight * self.weight.gain).tanh() * self.shift.sign + shift.detach()


class Net(nn.Module):
    def __init__(self, kind: type[nn.Parameter]) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Sequential(Layer(kind), Layer(kind)) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer[0].weight, self.kind)
            rows = layer(rows)
        return rows


def workload(kind: type[nn.Parameter]) -> Workload:
    torch.manual_seed(0)
    model = Net(kind)
    return Workload(
        model, torch.optim.AdamW(model.parameters()), torch.randn(8, 16), loss_fn=lambda out, _: out.square().mean()
    )


def gradients_of(load: Workload) -> list[torch.Tensor]:
    load.model.zero_grad()
    load.model(load.batch).square().mean().backward()
    return gradients(load.model)


@pytest.mark.parametrize("kind", [nn.Parameter, Scaled])
@pytest.mark.parametrize(
    "flags", ["--accumulate 2", "--checkpoint", "--accumulate 2 --checkpoint", "--offload activations"]
)
def test_a_forward_finds_them(flags: str, kind: type[nn.Parameter]) -> None:
    load = workload(kind)
    expected = gradients_of(load)
    with fit(load, flags):
        assert distance(gradients_of(load), expected) < 1e-6
    assert all(type(layer[0].weight) is kind and layer[0].weight.gain == 0.5 for layer in load.model.layers)


@pytest.mark.parametrize("kind", [nn.Parameter, Scaled])
def test_a_guarded_call_finds_them(kind: type[nn.Parameter]) -> None:
    load = workload(kind)
    expected = gradients_of(load)
    with fit(load) as session:
        session.accept(Rescuer(evidence=Evidence(torch.device("cpu"), 2**20)))
        assert distance(gradients_of(load), expected) == 0
        session.dismiss()


def test_a_prediction_finds_attributes() -> None:
    assert predict(workload(nn.Parameter), "--checkpoint").peak_allocated_bytes > 0


def test_fsdp2_refuses_attributes() -> None:
    load = workload(nn.Parameter)
    with pytest.raises(RefusalError, match=r"layers.0.0.weight has the attribute .gain, which FSDP2 leaves off"):
        fit(load, "--scale fsdp2 --offload optimizer")
