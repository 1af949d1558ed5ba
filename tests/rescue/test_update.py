"""The update under rescue: in one go where there is room, in parts where not, and never counted twice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import Workload, fit
from memlab.measuring.ledger import Ledger
from memlab.measuring.operator_effects import OperatorEffect, effect_of
from memlab.records import Category
from memlab.rescue.update import BrokenUpdateError, Retrying, Update, free_bytes, may_repeat, need_bytes
from memlab.runtime.buckets import is_separable
from memlab.runtime.optimizer_step import _writes_gradients
from memlab.runtime.out_of_memory import release
from memlab.runtime.tree import tensors_in
from tests.driving import Snapshot, loss_of, mlp, same, snapshot, train

Optimizer = torch.optim.Optimizer
Make = Callable[[list[torch.nn.Parameter]], Optimizer]


def two_groups(parameters: list[torch.nn.Parameter]) -> Optimizer:
    groups = [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "weight_decay": 0.0}]
    return optim.AdamW(groups, foreach=True)


KINDS: dict[str, Make] = {
    "single": lambda p: optim.AdamW(p, foreach=False),
    "foreach": lambda p: optim.AdamW(p, foreach=True),
    "fused": lambda p: optim.AdamW(p, fused=True),
    "amsgrad": lambda p: optim.Adam(p, foreach=True, amsgrad=True, maximize=True, weight_decay=0.1),
    "sgd": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9, foreach=True),
    "torch-adafactor": lambda p: optim.Adafactor(p),
    "adafactor": lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9),
    "bnb": lambda p: bitsandbytes.optim.AdamW8bit(p, min_8bit_size=1024),
    "groups": two_groups,
}
PLENTY, NOTHING = float("inf"), 0.0


class Births(TorchDispatchMode):
    """Counts allocations, and lets some fail: operators that would bear a tensor, from the n-th on, so many times."""

    def __init__(self, first: int | None = None, times: int = 1) -> None:
        super().__init__()
        self.count, self._first, self._times = 0, first, times

    @property
    def has_failed(self) -> bool:
        return self._first is not None and self.count >= self._first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if effect_of(func) == OperatorEffect.BIRTH and any(tensor.numel() for tensor in tensors_in(out)):
            self.count += 1
            if self._first is not None and self._first <= self.count < self._first + self._times:
                out = args = kwargs = None
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return out


def ready(make: Make, seen: int) -> tuple[torch.nn.Module, Optimizer]:
    """A model before its next update, after so many."""
    model = mlp(width=48)
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(seen))
    optimizer.zero_grad()
    loss_of(model, seen).backward()
    return model, optimizer


def undisturbed(make: Make, seen: int) -> Snapshot:
    model, optimizer = ready(make, seen)
    optimizer.step()
    return snapshot(model, optimizer)


def persistent(update: Update) -> None:
    """Run an update again until it is done, as a rescuer does; small faults are over by then."""
    while True:
        oom = None
        try:
            update.run([])
        except BrokenUpdateError:
            raise
        except torch.OutOfMemoryError as error:
            oom = error
        if oom is None:
            return
        release(oom)


def updates_with_faults(
    make: Make, seen: int, free: float, times: int = 1, every: int = 1
) -> Iterator[tuple[int, Snapshot | None]]:
    """One update for each allocation that can fail, and what it gave; None when it broke."""
    first = 1
    while True:
        model, optimizer = ready(make, seen)
        faults = Births(first, times)
        update = Update(optimizer, free=release, free_bytes=lambda _device, _enough: free)
        try:
            with faults:
                persistent(update)
        except BrokenUpdateError:
            yield first, None
        else:
            yield first, snapshot(model, optimizer)
        if not faults.has_failed:
            return
        first += every


# --- never counted twice --------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("free", [PLENTY, NOTHING])
@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_an_allocation_that_fails_anywhere_changes_nothing(name: str, seen: int, free: float) -> None:
    expected = undisturbed(KINDS[name], seen)
    at = 0
    for at, found in updates_with_faults(KINDS[name], seen, free):
        assert found is not None, at
        assert same(found, expected), at
    assert at > (1 if seen == 0 else 0)  # fused kernels allocate nothing once their state is there


@pytest.mark.few(4)
@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("name", ["single", "foreach", "nesterov", "adafactor", "groups"])
def test_memory_that_stays_short_is_survived_in_buckets(name: str, seen: int) -> None:
    expected = undisturbed(KINDS[name], seen)
    tried = 0
    for at, found in updates_with_faults(KINDS[name], seen, NOTHING, times=6, every=5):
        assert found is not None, at
        assert same(found, expected), at
        tried += 1
    assert tried >= 2


def test_an_update_in_one_go_is_begun_again_or_says_that_it_is_broken() -> None:
    expected = undisturbed(KINDS["foreach"], 0)
    is_broken = []
    for at, found in updates_with_faults(KINDS["foreach"], 0, PLENTY, times=12):
        assert found is None or same(found, expected), at
        is_broken.append(found is None)
    # state is created before anything is written; after that there is no way back
    first_broken = is_broken.index(True)
    assert first_broken > 0
    assert not any(is_broken[:first_broken])


def test_half_an_update_is_said_to_be_one() -> None:
    _, optimizer = ready(KINDS["foreach"], 1)
    update = Update(optimizer, free=release)
    with pytest.raises(BrokenUpdateError, match=r"in the middle of an update of AdamW.*go back to a checkpoint"):
        with Births(2, times=12):
            update.run([])


# --- a scaler -------------------------------------------------------------------------------------


def scaled(seen: int) -> tuple[torch.nn.Module, Optimizer]:
    """Two groups with gradients that a scaler has left to a fused optimizer."""
    model = mlp(width=48)
    first, *others = model.parameters()
    optimizer = optim.AdamW([{"params": [first]}, {"params": others}], fused=True)
    train(model, optimizer, range(seen))
    optimizer.zero_grad()
    (8 * loss_of(model, seen)).backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    return model, optimizer


@pytest.mark.full
@pytest.mark.parametrize("free", [PLENTY, NOTHING])
@pytest.mark.parametrize("times", [1, 12])
def test_gradients_are_unscaled_once(free: float, times: int) -> None:
    model, optimizer = scaled(0)
    optimizer.step()
    expected, first = snapshot(model, optimizer), 1
    while True:
        model, optimizer = scaled(0)
        faults = Births(first, times)
        try:
            with faults:
                persistent(Update(optimizer, free=release, free_bytes=lambda _device, _enough: free))
        except BrokenUpdateError:
            assert (free, times) == (PLENTY, 12)
        else:
            assert same(snapshot(model, optimizer), expected), first
        if not faults.has_failed:
            break
        first += 1
    assert first > 4


def test_an_overflow_leaves_everything_as_it_is() -> None:
    model, optimizer = scaled(1)
    optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    before = snapshot(model, optimizer)
    Update(optimizer, free=release).run([])
    assert same(snapshot(model, optimizer), before)


# --- costs nothing when nothing goes wrong --------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_with_room_the_update_allocates_what_the_plain_one_does(name: str, seen: int) -> None:
    counts = []
    for is_rescued in (False, True):
        _, optimizer = ready(KINDS[name], seen)
        with Births() as births:
            if is_rescued:
                Update(optimizer, free=release).run([])
            else:
                optimizer.step()
        counts.append(births.count)
    assert counts[0] == counts[1]


def peak_of(optimizer: Optimizer, step: Callable[[], object], capacity_bytes: int = 2**40) -> tuple[int, int]:
    """Peak of a step beyond what was there before, and what was there."""
    ledger = Ledger("cpu", capacity_bytes)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ledger.begin(
        [
            *((Category.PARAMETERS, p) for p in parameters),
            *((Category.GRADIENTS, p.grad) for p in parameters),
            *((Category.OPTIMIZER_STATE, each) for state in optimizer.state.values() for each in tensors_in(state)),
        ]
    )
    base_bytes = ledger.live_bytes
    with ledger:
        step()
    return ledger.peak_bytes - base_bytes, base_bytes


@pytest.mark.parametrize("seen", [0, 2])
def test_copies_of_a_tight_update_take_no_memory_of_the_device(seen: int) -> None:
    _, optimizer = ready(KINDS["fused"], seen)
    needed_bytes, base_bytes = peak_of(optimizer, optimizer.step)
    model, optimizer = ready(KINDS["fused"], seen)
    # room for the update and small copies, none for copies of everything
    capacity_bytes = base_bytes + needed_bytes + 4096
    peak_of(optimizer, lambda: Update(optimizer, free=release).run([]), capacity_bytes)
    assert same(snapshot(model, optimizer), undisturbed(KINDS["fused"], seen))


# --- what an update needs -------------------------------------------------------------------------


def most_demanding() -> Iterator[tuple[str, Make]]:
    """Every optimizer of torch's, with the options that cost memory."""
    options: dict[type[Any], dict[str, Any]] = {
        optim.SGD: {"momentum": 0.9, "nesterov": True},
        optim.Adam: {"amsgrad": True},
        optim.AdamW: {"amsgrad": True},
        optim.RMSprop: {"centered": True, "momentum": 0.9},
        optim.NAdam: {"decoupled_weight_decay": True},
    }
    kinds = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    for kind in sorted(kinds - {Optimizer, optim.LBFGS, optim.SparseAdam}, key=lambda kind: kind.__name__):
        for common in ({}, {"maximize": True, "weight_decay": 0.1}, {"maximize": True}, {"weight_decay": 0.1}):
            for how in ({"foreach": True}, {"foreach": False}, {"fused": True}, {}):
                arguments = {**options.get(kind, {}), **common, **how}
                try:
                    kind([torch.nn.Parameter(torch.ones(2, 2))], **arguments)
                except (TypeError, RuntimeError, ValueError):
                    continue
                yield f"{kind.__name__} {arguments}", lambda p, kind=kind, arguments=arguments: kind(p, **arguments)


