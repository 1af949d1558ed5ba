"""Compiled models: checkpointing by the compiler's own budget, and everything else as for any other model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.measuring.holdings import parameters_of
from memlab.measuring.ledger import Ledger
from memlab.techniques import checkpointing


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.second(nn.functional.gelu(self.first(inputs))), 0.2, self.training)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            inputs = inputs + part(inputs)
        return inputs


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return model


def by_parts(model: nn.Module) -> Any:
    for part in model.parts:  # type: ignore[union-attr] # a list of modules
        part.compile(backend="aot_eager", dynamic=False)
    return model


def made(compiled: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = compiled(Tower())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2, rows: int = 32) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(rows, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def peak_of(model: Any) -> int:
    ledger = Ledger()
    inputs = torch.randn(256, 16)
    model.zero_grad()
    ledger.begin(parameters_of(model))
    with ledger:
        model(inputs).sum().backward()
    return ledger.peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("compiled", [whole, in_place, by_parts])
def test_checkpointing_compiles_once_and_undo_compiles_nothing(compiled: Any) -> None:
    expected = train(*made(compiled), steps=6)
    model, optimizer = made(compiled)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    train(model, optimizer)
    before = compiled_graphs()
    with fit(Workload(model, optimizer), "--checkpoint") as session:
        train(model, optimizer)
        assert session.notes == ("recomputed as the compiler chooses, which keeps a tenth of what it would keep",)
        once = compiled_graphs()
        assert once - before == before  # each graph of the model is made once more
        session.switch("")
        session.switch("--checkpoint", now=True)
        train(model, optimizer, steps=1)
        assert compiled_graphs() == once
    assert config.activation_memory_budget == 1.0
    train(model, optimizer, steps=1)
    assert compiled_graphs() == once
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    model, optimizer = made(compiled)
    with fit(Workload(model, optimizer), "--checkpoint"):
        assert train(model, optimizer, steps=6) == expected


def test_it_needs_less_memory_and_nothing_else_is_compiled_so() -> None:
    model, optimizer = made(whole)
    other = whole(Tower())
    plain_bytes, other_bytes = peak_of(model), peak_of(other)
    with fit(Workload(model, optimizer), "--checkpoint"):
        peak_of(model)
        assert peak_of(model) < 0.8 * plain_bytes
        assert peak_of(other) == other_bytes
    assert peak_of(model) == plain_bytes


def test_copies_and_files_are_as_without_it() -> None:
    model, optimizer = made(in_place)
    with fit(Workload(model, optimizer), "--checkpoint"):
        train(model, optimizer, steps=1)
        copied = copy.deepcopy(model)
    assert not any(type(value).__module__.startswith("memlab") for value in vars(copied).values())


def test_evaluation_runs_the_code_that_is_there() -> None:
    model, optimizer = made(whole)
    model.eval()
    with torch.no_grad():
        expected = model(torch.ones(4, 16))
    before = compiled_graphs()
    with fit(Workload(model, optimizer), "--checkpoint"), torch.no_grad():
        assert torch.equal(model(torch.ones(4, 16)), expected)
    assert compiled_graphs() == before


def test_code_that_an_earlier_process_has_left_on_the_disk_is_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_cache(), inductor.patch(compile_threads=1):
        for _ in range(2):
            torch._dynamo.reset()
            monkeypatch.setattr(checkpointing.compiled, "_compilers", [])  # as a new process begins
            # products alone, which are not compiled by C++
            model: Any = torch.compile(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))))
            optimizer = torch.optim.SGD(model.parameters())
            with fit(Workload(model, optimizer), "--checkpoint"):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()


@pytest.mark.parametrize(
    ("backend", "flags", "said"),
    [
        (
            "eager",
            "--checkpoint",
            "OptimizedModule is compiled, and its backend does not split forward from backward by torch's partitioner, "
            "which is what keeps to a budget; compile it with inductor, put the plan on the model uncompiled, or use "
            "--accumulate N",
        ),
        (
            "aot_eager",
            "--checkpoint every:2",
            "OptimizedModule is compiled, and its compiler chooses what is recomputed; use --checkpoint, or train it "
            "uncompiled",
        ),
        (
            "aot_eager",
            "--tile 2",
            "OptimizedModule is compiled, and compiled code does not look into its modules again; put the plan on the "
            "model before torch.compile, or train it uncompiled",
        ),
    ],
)
def test_what_cannot_work_is_refused(backend: str, flags: str, said: str) -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(Tower(), backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RefusalError) as refused, fit(Workload(model, optimizer), flags):
        train(model, optimizer, steps=1)
    assert str(refused.value).partition(": ")[2] == said


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "flags",
    [
        "--adam8bit",
        "--offload optimizer",
        "--bf16",
        "--accumulate 2",
        "--accumulate 2 --checkpoint",
        "--optim adafactor",
    ],
)
def test_other_settings_compile_at_most_once_more(flags: str) -> None:
    model, optimizer = made(whole)
    train(model, optimizer)
    before = compiled_graphs()
    with fit(Workload(model, optimizer), flags) as session:
        train(model, optimizer)
        changed = compiled_graphs() - before
        assert changed <= (2 if "accumulate" in flags and "checkpoint" in flags else 1)
        train(model, optimizer)
        assert compiled_graphs() - before == changed
        assert session.usage.was_called


@pytest.mark.parametrize("flags", ["", "--offload optimizer"])
def test_a_step_in_a_compiled_function_is_watched_and_served_without_being_compiled(flags: str) -> None:
    def trained(flags: str | None) -> tuple[torch.Tensor, int]:
        torch._dynamo.reset()
        counters.clear()
        model = nn.Linear(16, 16, bias=False)
        nn.init.eye_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        ledger = Ledger()  # which watches from the call to the step
        session = None if flags is None else fit(Workload(model, optimizer), flags)
        optimizer.register_step_post_hook(lambda *_: ledger.stop())
        for _ in range(3):
            ledger.start()
            model(torch.ones(2, 16)).square().mean().backward()
            step()
            optimizer.zero_grad()
        ledger.close()
        if session is not None:
            session.undo()
        return model.weight.detach(), compiled_graphs()

    expected, graphs = trained(None)
    found, compiled = trained(flags)
    assert torch.equal(found, expected)
    assert compiled <= graphs


@pytest.mark.parametrize("compiled", ["function", "call", "part"])
def test_pure_bf16_serves_calls_in_compiled_functions(compiled: str) -> None:
    torch._dynamo.reset()
    model, inputs = Tower().eval(), torch.ones(2, 16)
    expected = model(inputs)
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--precision pure-bf16"):
        if compiled == "call":
            model.compile(backend="eager")
        called = {"function": lambda x: model(x) + 0.0, "call": model, "part": lambda x: x + model.parts[0](x)}[
            compiled
        ]
        run: Any = called if compiled == "call" else torch.compile(called, backend="eager")
        output = run(inputs)
        output.sum().backward()
    assert output.dtype is torch.float32
    assert torch.allclose(output, expected, rtol=5e-2, atol=5e-2) or compiled == "part"
    assert all(p.grad is not None for p in model.parts[0].parameters())


def test_offloaded_activations_of_a_model_whose_own_frame_torch_does_not_compile() -> None:
    """Torch leaves the forward of its own containers out, and took memlab's hooks for what was to be compiled."""
    losses = []
    for plan in ("", "--offload activations"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        model.compile(backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters())
        with fit(Workload(model, optimizer), plan):
            for _ in range(3):
                loss = model(torch.randn(8, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


class _Aside(nn.Sequential):
    """Dynamo does not look into it, nor did it before torch 2.15 into modules that come with torch."""

    @torch.compiler.disable
    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(rows)


def test_a_model_of_which_torch_compiles_nothing() -> None:
    with fit(Workload(other := in_place(Tower())), "--checkpoint"):
        other(torch.ones(4, 16))  # which has the same compiler
    model = _Aside(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    model.compile(backend="aot_eager")
    said = r"^checkpointing: torch compiles nothing of _Aside, .*; make it anew without compile\(\), or use --accumulate N$"
    with fit(Workload(model), "--checkpoint"), pytest.raises(RefusalError, match=said):
        model(torch.ones(4, 16))
