"""Attaching, switching and undoing: what is refused, what is rolled back, what other code sees meanwhile."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from memlab import PlanError, RefusalError, Workload, fit, measure, predict
from memlab.errors import SessionError, WorkloadError
from memlab.measuring.device import device_for
from memlab.measuring.ledger import Ledger
from memlab.measuring.steps import Meter
from memlab.rescue.start import Start
from memlab.runtime.observer import Observer
from memlab.session import Session, session_of, sessions
from memlab.session.snapshot import Snapshot
from memlab.techniques import TECHNIQUES
from memlab.techniques.accumulation import micro_outputs
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.offload.spill import is_spilled
from memlab.techniques.tiling import tiling
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.loops.cases import CASES, SelfJudging, TiedLanguageModel, Tower, causal_batch, gpt2, pairs, prompted_batch
from tests.loops.running import deviation, plain_loop, untouched


def tower() -> tuple[Tower, torch.optim.AdamW]:
    model = Tower()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        inputs, targets = pairs(step)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def unchanged(workload: Workload) -> Iterator[None]:
    """Everything, structure and values, is the same afterwards."""
    optimizers = list(workload.optimizers)
    structure, values = fingerprint(workload.model, optimizers), Snapshot(workload)
    yield
    assert differing(structure, fingerprint(workload.model, optimizers)) == []
    assert changed_between(values, Snapshot(workload)) == []


def refusal(act: Callable[[], Any], kind: type[Exception] = RefusalError) -> str:
    with pytest.raises(kind) as error:
        act()
    return str(error.value)


# -- wrong input -------------------------------------------------------------------------------


class TestWrongInput:
    def test_no_workload(self) -> None:
        assert refusal(lambda: fit(Tower(), "--accumulate 2"), WorkloadError) == (  # type: ignore[arg-type]
            "fit: expected a memlab.Workload, got Tower; write fit(Workload(model, optimizer), plan)"
        )

    def test_no_plan(self) -> None:
        text = "plan: expected a memlab.Plan or its flags as text, got int"
        assert refusal(lambda: fit(Workload(Tower()), 3), PlanError) == text  # type: ignore[arg-type]
        with fit(Workload(Tower())) as session:
            assert refusal(lambda: session.switch(3), PlanError) == text  # type: ignore[arg-type]

    def test_an_unknown_flag_touches_nothing(self) -> None:
        workload = Workload(*tower())
        with unchanged(workload):
            text = refusal(lambda: fit(workload, "--acumulate 2"), PlanError)
        assert text.startswith("unknown flag --acumulate; did you mean --accumulate?; flags are --accumulate, ")

    def test_two_sessions_on_one_model(self) -> None:
        model, optimizer = tower()
        with fit(Workload(model, optimizer), "--accumulate 2") as session:
            text = refusal(lambda: fit(Workload(model, optimizer)), SessionError)
            assert session_of(model) is session
            assert session.plan.label == "--accumulate 2"
        assert (
            text
            == "Tower has a session already: use its switch(plan), or undo() it first; in a notebook, flags of %%memfit and %memfit undo do that"
        )

    def test_a_session_that_is_over(self) -> None:
        session = fit(Workload(*tower()))
        session.undo()
        session.undo()
        text = "this session is over: make a new one with memlab.fit(workload, plan)"
        assert refusal(lambda: session.switch("--accumulate 2"), SessionError) == text
        assert refusal(session.__enter__, SessionError) == text
        assert repr(session) == "<memlab session on Tower 9.19k · AdamW · cpu: undone, 0 steps>"
        assert sessions() == ()


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "plan", "text"),
        [
            (
                nn.Linear(4, 2),
                "--checkpoint",
                "checkpointing: no part of Linear can be recomputed: none holds more than one layer, and a layer keeps its "
                "input either way; use --accumulate N to hold fewer activations at a time",
            ),
            (
                nn.Linear(4, 2),
                "--chunk-loss",
                "loss: Linear has no linear layer onto 2048 or more classes; use --accumulate N, which divides the "
                "logits as well",
            ),
            (
                Tower().half(),
                "--fp16",
                "precision: --fp16 needs float32 parameters, Tower has float16 ones; call model.float() and make the "
                "optimizer anew, or leave the precision as it is",
            ),
            (
                Tower(),
                "--offload optimizer:host",
                "offload: optimizer to host: the model is on the CPU, whose memory is the host's; use --offload "
                "optimizer:disk (the default there)",
            ),
            (
                Tower(),
                "--precision tf32",
                "precision: tf32 needs a CUDA GPU of the Ampere generation or newer; use --bf16 here",
            ),
        ],
    )
    def test_a_model_a_technique_cannot_serve(self, model: nn.Module, plan: str, text: str) -> None:
        workload = Workload(model, torch.optim.AdamW(model.parameters()))
        with unchanged(workload):
            assert refusal(lambda: fit(workload, plan)) == text
        assert sessions() == ()

    @pytest.mark.parametrize(
        ("plan", "text"),
        [
            (
                "--adam8bit",
                "optimizer: LBFGS keeps no Adam moments, and evaluates the loss several times in a step; use "
                "torch.optim.AdamW in its place",
            ),
            (
                "--offload optimizer",
                "offload: LBFGS keeps one history for all parameters and evaluates the loss several times in a step; "
                "use torch.optim.AdamW with --offload optimizer, or LBFGS without it",
            ),
            ("--fp16", "precision: fp16 cannot serve LBFGS, which evaluates the model inside its step; use --bf16"),
            (
                "--precision pure-bf16",
                "precision: pure-bf16 cannot serve LBFGS, which evaluates the model inside its step; use --bf16",
            ),
        ],
    )
    def test_lbfgs(self, plan: str, text: str) -> None:
        model = Tower()
        workload = Workload(model, torch.optim.LBFGS(model.parameters()))
        with unchanged(workload):
            assert refusal(lambda: fit(workload, plan)) == text
        # made later, it is refused at its first step and the step does not happen
        with fit(Workload(model), plan), unchanged(Workload(model)):
            late = torch.optim.LBFGS(model.parameters())
            inputs, targets = pairs(0)
            assert refusal(lambda: late.step(lambda: F.cross_entropy(model(inputs), targets))) == text

    def test_lbfgs_under_what_serves_it(self) -> None:
        def run(plan: str, dtype: torch.dtype = torch.float64) -> list[float]:
            torch.manual_seed(0)
            model = Tower().to(dtype)
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
            inputs, targets = pairs(0)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.to(dtype)), targets)
                loss.backward()
                return loss

            with fit(Workload(model, optimizer), plan):
                return [optimizer.step(closure).item() for _ in range(5)]  # type: ignore[arg-type, union-attr]

        assert deviation(run("--accumulate 2 --checkpoint --offload activations"), run("")) <= 1e-9
        # a line search on rounded losses takes another way down
        rounded = run("--bf16", torch.float32)
        assert rounded[0] == pytest.approx(run("")[0], rel=1e-2)
        assert rounded[-1] < rounded[0] / 10

    def test_what_no_optimizer_updates(self) -> None:
        """A loop that writes weights by hand is told what had no effect; tensors beside the model are converted like weights."""
        model = Tower()
        with fit(Workload(model), "--adam8bit --offload optimizer,activations --release-grads") as session:
            model(pairs(0)[0]).sum().backward()
            assert session.usage.passed_by == (
                "--adam8bit --offload optimizer --release-grads had no effect: no optimizer updates Tower; train it with one of "
                "torch.optim"
            )
        beside = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.AdamW([*model.parameters(), beside])
        with fit(Workload(model, optimizer), "--adam8bit"):
            (model(pairs(0)[0]).sum() * beside.sum()).backward()
            optimizer.step()
        assert {"step", "exp_avg", "exp_avg_sq"} == set(optimizer.state[beside])

    @pytest.mark.parametrize("rescue", [False, True])
    def test_an_optimizer_that_is_made_again_for_the_same_model_goes(self, *, rescue: bool) -> None:
        """One that is still there goes on as it was."""
        model, inputs = Tower(), pairs(0)[0]
        body, made = torch.optim.AdamW(model.parameters()), []
        with fit(Workload(model, body).held_weakly(), rescue=rescue) as session:
            for _ in range(3):
                optimizer = torch.optim.AdamW(model.parameters())
                made.append(weakref.ref(optimizer))
                for _ in range(2):
                    model(inputs).sum().backward()
                    body.step()
                    optimizer.step()
                gc.collect()
                assert [ref() is not None for ref in made] == [False] * (len(made) - 1) + [True]
                assert session.workload.optimizers == [body, optimizer]
        assert {int(state["step"]) for state in body.state.values()} == {6}
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}
        assert not body._optimizer_step_pre_hooks

    def test_an_optimizer_that_evaluates_its_closure_twice(self) -> None:
        """Sharpness-aware steps look at two points; memlab must leave both to them."""

        class TwoPoints(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                with torch.enable_grad():
                    closure()
                moved = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
                with torch.no_grad():
                    for parameter, way in moved:
                        parameter.add_(way)
                with torch.enable_grad():
                    loss = closure()
                with torch.no_grad():
                    for parameter, way in moved:
                        parameter.sub_(way)
                super().step()
                return loss

        def run(plan: str) -> list[float]:
            torch.manual_seed(0)
            model = SelfJudging()
            optimizer = TwoPoints(model.parameters(), lr=0.1)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(*pairs(0))
                loss.backward()
                return loss

            with fit(Workload(model, optimizer), plan):
                return [optimizer.step(closure).item() for _ in range(5)]

        assert deviation(run("--accumulate 2 --checkpoint"), run("")) <= 1e-5
        assert run("--offload optimizer") == run("")
        assert refusal(lambda: run("--precision pure-bf16")) == (
            "precision: TwoPoints evaluates the model inside its step; leave --precision pure-bf16 out, or call step() "
            "without a closure"
        )

    @pytest.mark.parametrize("plan", ["--offload optimizer", "--offload optimizer:disk", "--precision pure-bf16"])
    def test_a_step_of_the_users_own_runs_once_and_whole(self, plan: str) -> None:
        class Own(torch.optim.Adam):
            steps = 0
            fails = False

            def step(self, closure: Any = None) -> Any:
                gradients = [p.grad for p in self.param_groups[0]["params"]]
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                super().step()
                self.steps += 1
                if self.fails:
                    raise ValueError("in the middle")
                return float(norm)

        def run(plan: str) -> tuple[list[float], Own, Tower]:
            torch.manual_seed(0)
            model = Tower()
            optimizer = Own(model.parameters(), lr=1e-2, eps=1e-4)
            norms = []
            with fit(Workload(model, optimizer), plan) as session:
                for step in range(4):
                    optimizer.zero_grad()
                    F.cross_entropy(model(pairs(step)[0]), pairs(step)[1]).backward()
                    optimizer.fails = step == 2
                    try:
                        norms.append(optimizer.step())
                    except ValueError:
                        session.loop_was_left()
            return norms, optimizer, model

        (norms, optimizer, model), (expected_norms, expected, plain) = run(plan), run("")
        is_lossy = "bf16" in plan
        assert deviation(norms, expected_norms) <= (0.05 if is_lossy else 0)
        assert optimizer.steps == expected.steps == 4
        weights = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(*pair, atol=0.01) if is_lossy else torch.equal(*pair) for pair in weights)
        assert [int(state["step"]) for state in optimizer.state.values()] == [4] * len(optimizer.state)

    def test_a_recurrent_model(self) -> None:
        """Recurrent layers keep a second list of their weights; it must be the same one afterwards."""
        case = CASES["lstm"]
        model = case.model()
        optimizer = case.optimizer(model)
        weights = list(map(id, model.lstm._flat_weights))  # type: ignore[union-attr, arg-type]
        with fit(Workload(model, optimizer), "--accumulate 4 --offload optimizer"):
            losses = plain_loop(model, optimizer, case, 10)
        assert deviation(losses, untouched("lstm", plain_loop, 10)) <= 1e-5
        assert list(map(id, model.lstm._flat_weights)) == weights  # type: ignore[union-attr, arg-type]


class Odd(nn.Module):
    """A loss that is no mean and no sum over rows, or whose rows look at each other."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(16, 4), what

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.what == "exp":
            return {"loss": F.cross_entropy(self.inner(inputs), targets).exp()}
        return self.inner(inputs - inputs.mean(0))


