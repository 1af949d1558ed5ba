"""A measured snapshot on a GPU is torch's own recording, and a predicted one for that GPU resembles it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from memlab.errors import MemlabError
from memlab.measuring.runs import measure
from memlab.predicting import save_snapshot
from memlab.runtime.workload import Workload
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def workload() -> Workload:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    batch = (torch.randn(512, 1024, device="cuda"), torch.randn(512, 1024, device="cuda"))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=torch.nn.functional.mse_loss)


def peak_bytes(viz: dict[str, Any]) -> int:
    """Highest sum of what was asked for: what was alive before the recording, and the trace on top of it."""
    trace = viz["device_traces"][torch.cuda.current_device()]
    blocks = [block for segment in viz["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    changes = [
        entry["size"] if entry["action"] == "alloc" else -entry["size"]
        for entry in trace
        if entry["action"] in ("alloc", "free_completed")
    ]
    live = highest = sum(block["requested_size"] for block in blocks) - sum(changes)
    for change in changes:
        live += change
        highest = max(highest, live)
    return highest


@pytest.mark.parametrize("plan", ["", "--accumulate 4", "--adam8bit"])
def test_torch_records_two_steps_that_leave_nothing_behind(workload: Workload, tmp_path: Path, plan: str) -> None:
    before = Snapshot(workload)
    viz = pickle.loads(save_snapshot(tmp_path / "step.pickle", workload, plan, measured=True).read_bytes())
    assert changed_between(before, Snapshot(workload)) == []
    assert "add_local_files" in _memory_viz.trace_plot(viz)
    labels = {entry.get("user_metadata", "") for entry in viz["device_traces"][torch.cuda.current_device()]}
    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        assert any("within the optimizer's step" in label for label in labels)
        assert not torch.cuda.memory._get_memory_metadata()
    assert peak_bytes(viz) == pytest.approx(measure(workload, plan, 1).peak_allocated_bytes, rel=0.02)


def test_a_recording_under_way_is_not_ended(workload: Workload, tmp_path: Path) -> None:
    if not hasattr(torch._C, "_cuda_isHistoryEnabled"):
        pytest.skip("this torch cannot say whether it records")
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        with pytest.raises(MemlabError, match="records memory history already"):
            save_snapshot(tmp_path / "step.pickle", workload, measured=True)
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert not (tmp_path / "step.pickle").exists()
