"""Hand-written loops with everything people put into them; memlab must be invisible in what they compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from memlab import Workload
from tests.loops import tolerances
from tests.loops.cases import CASES, Case
from tests.loops.running import deviation, fitted

Optimizer = torch.optim.Optimizer
PLANS = (
    "--accumulate 4",
    "--checkpoint",
    "--accumulate 4 --checkpoint",
    "--offload activations",
    "--offload optimizer",
    "--chunk-loss",
)
STEPS = 16


# -- the loops: each returns what can be seen from it ------------------------------------------


def accumulating_itself(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    seen = []
    for step in range(steps):
        loss = case.loss(model, case.batch(step)) / 2
        loss.backward()
        seen.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def clipping_by_norm(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model, case.batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += [loss.item(), float(norm)]
    return seen


def clipping_by_value(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        loss = case.loss(model, case.batch(step))
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        seen.append(loss.item())
    return seen


def scheduling(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    """The scheduler is made in the loop, so after the session began."""
    scheduler = OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    seen = []
    for step in range(steps):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen += [loss.item(), scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"]]
    return seen


def evaluating_in_between(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    seen = []
    for step in range(steps):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                seen.append(case.loss(model, case.batch(1000 + step)).item())
            model.train()
            with torch.inference_mode():
                seen.append(case.loss(model, case.batch(1000 + step)).item())
    return seen


def with_a_closure(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, case.batch(len(seen)))
        loss.backward()
        return loss

    seen: list[float] = []
    while len(seen) < steps:
        seen += [optimizer.step(closure).item()]  # type: ignore[arg-type, union-attr]
    return seen


def loss_times_a_factor(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    """A loss that is changed before backward: scaled, and with a penalty on the weights."""
    seen = []
    for step in range(steps):
        penalty = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        loss = 0.3 * case.loss(model, case.batch(step)) + 1e-4 * penalty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def two_batches_one_backward(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    seen = []
    for step in range(0, steps, 2):
        loss = case.loss(model, case.batch(step)) + case.loss(model, case.batch(step + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


LOOPS: dict[str, Callable[[nn.Module, Optimizer, Case, int], list[float]]] = {
    loop.__name__: loop
    for loop in (
        accumulating_itself,
        clipping_by_norm,
        clipping_by_value,
        scheduling,
        evaluating_in_between,
        with_a_closure,
        loss_times_a_factor,
        two_batches_one_backward,
    )
}


def traces(
    case: Case, loop: Any, plan: str, steps: int, make_optimizer: Any = None, *, exact: bool = True
) -> tuple[list[float], list[float]]:
    """What a loop shows without memlab and with it."""
    make = make_optimizer or case.optimizer
    model = case.model()
    expected = loop(model, make(model), case, steps)
    model = case.model()
    optimizer = make(model)
    with fitted(Workload(model, optimizer), plan, exact=exact):
        found = loop(model, optimizer, case, steps)
    return found, expected


@pytest.mark.few
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["tied", "tied-criterion"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_under_every_plan(loop: str, name: str, plan: str) -> None:
    # a scheduler the loop makes patches the optimizer's step for good: that is the loop's own doing
    if loop == "scheduling":
        case = CASES[name]
        found, expected = _without_fingerprint(case, LOOPS[loop], plan)
    else:
        found, expected = traces(CASES[name], LOOPS[loop], plan, STEPS)
    assert deviation(found, expected) <= tolerances.LOSS


def _without_fingerprint(case: Case, loop: Any, plan: str) -> tuple[list[float], list[float]]:
    from memlab import fit

    model = case.model()
    expected = loop(model, case.optimizer(model), case, STEPS)
    model = case.model()
    optimizer = case.optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" among them
        with fit(Workload(model, optimizer), plan):
            found = loop(model, optimizer, case, STEPS)
    assert found[1::3] == expected[1::3]
    assert found[2::3] == expected[2::3]
    return found, expected


@pytest.mark.few(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["gpt2", "contrastive"])
def test_every_loop_with_everything_at_once(loop: str, name: str) -> None:
    plan = "--accumulate 3 --checkpoint --offload activations,optimizer"
    case = CASES[name]
    run = _without_fingerprint if loop == "scheduling" else None
    found, expected = run(case, LOOPS[loop], plan) if run else traces(case, LOOPS[loop], plan, 12)
    assert deviation(found, expected) <= tolerances.LOSS


# -- schedulers --------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("plan", ["--accumulate 4", "--offload optimizer", "--adam8bit", "--optim adafactor", "--fp16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: StepLR(o, 3),
        lambda o: OneCycleLR(o, 1e-3, total_steps=20),
        ReduceLROnPlateau,
    ],
    ids=["lambda", "step", "onecycle", "plateau"],
)
@pytest.mark.parametrize("made", ["before", "after"])
def test_learning_rates_follow_the_schedule(made: str, make: Any, plan: str) -> None:
    def run(plan: str) -> list[float]:
        case = CASES["module-logits"]
        model = case.model()
        optimizer = case.optimizer(model)
        scheduler = make(optimizer) if made == "before" else None
        schedulers = [scheduler] if scheduler else []
        rates = []
        with fitted(Workload(model, optimizer, scheduler=scheduler), plan, schedulers, exact=False):
            scheduler = scheduler or make(optimizer)
            for step in range(10):
                loss = case.loss(model, case.batch(step))
                loss.backward()
                optimizer.step()
                scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
            if made == "after":
                _forget_scheduler(optimizer)
        return rates

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(plan) == run("")


def _forget_scheduler(optimizer: Optimizer) -> None:
    """Take away what making a scheduler leaves on an optimizer, so that structures can be compared."""
    vars(optimizer).pop("step", None)
    for group in optimizer.param_groups:
        for key in set(group) - set(optimizer.defaults) - {"params"}:
            del group[key]


# -- parameter groups, kinds of optimizer ------------------------------------------------------


def decayed_and_not(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-3
    )


def with_momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def amsgrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@pytest.mark.few
@pytest.mark.parametrize("plan", ["--accumulate 4", "--offload optimizer", "--accumulate 4 --offload optimizer"])
@pytest.mark.parametrize("make", [decayed_and_not, with_momentum, amsgrad, fused])
def test_other_optimizers_and_groups(make: Any, plan: str) -> None:
    found, expected = traces(CASES["tied"], LOOPS["clipping_by_norm"], plan, STEPS, make)
    assert deviation(found, expected) <= tolerances.LOSS


@pytest.mark.parametrize("plan", ["--adam8bit", "--optim adafactor"])
def test_groups_keep_their_own_settings_when_converted(plan: str) -> None:
    """A group with learning rate 0 must not move, the other must."""

    def make(model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices, "lr": 1e-3}, {"params": others, "lr": 0.0}], weight_decay=0.1)

    case = CASES["tied"]
    model = case.model()
    optimizer = make(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fitted(Workload(model, optimizer), plan, exact=False):
        LOOPS["clipping_by_norm"](model, optimizer, case, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.dim() < 2), name


# -- autocast and GradScaler in the loop -------------------------------------------------------


def scaled(dtype: torch.dtype, *, clips: bool = False, enabled: bool = True, device: str = "cpu") -> Any:
    def loop(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
        scaler = torch.amp.GradScaler(device, enabled=enabled)
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype):
                loss = case.loss(model, case.batch(step))
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            scaler.step(optimizer)
            scaler.update()
            seen += [loss.item()] + [scaler.get_scale()] * enabled
        return seen

    return loop


# micro-batches round at other places in half precision than the whole batch does; the rest is exact
HALF = {torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["tied", "tied-criterion"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_grad_scaler_in_the_loop(dtype: torch.dtype, name: str, plan: str) -> None:
    loop = scaled(dtype, clips=True, enabled=dtype is torch.float16)
    found, expected = traces(CASES[name], loop, plan, STEPS)
    if "accumulate" in plan or "chunk" in plan:
        assert deviation(found, expected) <= HALF[dtype]
    else:
        assert found == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "contrastive", "vit"])
def test_the_scaler_finds_the_same_scale_under_accumulation(name: str) -> None:
    """Overflow is seen by the loop's scaler, at the scale where it would happen without memlab.

    The replay form may allow a larger one: sums over fewer rows stay within fp16 for longer.
    """
    found, expected = traces(CASES[name], scaled(torch.float16), "--accumulate 2", 10)
    scales = list(zip(found[1::2], expected[1::2], strict=True))
    assert all(mine >= theirs if name == "contrastive" else mine == theirs for mine, theirs in scales), scales


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["--adam8bit", "--offload optimizer", "--adam8bit --offload optimizer"])
def test_an_overflow_the_scaler_sees_skips_the_delegates_step(plan: str) -> None:
    case = CASES["tied"]
    model = case.model()
    optimizer = case.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with fitted(Workload(model, optimizer), plan, exact="adam8bit" not in plan):
        for step in range(3):
            loss = case.loss(model, case.batch(step))
            scaler.scale(loss).backward()
            if step == 1:
                next(model.parameters()).grad.fill_(float("inf"))
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved == (step != 1)
            optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**3