class TestInTheLoop:
    @pytest.mark.parametrize(
        ("model", "plan", "text"),
        [
            (
                Odd("exp"),
                "--accumulate 2",
                "accumulation: the loss of Odd is not a mean or sum over rows or targets, so micro-batches cannot give "
                "its gradient: for N rows together it is N, for them in two parts N and N; let the loop compute the loss from "
                "the outputs (any loss works then), or use --checkpoint",
            ),
            (
                Odd("mean"),
                "--accumulate 2",
                "accumulation: rows of a batch depend on each other in Odd: run apart they give another result than "
                "together (output is N of its size off, allowed 1e-04); use --checkpoint or --offload activations, which keep "
                "the batch whole",
            ),
        ],
    )
    def test_a_batch_that_cannot_be_split(self, model: nn.Module, plan: str, text: str) -> None:
        workload = Workload(model, torch.optim.AdamW(model.parameters()))
        with unchanged(workload), fit(workload, plan):
            # by how much it is off depends on the weights
            assert re.sub(r"(output is|for|it is|parts|and) [\d.]+", r"\1 N", refusal(lambda: model(*pairs(0)))) == text

    def test_a_second_backward(self) -> None:
        gradients = []
        model = SelfJudging()
        for plan in ("", "--accumulate 2"):
            model.zero_grad()
            with fit(Workload(model), plan):
                loss = model(*pairs(0))
                loss.backward(retain_graph=True)
                (loss * 2).backward()
                with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
                    loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0])

    def test_large_logits_before_and_after_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(micro_outputs, "LAZY_FROM_BYTES", 0)
        model = TiedLanguageModel()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = prompted_batch(0)
        with torch.no_grad():
            expected = model(batch["input_ids"])
        with fit(Workload(model, optimizer), "--accumulate 2"):
            output = model(**batch)
            output["loss"].backward()
            optimizer.step()
            assert torch.allclose(output["logits"], expected, atol=1e-6)
            assert torch.isfinite(model(**batch)["logits"]).all()
        model = TiedLanguageModel()
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        with fit(Workload(model), "--accumulate 2"):
            output = model(**batch)
            assert output["logits"].shape == expected.shape
            assert torch.allclose(output["logits"], model.eval()(batch["input_ids"]), atol=1e-6)

    def test_an_argument_that_is_filled_only_later(self) -> None:
        """The same call with and without a mask and labels: what is split is looked at anew."""
        model = gpt2().train()
        batch = causal_batch(0)
        labels = batch.pop("labels")
        expected = model(**batch, labels=labels).loss
        with fit(Workload(model), "--accumulate 4"):
            model(**batch, labels=None).logits.sum().backward()
            assert torch.allclose(model(**batch, labels=labels).loss, expected, rtol=1e-6)

    def test_a_smaller_last_batch(self) -> None:
        model = SelfJudging()
        inputs, targets = pairs(0)
        with fit(Workload(model), "--accumulate 4"):
            for rows in (10, 3, 1):
                found = model(inputs[:rows], targets[:rows])
                assert torch.allclose(found, F.cross_entropy(model.tower(inputs[:rows]), targets[:rows]), rtol=1e-6)

    def test_a_batch_without_any_target(self) -> None:
        model = TiedLanguageModel()
        batch = prompted_batch(0)
        batch["labels"] = torch.full_like(batch["labels"], -100)
        with fit(Workload(model), "--accumulate 4"):
            assert model(**batch)["loss"].isnan()
            batch["labels"][3, 4] = 7
            expected = TiedLanguageModel.forward(model, **batch)["loss"]
            assert torch.allclose(model(**batch)["loss"], expected, rtol=1e-6)

    def test_one_row_with_targets_in_the_first_batch(self) -> None:
        for row in (0, 7):
            model = TiedLanguageModel()
            batch = prompted_batch(0)
            batch["labels"][torch.arange(8) != row] = -100
            expected = model(**batch)["loss"]
            with fit(Workload(model), "--accumulate 4"):
                assert torch.allclose(model(**batch)["loss"], expected, rtol=1e-6)


