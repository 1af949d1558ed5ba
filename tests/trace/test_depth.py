"""Passes of models with many like blocks, from those of the same models with a few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload
from memlab.plan import Plan
from memlab.predicting.targets import target_for
from memlab.trace.depth import are_same, cut_of, notes_of_more
from memlab.trace.tracer import Tracer
from tests.techniques.models import gpt2, ragged_batch

VOCABULARY = 2100
FLAGS = ("", "--bf16", "--checkpoint", "--checkpoint selective --bf16", "--chunk-loss", "--fp16")


def language_model(layers: int = 6) -> Workload:
    model = gpt2(VOCABULARY, layers, dropout=0.1)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch(VOCABULARY, rows=4))


def tracer_of(workload: Workload, device: str | None = None) -> Tracer:
    target = target_for(workload, device)
    return Tracer(workload, target.device, target.choices)


def llama(layers: int) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)).train()
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch(VOCABULARY, rows=4))


class Tower(nn.Module):
    """Blocks in a row, and what a test does with them."""

    def __init__(self, *blocks: nn.Module, **does: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.does = does

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs = []
        for number, block in enumerate(self.blocks):
            values = values + block(values)
            if self.does.get("changes_in_the_fifth") and number == 4:
                values = values.sin()
            outputs.append(values)
        if self.does.get("goes_through_all"):
            outputs = [each.exp() for each in outputs]
        return outputs[-1].sum()


def tower(*widths: int, **does: bool) -> Workload:
    model = Tower(*(nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in widths), **does)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=(torch.randn(8, 16),))


@pytest.mark.parametrize("device", [None, "A100 80GB"])
@pytest.mark.parametrize("flags", FLAGS)
def test_a_pass_of_a_few_blocks_tells_that_of_all(flags: str, device: str | None) -> None:
    tracer, plan = tracer_of(language_model(), device), Plan.parse(flags)
    assert tracer._is_cut_exact
    for rows in (None, 2):
        found = tracer._pass_of_cut(plan, rows, use_cache=False)
        whole = tracer._pass_of_all(plan, rows, use_cache=False)
        assert found is not None
        assert are_same(found, whole)
        assert found.trained == whole.trained


@pytest.mark.parametrize("device", [None, "A100 80GB"])
def test_what_is_done_for_each_block_after_the_last_is_seen(device: str | None) -> None:
    """Caches are raised to fp32 when the model returns: one block's after another's."""
    tracer, plan = tracer_of(language_model(), device), Plan.parse("--bf16")
    assert tracer._is_cut_exact
    assert tracer._pass_of_cut(plan, None, use_cache=True) is None
    assert are_same(tracer.one_pass(plan), tracer._pass_of_all(plan))


def test_a_cache_that_keeps_blocks_apart_does_so_where_it_is_used() -> None:
    tracer, plan = tracer_of(language_model()), Plan.parse("--bf16")
    assert tracer._is_cut_exact
    assert tracer._pass_of_cut(plan, None, use_cache=True) is None
    found = tracer._pass_of_cut(plan, None, use_cache=False)
    assert found is not None
    assert are_same(found, tracer._pass_of_all(plan, use_cache=False))


@pytest.mark.parametrize("flags", ["", "--checkpoint", "--checkpoint --bf16"])
def test_blocks_whose_first_gradient_comes_before_their_last_activation_goes(flags: str) -> None:
    """The end of the second block's backward pass then runs with the first's."""
    tracer, plan = tracer_of(llama(layers=6), "A100 80GB"), Plan.parse(flags)
    assert tracer._is_cut_exact
    found = tracer._pass_of_cut(plan, None, use_cache=False)
    assert found is not None
    assert are_same(found, tracer._pass_of_all(plan, use_cache=False))


def test_notes_that_count_blocks_count_all() -> None:
    model = gpt2(VOCABULARY, layers=6, width=256)  # from 1 MiB on weights are tiled
    tracer = tracer_of(Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch(VOCABULARY, rows=4)))
    assert tracer._is_cut_exact
    for rows in (None, 2):
        found = tracer._pass_of_cut(Plan.parse("--tile 2"), rows, use_cache=False)
        assert found is not None
        assert found.notes == ("in 2 tiles: 6 feed-forward parts over rows",)
        assert are_same(found, tracer._pass_of_all(Plan.parse("--tile 2"), rows, use_cache=False))


def test_notes_that_differ_in_words_do_not_follow() -> None:
    assert notes_of_more(["3 of 1,024"], ["4 of 1,024"], 8) == ("12 of 1,024",)
    assert notes_of_more(["none"], ["4 of 1,024"], 8) is None
    assert notes_of_more([], ["4 of 1,024"], 8) is None


@pytest.mark.parametrize("does", [{"changes_in_the_fifth": True}, {"goes_through_all": True}])
def test_a_model_that_counts_its_blocks_is_traced_as_it_is(does: dict[str, Any]) -> None:
    tracer = Tracer(tower(*[32] * 6, **does))
    assert not tracer._is_cut_exact
    assert are_same(tracer.one_pass(Plan()), tracer._pass_of_all(Plan()))


@pytest.mark.parametrize(
    ("widths", "is_cut"), [((32,) * 6, True), ((48, *(32,) * 5), True), ((*(32,) * 5, 48), False), ((32,) * 4, False)]
)
def test_blocks_after_the_first_have_to_be_alike(widths: tuple[int, ...], is_cut: bool) -> None:
    assert (cut_of(tower(*widths)) is not None) is is_cut


def test_a_block_that_is_frozen_is_not_like_the_others() -> None:
    workload = tower(*[32] * 6)
    workload.model.blocks[3].requires_grad_(False)
    assert cut_of(workload) is None


@pytest.mark.parametrize(("flags", "device"), [("--offload activations", "A100 80GB"), ("--checkpoint every:2", None)])
def test_plans_under_which_blocks_depend_on_each_other_are_traced_as_they_are(flags: str, device: str | None) -> None:
    tracer, plan = tracer_of(language_model(), device), Plan.parse(flags)
    assert tracer._pass_of_cut(plan, None, use_cache=True) is None
    assert are_same(tracer.one_pass(plan), tracer._pass_of_all(plan))


@pytest.mark.parametrize("rows", [None, 2])
def test_bytes_off_the_device_are_those_of_all_blocks(rows: int | None) -> None:
    tracer, plan = tracer_of(language_model()), Plan.parse("--offload activations")
    found = tracer._pass_of_cut(plan, rows, use_cache=False)
    whole = tracer._pass_of_all(plan, rows, use_cache=False)
    assert found is not None
    assert found.host_bytes == whole.host_bytes > 0
    assert are_same(found, whole)


def test_the_twin_has_all_its_blocks_again() -> None:
    workload = language_model()
    tracer = Tracer(workload)
    twin = tracer.twin.workload
    before = [id(parameter) for parameter in twin.model.parameters()]
    stepped = [id(parameter) for parameter in twin.optimizers[0].param_groups[0]["params"]]
    assert tracer._is_cut_exact
    assert [id(parameter) for parameter in twin.model.parameters()] == before
    assert [id(parameter) for parameter in twin.optimizers[0].param_groups[0]["params"]] == stepped
    assert not any("forward" in vars(module) for module in twin.model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in twin.model.parameters())
