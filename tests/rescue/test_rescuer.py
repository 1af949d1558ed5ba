"""The rescuer between steps: what it keeps, and how it is attached and let go."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.measuring.holdings import parameters_of, state_of
from memlab.measuring.ledger import Ledger
from memlab.plan import Plan
from memlab.rescue import recovery
from memlab.rescue.evidence import Evidence
from memlab.rescue.fallback import Place
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.observer import Observer
from memlab.session import Session
from tests.rescue.faults import Faults
from tests.techniques.models import gpt2, ragged_batch


def _live_after_a_step(plan: str, *, rescue: bool) -> int:
    torch.manual_seed(0)
    model, batch = gpt2(), ragged_batch()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with fit(Workload(model, optimizer), plan, rescue=rescue):
        step()
        step()
        ledger = Ledger()
        ledger.begin([*parameters_of(model), *state_of([optimizer])])
        with ledger:
            step()
        live_bytes = ledger.live_bytes
        ledger.close()
    return live_bytes


@pytest.mark.parametrize("plan", ["", "--precision pure-bf16", "--adam8bit", "--offload optimizer", "--accumulate 2"])
def test_nothing_more_lives_between_steps(plan: str) -> None:
    assert _live_after_a_step(plan, rescue=True) == _live_after_a_step(plan, rescue=False)


class _LossAndLogits(nn.Module):
    """Returns its logits beside its loss, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))
        self.body = nn.Sequential(*layers, nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.body(x)
        return nn.functional.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("share", [0.9, 0.95, 0.98])
def test_outputs_that_the_loss_does_not_come_from_hold_nothing_of_a_backward_pass_that_failed(share: float) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(512, 64), torch.randint(0, 4, (512,))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, capacity_bytes: int | None) -> int:
        ledger = Ledger(capacity_bytes=capacity_bytes)
        ledger.begin([*parameters_of(model), *state_of([optimizer])])
        with ledger:
            model(x, labels)[0].backward()
        peak_bytes = ledger.peak_bytes
        ledger.close()
        return peak_bytes

    model = _LossAndLogits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peak_bytes = step(model, optimizer, None)
    expected = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    with fit(Workload(model, optimizer), rescue=True) as session:
        step(model, optimizer, int(peak_bytes * share))
        assert session.plan.label == "--accumulate 2"
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        values = self.values(x)
        return torch.where(edges, values @ x.T, -1e9).softmax(-1) @ values


class _OfOneGraph(nn.Module):
    """Attends to neighbours among all its rows: no part of them can be run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Attention() for _ in range(6))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, edges)
        return x


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_accumulation_that_there_is_no_memory_to_look_at_stands_in_no_way(share: float) -> None:
    torch.manual_seed(0)
    x, edges = torch.randn(64, 16), torch.rand(64, 64) < 0.2

    def step(model: nn.Module, capacity_bytes: int | None) -> int:
        ledger = Ledger(capacity_bytes=capacity_bytes)
        ledger.begin([*parameters_of(model)])
        with ledger:
            model(x, edges).square().mean().backward()
        peak_bytes = ledger.peak_bytes
        ledger.close()
        return peak_bytes

    model = _OfOneGraph()
    peak_bytes = step(model, None)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session:
        step(model, int(peak_bytes * share))
        assert session.plan.accumulation == 1
        assert session.plan.is_exact
    assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), expected, strict=True))


class _Adjoint(torch.autograd.Function):
    """Calls a layer in its backward pass, without torch's `custom_bwd`: under autocast that meets two dtypes."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x.detach()).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient * ctx.layer(ctx.saved_tensors[0])


class _Adjoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Adjoint.apply(self.layer, self.first(x))


