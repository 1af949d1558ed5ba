"""Frozen weights beside adapters in fewer bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.errors import MissingExtraError, PlanError
from memlab.plan import BaseBits, Plan
from memlab.session.snapshot import Snapshot
from memlab.techniques.adapters.base_bits import _Bf16, _Int8, _Nf4
from memlab.techniques.offload.spill import is_spilled
from tests.helpers.snapshots import changed_between
from tests.techniques.models import gpt2, ragged_batch

for package in ("peft", "transformers", "bitsandbytes"):
    pytest.importorskip(package, reason=f"needs {package}")

_BATCH = ragged_batch(vocabulary=128, rows=8, length=24)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128)).train()


def small_gpt2() -> nn.Module:
    return gpt2(vocabulary=128)


def losses(make: Callable[[], nn.Module], flags: str, steps: int = 5) -> list[float]:
    """Losses of a loop; the undo is checked."""
    model = make()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    load = Workload(model, optimizer)
    before, identities = Snapshot(load), [id(p) for p in model.parameters()]
    modules = [*model.modules()]
    with fit(load, flags):
        for _ in range(steps):
            loss = model(**_BATCH).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert changed_between(before, Snapshot(load)) == []
    assert identities == [id(p) for p in model.parameters()]
    assert modules == [*model.modules()]
    assert not any("forward" in vars(module) for module in modules)
    assert not any(is_spilled(p.untyped_storage()) for p in model.parameters())
    return found


class Packed:
    """The same weights rounded to what they are packed to, as plain fp32 weights."""

    kinds: dict[str, Any] = {"bf16": _Bf16, "int8": _Int8, "nf4": _Nf4}  # noqa: RUF012 - of a test

    def __init__(self, make: Callable[[], nn.Module], base: str) -> None:
        self._make, self._kind = make, self.kinds[base]

    def __call__(self) -> nn.Module:
        model: Any = self._make()
        for module in model.modules():
            is_linear = isinstance(module, nn.Linear)
            if (is_linear or type(module).__name__ == "Conv1D") and module is not model.get_output_embeddings():
                packed = self._kind(module.weight, is_transposed=not is_linear)
                module.weight.data = packed.unpacked(torch.float32)
        return model


# -- what is computed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small_gpt2, llama])
@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
def test_losses_are_those_of_adapters_beside_weights_that_were_rounded(
    make: Callable[[], nn.Module], base: str
) -> None:
    found = losses(make, f"--lora r=4 --base {base}")
    assert found == pytest.approx(losses(Packed(make, base), "--lora r=4"), rel=1e-6)
    plain = losses(make, "--lora r=4")
    assert found != plain
    assert found == pytest.approx(plain, rel=0.005)


@pytest.mark.parametrize("others", ["--checkpoint", "--accumulate 2", "--adam8bit", "--offload optimizer,activations"])
def test_beside_others(others: str) -> None:
    assert losses(llama, f"--lora r=4 --base nf4 {others}") == pytest.approx(
        losses(llama, "--lora r=4 --base nf4"), rel=1e-3
    )


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_in_half_precision(precision: str) -> None:
    assert losses(llama, f"--lora r=4 --base nf4 {precision}") == pytest.approx(
        losses(llama, "--lora r=4 --base nf4"), rel=1e-2
    )


@pytest.mark.parametrize(("kind", "off"), [(_Bf16, 0.003), (_Int8, 0.01), (_Nf4, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_packed_weights_are_close(kind: Any, off: float, dtype: torch.dtype, *, is_transposed: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    weight[3] = 0
    found = kind(weight, is_transposed=is_transposed).unpacked(torch.float32)
    assert found.shape == weight.shape
    assert float((found - weight).norm() / weight.float().norm()) < off
    assert not found[3].any()


def test_gradients_of_gradients() -> None:
    model = llama()
    inputs = torch.randn(2, 3, 64, requires_grad=True)
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--lora r=4 --base int8"):
        layer: Any = model.model.layers[0].mlp.gate_proj
        (first,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), inputs)
    assert second.abs().sum() > 0


# -- files and what the loop does ------------------------------------------------------------------------


def test_files_and_copies_are_of_the_weights_as_they_were() -> None:
    model = llama()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--lora r=4 --base nf4"):
        state = {
            name.replace("base_layer.", ""): value for name, value in model.state_dict().items() if "lora" not in name
        }
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
        copied: Any = copy.deepcopy(model)
        assert not any("forward" in vars(module) for module in copied.modules())
        assert torch.equal(
            copied.model.layers[0].mlp.up_proj.base_layer.weight, expected["model.layers.0.mlp.up_proj.weight"]
        )
        held = model.model.layers[0].mlp.up_proj.base_layer.weight.data
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    assert not held.any()  # it follows, as without a plan


def test_bits_change_and_adapters_stay() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fit(Workload(model, optimizer), "--lora r=4")
    for base in ("nf4", "int8", "keep", "bf16"):
        session.switch(f"--lora r=4 --base {base}", now=True)
        model(**_BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "4 steps" in repr(session)
    session.undo()


def test_memory_is_that_of_the_bits() -> None:
    def held(base: str) -> int:
        model = llama()
        with fit(Workload(model, torch.optim.AdamW(model.parameters())), f"--lora r=4 --base {base}") as session:
            return sum(tensor.nbytes for tensor in session.in_force.held_tensors)

    numbers = sum(
        module.weight.numel()
        for name, module in llama().named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    )
    assert held("bf16") == 2 * numbers
    assert held("nf4") == numbers // 2 + 4 * numbers // 64
    assert numbers < held("int8") < 1.1 * numbers


@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("make", [small_gpt2, llama])
@pytest.mark.parametrize("others", ["", "--checkpoint", "--bf16", "--accumulate 2", "--adam8bit --offload optimizer"])
@pytest.mark.few(5, full=30)
def test_predicted_peaks_are_the_measured_ones(make: Callable[[], nn.Module], base: str, others: str) -> None:
    model = make()
    load = Workload(model, torch.optim.AdamW(model.parameters()), batch=_BATCH)
    flags = f"--lora r=4 --base {base} {others}".strip()
    measured = measure(load, flags, 2)
    assert predict(load, flags).peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)
    assert measured.peak_allocated_bytes < measure(load, f"--lora r=4 {others}".strip(), 2).peak_allocated_bytes


# -- refusals ------------------------------------------------------------------------------------------


def test_what_learnt_beside_packed_weights_is_not_merged() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fit(Workload(model, optimizer), "--lora r=4 --base nf4")
    model(**_BATCH).loss.backward()
    optimizer.step()
    before = [p.clone() for p in model.parameters()]
    for plan in ("", "--lora r=4 --base nf4"):
        session.switch(plan, now=True)
        with pytest.raises(RefusalError) as refusal:
            session.switch("--lora off:merge", now=True)
        assert str(refusal.value) == (
            "adapters: what adapters of LlamaForCausalLM learnt beside weights in nf4 does not fit the weights as they were, and cannot be "
            "merged into them; use --lora off (it waits beside the model), --lora off:drop, or memlab.save_adapters(model, folder)"
        )
    assert all(map(torch.equal, before, model.parameters()))
    session.switch("--lora off:drop", now=True)
    session.undo()


def test_a_base_that_is_quantised_already_is_refused() -> None:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4"), nn.Linear(64, 64))
    with pytest.raises(RefusalError, match="Sequential is quantised already"):
        fit(Workload(model, torch.optim.AdamW(model[1].parameters())), "--lora --base nf4")


def test_nothing_to_pack_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(RefusalError) as refusal:
        fit(Workload(model, torch.optim.AdamW(model.parameters())), "--lora --base int8")
    assert str(refusal.value) == (
        "base: no linear layer of Sequential that adapters can go beside has a weight of 1024 elements or more with more bits than int8 and a "
        "storage of its own; leave out --base"
    )
    half = llama().to(torch.bfloat16)
    with pytest.raises(RefusalError, match="with more bits than bf16"):
        fit(Workload(half, torch.optim.AdamW(half.parameters())), "--lora --base bf16")


def test_weights_that_the_loop_holds_stay() -> None:
    model = llama()
    held = model.model.layers[0].mlp.up_proj.weight.data
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--lora r=4 --base nf4") as session:
        assert session.notes[-1] == "1 frozen weights stay as they are: the loop holds their values"
        assert model.model.layers[0].mlp.up_proj.base_layer.weight.data_ptr() == held.data_ptr()


def test_bitsandbytes_is_needed_for_nf4(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    model = llama()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError) as missing:
        fit(Workload(model, torch.optim.AdamW(model.parameters())), "--lora --base nf4")
    assert str(missing.value) == (
        "8-bit Adam or NF4 needs bitsandbytes, which is not installed: pip install 'memlab[lab]' (or pip install bitsandbytes)"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--base nf4", "--base is about frozen weights beside adapters, and there are none; add --lora"),
        ("--base nf4 --lora off:merge", "--base is about frozen weights beside adapters, and there are none; add --lora"),
        ("--base nf3 --lora", "--base nf3: allowed are keep, bf16, int8, nf4; did you mean nf4?"),
        ("--base int8 --lora dora", "--base and --lora dora exclude each other: DoRA takes the norm of the weights in every call; drop dora or --base"),
        (
            "--base nf4 --lora --offload params",
            "--base and --offload params exclude each other: the weights are off the device already, in fewer bits on it; drop one of the two",
        ),
        (
            "--base nf4 --lora --precision pure-bf16",
            "--base and --precision pure-bf16 exclude each other: both keep the weights in other bits; use --bf16 with --base",
        ),
        (
            "--base nf4 --lora --tile 2",
            "--base and --tile exclude each other: tiles read the weights of layers, which are off the device; drop one of the two",
        ),
    ],
)  # fmt: skip
def test_plans_that_mean_nothing(flags: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.parse(flags)
    assert str(error.value) == words


def test_a_plan_reads_as_it_was_written() -> None:
    plan = Plan.parse("--lora r=8 --base nf4")
    assert (plan.base, str(plan)) == (BaseBits.NF4, "--lora r=8,alpha=16 --base nf4")
    assert not plan.has_numbers_of(Plan.parse("--lora r=8"))