@pytest.mark.few
@pytest.mark.parametrize(("name", "make"), [pytest.param(*case, id=case[0]) for case in most_demanding()])
def test_every_optimizer_keeps_within_its_estimate(name: str, make: Make) -> None:
    parameters = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(4)]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        gradients = [parameter.grad.clone() for parameter in parameters]
        estimated_bytes = need_bytes(optimizer, parameters)[torch.device("cpu")]
        needed_bytes, _ = peak_of(optimizer, optimizer.step)
        small_bytes = 64 * len(parameters)  # counters of steps
        assert needed_bytes <= estimated_bytes + small_bytes
        changed = any(not torch.equal(g, p.grad) for g, p in zip(gradients, parameters, strict=True))
        assert _writes_gradients(optimizer) or not changed
    assert is_separable(optimizer)


def test_only_state_that_is_missing_counts() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = optim.AdamW([parameter], fused=True)
    cpu = torch.device("cpu")
    assert need_bytes(optimizer, [parameter]) == {cpu: 18000}
    optimizer.step()
    assert need_bytes(optimizer, [parameter]) == {cpu: 0}
    assert need_bytes(optimizer, []) == {}


def test_free_memory_is_what_the_ledger_has_left() -> None:
    cpu = torch.device("cpu")
    assert free_bytes(cpu, 1) == PLENTY
    with Ledger("cpu", 10_000):
        kept = torch.zeros(1000)
        assert free_bytes(cpu, 1) == 6000
    assert free_bytes(cpu, 1) == PLENTY
    assert free_bytes(torch.device("meta"), 1) is None
    del kept