# -- what other code sees ----------------------------------------------------------------------


class TestOtherCode:
    def test_the_signature_stays(self) -> None:
        model = gpt2()
        before = inspect.signature(model.forward)
        with fit(Workload(model), "--accumulate 2 --checkpoint"):
            assert inspect.signature(model.forward) == before

    @pytest.mark.parametrize("plan", ["", "--accumulate 2", "--checkpoint", "--chunk-loss", "--fp16"])
    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
    def test_copies_of_a_model_under_a_session_are_plain_models(self, way: str, plan: str) -> None:
        model = TiedLanguageModel()
        batch = prompted_batch(0)
        expected = model(**batch)["loss"]
        with fit(Workload(model, torch.optim.AdamW(model.parameters())), plan):
            copied = _copied(model, way)
            assert session_of(copied) is None
            assert copied.head.weight is copied.embed.weight
            assert copied.head.weight is not model.head.weight
            loss = copied(**batch)["loss"]
            assert torch.allclose(loss, expected, rtol=1e-6)
            loss.backward()
            assert all(parameter.grad is not None for parameter in copied.parameters())
            assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.allclose(copied(**batch)["loss"], expected, rtol=1e-6)

    @pytest.mark.parametrize(
        "plan", ["--accumulate 2 --checkpoint --chunk-loss", "--fp16 --adam8bit --offload optimizer"]
    )
    def test_state_dicts_are_those_of_the_untouched_objects(self, plan: str) -> None:
        model = TiedLanguageModel()
        optimizer = torch.optim.AdamW(model.parameters())
        model(**prompted_batch(0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        with fit(Workload(model, optimizer), plan):
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            file.seek(0)
            saved_model, saved_optimizer = torch.load(file)
        assert list(saved_model) == list(model.state_dict())
        assert all(torch.equal(saved_model[key], value) for key, value in model.state_dict().items())
        for key, state in optimizer.state_dict()["state"].items():
            assert {k: v.dtype for k, v in saved_optimizer["state"][key].items()} == {
                k: v.dtype for k, v in state.items()
            }

    @pytest.mark.parametrize(
        "plan", ["--bf16 --adam8bit", "--optim adafactor", "--precision pure-bf16", "--offload optimizer"]
    )
    @pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
    def test_copies_of_optimizers_go_on_by_themselves(self, plan: str, way: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with fit(Workload(model, optimizer), plan):
            step(model, optimizer)
            copied, its = way((model, optimizer))
            saved = optimizer.state_dict()["state"]
            for number, (key, state) in enumerate(its.state.items()):
                assert key is its.param_groups[0]["params"][number]
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                assert all(torch.equal(value, saved[number][name]) for name, value in state.items())
            step(copied, its)
            assert all(not torch.equal(a, b) for a, b in zip(copied.parameters(), model.parameters(), strict=True))
            step(model, optimizer)
        assert "__getstate__" not in vars(optimizer)
        assert "__getstate__" not in vars(its)

    def test_a_copy_of_an_optimizer_has_plain_state_of_plain_tensors_too(self) -> None:
        model = nn.Linear(64, 64)
        extra = torch.ones(4096).requires_grad_()
        optimizer = torch.optim.AdamW([*model.parameters(), extra])
        with fit(Workload(model, optimizer), "--adam8bit"):
            (model(torch.ones(2, 64)).sum() + extra.square().sum()).backward()
            optimizer.step()
            states = [state.keys() for state in copy.deepcopy(optimizer).state.values()]
        assert states == [{"step", "exp_avg", "exp_avg_sq"}] * 3

    def test_eval_and_no_grad_pass_through(self) -> None:
        model, _ = tower()
        inputs, _ = pairs(0)
        expected = model(inputs)
        with fit(Workload(model), "--accumulate 4 --checkpoint"):
            assert torch.equal(model.eval()(inputs), expected)
            with torch.no_grad():
                assert torch.equal(model.train()(inputs), expected)

    def test_a_wrapper_that_still_holds_the_hook(self) -> None:
        model, _ = tower()
        inputs, _ = pairs(0)
        session = fit(Workload(model), "--accumulate 2")
        inner = model.forward
        model.forward = lambda *args: 2 * inner(*args)  # type: ignore[method-assign]
        session.undo()
        assert torch.equal(model(inputs), 2 * Tower.forward(model, inputs))


def _copied(model: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# -- switching ---------------------------------------------------------------------------------


class TestSwitching:
    def test_between_a_forward_and_its_step_it_waits(self) -> None:
        model, optimizer = tower()
        inputs, targets = pairs(0)
        with fit(Workload(model, optimizer), "--accumulate 2") as session:
            loss = F.cross_entropy(model(inputs), targets)
            session.switch("--checkpoint --offload optimizer")
            assert (session.plan.label, str(session.pending)) == ("--accumulate 2", "--checkpoint --offload optimizer")
            loss.backward()
            optimizer.step()
            assert session.plan.label == "--accumulate 2"
            model(inputs)
            assert (session.plan.label, session.pending) == ("--checkpoint --offload optimizer", None)
            assert [str(entry) for entry in session.log] == [
                "step 1: as written → --accumulate 2",
                "step 2: --accumulate 2 → --checkpoint --offload optimizer",
            ]

    def test_now_for_a_loop_that_was_left_there(self) -> None:
        model, optimizer = tower()
        with fit(Workload(model, optimizer), "--accumulate 2") as session:
            model(pairs(0)[0])
            session.switch("--checkpoint", now=True)
            assert session.plan.label == "--checkpoint"

    def test_at_once_where_the_first_call_of_a_step_has_failed(self) -> None:
        class Correlated(nn.Linear):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return super().forward(rows - rows.mean(0))

        model = Correlated(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.randn(8, 4)
        with fit(Workload(model, optimizer), "--accumulate 2") as session:
            assert "rows of a batch depend on each other" in refusal(lambda: model(rows))
            session.switch("--bf16")
            assert (session.plan.label, session.pending) == ("--bf16", None)
            model(rows).sum().backward()
            with pytest.raises(TypeError):
                model(rows, rows)  # the second call of a step
            session.switch("")
            assert session.plan.label == "--bf16"
            optimizer.step()

    def test_from_another_thread_it_waits(self) -> None:
        model, optimizer = tower()
        with fit(Workload(model, optimizer)) as session:
            caught: list[Exception] = []

            def elsewhere() -> None:
                session.switch("--accumulate 2")
                try:
                    session.switch("--accumulate 2", now=True)
                except SessionError as error:
                    caught.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert str(caught[0]) == (
                "switch(now=True) from another thread than the one that trains: leave out now, and the training thread "
                "applies it"
            )
            assert session.plan.label == "as written"
            model(pairs(0)[0])
            assert session.plan.label == "--accumulate 2"

    def test_any_thread_trains_on_where_the_one_that_trained_has_ended(self) -> None:
        model, optimizer = tower()
        with fit(Workload(model, optimizer)) as session:
            thread = threading.Thread(target=lambda: train(model, optimizer))
            thread.start()
            thread.join()
            session.switch("--accumulate 2", now=True)
            assert session.plan.label == "--accumulate 2"

    def test_a_refusal_leaves_the_old_plan_in_force(self) -> None:
        model, optimizer = tower()
        train(model, optimizer)
        workload = Workload(model, optimizer)
        with fit(workload, "--accumulate 2 --offload optimizer") as session:
            with unchanged(workload):
                text = refusal(lambda: session.switch("--checkpoint --chunk-loss"))
            assert text == (
                "loss: Tower has no linear layer onto 2048 or more classes; use --accumulate N, which divides the "
                "logits as well"
            )
            assert session.plan.label == "--accumulate 2 --offload optimizer"
            train(model, optimizer)

    def test_a_pending_plan_that_is_refused_is_logged(self) -> None:
        model, optimizer = tower()
        inputs, targets = pairs(0)
        with fit(Workload(model, optimizer), "--accumulate 2") as session:
            F.cross_entropy(model(inputs), targets).backward()
            session.switch("--chunk-loss")
            optimizer.step()
            model(inputs)
            assert session.plan.label == "--accumulate 2"
            assert session.log[-1].text == (
                "refused --chunk-loss: loss: Tower has no linear layer onto 2048 or more classes; use --accumulate N, "
                "which divides the logits as well"
            )

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
    @pytest.mark.parametrize("moment", ["attach_optimizer", "attach_model", "pack_state"])
    def test_a_change_that_fails_half_way_is_rolled_back(
        self, moment: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = tower()
        train(model, optimizer)
        workload = Workload(model, optimizer)
        left = [2]

        def failing(self: Any, *args: Any) -> Any:
            left[0] -= 1 if moment == "pack_state" else 2
            if left[0] <= 0:  # out of memory is tried a second time
                raise error("half-way")
            return original(self, *args)

        original = getattr(OffloadOptimizer, moment)
        with unchanged(workload), pytest.raises(error, match="half-way"):
            with monkeypatch.context() as patched:
                patched.setattr(OffloadOptimizer, moment, failing)
                fit(workload, "--accumulate 2 --checkpoint --offload optimizer")
        assert sessions() == ()
        with fit(workload, "--accumulate 2 --checkpoint") as session:
            left[0] = 2
            with unchanged(workload), pytest.raises(error, match="half-way"):
                with monkeypatch.context() as patched:
                    patched.setattr(OffloadOptimizer, moment, failing)
                    session.switch("--accumulate 4 --offload optimizer")
            assert session.plan.label == "--accumulate 2 --checkpoint"
            train(model, optimizer)

    @pytest.mark.parametrize("kind", TECHNIQUES)
    def test_no_technique_fails_to_be_rolled_back(self, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The technique itself is in place when the one after it fails."""
        monkeypatch.setattr(tiling, "LARGE_BYTES", 1)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        workload, beside = Workload(model, optimizer), nn.Linear(64, 64).requires_grad_(False)
        plan = (
            "--accumulate 2 --checkpoint --precision pure-bf16 --adam8bit --offload activations,optimizer,params,frozen "
            "--chunk-loss --release-grads --tile 2 --lora r=2"
        )
        if kind.traits.is_engine:
            plan = "--scale fsdp2"
        if kind.field == "base":
            plan = "--lora r=2 --base int8"
        if kind.field == "padding":
            plan = "--pack"
        if kind.field == "batchnorm":
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            workload = Workload(model, torch.optim.AdamW(model.parameters()))
            plan = "--accumulate 2 --batchnorm micro"
        original = kind.attach_model

        def failing(self: Any, workload: Workload, undo: ExitStack) -> None:
            original(self, workload, undo)
            raise KeyboardInterrupt

        with unchanged(workload), pytest.raises(KeyboardInterrupt):
            monkeypatch.setattr(kind, "attach_model", failing)
            fit(workload, plan)
        assert sessions() == ()
        assert not beside._forward_hooks
        assert not is_spilled(beside.weight.untyped_storage())


_LOSSLESS = st.fixed_dictionaries(
    {
        "accumulate": st.sampled_from(["", "--accumulate 2", "--accumulate 4"]),
        "checkpoint": st.sampled_from(["", "--checkpoint", "--checkpoint every:2", "--checkpoint selective"]),
        "offload": st.sampled_from(
            [
                "",
                "--offload optimizer",
                "--offload activations",
                "--offload activations,optimizer",
                "--offload params",
                "--offload optimizer,params",
            ]
        ),
        "loss": st.sampled_from(["", "--chunk-loss"]),
    }
).map(lambda parts: " ".join(filter(None, parts.values())))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans=st.lists(_LOSSLESS, min_size=2, max_size=5), name=st.sampled_from(["tied", "tied-criterion"]))
def test_lossless_plans_in_any_order_change_nothing(plans: list[str], name: str) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model)
    workload = Workload(model, optimizer)
    structure = fingerprint(model, [optimizer])
    losses = []
    with fit(workload, "") as session:
        for step in range(3 * len(plans)):
            if step % 3 == 1:
                session.switch(plans[step // 3])
            loss = case.loss(model, case.batch(step))
            if step % 3 == 2:
                session.switch(plans[-1 - step // 3])  # waits for the step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert deviation(losses, untouched(name, plain_loop, 15)[: len(losses)]) <= 1e-5
    assert differing(structure, fingerprint(model, [optimizer])) == []


# -- several models, late optimizers -----------------------------------------------------------


class TestSeveral:
    @staticmethod
    def adversaries(plans: tuple[str, str] | None) -> list[float]:
        """Two models and two optimizers that train against each other."""
        torch.manual_seed(0)
        maker, critic = Tower(classes=16), Tower(classes=1)
        ways = [torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (maker, critic)]
        losses = []
        with ExitStack() as stack:
            if plans:
                for model, optimizer, plan in zip((maker, critic), ways, plans, strict=True):
                    stack.enter_context(fit(Workload(model, optimizer), plan))
            for step in range(15):
                real, noise = pairs(step)[0], pairs(100 + step)[0]
                made = maker(noise)
                ways[1].zero_grad()
                judged = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
                judged.backward()
                ways[1].step()
                ways[0].zero_grad()
                fooled = F.softplus(-critic(made)).mean()
                fooled.backward()
                ways[0].step()
                losses += [judged.item(), fooled.item()]
        return losses

    @pytest.mark.parametrize(
        "plans",
        [
            ("--accumulate 2", ""),
            ("", "--accumulate 2"),
            ("--accumulate 2 --checkpoint", "--accumulate 5 --offload optimizer"),
            ("--offload activations,optimizer", "--checkpoint"),
        ],
    )
    def test_models_that_train_against_each_other(self, plans: tuple[str, str]) -> None:
        assert deviation(self.adversaries(plans), self.adversaries(None)) <= 1e-5

    @pytest.mark.parametrize("plan", ["", "--accumulate 2", "--offload optimizer", "--adam8bit", "--fp16"])
    def test_an_optimizer_made_in_the_loop(self, plan: str) -> None:
        model = Tower()
        before = fingerprint(model)
        with fit(Workload(model), plan) as session:
            optimizer = torch.optim.AdamW(model.parameters())
            torch.optim.SGD(nn.Linear(1, 1).parameters()).step()
            assert session.workload.optimizers == []
            train(model, optimizer, 3)
            assert session.workload.optimizers == [optimizer]
            assert [entry.text for entry in session.log if "found" in entry.text] == ["found optimizer AdamW"]
            assert session.steps == 3
        assert differing(before, fingerprint(model)) == []
        hooks = {key: table for key, table in vars(optimizer).items() if key.endswith("_hooks")}
        assert hooks
        assert not any(hooks.values())
        assert {len(state) for state in optimizer.state.values()} == {3}

    def test_two_optimizers_of_one_model(self) -> None:
        def run(plan: str) -> list[float]:
            torch.manual_seed(0)
            model = Tower()
            halves = [torch.optim.AdamW(model.blocks.parameters()), torch.optim.SGD(model.leave.parameters(), 0.1)]
            losses = []
            with fit(Workload(model, halves), plan) as session:
                for step in range(10):
                    inputs, targets = pairs(step)
                    loss = F.cross_entropy(model(inputs), targets)
                    loss.backward()
                    for optimizer in halves:
                        optimizer.step()
                    model.zero_grad()
                    losses.append(loss.item())
                assert session.pending is None
            return losses

        assert deviation(run("--accumulate 2 --checkpoint --offload optimizer"), run("")) <= 1e-5


def test_a_session_keeps_a_model_without_a_plan_no_longer_than_others_do() -> None:
    model = nn.Linear(2, 2)
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = fit(workload.held_weakly())
    first.undo()
    session = fit(workload.held_weakly(), "--accumulate 2")
    alive = weakref.ref(model)
    del model, workload
    assert alive() is not None  # its undo needs it
    session.switch("", now=True)
    assert alive() is None
    assert not session.attached
    assert session.workload.optimizers == []
    assert repr(session) == "<memlab session on Linear is deleted: undone, 0 steps>"
    assert first.workload.optimizers == []  # since it was undone


class TestAnObserverThatFails:
    """One of memlab's own steps aside; one of somebody else's may raise on purpose."""

    @pytest.mark.parametrize("moment", ["forward_begins", "forward_ended", "step_begins", "step_ended", "plan_changed"])
    def test_the_loop_goes_on(self, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = tower()
        device = device_for(torch.device("cpu"))
        with Session(Workload(model, optimizer)) as session:
            meter = Meter(model, [optimizer], device)
            session.observers.add(meter)

            def fail(*_args: Any) -> None:
                raise KeyError("inconsistent")

            monkeypatch.setattr(meter, moment, fail)
            session.switch("--checkpoint")
            train(model, optimizer)
            assert session.observers.all == ()
            assert (
                session.observers.failure
                == "Meter of memlab failed and sees no more of this run (KeyError: 'inconsistent')"
            )
            assert [entry.text for entry in session.log].count(session.observers.failure) == 1
            meter.close()
        device.close()

    def test_an_operator_that_the_ledger_cannot_book(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Ledger, "_track", lambda *_args: 1 / 0)
        ledger = Ledger("cpu")
        with ledger:
            assert torch.ones(3).add(1).sum() == 6
        with pytest.raises(ZeroDivisionError):
            ledger.finish()

    def test_one_of_somebody_elses(self) -> None:
        class Strict(Observer):
            def forward_begins(self, batch: Any) -> None:
                raise KeyError("on purpose")

        model, optimizer = tower()
        with Session(Workload(model, optimizer), [Strict()]), pytest.raises(KeyError):
            train(model, optimizer)


class Noticing(nn.Module):
    """Registers hooks in its first forward, notes that it has, and computes with how often they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.noticed: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "has_registered", False):
            for block in self.blocks:
                block.register_forward_hook(lambda *_: self.noticed.append(1))
            self.has_registered = True
        self.noticed = []
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs * len(self.noticed)


@pytest.mark.parametrize(
    "flags", ["", "--accumulate 2", "--checkpoint", "--precision pure-bf16", "--offload activations"]
)
@pytest.mark.parametrize("before", ["", "measured", "predicted"])
def test_hooks_that_a_first_forward_registers_are_there_once(flags: str, before: str) -> None:
    torch.manual_seed(0)
    model, inputs = Noticing(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = Workload(model, optimizer, batch=(inputs, inputs), loss_fn=F.mse_loss)
    if before == "measured":
        measure(live, flags, steps=1)
        assert hooks_of(model) == 0
    elif before == "predicted":
        predict(live, flags)
    with fit(live, flags, rescue=True):
        for _ in range(2):
            F.mse_loss(model(inputs), inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert hooks_of(model) == len(model.noticed) == 2
    model(inputs)
    assert hooks_of(model) == len(model.noticed) == 2


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_what_a_call_puts_back_are_the_hooks_of_others() -> None:
    """A plan may come between a call and its repetition: its hooks are no effect of the call."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    kept = model[0].register_forward_hook(_look_on)
    start = Start(model, torch.device("cpu"))
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--offload params"):
        streamed = {block: dict(block._forward_pre_hooks) for block in model}
        assert all(streamed.values())
        model[1].register_forward_hook(_look_on)
        kept.remove()
        start.restore()
        assert {block: dict(block._forward_pre_hooks) for block in model} == streamed
        assert [_look_on in block._forward_hooks.values() for block in model] == [True, False, False]
        inside = Start(model, torch.device("cpu"))
    inside.restore()
    assert not any(block._forward_pre_hooks for block in model)


def _look_on(*_: Any) -> None:
    pass


def test_steps_of_what_is_no_optimizer_of_torchs_are_counted_by_calls() -> None:
    model = torch.nn.Linear(2, 1)
    with fit(Workload(model), "--release-grads") as session:
        for step in range(3):
            model(torch.ones(2, 2)).sum().backward()
            assert session.steps == step
            model.zero_grad()
        assert not session.notes, "nothing is freed"