class _Plans(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def plan_changed(self, plan: Plan) -> None:
        self.seen.append(plan.label)


# twice in a place: the first time the same plan is tried once more, with what was freed
@pytest.mark.parametrize(("place", "faults"), [("forward", [1, 2]), ("backward", [8, 9])])
def test_code_that_does_not_run_in_16_bits_takes_a_rescue_back(place: str, faults: list[int]) -> None:
    kept = ("accumulation", "checkpointing", "optimizer", "offload", "loss", "tiling")
    model, x, plans = _Adjoints(), torch.randn(4, 8), _Plans()
    model(x).sum().backward()
    expected = [p.grad for p in model.first.parameters()]
    model.zero_grad()
    with fit(Workload(model, torch.optim.SGD(model.first.parameters(), lr=0.1)), rescue=Rescuer(keep=kept)) as session:
        session.observers.add(plans)
        with Faults(faults):
            model(x).sum().backward()
        assert plans.seen == ["--bf16", "as written"]
        assert session.log[0].text.startswith(f"memory ran out in the {place} pass: ")
    assert all(torch.equal(p.grad, other) for p, other in zip(model.first.parameters(), expected, strict=True))


def normed(at: int | None, how: str) -> tuple[list[Any], Faults]:
    """Weights and averages after three steps of a model with BatchNorm; memory runs out in the third, where copies are made of the averages too."""
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), *block).double()
    if how == "with hooks":
        model[0].weight.register_hook(lambda gradient: 2 * gradient)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # a GPU on which nothing says that memory could run out
    roomy = Evidence(torch.device("cuda"), None, lambda: 2**40, lambda: 0)
    evidence = roomy if how == "unexpectedly" else None
    faults = Faults(() if at is None else (at,))
    with fit(Workload(model, optimizer), rescue=Rescuer(["accumulation"], evidence=evidence)) as session:
        for step, rows in enumerate(torch.randn(3, 6, 4, dtype=torch.float64)):
            if step == 1:
                session.switch("--checkpoint" if how == "on trial" else "", on_trial=True)
            with faults if step == 2 else nullcontext():
                output = model(rows)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*model.state_dict().values()], faults


@pytest.mark.parametrize("how", ["on trial", "with hooks", "unexpectedly"])
def test_what_a_call_begins_with_may_find_no_memory(how: str) -> None:
    expected, counted = normed(None, how)
    assert counted.count > 5
    for at in range(1, counted.count + 1):
        found, faults = normed(at, how)
        assert faults.failed
        assert all(map(torch.equal, found, expected)), (at, faults.failed)


def test_letting_go_twice_is_harmless() -> None:
    model = torch.nn.Linear(4, 2)
    session = fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True)
    rescuer = session.rescuer
    session.undo()
    session.dismiss()
    assert rescuer is not None
    rescuer.detach()
    assert rescuer.rescues == []
    assert session.rescuer is None


def test_a_rescuer_can_be_given_while_a_session_is_attached() -> None:
    model = torch.nn.Linear(4, 2)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))) as session:
        session.accept(Rescuer(keep={"precision"}))
        model(torch.ones(3, 4)).sum().backward()
        session.dismiss()
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 4), 6.0))


def test_the_half_precision_of_a_rescue_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 emulates bf16, slowly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    of_a_t4 = recovery.half_of(torch.device("cuda"))
    monkeypatch.undo()
    monkeypatch.setattr(recovery, "half_of", lambda _device: of_a_t4)
    model, kept = (
        torch.nn.Linear(4, 2),
        {"accumulation", "checkpointing", "optimizer", "offload", "gradients", "loss", "tiling"},
    )
    workload, inputs = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.ones(3, 4)
    with fit(workload, rescue=Rescuer(keep=kept)) as session:
        with Faults([1]):  # the second try is with what the first has freed
            model(inputs).sum().backward()
        assert session.plan == Plan()
    with fit(workload, rescue=Rescuer(keep=kept)) as session:
        with Faults([1, 2]):
            loss = model(inputs).sum()
        loss.backward()
        assert session.plan == Plan.parse("--fp16")
        assert session.rescuer is not None
        (rescue,) = session.rescuer.rescues
    said = str(rescue)
    assert said.startswith(
        "step 1: memory ran out in the forward pass: as written → --fp16, same batch again, 2 attempts ("
    )
    assert said.endswith(" s lost); numbers are rounded differently from here on; --keep precision prevents that")


