"""Models cut by their own plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from memlab import Workload, launch
from memlab.errors import RefusalError
from memlab.scaleout.engines import tp
from tests.scaleout.engines.test_micro import looked_at_late
from tests.scaleout.handing import assert_alike, handed_over
from tests.scaleout.runs import gpt2, llama, qwen, texts, trained


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("flags", "train", "make", "steps"),
    [
        ("tp", trained, llama, 60),
        ("tp --accumulate 2 --checkpoint", looked_at_late, qwen, 12),
    ],
)
def test_two_ranks_train_as_one_process_does(
    flags: str, train: Callable[..., list[float]], make: Callable[[], Workload], steps: int
) -> None:
    expected, losses, reference, workload = handed_over(flags, 2, texts(steps), train, make)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_alike(reference.model, workload.model, rtol=1e-4, atol=1e-5)


def test_layers_that_share_a_weight_are_cut_alike_or_not_at_all() -> None:
    model = llama().model
    # as Transformers plans it since some version
    model._tp_plan = {**model.tp_plan, "lm_head": "colwise_gather_output", "model.embed_tokens": "embedding_rowwise"}
    assert {"lm_head", "model.embed_tokens"} <= tp.entries(model).keys()
    model._tp_plan = {**model.tp_plan, "lm_head": "replicate"}
    assert not {"lm_head", "model.embed_tokens"} & tp.entries(model).keys()
    assert "model.layers.1.mlp.down_proj" in tp.entries(model)


def planned(plan: dict[str, str]) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 9))
    model.tp_plan = plan  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("make", "ranks", "said"),
    [
        (lambda: gpt2().model, 2, r"^scale: M has no plan for tensor parallelism \(tp_plan\); use --scale fsdp2"),
        (lambda: llama().model, 3, r"^scale: M has 4 attention heads, for 3 processes; use a number .* divides 4, or"),
        (lambda: llama().model, 4, r"^scale: M has 2 key and value heads, for 4 processes; use a number .* divides 2"),
        (
            lambda: planned({"0": "packed_colwise"}),
            2,
            r"^scale: the tp_plan of M has entries packed_colwise; use --scale fsdp2",
        ),
        (lambda: planned({"0": "colwise"}), 2, r"^scale: M has 9 out_features in 0, for 2 processes; use a number"),
    ],
)
def test_what_cannot_be_cut_is_refused(make: Callable[[], nn.Module], ranks: int, said: str) -> None:
    with pytest.raises(RefusalError, match=said):
        tp.check(make(), "M", ranks)


def test_it_is_refused_before_anything_starts() -> None:
    with pytest.raises(RefusalError, match=r"^scale: GPT2LMHeadModel has no plan"):
        launch(lambda: None, gpt2(), "--scale tp")
