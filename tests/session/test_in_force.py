"""A plan changes wholly or not at all: whatever raises in the middle, and however little memory there is."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Plan, PlanError, RefusalError, Workload, fit
from memlab.measuring.ledger import Ledger
from memlab.plan import FIELDS
from memlab.records import Category
from memlab.session import check, session_of, sessions
from memlab.session.in_force import InForce
from memlab.session.rollback import Rollback
from memlab.session.snapshot import Snapshot
from memlab.techniques import TECHNIQUES, Technique, is_wanted
from memlab.techniques.checkpointing.checkpointing import ActivationCheckpointing
from memlab.techniques.gradient_release.gradient_release import GradientRelease
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.offload.spill import is_spilled
from memlab.techniques.optimizer.optimizer import OptimizerConversion
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.helpers.switch_faults import PLAN_PAIRS, NoMemory, Run, Small, differences, happening, running


class InjectedError(Exception):
    pass


def injected() -> None:
    raise InjectedError


def new_contents(old: str, new: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an undisturbed change comes to, and how training goes on from there."""
    with running(old) as run:
        run.session.switch(new, now=True)
        return run.contents(), run.go_on()


@pytest.fixture(autouse=True)
def nothing_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes longer than everything else here, and there are hundreds of failures."""
    monkeypatch.setattr("memlab.session.in_force.gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture(params=PLAN_PAIRS, ids=lambda pair: f"{pair[0] or 'nothing'} → {pair[1] or 'nothing'}")
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers", [(8, 8), (600, 600), (8, 8, 8)], ids=["small", "large", "BatchNorm"])
def test_what_a_check_says_depends_on_the_setting_alone(layers: tuple[int, ...]) -> None:
    """A technique whose setting stays is not asked again, neither by a change nor by a prediction."""
    between = [nn.BatchNorm1d(8)] if len(layers) > 2 else []
    model = nn.Sequential(nn.Linear(*layers[:2]), *between, nn.Linear(*layers[-2:]))
    workload = Workload(model, torch.optim.AdamW(model.parameters()))
    said: dict[Any, dict[str, str]] = {}
    for one, other in itertools.product(FIELDS, FIELDS):
        for text, beside in itertools.product(one.choices, other.choices):
            with suppress(PlanError):
                plan = Plan().with_setting(one.name, text).with_setting(other.name, beside)
                for kind in TECHNIQUES:
                    if is_wanted(kind, plan) and not kind.traits.is_engine:
                        said.setdefault((kind, kind.setting(plan)), {})[answer(kind(plan), workload)] = plan.label
    assert [told for told in said.values() if len(told) > 1] == []


def answer(technique: Technique, workload: Workload) -> str:
    try:
        technique.check(workload)
        technique.check_optimizer(workload.optimizers[0])
    except RefusalError as refusal:
        return str(refusal)
    return ""


def test_techniques_that_stay_know_the_plan_in_force() -> None:
    model = nn.Linear(8, 8)
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--accumulate 2") as session:
        (before,) = session.techniques
        session.switch("--accumulate 2 --bf16", now=True)
        assert before in session.techniques
        assert {each.plan for each in session.techniques} == {session.plan}


def test_a_setting_that_gives_nothing_without_another_is_refused_once_that_goes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--accumulate 2 --batchnorm micro") as session:
        with pytest.raises(RefusalError, match="--batchnorm micro changes nothing without --accumulate N"):
            session.switch("--batchnorm micro", now=True)
        assert session.plan == Plan.parse("--accumulate 2 --batchnorm micro")


def test_who_asks_whether_a_plan_applies_hears_what_was_seen_of_the_loop() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = Plan.parse("--release-grads")
    with fit(Workload(model, optimizer)) as session:
        check(session.workload, plan)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        with pytest.raises(
            RefusalError, match=re.escape("the loop calls backward() a second time before optimizer.step()")
        ):
            check(session.workload, plan)


class TestErrors:
    @pytest.mark.few(2, full=8)
    def test_at_every_call_into_a_technique(self, pair: tuple[str, str]) -> None:
        old, new = pair
        with running(old) as undisturbed:
            expected = undisturbed.go_on()
        with running(old) as run:
            structure, contents, techniques = run.structure(), run.contents(), list(run.session.techniques)
            nth, shown = 0, list[InjectedError]()
            while True:
                nth += 1
                try:
                    with happening(injected, nth, ("techniques/",)) as moment:
                        run.session.switch(new, now=True)
                except InjectedError as error:
                    shown[:] = [error]  # as a notebook keeps the last one, with all that its frames hold
                    assert differing(structure, run.structure()) == [], moment.place
                    assert differences(run.contents(), contents) == [], moment.place
                    assert all(a is b for a, b in zip(run.session.techniques, techniques, strict=True)), moment.place
                else:
                    break
                finally:
                    tried = moment.place
            assert tried == ""
            assert nth > 3
            assert differences(run.contents(), new_contents(old, new)[0]) == []
        # a run whose changes all failed trains on as if none had been tried
        with running(old) as run:
            for each in range(1, nth, 5):
                run.contents()  # what has been shown of weights is more to do
                with pytest.raises(InjectedError), happening(injected, each, ("techniques/",)):
                    run.session.switch(new, now=True)
            assert differences(run.go_on(), expected) == []

    def test_a_plan_that_did_not_come_can_be_asked_for_again_while_its_error_is_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = torch.optim.Optimizer.add_param_group
        with running("") as run:
            with monkeypatch.context() as patch, pytest.raises(InjectedError) as kept:
                patch.setattr(GradientRelease, "attach_optimizer", lambda *_arguments: injected())
                run.session.switch("--release-grads", now=True)
            assert kept.value.__traceback__ is not None
            assert torch.optim.Optimizer.add_param_group is own
            run.session.switch("--release-grads", now=True)
            assert torch.optim.Optimizer.add_param_group is not own
        assert torch.optim.Optimizer.add_param_group is own

    def test_a_refusal_comes_before_anything_is_touched(self) -> None:
        with running("--accumulate 2 --adam8bit") as run:
            structure, contents = run.structure(), run.contents()
            with pytest.raises(RefusalError, match="tf32 needs a CUDA GPU"):
                run.session.switch("--checkpoint --precision tf32", now=True)
            assert differing(structure, run.structure()) == []
            assert differences(run.contents(), contents) == []

    def test_while_a_session_begins(self) -> None:
        for nth in range(1, 400, 7):
            model = Small()
            optimizer = torch.optim.AdamW(model.parameters())
            structure = fingerprint(model, [optimizer])
            try:
                with happening(injected, nth, ("techniques/",)) as moment:
                    session = fit(Workload(model, optimizer), "--accumulate 2 --fp16 --offload optimizer")
                session.undo()
            except InjectedError:
                assert sessions() == ()
            assert differing(structure, fingerprint(model, [optimizer])) == [], moment.place
            if not moment.place:
                break
        assert nth > 20


class TestLateOptimizers:
    def test_at_every_call_into_a_technique(self) -> None:
        model = Small()
        workload = Workload(model)
        with fit(workload, "--adam8bit --precision pure-bf16 --offload optimizer") as session:
            nth, failed = 0, 0
            while True:
                nth += 1
                optimizer = torch.optim.AdamW(model.parameters())
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                structure = fingerprint(model, [optimizer])
                weights = [parameter.detach().clone() for parameter in model.parameters()]
                try:
                    with happening(injected, nth, ("techniques/",)) as moment:
                        session.taken.found(optimizer)
                except InjectedError:
                    failed += 1
                    assert workload.optimizers == []
                    assert differing(structure, fingerprint(model, [optimizer])) == [], moment.place
                    assert all(map(torch.equal, weights, model.parameters()))
                else:
                    break
            assert failed > 5
            assert workload.optimizers == [optimizer]
            optimizer.step()
            assert session.steps == 1


class TestShortOfMemory:
    @pytest.mark.few(4, full=8)
    def test_at_every_allocation_with_no_memory_after_it(self, pair: tuple[str, str]) -> None:
        """Going back makes no tensor; the second try fails at once."""
        old, new = pair
        with running(old) as undisturbed:
            expected = undisturbed.go_on()
        with running(old) as run:
            structure, contents = run.structure(), run.contents()
            nth = 0
            while True:
                nth += 1
                failing = NoMemory(nth, lasting=True)
                try:
                    with failing:
                        run.session.switch(new, now=True)
                except torch.OutOfMemoryError:
                    assert differing(structure, run.structure()) == [], nth
                    assert differences(run.contents(), contents) == [], nth
                else:
                    break
            assert not failing.has_failed
            assert differences(run.contents(), new_contents(old, new)[0]) == []
        with running(old) as run:
            for each in range(1, nth, 3):
                run.contents()  # what has been shown of weights is more to do
                with pytest.raises(torch.OutOfMemoryError), NoMemory(each, lasting=True):
                    run.session.switch(new, now=True)
            assert differences(run.go_on(), expected) == []

    def test_what_is_offloaded_stays_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A technique knows what it keeps elsewhere by its storage, so going back must bring that very storage."""
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())

        def parameters_and_moments() -> list[int]:
            moments = [value for state in optimizer.state.values() for value in state.values()]
            return [t.untyped_storage().data_ptr() for t in (*model.parameters(), *moments) if t.numel() > 64]

        def spilled() -> list[bool]:
            return [is_spilled(parameter.untyped_storage()) for parameter in model.parameters()]

        with fit(Workload(model, optimizer), "--offload params,optimizer") as session:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            at_rest = spilled()
            assert any(at_rest)
            offloaded, before, tries = parameters_and_moments(), [p.detach().clone() for p in model.parameters()], []

            def fails(*_: Any) -> None:
                tries.append(len(tries))
                raise torch.OutOfMemoryError("CUDA out of memory")

            with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
                patched.setattr(ActivationCheckpointing, "attach_model", fails)
                session.switch("--checkpoint", now=True)
            assert len(tries) == 2
            assert parameters_and_moments() == offloaded
            assert spilled() == at_rest
            assert all(map(torch.equal, before, model.parameters()))
        assert not any(spilled())

    @pytest.mark.few(4)
    def test_at_any_allocation_once(self, pair: tuple[str, str]) -> None:
        """The second try, which keeps nothing old on the device, comes to the same."""
        old, new = pair
        expected, afterwards = new_contents(old, new)
        nth = 0
        while True:
            nth += 3
            failing = NoMemory(nth, lasting=False)
            with running(old) as run:
                with failing:
                    run.session.switch(new, now=True)
                assert differences(run.contents(), expected) == [], nth
                assert differences(run.go_on(), afterwards) == []
            if not failing.has_failed:
                break

    @pytest.mark.few(4)
    def test_old_tensors_that_left_the_device_come_back(self, pair: tuple[str, str]) -> None:
        """An error in the second try, when what has been replaced lies elsewhere already."""
        old, new = pair
        for nth in (1, 3, 6, 12, 24, 48):
            with running(old) as run:
                structure, contents = run.structure(), run.contents()
                run.session.in_force._wholly = lambda act, interrupts: run.session.in_force._once(  # type: ignore[method-assign]
                    act, interrupts, sparing=True
                )
                try:
                    with happening(injected, nth, ("techniques/",)):
                        run.session.switch(new, now=True)
                except InjectedError:
                    assert differing(structure, run.structure()) == [], nth
                    assert differences(run.contents(), contents) == [], nth
                del run.session.in_force._wholly

    @pytest.mark.parametrize("plan", ["--adam8bit", "--precision pure-bf16"])
    def test_a_change_for_which_only_one_form_fits(self, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memlab.session.in_force.gc", gc)  # what the first try has made goes with it
        with large_run() as (workload, ledger):
            ledger.limit_bytes = ledger.live_bytes + 2**20  # four layers in fp32
            with fit(workload) as session:
                with monkeypatch.context() as patched:
                    patched.setattr(Rollback, "spare", lambda self: None)
                    with pytest.raises(torch.OutOfMemoryError):
                        session.switch(plan)
                    assert session.plan == Plan()
                session.switch(plan)
                assert session.plan == Plan.parse(plan)
                ledger.limit_bytes = float("inf")

    def test_halves_of_masters_leave_the_device_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Taking pure bf16 off needs what it frees: of each parameter two halves, of which the plan keeps one."""
        with large_run() as (workload, ledger):
            workload.optimizers[0].state.clear()
            session = fit(workload, "--precision pure-bf16")
            ledger.limit_bytes = ledger.live_bytes + 2**20  # four layers in fp32
            with monkeypatch.context() as patched:
                patched.setattr(Rollback, "spare", lambda self: None)
                with pytest.raises(torch.OutOfMemoryError):
                    session.undo()
            session.undo()
            ledger.limit_bytes = float("inf")

    def test_an_undo_for_which_there_is_no_room_changes_nothing(self) -> None:
        with large_run() as (workload, ledger):
            session = fit(workload, "--adam8bit")
            before, structure = Snapshot(workload), fingerprint(workload.model, workload.optimizers)
            ledger.limit_bytes = ledger.live_bytes + 2**19
            with pytest.raises(torch.OutOfMemoryError):
                session.undo()
            assert session_of(workload.model) is session
            assert session.plan == Plan.parse("--adam8bit")
            ledger.limit_bytes = float("inf")
            assert changed_between(before, Snapshot(workload)) == []
            assert differing(structure, fingerprint(workload.model, workload.optimizers)) == []
            session.undo()
            assert session_of(workload.model) is None


@contextmanager
def large_run() -> Iterator[tuple[Workload, Ledger]]:
    """A model of 16 layers of 256 KiB, trained, on a device whose ledger knows of everything."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = (v for state in optimizer.state.values() for v in state.values())
    ledger = Ledger()
    ledger.begin([(Category.PARAMETERS, tensor) for tensor in (*model.parameters(), *states)])
    with ledger:
        yield Workload(model, optimizer), ledger


class TestInPlace:
    """What the old plan keeps is not written by a change that may still fail."""

    def test_buffers_of_offloaded_state(self) -> None:
        with running("--optim adafactor --offload optimizer") as run:
            held = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
            copies = [tensor.clone() for tensor in held]
            run.session.switch("--offload optimizer", now=True)
            assert all(map(torch.equal, held, copies))

    @pytest.mark.parametrize("during_a_step", [False, True])
    def test_an_offloaded_optimizer_below_which_moments_change(
        self, during_a_step: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Same names, shapes and dtypes before and after: the buffers must be others."""
        with running("--offload optimizer") as run:
            technique = next(t for t in run.session.techniques if isinstance(t, OffloadOptimizer))
            technique._streaming = during_a_step
            contents = run.contents()

            def failing(self: Any, *args: Any) -> Any:
                return {name: v + 1 if isinstance(v, torch.Tensor) else v for name, v in args[2].items()}

            monkeypatch.setattr(OptimizerConversion, "pack_state", failing)
            monkeypatch.setattr(OptimizerConversion, "unpack_state", lambda self, *args: args[2])
            last = next(reversed(list(run.optimizer.state)))
            original = OffloadOptimizer.pack_state

            def raising(self: Any, optimizer: Any, parameter: Any, state: Any) -> Any:
                packed = original(self, optimizer, parameter, state)
                if parameter is last:
                    raise InjectedError
                return packed

            monkeypatch.setattr(OffloadOptimizer, "pack_state", raising)
            with pytest.raises(InjectedError):
                run.session.switch("--adam8bit --offload optimizer", now=True)
            monkeypatch.undo()
            assert differences(run.contents(), contents) == []


class TestBookkeeping:
    def test_techniques_in_their_order_whatever_came_first(self) -> None:
        model = Small()
        in_force = InForce(Workload(model, torch.optim.AdamW(model.parameters())))
        for flags in ("--accumulate 2", "--accumulate 2 --checkpoint", "--accumulate 2 --checkpoint --fp16"):
            in_force.change(Plan.parse(flags))
        assert [t.field for t in in_force.techniques] == ["checkpointing", "precision", "accumulation"]
        kept = in_force.techniques[0]
        in_force.change(Plan.parse("--checkpoint --accumulate 3"))
        assert in_force.techniques[0] is kept
        in_force.change(Plan())
        assert in_force.techniques == []


class TestRollback:
    @pytest.mark.parametrize(
        "change",
        [
            lambda model, optimizer: setattr(model, "forward", print),
            lambda model, optimizer: model.register_forward_hook(print),
            lambda model, optimizer: model.head.weight.register_hook(print),
            lambda model, optimizer: setattr(model.head.weight, "grad", torch.ones_like(model.head.weight)),
            lambda model, optimizer: setattr(model.head.weight, "data", model.head.weight.data.half()),
            lambda model, optimizer: optimizer.register_step_pre_hook(print),
            lambda model, optimizer: optimizer.state.clear(),
            lambda model, optimizer: optimizer.param_groups[0].update(lr=5.0),
            lambda model, optimizer: optimizer.state[model.bias].update(extra=1),
            lambda model, optimizer: torch.set_float32_matmul_precision("high"),
        ],
    )
    def test_what_it_remembers(self, change: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        run = Run("")
        run.session.undo()
        structure, contents = run.structure(), run.contents()
        before = Rollback(run.model, [run.optimizer])
        change(run.model, run.optimizer)
        assert differing(structure, run.structure()) + differences(run.contents(), contents) or (
            run.optimizer.param_groups[0]["lr"] == 5.0
        )
        before.restore()
        assert differing(structure, run.structure()) == []
        assert differences(run.contents(), contents) == []
        assert run.optimizer.param_groups[0]["lr"] == 1e-2

    def test_hooks_keep_their_order(self) -> None:
        model = Small()
        handles = [model.head.weight.register_hook(lambda g, n=n: None) for n in range(3)]
        before = Rollback(model)
        handles[0].remove()
        before.restore()
        assert [*(model.head.weight._backward_hooks or {})] == [handle.id for handle in handles]
        for handle in handles:
            handle.remove()
        assert not model.head.weight._backward_hooks
