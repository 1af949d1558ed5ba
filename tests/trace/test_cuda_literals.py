from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memlab.hardware.gpus import gpu
from memlab.trace.cuda_choices import cuda_choices
from tests.trace.cuda_twins import FAKE, Operators, fake, twin_of

A100 = gpu("A100 80GB")


class Written(nn.Module):
    """A model whose author had a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        noise = torch.zeros(4, device="cuda") + torch.arange(4, device=torch.device("cuda:0"))
        return self.layer(rows.cuda().to("cuda") + noise.to(device="cuda")).type("torch.cuda.FloatTensor")


def test_devices_in_a_forward_mean_the_twins() -> None:
    model = twin_of(Written())

    with cuda_choices(A100), FAKE:
        out = model(fake(3, 4))
        out.sum().backward()

    assert out.device.type == "cpu"
    assert not out.is_cuda
    assert model.layer.weight.grad is not None


def test_devices_mean_the_twins_in_a_recomputation_too() -> None:
    model = twin_of(Written())
    rows = fake(3, 4, trained=True)

    with cuda_choices(A100), FAKE:
        checkpoint(model, rows, use_reentrant=False).sum().backward()
        torch.autograd.grad(checkpoint(model, rows, use_reentrant=False).sum(), rows)
        torch.autograd.backward([checkpoint(model, rows, use_reentrant=False).sum()])

    assert rows.grad is not None


def test_backward_takes_the_arguments_it_always_takes() -> None:
    rows = fake(3, 4, trained=True)

    with cuda_choices(A100):
        (rows * 2).backward(gradient=fake(3, 4), retain_graph=False, inputs=[rows])
        (rows * 2).backward(fake(3, 4))

    assert rows.grad is not None


def test_a_device_context_means_the_twins() -> None:
    with cuda_choices(A100), FAKE, torch.device("cuda"):
        assert torch.empty(2).device.type == "cpu"


def test_autocast_for_cuda_acts_and_answers() -> None:
    rows = fake(3, 4)

    with cuda_choices(A100):
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.float16
            assert torch.get_autocast_gpu_dtype() is torch.float16
            assert (rows @ rows.t()).dtype is torch.float16
            with torch.autocast("cuda", enabled=False):
                assert (rows @ rows.t()).dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_casts_and_other_tensors_pass() -> None:
    rows = fake(3, 4)

    with cuda_choices(A100), Operators() as operators:
        assert rows.to(torch.float16).dtype is torch.float16
        assert rows.to(rows.half()).dtype is torch.float16
        assert rows.to("cuda", torch.float16).dtype is torch.float16
        assert rows.cuda(memory_format=torch.contiguous_format).shape == rows.shape

    assert operators.count("_to_copy") == 4