class FakeGpu:
    """What CUDA would say of its memory."""

    def __init__(self, reserved: int, active: int, split: int, free: int, share: float = 1.0) -> None:
        current = {"reserved_bytes": reserved, "active_bytes": active, "inactive_split_bytes": split}
        self._counters = {name: {"all": {"current": value}} for name, value in current.items()}
        self._free, self._share = free, share
        self.asked = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _device: self._counters)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: self._asked())
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: self._share, raising=False)

    def _asked(self) -> tuple[int, int]:
        self.asked += 1
        return self._free, 1000


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (FakeGpu(reserved=500, active=300, split=50, free=400), 150 + 400),
        (FakeGpu(reserved=500, active=300, split=50, free=400, share=0.6), 150 + 100),
        (FakeGpu(reserved=700, active=300, split=50, free=300, share=0.5), 350),
    ],
)
def test_free_memory_of_a_gpu(gpu: FakeGpu, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.install(monkeypatch)
    assert free_bytes(torch.device("cuda", 0), 100_000) == expected
    assert gpu.asked == 1


def test_the_driver_is_not_asked_when_the_cache_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(reserved=500, active=300, split=50, free=400)
    gpu.install(monkeypatch)
    assert free_bytes(torch.device("cuda", 0), 150) == 150
    assert gpu.asked == 0


# --- operators ------------------------------------------------------------------------------------


def test_what_may_be_repeated() -> None:
    one, half = torch.ones(4), torch.ones(4).bfloat16()
    aten = torch.ops.aten
    assert may_repeat(aten.add.Tensor, (one, one), {})
    assert may_repeat(aten.add_.Tensor, (one, half), {})
    assert may_repeat(aten._foreach_sqrt.default, ([one, half],), {})
    assert may_repeat(aten._foreach_add_.List, ([one, one], [one, one]), {})
    assert may_repeat(aten._foreach_copy_.default, ([one], [half]), {})
    # the first of the list may be done
    assert not may_repeat(aten._foreach_add_.List, ([one, one], [half, half]), {})
    assert not may_repeat(aten._foreach_add_.Scalar, ([torch.ones(4, 4).t()], 1), {})
    assert not may_repeat(aten.add.out, (one, one), {"out": one})
    assert not may_repeat(torch.ops.higher_order.cond, (), {})


def test_an_operator_that_may_have_written_is_not_repeated() -> None:
    freed: list[BaseException] = []
    lists = [torch.ones(4), torch.ones(4)], [torch.ones(4), torch.ones(4).bfloat16()]

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with Full(), Retrying(freed.append) as retrying, pytest.raises(torch.OutOfMemoryError):
        torch._foreach_add_(*lists)
    assert retrying.has_written
    assert freed == []


def test_other_errors_pass_at_once() -> None:
    freed: list[BaseException] = []
    with Retrying(freed.append), pytest.raises(RuntimeError, match="size"):
        torch.ones(2) + torch.ones(3)
    assert freed == []


# --- in a session ---------------------------------------------------------------------------------


def trained(plan: str, first: int | None, times: int) -> tuple[Snapshot, Any, Births]:
    """Two steps under rescue; in the second one allocations of the update fail."""
    model = mlp(width=48)
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    faults = Births(first, times)
    with fit(Workload(model, optimizer), plan, rescue=True) as session:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step:
                with faults:
                    optimizer.step()
            else:
                optimizer.step()
        rescuer = session.rescuer
    return snapshot(model, optimizer), rescuer, faults


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["", "--adam8bit", "--offload optimizer:disk"])
def test_a_session_finishes_the_update_and_tells(plan: str) -> None:
    expected, _, whole = trained(plan, None, 0)
    for first in range(1, whole.count + 1, 5):
        found, rescuer, _ = trained(plan, first, 1)
        assert [rescue.step for rescue in rescuer.rescues] == [2], first
        if rescuer.rescues[0].after == rescuer.rescues[0].before:
            assert same(found, expected), first