class _Refusing:
    """A session whose loop runs out of memory as written, and whose plans do not apply except one that rounds."""

    def __init__(self, *, has_lossy: bool) -> None:
        self.plan, self.steps, self.companions, self.tried = Plan(), 0, [], []
        self.log = self.workload = self.switching = self.observers = self
        self.refused: set[Plan] = set()
        self.techniques: tuple[Any, ...] = ()
        self.device, self.optimizers = torch.device("cpu"), [None]
        self.fallbacks = [(Plan(accumulation=2), False), *([(Plan.parse("--bf16"), True)] if has_lossy else [])]

    def change(self, plan: Plan, **_how: bool) -> None:
        self.plan = plan

    def drop_graphs(self) -> bool:
        self.tried.append("graphs dropped")
        return True

    def note(self, *_text: Any, **_more: Any) -> None:
        pass

    rescued = tell = note

    def next_plans(self, _base: Plan, _place: Any, *, refused: set[Plan], **_more: Any) -> Iterator[Any]:
        return (SimpleNamespace(plan=plan, lossy=lossy) for plan, lossy in self.fallbacks if plan not in refused)

    def work(self) -> None:
        self.tried.append(self.plan.label)
        if self.plan == Plan() and self.tried.count(self.plan.label) < len(self.fallbacks) + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.plan == Plan(accumulation=2):
            raise RefusalError("accumulation", "its rows depend on each other", "leave it out")


@pytest.mark.parametrize(
    ("has_lossy", "tried"),
    [
        (True, ["as written", "--accumulate 2", "graphs dropped", "as written", "--bf16"]),
        (False, ["as written", "--accumulate 2", "graphs dropped", "as written"]),
    ],
)
def test_what_is_tried_once_more_is_the_plan_before_and_not_one_that_was_refused(
    monkeypatch: pytest.MonkeyPatch, has_lossy: bool, tried: list[str]
) -> None:
    session: Any = _Refusing(has_lossy=has_lossy)
    monkeypatch.setattr(recovery, "next_plans", session.next_plans)
    recovering = recovery.Recovery(lambda: session, lambda: None, session.drop_graphs, (), None, None, None)
    recovering.until_it_fits(session.work, lambda error: recovering.make_room(error, Place.FORWARD))
    assert session.tried == tried


def test_processes_that_fill_the_device_are_named_once() -> None:
    class Full(nn.Linear):
        """Runs out of memory with more than two rows."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if len(rows) > 2:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is "
                    "free. Process 812 has 60.00 GiB memory in use."
                )
            return super().forward(rows)

    model = Full(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), rescue=True) as session:
        for rows in (4, 6):
            model(torch.ones(rows, 3)).sum().backward()
            optimizer.step()
    notes = [entry.text for entry in session.log if "812" in entry.text]
    assert notes == ["memory ran out: process 812 holds 60.00 GiB of this GPU"]


@pytest.mark.parametrize("at", [[31], [31, 66]], ids=["once", "and while it is looked at"])
def test_a_plan_that_a_rescue_has_come_to_and_the_next_call_refuses_ends_no_loop(at: list[int]) -> None:
    class Yielding(nn.Module):
        """Computes when the loop uses it, in the loop's own code."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
            for block in self.blocks:
                rows = block(rows).tanh()
                yield rows

    def weights(faults: Faults) -> tuple[list[torch.Tensor], Session]:
        torch.manual_seed(0)
        model = Yielding()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=True) as session, faults:
            for _ in range(3):
                torch.stack([rows.square().mean() for rows in model(torch.ones(4, 6))]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            plan = session.plan
        assert plan == Plan()
        return list(model.parameters()), session

    expected, _ = weights(Faults())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found, session = weights(faults := Faults(at))
    assert len(faults.failed) == len(at)
    assert all(map(torch.allclose, found, expected))
    assert any("as written is back" in line for line in map(str, session.log))
