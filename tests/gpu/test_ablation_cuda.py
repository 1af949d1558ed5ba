"""An ablation on a real GPU: reserved memory beside allocated, predictions beside both, everything put back."""

from __future__ import annotations

import pytest
import torch

from memlab import Workload, ablation
from memlab.measuring.device import device_for
from memlab.report import ablation as report_of
from memlab.report import text
from memlab.session.snapshot import Snapshot
from memlab.techniques.offload import link
from memlab.units import MIB
from tests.helpers.snapshots import changed_between
from tests.techniques.models import gpt2, ragged_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def load() -> Workload:
    model = gpt2(vocabulary=16384, layers=4, width=256).cuda()
    batch = {name: tensor.cuda() for name, tensor in ragged_batch(16384, rows=16, length=64).items()}
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch)


@pytest.mark.memory
def test_a_whole_ablation(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    # predictions are of the streamed way, whatever the link
    monkeypatch.setattr(link, "measured", lambda _device: link.Link(down=4e11, up=4e11, both=4e11, updated=1e9))
    before = Snapshot(load)
    found = ablation(load, steps=3, progress=lambda line: None)
    assert changed_between(before, Snapshot(load)) == []
    ran = [row for row in found.rows if row.ran is not None]
    assert len(ran) >= 7, [row.refused for row in found.rows]
    assert all(row.ran.peak_reserved_bytes >= row.ran.peak_allocated_bytes for row in ran)
    assert found.last.ran.peak_allocated_bytes < 0.7 * ran[0].ran.peak_allocated_bytes
    for row in ran:
        if row.prediction is not None:
            assert row.prediction.peak_allocated_bytes == pytest.approx(row.ran.peak_allocated_bytes, rel=0.03)
    assert "peak reserved" in text.table(report_of.table(found))


@pytest.mark.memory
def test_what_runs_out_is_a_row(load: Workload) -> None:
    whole = ablation(load, [], steps=1, progress=lambda line: None).rows[0].ran
    torch.cuda.empty_cache()
    small = device_for(load.device, torch.cuda.memory_reserved() + whole.peak_allocated_bytes // 2)
    try:
        found = ablation(load, ["--chunk-loss", "--accumulate 8"], steps=1, device=small, progress=lambda line: None)
    finally:
        small.close()
    assert found.rows[0].ran_out
    assert whole.peak_allocated_bytes > 64 * MIB