def test_what_cannot_be_rescued_is_said_once() -> None:
    class Own(optim.SGD):
        pass

    model = mlp(width=16)
    optimizer = Own(model.parameters(), lr=1e-2)
    with fit(Workload(model, optimizer), rescue=True) as session:
        train(model, optimizer, range(3))
        assert [entry.text for entry in session.log if "Own" in entry.text] == [
            "memory that runs out in the update of Own is not rescued, as it cannot be done in parts"
        ]


def test_ctrl_c_waits_for_the_end_of_the_update() -> None:
    class Impatient(TorchDispatchMode):
        pressed = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not self.pressed and "lerp" in str(func):
                self.pressed = True
                signal.raise_signal(signal.SIGINT)
            return func(*args, **(kwargs or {}))

    expected = undisturbed(KINDS["single"], 1)
    model, optimizer = ready(KINDS["single"], 1)
    with pytest.raises(KeyboardInterrupt), Impatient():
        Update(optimizer, free=release).run([])
    assert same(snapshot(model, optimizer), expected)


class NoneAsLarge(TorchDispatchMode):
    """Has no memory for tensors of so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if effect_of(func) == OperatorEffect.BIRTH and any(t.numel() >= self._elements for t in tensors_in(out)):
            out = args = kwargs = None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return out


def test_where_the_largest_has_no_room_nothing_is_updated_and_state_is_made_in_the_order_of_groups() -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (150_000, 600_000, 200_000)]
    optimizer = optim.AdamW(parameters, foreach=False)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    update = Update(optimizer, free=release, free_bytes=lambda _device, _enough: NOTHING)
    with pytest.raises(torch.OutOfMemoryError), NoneAsLarge(600_000):
        update.run([])
    assert not update.is_partly_done
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)
    assert not optimizer.state
    persistent(update)
    assert [*optimizer.state] == parameters
