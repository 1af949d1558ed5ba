"""Low-rank adapters: put on a live model, trained, and taken off with every bit as it was."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memlab import MemlabError, RefusalError, Workload, fit, measure, predict, save_adapters
from memlab.errors import MissingExtraError, WorkloadError
from memlab.plan import Plan
from memlab.plan.savings import SAVINGS
from memlab.plan.space import plan_space
from memlab.runtime.model_state import State
from memlab.session import session_of
from memlab.techniques.adapters.injected import adapters_of
from tests.helpers.fingerprint import differing, fingerprint

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

_IDS = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
_TEXT = {"input_ids": _IDS, "labels": _IDS}


def _gpt2(**more: Any) -> nn.Module:
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**(sizes | drop | more), bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def _llama(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**(sizes | {"vocab_size": 64, "max_position_embeddings": 16} | more))
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)
    )


def _t5() -> nn.Module:
    sizes = {
        "d_model": 32,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "d_kv": 16,
        "vocab_size": 64,
        "dropout_rate": 0.0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


_FAMILIES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, torch.Tensor]]] = {
    "gpt2": (_gpt2, _TEXT),
    "llama": (_llama, _TEXT),
    "bert": (_bert, {"input_ids": _IDS, "labels": torch.tensor([0, 1, 1, 0])}),
    "t5": (_t5, _TEXT),
}


def _made(family: str = "gpt2") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    make, batch = _FAMILIES[family]
    return make().train(), dict(batch)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as people make them."""
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _outputs(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the model gives in evaluation: where gradients are asked for, torch chooses kernels by what requires some."""
    model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = model(**batch).logits
    model.train()
    return outputs


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {
        number: {name: copy.deepcopy(value) for name, value in entry.items()}
        for number, entry in enumerate(optimizer.state.values())
    }
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()},
        "state": state,
        "order": [id(key) for key in optimizer.state],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "lists": [(id(group), id(group["params"]), [*map(id, group["params"])]) for group in optimizer.param_groups],
        "modules": {name: id(module) for name, module in model.named_modules()},
    }


def _differ(found: Any, expected: Any, name: str = "") -> list[str]:
    if isinstance(expected, dict):
        if [*found] != [*expected]:
            return [f"{name}: other keys"]
        return [line for key in expected for line in _differ(found[key], expected[key], f"{name} {key}")]
    same = torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
    return [] if same else [name]


@pytest.mark.parametrize("flags", ["--lora r=4", "--lora dora,r=2,alpha=3"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_outputs_are_the_same_when_they_come_and_every_bit_is_back_when_they_go(family: str, flags: str) -> None:
    model, batch = _made(family)
    optimizer = _adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for _ in range(2):
        _step(model, optimizer, batch)
    model(**batch).loss.backward()  # a gradient that the loop has not dropped
    outputs, random = _outputs(model, batch), torch.get_rng_state()
    values, structure = _values(model, optimizer), fingerprint(model, [optimizer], [scheduler])
    session = fit(Workload(model, optimizer), flags)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(_outputs(model, batch), outputs)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    assert session.host_bytes > 0  # moments that wait
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for _ in range(3):
        losses.append(_step(model, optimizer, batch))
        scheduler.step()
    assert losses[0] > losses[1] > losses[2]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate * 0.9**3 for rate in rates])
    before = torch.get_rng_state()
    session.undo()
    assert torch.equal(torch.get_rng_state(), before)
    for group in values["groups"]:
        group["lr"] = pytest.approx(group["lr"] * 0.9**3)
    assert _differ(_values(model, optimizer), values) == []
    assert differing(structure, fingerprint(model, [optimizer], [scheduler])) == []
    assert torch.equal(_outputs(model, batch), outputs)


@pytest.mark.parametrize("flags", ["--lora r=2", "--lora dora,r=2"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_of_16_bit_weights_are_in_fp32_and_change_no_output(family: str, flags: str) -> None:
    model, batch = _made(family)
    optimizer = _adamw(model.bfloat16())
    outputs = _outputs(model, batch)
    with fit(Workload(model, optimizer), flags):
        assert torch.equal(_outputs(model, batch), outputs)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        losses = [_step(model, optimizer, batch) for _ in range(3)]
    assert losses[0] > losses[2]
    assert torch.equal(_outputs(model, batch), outputs)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_losses_are_those_of_pefts_own_loop(family: str, kind: str) -> None:
    import peft

    def optimizer_of(groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        settings = [{"params": groups[0], "lr": 1e-2, "weight_decay": 0.1}, {"params": groups[1], "lr": 3e-2}]
        return torch.optim.AdamW(settings) if kind == "AdamW" else torch.optim.SGD(settings, momentum=0.9)

    def is_attention(name: str) -> bool:
        return "attn" in name

    model, batch = _made(family)
    other = copy.deepcopy(model)
    parts = [[p for name, p in model.named_parameters() if is_attention(name) is first] for first in (True, False)]
    optimizer = optimizer_of(parts)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5)
    random = torch.get_rng_state()
    with fit(Workload(model, optimizer), "--lora r=4,alpha=6"):
        found = []
        for _ in range(5):
            found.append(_step(model, optimizer, batch))
            scheduler.step()
    torch.set_rng_state(random)
    targets = ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else "all-linear"
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=family == "gpt2")
    wrapped: Any = peft.get_peft_model(other, config)
    trained = [(name, p) for name, p in wrapped.named_parameters() if p.requires_grad]
    optimizer = optimizer_of([[p for name, p in trained if is_attention(name) is first] for first in (True, False)])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5)
    expected = []
    for _ in range(5):
        expected.append(_step(wrapped, optimizer, batch))
        scheduler.step()
    assert found == expected


_BESIDE = (
    "--accumulate 2",
    "--checkpoint",
    "--checkpoint selective",
    "--offload optimizer",
    "--offload activations",
    "--offload params",
    "--release-grads",
    "--chunk-loss",
    "--tile 2",
    "--bf16",
    "--fp16",
    "--precision pure-bf16",
    "--adam8bit",
    "--optim adafactor",
    "--accumulate 2 --checkpoint --bf16 --adam8bit --offload activations,optimizer,params --chunk-loss",
)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    model, batch = _large()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--lora r=4"):
        return [_step(model, optimizer, batch) for _ in range(3)]


def _large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that every technique applies to."""
    torch.manual_seed(0)
    ids = torch.randint(0, 2048, (4, 12), generator=torch.Generator().manual_seed(1))
    return _llama(vocab_size=2048, intermediate_size=256).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.few(9, full=15)
@pytest.mark.parametrize("beside", _BESIDE)
def test_beside_each_other_technique(beside: str, alone: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.techniques.tiling.tiling.LARGE_BYTES", 1)
    model, batch = _large()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values, structure = _values(model, optimizer), fingerprint(model, [optimizer])
    with fit(Workload(model, optimizer), f"--lora r=4 {beside}") as session:
        losses = [_step(model, optimizer, batch) for _ in range(3)]
        assert not any("no effect" in note for note in session.notes)
    is_exact = Plan.parse(beside).is_exact
    assert losses == pytest.approx(alone, rel=1e-6 if is_exact else 2e-3)
    assert _differ(_values(model, optimizer), values) == []
    assert differing(structure, fingerprint(model, [optimizer])) == []


@pytest.mark.few(4, full=8)
@pytest.mark.parametrize("has_state", [False, True], ids=["fresh", "existing state"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_predicted_peaks_are_the_measured_ones(family: str, *, has_state: bool) -> None:
    model, batch = _made(family)
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch)
    if has_state:
        _step(model, workload.optimizers[0], batch)
    for flags in ("--lora r=4", "--lora r=2,dora --accumulate 2 --checkpoint --adam8bit"):
        predicted, measured = predict(workload, flags), measure(workload, flags, steps=1)
        assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)


def test_frozen_weights_of_blocks_are_predicted_off_the_device_beside_checkpoints() -> None:
    torch.manual_seed(0)
    model, batch = _llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3).train(), dict(_TEXT)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate" not in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    workload = Workload(model, optimizer, batch=batch)
    predicted, measured = (ask(workload, "--offload params --checkpoint") for ask in (predict, measure))
    again = measure(workload, "--offload params --checkpoint")
    # a copy that has gone leaves its place to another tensor, and a write to that one is none to the weight
    assert {measured.peak_allocated_bytes, again.peak_allocated_bytes} == {predicted.peak_allocated_bytes}


def test_predictions_under_adapters_are_of_the_model_as_it_was_written() -> None:
    model, batch = _made()
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch)
    expected = {flags: predict(workload, flags).peak_allocated_bytes for flags in ("", "--lora r=4", "--adam8bit")}
    with fit(workload, "--lora r=2"):
        _step(model, workload.optimizers[0], batch)
        assert {flags: predict(workload, flags).peak_allocated_bytes for flags in expected} == expected


