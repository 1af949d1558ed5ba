"""Saved snapshots open in torch's viewer and tell the same story as predictions and measurements."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz
from torch.nn import functional as F

from memlab.allocator.sizes import SMALL_SEGMENT_BYTES
from memlab.errors import MemlabError, RefusalError, WorkloadError
from memlab.measuring.runs import measure
from memlab.plan import Plan
from memlab.predicting import predict, save_snapshot, snapshots
from memlab.predicting.plan_predictor import Parts, PlanPredictor
from memlab.predicting.reserved import Script, reserved_by
from memlab.predicting.segments import NOTHING
from memlab.records import Category
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import fit, session_of
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between

VOCABULARY, ROWS, LENGTH, WIDTH = 257, 8, 32, 64
PLANS = ("", "--accumulate 4", "--accumulate 2 --checkpoint", "--bf16", "--adam8bit", "--precision pure-bf16",
         "--offload optimizer")  # fmt: skip
TRAIN_STEPS = 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Speaker(torch.nn.Module):
    """Enough of a language model to have blocks to checkpoint and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.fixture
def speaker() -> Workload:
    model = Speaker()
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch={"input_ids": ids, "labels": ids})


@pytest.fixture
def regression() -> Workload:
    """A loop that computes the loss itself, so that accumulation is traced as a whole step."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    batch = (torch.randn(512, 64), torch.randn(512, 64))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=F.mse_loss)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def saved(workload: Workload, plan: str = "", device: str | None = None, **options: Any) -> dict[str, Any]:
        path = tmp_path / "step.pickle"
        assert save_snapshot(path, workload, plan, device, **options) == path
        return pickle.loads(path.read_bytes())

    return saved


class Sums:
    """What a trace adds up to, computed from its entries alone."""

    def __init__(self, viz: dict[str, Any]) -> None:
        (self.entries,) = viz["device_traces"]
        self.alive: dict[int, dict[str, Any]] = {}
        self.peak_bytes, self.live_bytes, self.reserved_bytes, self.peak_reserved_bytes = 0, 0, 0, 0
        self.at_peak: dict[str, int] = {}
        by_category: dict[str, int] = {}
        for entry in self.entries:
            size_bytes, label = entry["size"], entry["user_metadata"]
            match entry["action"]:
                case "alloc":
                    assert entry["addr"] not in self.alive
                    self.alive[entry["addr"]] = entry
                    self.live_bytes += size_bytes
                    by_category[label] = by_category.get(label, 0) + size_bytes
                case "free_completed":
                    born = self.alive.pop(entry["addr"])
                    assert (size_bytes, label, entry["frames"]) == (born["size"], born["user_metadata"], born["frames"])
                    self.live_bytes -= size_bytes
                    by_category[label] -= size_bytes
                case "segment_alloc":
                    self.reserved_bytes += size_bytes
                case action:
                    assert action == "free_requested"
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes = self.live_bytes
                self.at_peak = {name: size for name, size in by_category.items() if size}
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def begins(viz: dict[str, Any]) -> list[str]:
    return [each["name"] for each in viz["external_annotations"] if each["stage"] == "START"]


@pytest.mark.parametrize("device", [None, "T4"])
def test_torch_opens_the_file(speaker: Workload, save: Any, device: str | None) -> None:
    viz = save(speaker, "--accumulate 2", device)
    assert "total_reserved" in _memory_viz.segsum(viz)
    assert f"{len(viz['device_traces'][0])} entries" in _memory_viz.trace(viz)
    assert "add_local_files" in _memory_viz.trace_plot(viz)
    assert "add_local_files" in _memory_viz.segment_plot(viz)


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS)
def test_the_predicted_trace_has_the_peak_of_the_prediction(speaker: Workload, save: Any, plan: str) -> None:
    sums = Sums(save(speaker, plan))
    prediction = predict(speaker, plan)
    assert sums.peak_bytes == prediction.peak_allocated_bytes
    if plan == "":
        assert sums.at_peak == prediction.breakdown


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", ["", "--accumulate 2", "--bf16", "--adam8bit"])
def test_for_a_gpu_workspaces_come_on_top_and_segments_are_as_predicted(
    speaker: Workload, save: Any, plan: str
) -> None:
    sums = Sums(save(speaker, plan, "T4"))
    prediction = predict(speaker, plan, "T4")
    assert sums.peak_bytes == sum(prediction.breakdown.values())
    # the prediction adds the small pool by its bytes, in whole segments
    assert prediction.peak_reserved_bytes is not None
    assert abs(sums.peak_reserved_bytes - prediction.peak_reserved_bytes) <= SMALL_SEGMENT_BYTES


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS)
def test_the_trace_agrees_with_what_is_measured(speaker: Workload, save: Any, plan: str) -> None:
    measured_bytes = measure(speaker, plan, 1).peak_allocated_bytes
    assert Sums(save(speaker, plan)).peak_bytes == pytest.approx(measured_bytes, rel=0.005)


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["", "--accumulate 4", "--adam8bit"])
def test_only_what_outlives_steps_is_alive_at_the_end(speaker: Workload, save: Any, plan: str) -> None:
    viz = save(speaker, plan)
    sums = Sums(viz)
    left: dict[str, int] = {}
    for entry in sums.alive.values():
        left[entry["user_metadata"]] = left.get(entry["user_metadata"], 0) + entry["size"]
    assert set(left) == {"parameters", "optimizer state", "activations"}
    assert left["parameters"] == sum(4 * p.numel() for p in speaker.model.parameters())
    assert left["activations"] == speaker.batch["input_ids"].nbytes
    in_blocks = [block for segment in viz["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    assert {block["address"]: block["requested_size"] for block in in_blocks} == {
        address: entry["size"] for address, entry in sums.alive.items()
    }


def test_state_is_born_in_the_first_step_only(speaker: Workload, save: Any) -> None:
    viz = save(speaker)
    states = [
        entry
        for entry in viz["device_traces"][0]
        if entry["action"] == "alloc" and entry["user_metadata"] == "optimizer state"
    ]
    assert len(states) >= 2 * len(list(speaker.model.parameters()))
    assert {entry["frames"][1]["name"].split(" · ")[0] for entry in states} == {"step 1"}


def test_optimizer_state_that_exists_is_there_before_the_first_step(speaker: Workload, save: Any) -> None:
    for _ in range(TRAIN_STEPS):
        speaker.model(**speaker.batch)["loss"].backward()
        speaker.optimizers[0].step()
        speaker.optimizers[0].zero_grad()
    trace = save(speaker)["device_traces"][0]
    when = {entry["frames"][1]["name"] for entry in trace if entry["user_metadata"] == "optimizer state"}
    assert when == {"before the first step"}


def test_frames_say_what_ran_and_annotations_where_stretches_begin(speaker: Workload, save: Any) -> None:
    viz = save(speaker, "--accumulate 4", "T4")
    words = "memlab: --accumulate 4, predicted for T4"
    micro = [f"micro-batch {number} of 4" for number in (1, 2, 3, 4)]
    stretches = [*micro, "outputs put together", "update"]
    assert begins(viz) == [
        words, "look at a few rows", *(f"step {step} · {stretch}" for step in (1, 2) for stretch in stretches),
    ]  # fmt: skip
    assert len([each for each in viz["external_annotations"] if each["stage"] == "END"]) == len(begins(viz))
    allocs = [entry for entry in viz["device_traces"][0] if entry["action"] == "alloc"]
    for entry in allocs:
        innermost, within, file = [frame["name"] for frame in entry["frames"]]
        assert innermost.split(" · ")[0] == entry["user_metadata"]
        assert within in {"before the first step", *begins(viz)}
        assert file == words
    names = {entry["frames"][0]["name"] for entry in allocs}
    assert {"activations · forward", "gradients · backward", "optimizer state · step", "workspaces"} <= names
    assert {frame["filename"] for entry in allocs for frame in entry["frames"]} == {"memlab"}


def test_a_cpu_file_says_that_there_is_no_allocator(speaker: Workload, save: Any) -> None:
    viz = save(speaker)
    said = viz["external_annotations"][0]["name"]
    assert said.startswith("memlab: as written, predicted for CPU ledger; a CPU has")
    assert viz["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == ""
    assert "no caching allocator" not in str(save(speaker, "", "T4")["external_annotations"])


def test_predicted_times_are_those_of_the_prediction(speaker: Workload, save: Any) -> None:
    viz = save(speaker, "", "T4")
    times = [entry["time_us"] for entry in viz["device_traces"][0]]
    assert times == sorted(times)
    whole_us = 1e6 * predict(speaker, "", "T4").step_seconds
    assert viz["external_annotations"][-1]["time_us"] == pytest.approx(2 * whole_us, abs=2)
    (update,) = [
        each for each in viz["external_annotations"] if each["name"] == "step 1 · update" and each["stage"] == "END"
    ]
    assert update["time_us"] == pytest.approx(whole_us, abs=2)


def test_a_step_traced_as_a_whole_leaves_nothing_of_itself(regression: Workload, save: Any) -> None:
    sums = Sums(save(regression, "--accumulate 4"))
    assert sums.peak_bytes == predict(regression, "--accumulate 4").peak_allocated_bytes
    assert {entry["user_metadata"] for entry in sums.alive.values()} == {"parameters", "optimizer state", "activations"}


@pytest.mark.parametrize("plan", ["", "--accumulate 2 --adam8bit"])
def test_nothing_live_is_changed(speaker: Workload, save: Any, plan: str) -> None:
    speaker.model.head.bias.grad = torch.ones(VOCABULARY)
    speaker.model.eval()
    before = Snapshot(speaker)
    save(speaker, plan)
    assert changed_between(before, Snapshot(speaker)) == []
    assert session_of(speaker.model) is None


def test_a_session_keeps_its_plan_and_its_observers(speaker: Workload, save: Any) -> None:
    with fit(speaker, "--accumulate 2", [Observer()]) as session:
        watching = session.observers.all
        assert watching
        sums = Sums(save(speaker))
        assert session.plan == Plan.parse("--accumulate 2")
        assert session.observers.all == watching
    assert sums.peak_bytes == predict(speaker).peak_allocated_bytes


def test_the_file_is_replaced_and_a_failure_leaves_the_old_one(speaker: Workload, tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    path.write_bytes(b"old")
    with pytest.raises(RefusalError):
        save_snapshot(path, speaker, f"--accumulate {2 * ROWS}")
    assert path.read_bytes() == b"old"
    save_snapshot(str(path), speaker)
    assert pickle.loads(path.read_bytes())["segments"]


def test_bad_paths_are_said_before_any_work(speaker: Workload, tmp_path: Path) -> None:
    speaker.batch = None  # would be refused next
    with pytest.raises(MemlabError, match=r"there is no folder .*missing; make it first"):
        save_snapshot(tmp_path / "missing" / "step.pickle", speaker)
    with pytest.raises(MemlabError, match="that is a folder"):
        save_snapshot(tmp_path, speaker)
    with pytest.raises(WorkloadError, match="needs a batch"):
        save_snapshot(tmp_path / "step.pickle", speaker)


def test_nothing_is_recorded_on_a_cpu(speaker: Workload, save: Any) -> None:
    with pytest.raises(
        MemlabError, match=r"torch's allocator for GPUs records, and the model is on cpu: ask for a predicted"
    ):
        save(speaker, measured=True)


def test_plans_are_refused_as_predictions_are(speaker: Workload, save: Any) -> None:
    flags = f"--accumulate {2 * ROWS}"
    with pytest.raises(RefusalError) as predicted:
        predict(speaker, flags)
    with pytest.raises(RefusalError) as refused:
        save(speaker, flags)
    assert str(refused.value) == str(predicted.value)
    assert PlanPredictor(speaker).refusal(Plan.parse(flags)) is not None


# -- the replay that reserved bytes come from


BIG = 16 * 2**20
PLACE = {category: place for place, category in enumerate(Category)}


def reserved(passes: list[list[tuple[int, int]]], last: list[tuple[int, int]], **more: Any) -> int:
    """Allocated bytes at the peak, for storages of whole MiB."""
    from memlab.allocator import Settings

    labelled = [[(size, number, PLACE[Category.TEMPORARIES], 0) for size, number in events] for events in passes]
    update = [(size, number, PLACE[Category.TEMPORARIES], 3) for size, number in last]
    script = Script(Parts(NOTHING, (), 1, 0, 0, (), **more), labelled, update)
    return reserved_by(script, Settings()).allocated_bytes


def test_a_storage_that_changes_its_size_is_freed_whole() -> None:
    grows = [(BIG, 1), (BIG, 1), (-2 * BIG, 1)]
    # for a moment both the old and the new one are there
    assert reserved([grows], []) == 3 * BIG
    assert reserved([grows * 3], []) == 3 * BIG


def test_outputs_of_every_micro_batch_are_kept_until_the_update() -> None:
    micro = [(BIG, 1), (BIG, 2), (-BIG, 2)]
    assert reserved([micro] * 6, [(BIG, 1), (-BIG, 1)]) == 7 * BIG
    assert reserved([micro] * 6, [(10 * BIG, 1), (-10 * BIG, 1)]) == 10 * BIG


def test_what_an_update_replaces_is_counted_once() -> None:
    replaced = [(BIG, 2), (-BIG, 1)]
    assert reserved([[]], replaced, owned={1: BIG}) == 2 * BIG
    # what has no place to go on living in ends with its step
    assert reserved([[]], [(BIG, 2)], owned={1: BIG}) == 2 * BIG


# -- torch's own recorder, as far as it goes without a GPU (see tests/gpu/test_recorded_snapshots.py)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for torch's recorder of the CUDA allocator."""
    state: dict[str, Any] = {"enabled": None, "metadata": "the user's", "seen": []}

    def record(enabled: str | None = "all", **options: Any) -> None:
        state["enabled"] = enabled

    def set_metadata(words: str) -> None:
        state["metadata"] = words
        state["seen"].append(words)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: state["enabled"] is not None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", set_metadata, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_get_memory_metadata", lambda: state["metadata"], raising=False)
    return state


def test_torchs_recorder_is_off_again_after_a_failure(recorder: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        with snapshots._recording():
            assert recorder["enabled"] == "all"
            raise KeyError
    assert recorder["enabled"] is None


def test_a_recording_of_the_users_is_left_alone(recorder: dict[str, Any]) -> None:
    recorder["enabled"] = "state"
    with pytest.raises(MemlabError, match="records memory history already"):
        with snapshots._recording():
            pytest.fail("must not begin")
    assert recorder["enabled"] == "state"


def test_metadata_says_what_runs_and_is_put_back(recorder: dict[str, Any], speaker: Workload) -> None:
    watch = snapshots._MetadataObserver()
    with fit(speaker, "", observers=[watch]):
        speaker.model(**speaker.batch)["loss"].backward()
        speaker.optimizers[0].step()
    watch.close()
    assert recorder["seen"] == [
        "memlab: within the model's call", "memlab: outside of model and optimizer",
        "memlab: within the optimizer's step", "memlab: outside of model and optimizer", "the user's",
    ]  # fmt: skip
