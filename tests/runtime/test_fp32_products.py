"""How factors of fp32 products are rounded, by both of torch's interfaces: kept, put back, and exact where batches are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit, measure
from memlab.errors import RefusalError
from memlab.runtime.fp32_products import Fp32Products, exact_products, rounds_factors

needs_second = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has one interface"
)


def _high() -> None:
    torch.set_float32_matmul_precision("high")


def _medium() -> None:
    torch.set_float32_matmul_precision("medium")


def _second_interface() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _both_interfaces() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def _convolutions() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"


SETTINGS = [
    _high,
    _medium,
    *(pytest.param(each, marks=needs_second) for each in (_second_interface, _both_interfaces, _convolutions)),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = Fp32Products()
    yield
    before.restore()


@pytest.mark.parametrize("use", SETTINGS)
def test_exact_products_end_as_they_began(use: Callable[[], None]) -> None:
    use()
    before = Fp32Products().values
    with exact_products():
        assert not rounds_factors()
        values = {value for _, value in Fp32Products().values}
        assert values <= {"highest", False, "ieee", "none"}
    assert Fp32Products().values == before


@pytest.mark.parametrize("use", SETTINGS)
def test_sessions_take_a_loop_as_it_is(use: Callable[[], None]) -> None:
    use()
    before = Fp32Products().values
    model = nn.Linear(4, 4)
    load = Workload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batch=(torch.ones(4, 4),) * 2, loss_fn=F.mse_loss
    )
    measure(load, "--accumulate 2", 1)
    with fit(load, "--accumulate 2"):
        assert Fp32Products().values == before
    assert Fp32Products().values == before


class _Telling(nn.Module):
    """Writes to a file how it computes: anything else it did is taken back after rows were compared."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.layer, self.path = nn.Linear(3, 3), str(path)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with Path(self.path).open("a") as file:
            file.write("rounded " if rounds_factors() else "exact ")
        return self.layer(rows)


def test_rows_are_compared_without_rounding_and_trained_with_it(tmp_path: Path) -> None:
    _high()
    torch.manual_seed(0)
    model = _Telling(tmp_path / "calls")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 2"):
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    calls = (tmp_path / "calls").read_text().split()
    assert set(calls[: calls.index("rounded")]) == {"exact"}
    assert set(calls[calls.index("rounded") :]) == {"rounded"}, calls


class _RoundsByRows(nn.Module):
    """Products whose last digits are others in batches of other sizes, as those of a GPU, before units that switch."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(64, 2048, bias=False), nn.Linear(2048, 8, bias=False)
        self.times = times

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values = self.wide(rows)  # [b, s, 2048]
        places = torch.arange(values.numel(), dtype=torch.float64).view(values.shape)
        digits = torch.sin(places * 12.9898 * len(rows)).to(values.dtype) * torch.finfo(values.dtype).eps * self.times
        return self.out(torch.relu(values + values.detach().norm() / values.numel() ** 0.5 * digits))


@pytest.mark.parametrize("seed", range(3))
def test_units_that_rounding_switches_are_no_dependence(seed: int) -> None:
    torch.manual_seed(seed)
    model = _RoundsByRows(times=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 4"):
        model(torch.randn(8, 128, 64)).square().mean().backward()
        optimizer.step()


def test_more_than_rounding_is_dependence() -> None:
    model = _RoundsByRows(times=3000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        fit(Workload(model, optimizer), "--accumulate 4"),
        pytest.raises(RefusalError, match="rows of a batch depend on each other"),
    ):
        model(torch.randn(8, 128, 64)).square().mean().backward()
