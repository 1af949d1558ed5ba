"""Gradients while the ledger watches: torch has formulas that it chooses by whether a mode is on, and results must be the loop's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import linalg, nn
from torch.utils.checkpoint import checkpoint

from memlab import Workload
from memlab.measuring.device import device_for
from memlab.measuring.ledger import Ledger
from memlab.measuring.steps import Meter
from memlab.session import Session

Function = Callable[[torch.Tensor], torch.Tensor]


def positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT + torch.eye(4)


def there(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel()).view_as(x) % 4


# those of torch's sources that ask for a mode, and their neighbours
FUNCTIONS: dict[str, Function] = {
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(-1),
    "prod of a dimension with zeros": lambda x: x.relu().prod(1, keepdim=True),
    "prod of two": lambda x: x.prod(-1).prod(-1),
    "prod of complex numbers": lambda x: torch.complex(x, x + 1).prod(-1).abs(),
    "prod that is seen by a view": lambda x: x.prod(-1).t(),
    "cumprod": lambda x: x.cumprod(-1),
    "cumprod with zeros": lambda x: x.relu().cumprod(-1),
    "det": linalg.det,
    "slogdet": lambda x: linalg.slogdet(x)[1],
    "inv": linalg.inv,
    "solve": lambda x: linalg.solve(positive(x), x),
    "cholesky": lambda x: linalg.cholesky(positive(x)),
    "qr": lambda x: linalg.qr(x)[1],
    "svd": lambda x: linalg.svd(x)[0].abs(),
    "svdvals": linalg.svdvals,
    "eigh": lambda x: linalg.eigh(positive(x))[0],
    "lu": lambda x: linalg.lu(x)[2],
    "lu_solve": lambda x: linalg.lu_solve(*linalg.lu_factor(x), x),
    "pinv": linalg.pinv,
    "matrix_exp": linalg.matrix_exp,
    "householder_product": lambda x: linalg.householder_product(x.tril(-1), x[:, 0].sigmoid()),
    "nuclear norm": partial(linalg.matrix_norm, ord="nuc"),
    **{f"norm {p}": partial(torch.norm, p=p, dim=-1) for p in (0.5, 1, 2, 3, float("inf"))},
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "cdist": lambda x: torch.cdist(x, x.flip(1)),
    "max": lambda x: x.round().max(),
    "amax": lambda x: x.round().amax(-1),
    "median": torch.median,
    "cummax": lambda x: x.cummax(-1)[0],
    "topk": lambda x: x.topk(2)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "std": lambda x: x.std(-1),
    "trace": lambda x: x[0].trace(),
    "index": lambda x: x[:, [0, 0, 2]],
    "index_put": lambda x: x.clone().index_put((torch.tensor([0, 0]),), x[2], accumulate=True),
    "gather": lambda x: x.gather(2, there(x)),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    **{
        f"scatter_reduce {how}": lambda x, how=how: torch.ones_like(x).scatter_reduce(2, there(x) // 2, x, how)
        for how in ("sum", "prod", "mean", "amax")
    },
    **{
        f"index_reduce {how}": lambda x, how=how: torch.ones_like(x).index_reduce(2, torch.tensor([0, 1, 1, 2]), x, how)
        for how in ("prod", "mean", "amax")
    },
    "pow": lambda x: x.relu() ** x.abs(),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(
        x, x.detach().sigmoid(), pos_weight=torch.ones(4)
    ),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), there(x)[..., 0].flatten(), label_smoothing=0.1),
    "ctc_loss": lambda x: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1), torch.ones(6, 1, dtype=torch.long), torch.full((6,), 4), torch.ones(6).long()
    ),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "dropout": F.dropout,
    "alpha_dropout": partial(F.alpha_dropout, training=True),
    "prelu": lambda x: F.prelu(x, x[0, 0, :1]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x.detach(), dropout_p=0.1),
    "embedding": lambda x: F.embedding(there(x)[0], x[0]),
    "embedding_bag": lambda x: F.embedding_bag(there(x)[0], x[0], mode="max"),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), 1),
    "lstm_cell": lambda x: torch._VF.lstm_cell(x[0], (x[1], x[2]), x[0].repeat(4, 1), x[1].repeat(4, 1))[0],
}


def results(function: Function, ledger: Ledger | None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 4, dtype=dtype).requires_grad_()
    if ledger is not None:
        ledger.begin([])
        ledger.start()
    output = function(x)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    if ledger is not None:
        assert ledger.watching
        ledger.stop()
        ledger.finish()
    assert x.grad is not None
    return [output.detach(), x.grad]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_loops_own(name: str) -> None:
    expected, found = (results(FUNCTIONS[name], ledger) for ledger in (None, Ledger()))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_products_in_bf16_and_of_what_is_computed_again() -> None:
    for function in (
        FUNCTIONS["prod of a dimension"],
        lambda x: checkpoint(lambda x: x.exp().prod(-1), x, use_reentrant=False),
    ):
        expected, found = (results(function, ledger, torch.bfloat16) for ledger in (None, Ledger()))
        assert all(map(torch.equal, found, expected))


def test_the_gradient_of_a_product_is_counted() -> None:
    ledger = Ledger()
    x = torch.rand(64, 64).requires_grad_()
    ledger.begin([])
    with ledger:
        x.prod(-1).sum().backward()
        assert ledger.live_bytes == x.nbytes
    assert ledger.finish().peak_bytes >= x.nbytes


def test_a_backward_pass_that_nobody_watches_any_more_is_left_alone() -> None:
    ledger = Ledger()
    x = torch.rand(4, 4).requires_grad_()
    with ledger:
        loss = x.prod(-1).sum()
    loss.backward()
    assert not ledger.watching


def test_a_loop_that_is_measured_is_the_loop() -> None:
    """The trees of NODE multiply along a dimension."""

    class Tree(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows).sigmoid().view(-1, 4, 2).prod(-1)

    torch.manual_seed(0)
    model, rows = Tree(4, 8), torch.randn(16, 4)
    plain = copy.deepcopy(model)
    for each, is_measured in ((plain, False), (model, True)):
        optimizer = torch.optim.Adam(each.parameters(), 1e-2)
        meter = [Meter(each, [optimizer], device_for(torch.device("cpu")))] if is_measured else []
        with Session(Workload(each, optimizer), meter):
            for _ in range(3):
                optimizer.zero_grad()
                each(rows).square().mean().backward()
                optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