class TestWhatWasLearnt:
    def test_is_kept_beside_the_model_and_comes_back_to_the_bit(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        _step(model, optimizer, batch)
        with fit(Workload(model, optimizer)) as session:
            session.switch("--lora r=4")
            for _ in range(2):
                _step(model, optimizer, batch)
            layer = model.get_submodule("transformer.h.0.attn.c_attn")
            values = _values(model, optimizer)
            undisturbed = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            session.switch("")
            assert session.log[-2].text == (
                "what adapters learnt in 2 steps waits beside GPT2LMHeadModel (16.0 KiB): in the next plan --lora r=4,alpha=8 brings it back, "
                "--lora off:merge adds it to the weights, --lora off:drop drops it"
            )
            _step(model, optimizer, batch)  # of the weights themselves
            optimizer.zero_grad()
            with pytest.raises(
                RefusalError,
                match=r"has adapters \(r=4,alpha=8\) that learnt in 2 steps, and r=2,alpha=4 would make others",
            ):
                session.switch("--lora r=2")
            session.switch("--lora r=4")
            assert model.get_submodule("transformer.h.0.attn.c_attn") is layer
            found = _values(model, optimizer)
            assert _differ(found["state"], values["state"]) == []
            learnt = {name: value for name, value in values["weights"].items() if "lora_" in name}
            assert _differ({name: found["weights"][name] for name in learnt}, learnt) == []
        del undisturbed
        assert adapters_of(model) is not None

    def test_goes_on_as_if_it_had_not_been_away(self) -> None:
        losses = []
        for is_away in (False, True):
            model, batch = _made()
            optimizer = _adamw(model)
            session = fit(Workload(model, optimizer), "--lora r=4")
            own = [_step(model, optimizer, batch) for _ in range(2)]
            if is_away:
                session.undo()
                session = fit(Workload(model, optimizer), "--lora r=4")
            losses.append(own + [_step(model, optimizer, batch) for _ in range(2)])
            session.undo()
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("flags", ["--lora r=4", "--lora r=4,dora"])
    def test_is_merged_into_the_weights_where_that_is_asked_for(self, flags: str) -> None:
        model, batch = _made("llama")
        optimizer = _adamw(model)
        modules = {name: id(module) for name, module in model.named_modules()}
        with fit(Workload(model, optimizer), f"{flags} --adam8bit") as session:
            for _ in range(3):
                _step(model, optimizer, batch)
            outputs = model(**batch).logits.detach()
            session.switch("--lora off:merge --adam8bit", now=True)
            assert torch.allclose(model(**batch).logits, outputs, atol=1e-5)
            assert {name: id(module) for name, module in model.named_modules()} == modules
            assert session.log[-2].text == (
                "what adapters learnt in 3 steps is part of the weights of LlamaForCausalLM: undo does not take it out"
            )
            assert adapters_of(model) is None
            assert session.plan == Plan.parse("--adam8bit")  # it is done once
            _step(model, optimizer, batch)
            measure(Workload(model, optimizer, batch=batch), "--bf16", steps=1)
        assert all(p.requires_grad for p in model.parameters())

    def test_is_dropped_where_that_is_asked_for(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        values = _values(model, optimizer)
        with fit(Workload(model, optimizer), "--lora r=4") as session:
            _step(model, optimizer, batch)
            session.switch("--lora off:drop")
            assert session.log[-2].text == "what adapters of GPT2LMHeadModel learnt in 1 step is dropped"
            assert adapters_of(model) is None
            session.switch("--lora r=2")  # others, then
        assert _differ(_values(model, optimizer), values) == []

    def test_that_is_not_finite_is_not_merged(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        with fit(Workload(model, optimizer), "--lora r=4") as session:
            _step(model, optimizer, batch)
            with torch.no_grad():
                next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(torch.inf)
            values = _values(model, optimizer)
            with pytest.raises(RefusalError, match="what the adapters learnt is not finite; use --lora off:drop"):
                session.switch("--lora off:merge")
            assert _differ(_values(model, optimizer), values) == []
            assert session.plan == Plan.parse("--lora r=4")


class TestSaving:
    @pytest.mark.parametrize("waits", [False, True], ids=["in the model", "waiting"])
    @pytest.mark.parametrize("flags", ["--lora r=4", "--lora dora,r=4,targets=c_attn"])
    def test_files_are_pefts_own(self, flags: str, tmp_path: Path, *, waits: bool) -> None:
        import peft

        model, batch = _made()
        optimizer = _adamw(model)
        session = fit(Workload(model, optimizer), flags)
        for _ in range(2):
            _step(model, optimizer, batch)
        outputs = model(**batch).logits.detach()
        if waits:
            session.undo()
        save_adapters(model, tmp_path / "adapters")
        assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        loaded = peft.PeftModel.from_pretrained(_made()[0], str(tmp_path / "adapters"))
        assert torch.equal(loaded(**batch).logits, outputs)
        session.undo()

    def test_of_transformers_models_save_pretrained_writes_the_same(self, tmp_path: Path) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        with fit(Workload(model, optimizer), "--lora r=4"):
            _step(model, optimizer, batch)
            model.save_pretrained(tmp_path / "own")  # type: ignore[operator]
            save_adapters(model, tmp_path / "ours")
        from safetensors.torch import load_file

        own, ours = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("own", "ours"))
        assert _differ(dict(sorted(ours.items())), dict(sorted(own.items()))) == []
        assert json.loads((tmp_path / "own" / "adapter_config.json").read_text())["r"] == 4
        model.save_pretrained(tmp_path / "whole")  # type: ignore[operator]
        assert not (tmp_path / "whole" / "adapter_config.json").exists()

    def test_a_model_without_adapters_has_none_to_save(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError, match="Linear has no adapters to save: --lora makes some"):
            save_adapters(nn.Linear(2, 2), tmp_path)


class TestTheLoop:
    def test_a_click_and_an_undo_in_the_middle_of_it(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        with fit(Workload(model, optimizer)) as session:
            kinds = []
            for number in range(6):
                if number in (2, 4):
                    session.switching.ask(Plan.parse("--lora r=2" if number == 2 else ""))
                _step(model, optimizer, batch)
                kinds.append(sum(len(group["params"]) for group in optimizer.param_groups))
        own = len([*model.parameters()])
        assert kinds == [own, own, 16, 16, own, own]

    def test_other_settings_change_and_leave_the_adapters_alone(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        with fit(Workload(model, optimizer), "--lora r=2") as session:
            (technique,) = session.techniques
            adapters = [p for p in model.parameters() if p.requires_grad]
            for flags in ("--lora r=2 --checkpoint", "--lora r=2 --adam8bit --bf16", "--lora r=2"):
                session.switch(flags)
                _step(model, optimizer, batch)
                assert session.techniques[0] is technique
                assert all(
                    a is b for a, b in zip(adapters, (p for p in model.parameters() if p.requires_grad), strict=True)
                )

    def test_what_is_frozen_or_not_trained_stays_as_it_is(self) -> None:
        model, batch = _made()
        model.get_submodule("transformer.h.0").requires_grad_(False)
        left_out = model.get_submodule("transformer.ln_f").weight
        optimizer = torch.optim.SGD([p for p in model.parameters() if p is not left_out and p.requires_grad], lr=0.1)
        trains = {name: p.requires_grad for name, p in model.named_parameters()}
        with fit(Workload(model, optimizer), "--lora r=2"):
            adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
            assert {name.split(".attn.")[0].split(".mlp.")[0] for name in adapted} == {"transformer.h.1"}
            assert left_out.requires_grad
            _step(model, optimizer, batch)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == trains

    def test_each_of_several_optimizers_goes_on_with_the_adapters_of_its_weights(self) -> None:
        model, batch = _made()
        parts = [[p for name, p in model.named_parameters() if ("attn" in name) is first] for first in (True, False)]
        optimizers = [torch.optim.AdamW(parts[0], lr=1e-2), torch.optim.SGD(parts[1], lr=1e-2, momentum=0.9)]
        values = [_values(model, each) for each in optimizers]
        with fit(Workload(model, optimizers), "--lora r=2") as session:
            assert [len(each.param_groups[0]["params"]) for each in optimizers] == [8, 8]
            for _ in range(2):
                model(**batch).loss.backward()
                for each in optimizers:
                    each.step()
                    each.zero_grad()
        assert "learnt in 2 steps" in session.log[-2].text
        assert [_differ(_values(model, each), before) for each, before in zip(optimizers, values, strict=True)] == [
            [],
            [],
        ]

    def test_an_optimizer_that_is_found_at_its_first_step_joins(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        values = _values(model, optimizer)
        with fit(Workload(model), "--lora r=2"):
            losses = [_step(model, optimizer, batch) for _ in range(3)]
        assert losses[0] > losses[-1]
        assert _differ(_values(model, optimizer), values) == []

    def test_an_optimizer_made_under_it_gets_the_weights_of_its_adapters(self) -> None:
        model, batch = _made()
        session = fit(Workload(model), "--lora r=2")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        _step(model, optimizer, batch)
        session.undo()
        names = {id(p): name for name, p in model.named_parameters()}
        held = {names[id(p)] for p in optimizer.param_groups[0]["params"]}
        assert held == {name for name in names.values() if ".c_" in name and name.endswith("weight")}
        assert any(
            entry.text
            == "AdamW was made under --lora and has none of 20 parameters that were frozen then: make it anew to train them"
            for entry in session.log
        )

    def test_a_measurement_leaves_nothing_behind(self) -> None:
        model, batch = _made()
        optimizer = _adamw(model)
        workload = Workload(model, optimizer, batch=batch)
        _step(model, optimizer, batch)
        values = _values(model, optimizer)
        measure(workload, "--lora r=4", steps=1)
        assert adapters_of(model) is None
        assert _differ(_values(model, optimizer), values) == []
        with fit(workload, "--lora r=4"):
            _step(model, optimizer, batch)
            under = _values(model, optimizer)
            measure(workload, "", steps=1)
            measure(workload, "--lora r=4 --adam8bit", steps=1)
            assert _differ(_values(model, optimizer)["state"], under["state"]) == []
            assert _differ(_values(model, optimizer)["weights"], under["weights"]) == []
        assert _differ(_values(model, optimizer), values) == []

    def test_layers_that_the_model_does_not_call_are_named(self) -> None:
        class Reads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(self.one(inputs), self.other.weight)

        model = Reads()
        optimizer = torch.optim.AdamW(model.parameters())
        with fit(Workload(model, optimizer), "--lora r=2") as session:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert session.notes[1:] == (
                "memlab.save_adapters(model, folder) saves adapters of Reads: its own state dict has peft's names while they are in it",
                "2 of 4 tensors of adapters got no gradient in the first step: the model did not call their layers",
            )

    def test_models_of_transformers_save_adapters_themselves_and_no_line_says_how(self) -> None:
        model, _ = _made()
        with fit(Workload(model, _adamw(model)), "--lora r=2") as session:
            assert not any("save_adapters" in note for note in session.notes)

    def test_frozen_weights_are_not_copied_as_if_they_were_statistics(self) -> None:
        model, _ = _made()
        own = [*model.parameters()]
        with fit(Workload(model, _adamw(model)), "--lora r=2"):
            state = State.of_model(model, torch.device("cpu"))
            assert not any(kept.is_copied and kept.seen is each for kept in state.own_tensors for each in own)
        model.requires_grad_(False)  # by the user: a layer may keep an average there
        state = State.of_model(model, torch.device("cpu"))
        assert any(kept.is_copied and kept.seen is each for kept in state.own_tensors for each in own)

    def test_nobody_chooses_it_by_themselves(self) -> None:
        assert all(saving.field.name != "adapters" for saving in SAVINGS)
        assert all(not plan.adapters.is_on for plan in plan_space())
        assert all(plan.adapters == "r=4,alpha=8" for plan in plan_space(Plan.parse("--lora r=4")))
        assert not Plan.parse("--lora").is_exact


class _Quantised(nn.Linear):
    """As those of bitsandbytes keep their weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)


def _said(model: nn.Module, flags: str, optimizer: torch.optim.Optimizer | None = None) -> str:
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    values, structure = _values(model, optimizer), fingerprint(model, [optimizer])
    with pytest.raises(MemlabError) as caught:
        fit(Workload(model, optimizer), flags)
    assert session_of(model) is None
    assert _differ(_values(model, optimizer), values) == []
    assert differing(structure, fingerprint(model, [optimizer])) == []
    return str(caught.value)


class TestRefusals:
    def test_models_without_linear_layers(self) -> None:
        assert _said(nn.Sequential(nn.Conv1d(2, 2, 1)), "--lora") == (
            "adapters: Sequential calls no linear layers of its own, and adapters go beside these; use --adam8bit or --offload optimizer"
        )
        assert "calls no linear layers of its own" in _said(nn.TransformerEncoderLayer(4, 2), "--lora")

    def test_targets_that_match_nothing(self) -> None:
        assert _said(_made()[0], "--lora targets=c_attn,q_proj") == (
            "adapters: targets=q_proj matches no linear layer of GPT2LMHeadModel; there are c_proj, c_attn, c_fc"
        )

    def test_targets_that_do_not_train(self) -> None:
        model, _ = _made()
        model.get_submodule("transformer.h").requires_grad_(False)
        assert _said(model, "--lora targets=c_fc") == (
            "adapters: none of the linear layers c_fc of GPT2LMHeadModel is trained by the optimizer, and what is frozen stays as it is; "
            "have the optimizer train some, or use peft's own get_peft_model before the cell"
        )

    def test_peft_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = _made()
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(MissingExtraError) as caught:
            fit(Workload(model, torch.optim.AdamW(model.parameters())), "--lora")
        assert str(caught.value) == (
            "--lora needs peft, which is not installed: pip install 'memlab[adapters]' (or pip install peft)"
        )

    def test_a_quantised_base(self) -> None:
        assert _said(nn.Sequential(nn.Linear(4, 4), _Quantised()), "--lora") == (
            "adapters: Sequential is quantised already (1 is a _Quantised), and what adapters learn could not be merged into it, nor undone "
            "to the bit; use peft's own prepare_model_for_kbit_training and get_peft_model before the cell"
        )

    def test_a_peft_that_transformers_does_not_save_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own error would end the run at the first checkpoint."""
        import peft
        from transformers.integrations import peft as integration

        monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "99.0")
        assert _said(_gpt2(), "--lora") == (
            f"adapters: this Transformers saves adapters with peft 99.0 or newer, and {peft.__version__} is installed; "
            "install such a peft, or an older Transformers"
        )
        fit(Workload(nn.Sequential(nn.Linear(4, 4)), ()), "--lora").undo()

    def test_models_that_are_pefts_already(self) -> None:
        import peft

        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        for model in (peft.get_peft_model(_gpt2(), config), peft.inject_adapter_in_model(config, _gpt2())):
            assert _said(model, "--lora").endswith(
                "has adapters of peft's already, which train as they are; leave out --lora"
            )

    def test_nothing_to_merge(self) -> None:
        assert _said(_made()[0], "--lora off:merge") == (
            "adapters: no adapters of GPT2LMHeadModel have learnt anything to merge into the weights; train some with --lora"
        )
        assert _said(_made()[0], "--lora off:drop") == (
            "adapters: no adapters of GPT2LMHeadModel have learnt anything to drop; train some with --lora"
        )

    def test_optimizers_with_a_list_of_their_own(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        assert _said(model, "--lora", torch.optim.LBFGS(model.parameters())) == (
            "adapters: LBFGS has a list of parameters beside its groups (_params), which adapters cannot join; use torch.optim.AdamW in its place"
        )

    def test_one_optimizer_of_two_models(self) -> None:
        one, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()])
        with fit(Workload(one, optimizer)), fit(Workload(other, optimizer)) as session:
            with pytest.raises(RefusalError, match="one AdamW updates Sequential and Sequential"):
                session.switch("--lora")

    def test_compiled_models(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        model.compile()
        assert "is compiled" in _said(model, "--lora")
