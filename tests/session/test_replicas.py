"""Copies of a model that `torch.nn.DataParallel` makes for further GPUs in each call."""

from __future__ import annotations

import pytest
import torch

from memlab import RefusalError, Workload, fit


def replica_of(model: torch.nn.Sequential) -> torch.nn.Module:
    """A copy with other weights, as it is made for another GPU."""
    copy = model._replicate_for_data_parallel()  # type: ignore[operator]
    for name, part in model.named_children():
        setattr(copy, name, part._replicate_for_data_parallel())  # type: ignore[operator]
        for each, parameter in part.named_parameters():
            setattr(getattr(copy, name), each, 2 * parameter)
    return copy


@pytest.mark.parametrize("flags", ["", "--adam8bit"])
def test_they_compute_with_their_own_weights(flags: str) -> None:
    model, rows = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), torch.randn(3, 8)
    expected = replica_of(model)(rows)
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), flags):
        assert torch.equal(replica_of(model)(rows), expected)
        assert not torch.equal(model(rows), expected)


def test_settings_that_do_not_reach_them_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--bf16"):
        with pytest.raises(RefusalError) as refused:
            replica_of(model)(torch.randn(3, 8))
    assert str(refused.value) == (
        "session: DataParallel calls copies of Sequential on several GPUs, which --bf16 does not reach; use one GPU "
        "(CUDA_VISIBLE_DEVICES=0), or one process for each: %%memfit --nproc 2 --scale ddp"
    )
