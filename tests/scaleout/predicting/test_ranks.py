"""What is predicted for ranks, beside what real ones need; and how many of which GPU."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from memlab import Workload, compare_ranks, how_many, predict, predict_ranks
from memlab.errors import RefusalError, ScaleError, WorkloadError
from memlab.records.ranks import RankPrediction
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between
from tests.scaleout.handing import case
from tests.scaleout.ranks import bert, gpt2, perceptron, run, small, workload_of

_FIGURE = 0.03
_WIRE = 0.03


def _case(make: Callable[..., Any], flags: str, nproc: int) -> Any:
    return case(flags, make, nproc, id=f"{make.__name__}-{flags}-{nproc}")


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize(
    ("flags", "make", "nproc"),
    [
        _case(gpt2, "ddp", 2),
        _case(bert, "fsdp2 --checkpoint --bf16", 2),
        _case(small, "fsdp2 --offload optimizer", 2),
        _case(bert, "zero1", 2),
        _case(perceptron, "zero2 --offload optimizer", 2),
        _case(gpt2, "zero3 --checkpoint", 2),
        _case(bert, "zero3 --bf16", 2),
        _case(perceptron, "zero3", 1),
    ],
)
def test_a_rank_needs_and_sends_what_was_predicted(make: Callable[..., Any], flags: str, nproc: int) -> None:
    workload = workload_of(make)
    before = Snapshot(workload)
    predicted = predict_ranks(workload, f"--scale {flags}", nproc=nproc)
    assert changed_between(before, Snapshot(workload)) == []
    measured = run(workload, f"--scale {flags}", nproc)
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_bytes, rel=_FIGURE)
    assert predicted.wire_bytes == pytest.approx(measured.sent_bytes, rel=_WIRE, abs=2**12)


def test_each_stage_divides_one_thing_more() -> None:
    workload = workload_of(perceptron)
    predicted_plans = compare_ranks(workload, engines=["ddp", "zero1", "zero2", "zero3"], nprocs=[1, 8])
    one, eight = predicted_plans.predictions[:4], predicted_plans.predictions[4:]
    assert [each.scale for each in eight] == ["--scale ddp", "--scale zero1", "--scale zero2", "--scale zero3"]
    kept: Callable[[RankPrediction, str], float] = lambda each, kind: each.divided[kind]  # noqa: E731 - a short name
    share = [kept(b, "optimizer state") / kept(a, "optimizer state") for a, b in zip(one, eight, strict=True)]
    assert share == pytest.approx([1, 1 / 8, 1 / 8, 1 / 8], rel=0.01)
    assert kept(eight[3], "parameters") == pytest.approx(kept(one[3], "parameters") / 8, rel=0.01)
    assert kept(eight[2], "parameters") == pytest.approx(kept(one[2], "parameters"), rel=0.001)
    assert [each.wire_bytes for each in one] == [0, 0, 0, 0]


def test_one_process_under_ddp_needs_its_buckets_on_top() -> None:
    workload = workload_of(perceptron)
    plain = predict(workload)
    buckets_bytes = sum(parameter.nbytes for parameter in workload.model.parameters())
    predicted = predict_ranks(workload, "--scale ddp", nproc=1)
    assert predicted.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes + buckets_bytes, rel=0.001)


def test_offloaded_state_is_in_host_memory_beside_a_gpu() -> None:
    workload = workload_of(perceptron)
    here = predict_ranks(workload, "--scale fsdp2", nproc=2, device="T4")
    away = predict_ranks(workload, "--scale fsdp2 --offload optimizer", nproc=2, device="T4")
    assert here.host_bytes == 0
    size_bytes = sum(parameter.nbytes for parameter in workload.model.parameters())
    assert away.host_bytes == pytest.approx(4 * size_bytes / 2, rel=0.01)
    assert away.peak_allocated_bytes < here.peak_allocated_bytes - 1.5 * size_bytes


def test_what_a_gpu_computes_in_is_that_gpus() -> None:
    workload = workload_of(perceptron)
    assert not predict_ranks(workload, "--scale fsdp2 --precision tf32", nproc=2, device="A100 80GB").refused
    with pytest.raises(RefusalError, match="tf32 needs a CUDA GPU of the Ampere generation or newer"):
        predict_ranks(workload, "--scale fsdp2 --precision tf32", nproc=2, device="T4")


def test_what_cannot_be_says_why() -> None:
    workload = workload_of(perceptron)
    with pytest.raises(RefusalError, match=r"the batch has 32 rows, for 33 processes; use batches of 33 rows"):
        predict_ranks(workload, "--scale fsdp2", nproc=33)
    with pytest.raises(ScaleError, match=r"nproc 0: expected a whole number of processes, 1 or more"):
        predict_ranks(workload, "--scale fsdp2", nproc=0)
    with pytest.raises(WorkloadError, match="a prediction needs a batch"):
        predict_ranks(Workload(workload.model, workload.optimizers), "--scale fsdp2")
    predicted_plans = compare_ranks(workload, "--offload optimizer", engines=["ddp", "fsdp2"], nprocs=[2])
    assert [bool(each.refused) for each in predicted_plans.predictions] == [True, False]


def _llama(layers: int) -> Workload:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
                num_key_value_heads=8, vocab_size=32000, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    ids = torch.zeros(1, 512, dtype=torch.long)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch={"input_ids": ids, "labels": ids.clone()})


@pytest.mark.full
def test_how_many_gpus_hold_a_model_that_fits_none() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = how_many(_llama(16), engines=["ddp", "fsdp2"], of=["T4", "A100 80GB"], most=64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**20  # of more than 200 GiB
    assert [(row.gpu, row.engine) for row in found.rows] == [
        ("T4", "ddp"), ("T4", "fsdp2"), ("A100 80GB", "ddp"), ("A100 80GB", "fsdp2"),
    ]  # fmt: skip
    ddp, fsdp2 = found.of("A100 80GB", "ddp"), found.of("A100 80GB", "fsdp2")
    assert ddp is not None
    assert ddp.ranks is None
    # 16 bytes for each of 14.2 billion parameters are 212 GiB, and 4 × 76 GiB the first that hold them with the rest
    assert fsdp2 is not None
    assert fsdp2.ranks == 4


def test_how_many_says_which_engines_are_left_out() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(4, 64),))
    found = how_many(workload, "--offload optimizer", engines=["ddp", "fsdp2"], of=["T4"])
    assert [row.engine for row in found.rows] == ["fsdp2"]
    assert "--offload optimizer exclude each other: ddp keeps optimizer state on the device" in found.notes[-1]
    with pytest.raises(RefusalError, match="ddp keeps optimizer state on the device"):
        how_many(workload, "--offload optimizer", engines=["ddp"], of=["T4"])
    with pytest.raises(ScaleError, match="most=0"):
        how_many(workload, most=0)
