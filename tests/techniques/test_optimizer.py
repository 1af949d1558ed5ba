"""Converting live optimizers: how far training deviates, what is given back, what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map, tree_map_only_

from memlab import Workload, extras, fit
from memlab.errors import MissingExtraError, RefusalError
from memlab.plan import Plan
from memlab.runtime.optimizer_step import run_step
from memlab.runtime.state_entries import kept_of
from memlab.session.rollback import Rollback
from memlab.session.snapshot import Snapshot
from memlab.techniques.optimizer.four_bit import FourBitAdamW, FourBitFormat
from memlab.techniques.optimizer.low_rank import Apollo, LowRankFormat
from memlab.techniques.optimizer.optimizer import OptimizerConversion
from tests.driving import (
    applied,
    assert_recovers_anywhere,
    deviation,
    loss_of,
    mlp,
    same,
    snapshot,
    state_bytes,
    techniques_of,
    tiny_gpt2,
    train,
)
from tests.helpers.snapshots import changed_between

Make = Callable[[], torch.nn.Module]
EIGHT_BIT = "--adam8bit"
EIGHT_BIT_ON_DISK = "--adam8bit --offload optimizer"
FOUR_BIT = "--optim adamw4bit"


def adamw(model: torch.nn.Module, lr: float = 1e-3, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def reference_losses(make: Make, lr: float, forget_at: int | None = None) -> list[float]:
    model = make()
    optimizer = adamw(model, lr)
    losses = train(model, optimizer, range(forget_at or 100))
    if forget_at:
        optimizer.state.clear()
        losses += train(model, optimizer, range(forget_at, 100))
    return losses


def switched_losses(make: Make, lr: float, flags: str) -> list[float]:
    """As written for 50 steps, converted for 25, as written again for 25."""
    model = make()
    optimizer = adamw(model, lr)
    losses = train(model, optimizer, range(50))
    with applied(optimizer, flags, bucket_bytes=2**16):
        losses += train(model, optimizer, range(50, 75))
    return losses + train(model, optimizer, range(75, 100))


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK])
@pytest.mark.parametrize(("make", "lr"), [(mlp, 1e-3), (tiny_gpt2, 3e-4)])
def test_there_and_back_in_8_bits_deviates_by_a_thousandth_at_most(flags: str, make: Make, lr: float) -> None:
    reference = reference_losses(make, lr)
    converted = deviation(switched_losses(make, lr, flags), reference)
    dropped = deviation(reference_losses(make, lr, forget_at=50), reference)
    assert converted <= 1e-3
    assert dropped > 20 * converted


@pytest.mark.parametrize(("make", "lr", "tolerance"), [(mlp, 1e-3, 0.12), (tiny_gpt2, 3e-4, 0.025)])
def test_adafactor_trains_alike(make: Make, lr: float, tolerance: float) -> None:
    reference = reference_losses(make, lr)
    assert deviation(switched_losses(make, lr, "--optim adafactor"), reference) <= tolerance


def test_the_user_of_8_bit_adam_can_go_to_32_bits_and_back() -> None:
    runs = []
    for flags in ("", "--optim adamw"):
        model = mlp()
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3)
        losses = train(model, optimizer, range(50))
        with applied(optimizer, flags):
            losses += train(model, optimizer, range(50, 75))
            assert ("exp_avg" in next(iter(optimizer.state.values()))) == bool(flags)
        runs.append(losses + train(model, optimizer, range(75, 100)))
        assert "state1" in next(iter(optimizer.state.values()))
    assert deviation(runs[1], runs[0]) <= 2e-3


@pytest.mark.parametrize("flags", [EIGHT_BIT, FOUR_BIT, "--optim lion8bit", "--optim adafactor", "--optim sgd"])
def test_a_fresh_optimizer_can_start_converted(flags: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    with applied(optimizer, flags):
        inside = train(model, optimizer, range(20))
    outside = train(model, optimizer, range(20, 40))
    assert min(outside) < inside[0]
    assert all({"step", "exp_avg", "exp_avg_sq"} == state.keys() for state in optimizer.state.values())


@pytest.mark.parametrize(
    "flags", [FOUR_BIT, "--optim lion8bit", "--optim adafactor", "--optim sgd", "--optim adafactor --offload optimizer"]
)
def test_parked_moments_come_back_bit_by_bit_when_no_step_was_taken(flags: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(5))
    before = snapshot(model, optimizer)
    with applied(optimizer, flags) as techniques:
        assert techniques[0].host_bytes >= 0.8 * 8 * sum(p.numel() for p in model.parameters())
    assert same(snapshot(model, optimizer), before)


def test_after_a_step_adafactor_gives_back_the_second_moment_and_starts_the_first_from_zero() -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(30))
    reference = snapshot(model, optimizer)["state"]
    with applied(optimizer, "--optim adafactor") as techniques:
        train(model, optimizer, range(30, 31))
        assert techniques[0].host_bytes == 0
    state = snapshot(model, optimizer)["state"]
    for name, held in state.items():
        assert held["step"] == 31
        assert not held["exp_avg"].any()
        ratio = held["exp_avg_sq"].sum() / reference[name]["exp_avg_sq"].sum()
        assert 0.5 < ratio < 2, name


def test_stale_moments_are_not_given_back_even_before_the_step_has_ended() -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    loss_of(model, 3).backward()
    with applied(optimizer, "--optim adafactor") as techniques:
        run_step(optimizer, techniques)
        assert techniques[0].host_bytes > 0
    assert not any(state["exp_avg"].any() for state in optimizer.state.values())


def test_notes_say_what_is_not_exact() -> None:
    expected = {
        EIGHT_BIT: "moments are kept in 8 bits; turning them into fp32 again is close, not bit-exact",
        FOUR_BIT: "moments are kept in 4 bits; turning them into fp32 again is close, not bit-exact",
        "--optim adafactor": "Adafactor keeps row and column means of the second moment and no first moment; both come "
        "back as they were until the first step, after that the first moment starts again from zero",
        "--optim sgd": "SGD keeps no moments and may need another learning rate; the moments come back as they were "
        "until the first step, after that they start again from zero",
        "--optim adamw": "already AdamW: --optim adamw changes nothing",
    }
    for flags, note in expected.items():
        with applied(adamw(mlp()), flags) as techniques:
            assert techniques[0].notes == [note]


# --- memory ---------------------------------------------------------------------------------------


def test_bytes_per_parameter() -> None:
    model = mlp(width=1024)
    optimizer = adamw(model)
    count = sum(p.numel() for p in model.parameters())
    train(model, optimizer, range(1))
    assert state_bytes(optimizer) / count == pytest.approx(8.0, abs=0.01)
    with applied(optimizer, EIGHT_BIT):
        assert state_bytes(optimizer) / count <= 2.1
        train(model, optimizer, range(1, 2))
        assert state_bytes(optimizer) / count <= 2.1
    with applied(optimizer, "--optim adafactor"):
        assert state_bytes(optimizer) / count <= 0.05
    assert state_bytes(optimizer) / count == pytest.approx(8.0, abs=0.01)


@pytest.mark.parametrize("flags", [EIGHT_BIT_ON_DISK, FOUR_BIT, "--optim lion8bit", "--optim adafactor", "--optim sgd"])
def test_nothing_of_the_model_stays_alive(flags: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    with applied(optimizer, flags) as techniques:
        train(model, optimizer, range(2))
    alive = [weakref.ref(p) for p in model.parameters()]
    del model, optimizer
    gc.collect()
    assert techniques
    assert all(reference() is None for reference in alive)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    assert not manager.pid2config
    assert not manager.module_weight_config_triple


# --- the optimizer stays the user's ---------------------------------------------------------------


@pytest.mark.parametrize("flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK, "--optim adafactor", "--optim sgd"])
def test_groups_stay_the_same_objects_with_the_same_keys(flags: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    keys = [list(group) for group in groups]
    with applied(optimizer, flags):
        train(model, optimizer, range(2))
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
    assert all(group["params"] is params for group, params in zip(groups, lists, strict=True))
    assert [list(group) for group in groups] == keys


def test_settings_of_several_groups_are_followed() -> None:
    model = mlp()
    first, *others = model.children()
    groups = [
        {"params": list(first.parameters()), "lr": torch.tensor(0.0), "weight_decay": 0.0},
        {"params": [p for other in others for p in other.parameters()], "lr": 1e-3, "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    for flags in (EIGHT_BIT, FOUR_BIT, "--optim lion8bit", "--optim adafactor", "--optim sgd"):
        before = snapshot(model, optimizer)["parameters"]
        with applied(optimizer, flags):
            train(model, optimizer, range(1))
        after = snapshot(model, optimizer)["parameters"]
        assert same({k: v for k, v in before.items() if k[0] == "0"}, {k: v for k, v in after.items() if k[0] == "0"})
        assert not torch.equal(before["2.weight"], after["2.weight"])


def test_weight_decay_of_the_delegate_is_that_of_the_group() -> None:
    model = mlp()
    optimizer = adamw(model, lr=0.1, weight_decay=0.5)
    before = snapshot(model, optimizer)["parameters"]
    with applied(optimizer, EIGHT_BIT):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * 0.95)


@pytest.mark.parametrize("kind", ["lambda", "one-cycle"])
def test_schedulers_keep_driving_the_learning_rate(kind: str) -> None:
    runs = []
    for flags in ("", EIGHT_BIT):
        model = mlp()
        optimizer = adamw(model, lr=1e-3)
        scheduler: Any
        if kind == "lambda":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 5 else 0.0)
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=12)
        with applied(optimizer, flags):
            losses = train(model, optimizer, range(10), after=scheduler.step)
        frozen = snapshot(model, optimizer)["parameters"]
        runs.append((losses, [group["lr"] for group in optimizer.param_groups]))
        if kind == "lambda":
            with applied(optimizer, flags):
                train(model, optimizer, range(10, 12))
            assert same(snapshot(model, optimizer)["parameters"], frozen)
    assert runs[0][1] == runs[1][1]
    assert deviation(runs[1][0], runs[0][0]) <= 2e-3


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model = mlp()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    optimizer = adamw(model)
    before = frozen.clone()
    with applied(optimizer, EIGHT_BIT):
        train(model, optimizer, range(3))
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state


def test_channels_last_parameters_stay_channels_last() -> None:
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(convolution)
    inputs = torch.randn(2, 32, 6, 6)
    optimizer, plain = adamw(convolution), adamw(twin)
    for _ in range(3):
        for model, mine in ((convolution, optimizer), (twin, plain)):
            mine.zero_grad()
            model(inputs).square().mean().backward()
        with applied(optimizer, EIGHT_BIT):
            optimizer.step()
        plain.step()
    assert convolution.weight.stride() == twin.weight.stride()
    assert (convolution.weight - twin.weight).abs().mean() < 1e-4


def test_bf16_parameters_get_bf16_moments_back() -> None:
    model = mlp().to(torch.bfloat16)
    optimizer = adamw(model)

    def step() -> None:
        loss = model(torch.randn(8, 16, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        optimizer.step()

    step()
    for flags in (EIGHT_BIT, "--optim adafactor"):
        with applied(optimizer, flags):
            step()
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
        step()


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK, "--optim adafactor", "--optim sgd"])
def test_a_checkpoint_is_in_the_users_format_and_live_state_is_not_touched(flags: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(10))
    with applied(optimizer, flags):
        train(model, optimizer, range(10, 12))
        before = snapshot(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        assert same(snapshot(model, optimizer), before)
    twin = copy.deepcopy(model)
    plain = adamw(twin)
    plain.load_state_dict(saved)
    assert train(twin, plain, range(12, 15)) == train(model, optimizer, range(12, 15))


@pytest.mark.parametrize("flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK])
def test_a_plain_checkpoint_loads_under_8_bits(flags: str) -> None:
    model = mlp()
    plain = adamw(model)
    train(model, plain, range(30))
    saved = copy.deepcopy(plain.state_dict())
    twin = copy.deepcopy(model)
    optimizer = adamw(twin, lr=1.0)
    with applied(optimizer, flags):
        optimizer.load_state_dict(saved)
        assert "state1" in next(iter(optimizer.state.values()))
        losses = train(twin, optimizer, range(30, 40))
    assert deviation(losses, train(model, plain, range(30, 40))) <= 1e-3


def test_state_loaded_past_the_hooks_is_converted_at_the_next_step() -> None:
    model = mlp()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3)
    train(model, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    with applied(optimizer, "--optim adamw"):
        train(model, optimizer, range(5, 8))
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(8, 10))
        assert all("exp_avg" in state for state in optimizer.state.values())
        assert {int(state["step"]) for state in optimizer.state.values()} == {7}


# --- the loop's own look at state -----------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK, "--optim adafactor", f"{EIGHT_BIT} --precision pure-bf16"]
)
def test_moments_are_found_under_their_own_names(flags: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    with fit(Workload(model, optimizer), flags):
        train(model, optimizer, range(4))
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        for parameter, kept in zip(model.parameters(), expected.values(), strict=True):
            state = optimizer.state[parameter]
            assert "exp_avg" in state
            assert "exp_avg_sq" in state
            assert state["step"].item() == 4.0
            assert same(state.get("exp_avg"), kept["exp_avg"])
            assert same(state["exp_avg_sq"], kept["exp_avg_sq"])
        train(model, optimizer, range(4, 6))


_READS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "items": lambda state: dict(state.items()),
    "keys and values": lambda state: dict(zip(state.keys(), state.values(), strict=True)),
    "dict": lambda state: dict(state),
    "unpacked": lambda state: {**state},
    "iterate": lambda state: {name: state[name] for name in state},
    "copy": lambda state: state.copy(),
    "|": lambda state: {} | state,
    "tree": lambda state: tree_map(lambda value: value, state),
}


@pytest.mark.parametrize("read", _READS)
@pytest.mark.parametrize("flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK, "--optim adafactor"])
def test_who_goes_through_all_of_a_state_finds_the_users_own(flags: str, read: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    with fit(Workload(model, optimizer), flags):
        train(model, optimizer, range(4))
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        for parameter, kept in zip(model.parameters(), expected.values(), strict=True):
            found = _READS[read](optimizer.state[parameter])
            assert found.keys() == kept.keys()
            assert all(same(found[name], kept[name]) for name in kept)
        # as loops do that move state to another device
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to("cpu")
        train(model, optimizer, range(4, 6))
        assert not any("exp_avg" in kept_of(state) for state in optimizer.state.values())


_WRITES: dict[str, Callable[[dict[str, Any], torch.Tensor], object]] = {
    "update": lambda state, moment: state.update(exp_avg=moment),
    "|=": lambda state, moment: state.__ior__({"exp_avg": moment}),
    "pop": lambda state, moment: state.update(exp_avg=state.pop("exp_avg", None) * 0),
    "del": lambda state, moment: (state.__delitem__("exp_avg"), state.__setitem__("exp_avg", moment)),
    "setdefault": lambda state, moment: state.setdefault("exp_avg", moment).zero_(),
    "iterate": lambda state, moment: [state[name].mul_(0) for name in state if name == "exp_avg"],
    "clear": lambda state, moment: state.clear(),
    "tree": lambda state, moment: tree_map_only_(torch.Tensor, lambda value: value.mul_(1 - value.dim() // 2), [state]),
}


@pytest.mark.parametrize("write", _WRITES)
@pytest.mark.parametrize("flags", [EIGHT_BIT, "--precision pure-bf16"])
def test_what_the_loop_writes_into_a_state_counts(flags: str, write: str) -> None:
    found = []
    for each in ("", flags):
        model = mlp()
        optimizer = adamw(model)
        with fit(Workload(model, optimizer), each):
            train(model, optimizer, range(3))
            first = next(model.parameters())
            _WRITES[write](optimizer.state[first], torch.zeros_like(first))
            train(model, optimizer, range(3, 5))
            found.append({name: value.clone() for name, value in optimizer.state[first].items()})
    plain, under = found
    assert under["step"] == plain["step"]
    distance = (under["exp_avg"] - plain["exp_avg"]).norm() / plain["exp_avg"].norm()
    assert float(distance) < 0.03  # where nothing is written, 0.3 and more


def test_reading_moments_changes_nothing() -> None:
    runs = []
    for reads in (False, True):
        model = mlp()
        optimizer = adamw(model)
        with fit(Workload(model, optimizer), EIGHT_BIT):
            train(model, optimizer, range(3))
            if reads:
                assert all(torch.isfinite(state["exp_avg_sq"]).all() for state in optimizer.state.values())
            runs.append(train(model, optimizer, range(3, 6)))
            assert all("state1" in state for state in optimizer.state.values())
        runs[-1].append(snapshot(model, optimizer))
    assert runs[0][:-1] == runs[1][:-1]
    assert same(runs[0][-1], runs[1][-1])


def test_state_that_was_looked_at_goes_back_to_what_it_was() -> None:
    model = mlp()
    optimizer = adamw(model)
    with fit(Workload(model, optimizer), EIGHT_BIT):
        train(model, optimizer, range(3))
        way_back, before = Rollback(model, [optimizer]), Snapshot(Workload(model, optimizer))
        for restore in (way_back.restore, before.restore):
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
            restore()
            assert changed_between(before, Snapshot(Workload(model, optimizer))) == []
        assert all(state["exp_avg"].any() for state in optimizer.state.values())
        train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_the_loop_writes_into_moments_counts(is_replaced: bool) -> None:
    weights = []
    for flags in ("", EIGHT_BIT, EIGHT_BIT_ON_DISK):
        model = mlp()
        optimizer = adamw(model, lr=1e-2)
        train(model, optimizer, range(3))
        with fit(Workload(model, optimizer), flags):
            train(model, optimizer, range(3, 5))
            for state in optimizer.state.values():
                if is_replaced:
                    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
                else:
                    state["exp_avg"].zero_()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            # without a gradient and a first moment only the weight decay is left
            weights.append(
                [(p.detach() - b * (1 - 1e-4)).abs().max() for p, b in zip(model.parameters(), before, strict=True)]
            )
    assert all(float(left) < 1e-7 for run in weights for left in run)


def test_state_that_the_loop_copies_is_its_own() -> None:
    model = mlp()
    optimizer = adamw(model)
    with fit(Workload(model, optimizer), EIGHT_BIT):
        train(model, optimizer, range(3))
        copied = copy.deepcopy(dict(optimizer.state))
        assert all(
            type(state) is dict and state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in copied.values()
        )
        assert all("state1" in kept_of(state) for state in optimizer.state.values())


def test_a_moment_that_nobody_keeps_is_said_to_be_gone() -> None:
    model = mlp()
    optimizer = adamw(model)
    with fit(Workload(model, optimizer), "--optim sgd"):
        train(model, optimizer, range(2))
        with pytest.raises(KeyError) as error:
            next(iter(optimizer.state.values()))["exp_avg"]
    assert error.value.args == (
        "exp_avg: not kept under --optim sgd; `%memfit undo` brings the optimizer's own state back",
    )


def test_a_look_at_state_keeps_nothing_alive() -> None:
    model = mlp()
    optimizer = adamw(model)
    session = fit(Workload(model, optimizer), EIGHT_BIT)
    train(model, optimizer, range(2))
    held = list(optimizer.state.values())
    session.undo()
    assert all(type(state) is dict for state in optimizer.state.values())
    gone = weakref.ref(optimizer)
    del session, optimizer
    gc.collect()
    assert gone() is None
    assert [*held[0]] == ["step", "exp_avg", "exp_avg_sq"]


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("flags", [EIGHT_BIT, EIGHT_BIT_ON_DISK, "--optim adafactor", "--optim sgd"])
@pytest.mark.parametrize("seen", [0, 2])
def test_a_step_interrupted_anywhere_can_be_completed(flags: str, seen: int) -> None:
    model = mlp()
    optimizer = adamw(model)
    with applied(optimizer, flags) as techniques:
        train(model, optimizer, range(seen))
        optimizer.zero_grad()
        loss_of(model, seen).backward()
        assert_recovers_anywhere(model, optimizer, techniques)


# --- refusals -------------------------------------------------------------------------------------


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


REFUSED: list[tuple[str, Callable[[Any], torch.optim.Optimizer], str]] = [
    (
        EIGHT_BIT,
        torch.optim.LBFGS,
        (
            "optimizer: LBFGS keeps no Adam moments, and evaluates the loss several times in a step; "
            "use torch.optim.AdamW in its place"
        ),
    ),
    (
        EIGHT_BIT,
        torch.optim.SGD,
        "optimizer: SGD keeps no Adam moments that adam8bit could take over; use torch.optim.AdamW in its place",
    ),
    (
        "--optim adafactor",
        torch.optim.RMSprop,
        "optimizer: RMSprop keeps no Adam moments that adafactor could take over; use torch.optim.AdamW in its place",
    ),
    (
        "--optim adamw",
        torch.optim.NAdam,
        "optimizer: NAdam keeps no Adam moments that adamw could take over; use torch.optim.AdamW in its place",
    ),
    (
        EIGHT_BIT,
        OwnStep,
        (
            "optimizer: OwnStep changes the step of Adam, and adam8bit would lose the change; "
            "use torch.optim.AdamW in its place"
        ),
    ),
    (
        EIGHT_BIT,
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        "optimizer: AdamW was made with amsgrad=True, which adam8bit does not have; make it without amsgrad",
    ),
    (
        EIGHT_BIT,
        lambda parameters: torch.optim.AdamW(parameters, maximize=True),
        "optimizer: AdamW was made with maximize=True, which adam8bit does not have; make it without maximize",
    ),
    (
        "--optim adafactor",
        lambda parameters: torch.optim.Adam(parameters, differentiable=True),
        (
            "optimizer: Adam was made with differentiable=True, which adafactor does not have; "
            "make it without differentiable"
        ),
    ),
    (
        EIGHT_BIT,
        lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1),
        (
            "optimizer: Adam adds its weight_decay to the gradient, adam8bit takes it off the weights; "
            "use torch.optim.AdamW, or Adam with weight_decay=0"
        ),
    ),
    (
        "--optim paged-adam8bit",
        torch.optim.AdamW,
        "optimizer: paged-adam8bit needs a CUDA GPU with unified memory, and the model is on cpu; nearest: --adam8bit",
    ),
]


@pytest.mark.parametrize(("flags", "make", "text"), REFUSED)
def test_refusals(flags: str, make: Callable[[Any], torch.optim.Optimizer], text: str) -> None:
    optimizer = make(mlp().parameters())
    with pytest.raises(RefusalError) as refusal:
        techniques_of(flags)[0].check_optimizer(optimizer)
    assert str(refusal.value) == text


def test_float64_is_refused_in_8_bits() -> None:
    with pytest.raises(RefusalError) as refusal:
        techniques_of(EIGHT_BIT)[0].check_optimizer(adamw(mlp().double()))
    assert str(refusal.value) == (
        "optimizer: a parameter is torch.float64, and adam8bit takes float32, float16, bfloat16; use --optim adafactor"
    )


def test_complex_parameters_are_refused_by_adafactor() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2, dtype=torch.cfloat))])
    with pytest.raises(RefusalError, match=r"a parameter is torch\.complex64, and adafactor takes float32"):
        techniques_of("--optim adafactor")[0].check_optimizer(optimizer)


def test_sparse_gradients_are_refused_before_and_at_a_step() -> None:
    embedding = torch.nn.Embedding(100, 64, sparse=True)
    optimizer = adamw(embedding)
    text = "optimizer: an embedding makes sparse gradients, which adam8bit cannot use; make it with sparse=False"
    with applied(optimizer, EIGHT_BIT):
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(RefusalError) as at_step:
            optimizer.step()
    with pytest.raises(RefusalError) as before:
        techniques_of(EIGHT_BIT)[0].check_optimizer(optimizer)
    assert str(at_step.value) == str(before.value) == text
    assert not optimizer.state


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(extras.importlib, "import_module", absent)
    with pytest.raises(MissingExtraError) as missing:
        techniques_of(EIGHT_BIT)[0].check_optimizer(adamw(mlp()))
    assert str(missing.value) == (
        "8-bit Adam or NF4 needs bitsandbytes, which is not installed: pip install 'memlab[lab]' (or pip install bitsandbytes)"
    )


@pytest.mark.parametrize(
    ("flags", "make"),
    [
        (EIGHT_BIT, bitsandbytes.optim.AdamW8bit),
        ("--optim lion8bit", bitsandbytes.optim.Lion8bit),
        ("--optim adamw", torch.optim.Adam),
        ("--optim sgd", torch.optim.SGD),
        ("--optim adafactor", transformers.Adafactor),
        ("--optim apollo", type("APOLLOAdamW", (torch.optim.AdamW,), {})),
        ("--optim muon", lambda parameters: torch.optim.Muon(each for each in parameters if each.dim() == 2)),
    ],
)
def test_what_is_there_already_is_noted_and_left_alone(flags: str, make: Callable[..., Any]) -> None:
    optimizer = make(mlp().parameters())
    technique = OptimizerConversion(Plan.parse(flags))
    technique.check_optimizer(optimizer)
    with ExitStack() as undo:
        technique.attach_optimizer(optimizer, undo)
    assert technique.notes == [f"already {type(optimizer).__name__}: --optim {technique.choice} changes nothing"]
    assert technique.stepper(optimizer) is None


# --- 4 bits ---------------------------------------------------------------------------------------


def _updated(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape) * torch.rand(parameter.shape) ** 4 * 1e-3
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("shape", [(64, 64), (300, 4096), (40, 100), (3, 1025, 2)])
def test_4_bit_moments_are_those_of_torchao_uncompiled(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], trained: int
) -> None:
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    parameter, reference = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    settings = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    optimizer, own = torch.optim.AdamW([parameter], **settings), torchao.AdamW4bit([reference], **settings)
    _updated(optimizer, parameter, trained)
    with torch.no_grad():
        reference.copy_(parameter)
    is_packed = parameter.numel() >= 4096 and parameter.numel() % 128 == 0
    for name, value in optimizer.state[parameter].items():
        own.state[reference][name] = value.clone()
        if name != "step":
            own.state[reference][name] = own._new_buffer(reference, name == "exp_avg").copy_(value)
    with applied(optimizer, FOUR_BIT):
        _updated(optimizer, parameter, 4)
        _updated(own, reference, 4)
        state, expected = kept_of(optimizer.state[parameter]), own.state[reference]
    torch.testing.assert_close(parameter, reference)
    for number, name in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        if is_packed:
            assert torch.equal(state[f"codes{number}"], expected[name].codes)
            assert torch.equal(state[f"scale{number}"], expected[name].scale)
            assert torch.equal(optimizer.state[parameter][name], expected[name].dequantize())
        else:
            assert torch.equal(optimizer.state[parameter][name], expected[name])


@pytest.mark.parametrize(("make", "lr"), [(mlp, 1e-3), (tiny_gpt2, 3e-4)])
def test_there_and_back_in_4_bits_deviates_by_some_hundredths_at_most(make: Make, lr: float) -> None:
    assert 1e-3 < deviation(switched_losses(make, lr, FOUR_BIT), reference_losses(make, lr)) <= 0.02


def test_4_bit_moments_take_a_byte_and_a_sixteenth() -> None:
    parameter = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = _updated(torch.optim.AdamW([parameter]), parameter, 1)
    tables = 2 * 4 * (2 * 256 + 15)
    with applied(optimizer, FOUR_BIT):
        assert state_bytes(optimizer) == parameter.numel() * (1 + 2 * 4 / 128) + tables
        _updated(optimizer, parameter, 1)
        assert state_bytes(optimizer) == parameter.numel() * (1 + 2 * 4 / 128) + tables


def test_a_4_bit_update_takes_no_more_memory_for_a_larger_parameter() -> None:
    peaks = []
    for rows in (1024, 4096):
        parameter = torch.nn.Parameter(torch.ones(rows, 2048))
        parameter.grad = torch.ones_like(parameter)
        optimizer = FourBitAdamW([parameter])
        optimizer.state[parameter] = FourBitFormat().fresh(parameter)
        optimizer.step()  # makes the tables
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            optimizer.step()
        peaks.append(_peak(profiler))
    assert peaks[0] == peaks[1] <= 20 * 2**20


def _peak(profiler: profile) -> int:
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_updates_of_channels_last_parameters_are_those_of_contiguous_ones(dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.ones(64, 32, 3, 3, dtype=dtype)) for _ in range(2)]
    parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
    strides = parameters[1].stride()
    for each in parameters:
        optimizer = torch.optim.AdamW([each], lr=0.1)
        torch.manual_seed(0)
        with applied(optimizer, FOUR_BIT):
            for _ in range(3):
                each.grad = torch.randn(each.shape).to(dtype)
                optimizer.step()
    assert torch.equal(*parameters)
    assert not torch.equal(parameters[0], torch.ones_like(parameters[0]))
    assert parameters[1].stride() == strides


_OF_A_MOMENT = ("state1", "absmax1")

# --- Lion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [0, 3])
def test_lion_is_that_of_a_loop_by_hand_at_a_fifth_of_the_rate(trained: int) -> None:
    model, reference = tiny_gpt2(), tiny_gpt2()
    optimizer, own = adamw(model, weight_decay=0.05), adamw(reference, weight_decay=0.05)
    for each, its_own in ((model, optimizer), (reference, own)):
        train(each, its_own, range(trained))
    lion = bitsandbytes.optim.Lion8bit(reference.parameters(), lr=0.2 * own.param_groups[0]["lr"], weight_decay=0.25)
    functional = bitsandbytes.functional
    codebook = functional.create_dynamic_map(signed=True)
    for parameter, state in own.state.items():
        if parameter.numel() < 4096:
            lion.state[parameter] = {"step": trained, "state1": state["exp_avg"].clone()}
            continue
        codes, rest = functional.quantize_blockwise(state["exp_avg"], code=codebook, blocksize=256)
        lion.state[parameter] = {"step": trained, "state1": codes, "qmap1": codebook, "absmax1": rest.absmax}
    with fit(Workload(model, optimizer), "--optim lion8bit"):
        losses = train(model, optimizer, range(trained, trained + 4))
    assert losses == train(reference, lion, range(trained, trained + 4))
    assert same(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_lion_keeps_one_moment_in_a_byte_and_moves_weights_as_far_as_adamw_does() -> None:
    moved = []
    for flags in ("", "--optim lion8bit"):
        model = tiny_gpt2()
        optimizer = adamw(model)
        train(model, optimizer, range(20))
        before = [each.detach().clone() for each in model.parameters()]
        with fit(Workload(model, optimizer), flags):
            train(model, optimizer, range(20, 40))
            state, large = optimizer.state, [each for each in model.parameters() if each.numel() >= 4096]
            resident = sum(
                each.nbytes for p in large for name, each in kept_of(state[p]).items() if name in _OF_A_MOMENT
            )
        moved.append(
            sum(float((p.detach() - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True)) ** 0.5
        )
    assert resident / sum(each.numel() for each in large) == pytest.approx(1 + 4 / 256, rel=0.01)
    assert moved[1] == pytest.approx(moved[0], rel=0.6)


# --- Muon: two optimizers in one ------------------------------------------------------------------


def by_hand(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Muon on the matrices of blocks and the user's AdamW on the rest, as one writes it."""
    matrices = [each for name, each in model.named_parameters() if ".h." in name and each.dim() == 2]
    (group,) = optimizer.param_groups
    settings = {name: group[name] for name in ("lr", "weight_decay")}
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings)
    for each in matrices:
        if state := optimizer.state.pop(each, None):
            muon.state[each]["momentum_buffer"] = state["exp_avg"]
    group["params"] = [each for each in group["params"] if not any(each is matrix for matrix in matrices)]
    losses = []
    for step in steps:
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        muon.step()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.few(3)
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("beside", ["", " --offload optimizer", " --release-grads"])
def test_muon_is_that_of_a_loop_by_hand(trained: int, beside: str) -> None:
    model, reference = tiny_gpt2(), tiny_gpt2()
    optimizer, own = adamw(model, weight_decay=0.05), adamw(reference, weight_decay=0.05)
    for each, its_own in ((model, optimizer), (reference, own)):
        train(each, its_own, range(trained))
    with fit(Workload(model, optimizer), f"--optim muon{beside}"):
        losses = train(model, optimizer, range(trained, trained + 4))
    assert losses == by_hand(reference, own, range(trained, trained + 4))
    assert same(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_muon_keeps_one_moment_of_matrices_in_blocks_and_both_of_all_else() -> None:
    model = tiny_gpt2()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    sizes = {True: 0, False: 0}
    for name, each in model.named_parameters():
        sizes[".h." in name and each.dim() == 2] += each.numel()
    with fit(Workload(model, optimizer), "--optim muon") as session:
        steps = 4 * sum("momentum_buffer" not in state for state in optimizer.state.values())
        assert state_bytes(optimizer) == 4 * sizes[True] + 8 * sizes[False] + steps
        assert session.host_bytes >= 8 * sizes[True]
    assert same(snapshot(model, optimizer), before)


def test_after_a_step_muon_gives_back_no_moments_of_its_matrices() -> None:
    model = tiny_gpt2()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    with fit(Workload(model, optimizer), "--optim muon"):
        train(model, optimizer, range(2, 3))
    for name, each in model.named_parameters():
        is_matrix = ".h." in name and each.dim() == 2
        assert bool(optimizer.state.get(each)) != is_matrix, name


def test_muon_goes_by_the_blocks_of_one_model() -> None:
    small = torch.nn.Linear(4, 4)
    with pytest.raises(RefusalError) as no_blocks:
        techniques_of("--optim muon")[0].check(Workload(small, adamw(small)))
    assert str(no_blocks.value) == (
        "optimizer: Linear repeats no blocks, whose matrices muon updates; use --adam8bit or --optim adafactor"
    )
    model = tiny_gpt2()
    both = torch.optim.AdamW([*model.parameters(), *small.parameters()])
    with pytest.raises(RefusalError) as other_parameters:
        techniques_of("--optim muon")[0].check(Workload(model, both))
    assert str(other_parameters.value) == (
        "optimizer: muon goes by the blocks of one model, and the optimizer of GPT2LMHeadModel has other parameters too; "
        "use --adam8bit or --optim adafactor"
    )


@pytest.mark.parametrize(
    "plan",
    [
        *("--adam8bit", "--adam8bit --offload optimizer", "--optim adafactor", "--optim sgd"),
        *("--precision pure-bf16", "--precision pure-bf16 --offload optimizer"),
    ],
)
def test_moments_are_given_back_bit_for_bit_where_no_update_came(plan: str) -> None:
    """As after a plan that another of its settings had refused, or a try of a rescue."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = copy.deepcopy(optimizer.state_dict())
    with fit(Workload(model, optimizer), plan) as session:
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.zero_grad()
        assert session.host_bytes > 0
    for number, state in optimizer.state_dict()["state"].items():
        assert list(state) == list(before["state"][number])
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())
    with fit(Workload(model, optimizer), plan) as session:
        parked = session.host_bytes
        step()
        assert session.host_bytes < parked


def test_moments_of_a_weight_that_two_optimizers_hold_are_given_back_to_each() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(96, 96)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=rate) for rate in (1e-3, 1e-2)]
    for number, optimizer in enumerate(optimizers):
        (model(torch.randn(8, 96)) * (1 + 9 * number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    for plan in ("--precision pure-bf16", "--adam8bit"):
        with fit(Workload(model, optimizers), plan):
            model(torch.randn(8, 96)).sum().backward()
            model.zero_grad()
        for optimizer, own in zip(optimizers, before, strict=True):
            for number, state in optimizer.state_dict()["state"].items():
                assert all(torch.equal(value, own["state"][number][name]) for name, value in state.items())


# --- APOLLO ---------------------------------------------------------------------------------------

APOLLO = "--optim apollo"


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (80, 80)])
def test_apollo_updates_as_the_package_of_its_authors(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("apollo_torch")
    parameter, reference = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizer = Apollo([parameter])
    optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1)
    state = optimizer.state[parameter] = LowRankFormat().fresh(parameter)
    rank, width = state["projection"].shape
    settings = {"rank": rank, "update_proj_gap": 200, "scale": width / rank, "scale_type": "channel", "proj": "random"}
    group = {"params": [reference], "proj_type": "std", **settings}
    own = package.APOLLOAdamW([group], lr=1e-2, weight_decay=0.1, eps=1e-8)

    def same_projection(*_: Any, type: str, **__: Any) -> torch.Tensor:  # noqa: A002 - the package's name
        projection: torch.Tensor = state["projection"]
        return projection if type == "right" else projection.t()

    projector = package.apollo.GradientProjector
    monkeypatch.setattr(projector, "get_orthogonal_matrix", same_projection)
    torch.manual_seed(0)
    for step in range(6):
        parameter.grad = torch.randn(shape) * 10 ** (step % 3)
        reference.grad = parameter.grad.clone()
        optimizer.step()
        own.step()
    assert (parameter - 1).abs().max() > 0.05
    torch.testing.assert_close(parameter, reference)


def test_apollo_goes_on_after_a_step_without_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = Apollo([parameter])
    optimizer.state[parameter] = LowRankFormat().fresh(parameter)
    moved = []
    for scale in (1.0, 0.0, 1.0):
        before = parameter.detach().clone()
        torch.manual_seed(0)
        parameter.grad = scale * torch.randn(64, 64)
        optimizer.step()
        moved.append(float((parameter.detach() - before).norm()))
    assert moved[2] > 0.5 * moved[0]


def test_a_projection_is_another_one_every_200_steps() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = Apollo([parameter])
    state = optimizer.state[parameter] = LowRankFormat().fresh(parameter)
    parameter.grad = torch.ones(64, 64)
    drawn = {}
    for step in (0, 1, 199, 200, 201):
        state["step"] = step
        optimizer.step()
        drawn[step] = state["projection"].clone()
    assert torch.equal(drawn[0], drawn[199])
    assert torch.equal(drawn[200], drawn[201])
    assert not torch.equal(drawn[199], drawn[200])


def test_apollo_keeps_moments_of_a_subspace_and_moves_weights_about_as_far_as_adamw_does() -> None:
    moved, losses = [], []
    for flags in ("", APOLLO):
        model = tiny_gpt2()
        optimizer = adamw(model)
        train(model, optimizer, range(20))
        before, random = snapshot(model, optimizer), torch.get_rng_state()
        with fit(Workload(model, optimizer), flags) as session:
            matrices = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
            if flags:
                rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
                # two moments, the projection and a norm
                ours = sum(4 * (min(p.shape) // 4) * (2 * max(p.shape) + min(p.shape)) + 4 for p in matrices)
                assert state_bytes(optimizer) == ours + sum(8 * p.numel() + 4 for p in rest)
                assert session.host_bytes >= 8 * sum(p.numel() for p in matrices)
        assert same(snapshot(model, optimizer), before)
        assert torch.equal(torch.get_rng_state(), random)
        start = [p.detach().clone() for p in matrices]
        with fit(Workload(model, optimizer), flags):
            losses.append(train(model, optimizer, range(20, 60))[-1])
        moved.append(sum(float((p.detach() - b).square().sum()) for p, b in zip(matrices, start, strict=True)) ** 0.5)
    assert 0.4 < moved[1] / moved[0] < 1.5
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("beside", [" --offload optimizer", " --release-grads", " --offload params"])
def test_apollo_beside_other_settings_trains_as_it_does_alone(beside: str) -> None:
    runs = []
    for flags in (APOLLO, APOLLO + beside):
        model = tiny_gpt2()
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        with fit(Workload(model, optimizer), flags):
            runs.append(train(model, optimizer, range(3, 8)))
    assert runs[0] == runs[1]


def test_after_a_step_apollo_gives_back_no_moments_of_its_matrices() -> None:
    model = tiny_gpt2()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    with fit(Workload(model, optimizer), APOLLO):
        train(model, optimizer, range(2, 3))
        assert len(optimizer.state_dict()["state"]) < len([*model.parameters()])
    for name, parameter in model.named_parameters():
        assert bool(optimizer.state.get(parameter)) == (not (".h." in name and parameter.dim() == 2)), name
    train(model, optimizer, range(3, 6))
    assert all(map(optimizer.state.get, model.parameters()))
