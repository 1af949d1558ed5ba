"""What a forward pass makes when it first needs it: parameters, parts, buffers. They are made once, as without memlab."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit
from memlab.plan import Plan

KINDS = ("parameter", "registered", "part", "attribute", "buffer")


class Growing(nn.Module):
    """Makes something of its own for each task, when it first comes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 4)))
        self.scales, self.parts, self.counts = nn.ParameterDict(), nn.ModuleDict(), nn.Module()
        self.register_parameter("gain", None)

    def forward(self, rows: torch.Tensor, task: str) -> torch.Tensor:
        if self.kind == "parameter":
            if task not in self.scales:
                self.scales[task] = nn.Parameter(torch.randn(4))
            return self.body(rows * self.scales[task])
        if self.kind == "registered":
            if self.gain is None:
                self.gain = nn.Parameter(torch.randn(rows.size(1)))
            return self.body(rows * self.gain)
        if self.kind == "part":
            if task not in self.parts:
                self.parts[task] = nn.Linear(4, 4)
            return self.parts[task](self.body(rows))
        if self.kind == "attribute":
            if not hasattr(self, "before"):
                self.before = nn.Linear(rows.size(1), 4)
            return self.body(self.before(rows))
        if not hasattr(self.counts, task):
            self.counts.register_buffer(task, torch.zeros(()))
        setattr(self.counts, task, getattr(self.counts, task) + 1)
        return self.body(rows) * getattr(self.counts, task)


def trained(kind: str, flags: str, *, session: bool = True, rescue: bool = False) -> tuple[list[torch.Tensor], float]:
    """Return what a loop ends with, and the next random number; it gives its optimizer what is made."""
    torch.manual_seed(0)
    model = Growing(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with fit(Workload(model, optimizer), flags, rescue=rescue) if session else nullcontext():
        for step in range(6):
            out = model(torch.randn(8, 4), f"t{step % 3}")
            known = {id(each) for group in optimizer.param_groups for each in group["params"]}
            if made := [each for each in model.parameters() if id(each) not in known]:
                optimizer.add_param_group({"params": made})
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    return [*model.state_dict().values()], torch.rand(()).item()


def is_same(one: tuple[list[torch.Tensor], float], other: tuple[list[torch.Tensor], float]) -> bool:
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(torch.allclose, one[0], other[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", ["", "--checkpoint", "--offload activations", "--release-grads"])
def test_it_is_made_once(kind: str, flags: str) -> None:
    assert is_same(trained(kind, flags), trained(kind, "", session=False))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_made_once_where_memory_can_run_out(kind: str) -> None:
    assert is_same(trained(kind, "", rescue=True), trained(kind, "", session=False))


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("parameter", "scales.t0"),
        ("registered", "gain"),
        ("part", "parts.t0.weight, parts.t0.bias"),
        ("attribute", "before.weight, before.bias"),
    ],
)
def test_each_part_of_a_batch_would_make_its_own(kind: str, made: str) -> None:
    torch.manual_seed(0)
    model = Growing(kind)
    parameters, after = [*model.parameters()], torch.get_rng_state()
    with fit(Workload(model, torch.optim.SGD(parameters, lr=0.1)), "--accumulate 2") as session:
        with pytest.raises(RefusalError) as caught:
            model(torch.ones(8, 4), "t0")
        assert [*map(id, model.parameters())] == [*map(id, parameters)]
        assert torch.equal(torch.get_rng_state(), after)
        session.switch(Plan())
    assert str(caught.value) == (
        f"accumulation: the forward pass of Growing makes parameters ({made}), and each micro-batch would make its own; "
        "use --checkpoint or --offload activations, which keep the batch whole"
    )


def test_a_buffer_that_is_made_counts_calls() -> None:
    assert is_same(trained("buffer", "--accumulate 2"), trained("buffer", "", session=False))


def test_a_batch_of_a_running_loop_that_makes_parameters_is_run_whole() -> None:
    torch.manual_seed(0)
    model = Growing("parameter")
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--accumulate 2") as session:
        model.scales["t0"] = nn.Parameter(torch.ones(4))
        for task in ("t0", "t0", "t1"):
            model(torch.ones(8, 4), task).square().mean().backward()
        assert all(scale.grad is not None for scale in model.scales.values())
        assert session.notes == (
            "a batch is run whole, since the forward pass of Growing makes parameters (scales.t1), and each micro-batch would "
            "make its own",
        )
