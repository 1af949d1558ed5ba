"""Memory runs out in calls without gradients: they are run in parts of their rows, or the loop's own error comes with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab import Workload, fit
from memlab.measuring.holdings import parameters_of, state_of
from memlab.measuring.ledger import Ledger
from memlab.plan import Plan
from memlab.rescue.fallback import Place, next_plans
from memlab.rescue.recovery import NothingFitsError
from memlab.session import Session
from tests.loops.cases import bert_classifier, gpt2
from tests.loops.test_trainer import trainer_for
from tests.rescue.faults import LONG, Faults

_SAMPLE = 4  # allocations of each case
_GAVE = "memory ran out in a call without gradients: as written → its rows in {} parts, same batch again"


def _tokens(rows: int = 6) -> torch.Tensor:
    return torch.randint(6, 2048, (rows, 8), generator=torch.Generator().manual_seed(0))


def _gpt2(labels: bool) -> tuple[nn.Module, dict[str, Any]]:
    ids = _tokens()
    return gpt2(), {"input_ids": ids} | ({"labels": ids} if labels else {})


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    mask = (torch.arange(8) < torch.tensor([[3], [8], [5], [6], [8], [4]])).long()
    return bert_classifier(), {"input_ids": _tokens(), "attention_mask": mask, "labels": torch.arange(6) % 2}


def _recurrent() -> tuple[nn.Module, dict[str, Any]]:
    return nn.LSTM(8, 8), {"input": torch.randn(5, 6, 8)}  # rows in the second dimension


_MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "logits": lambda: _gpt2(labels=False),
    "loss and logits": lambda: _gpt2(labels=True),
    "bert": _bert,
    "recurrent": _recurrent,
}


def _evaluated(
    build: Callable[[], tuple[nn.Module, dict[str, Any]]], plan: str, faults: Faults, mode: Any = torch.no_grad
) -> tuple[Any, list[torch.Tensor], Session]:
    """Train a step, evaluate, train another; return what the evaluation gave, the weights and a number drawn at the end."""
    torch.manual_seed(0)
    model, batch = build()
    model = model if "bf16" in plan or "8bit" in plan else model.double()
    batch = {
        name: each.to(next(model.parameters()).dtype) if each.is_floating_point() else each
        for name, each in batch.items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        output = model.train()(**batch)
        sum(
            leaf.square().mean()
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ).backward()
        optimizer.step()
        optimizer.zero_grad()

    with fit(Workload(model, optimizer), plan, rescue=True) as session:
        step()
        model.eval()
        with mode(), faults:
            output = model(**batch)
        step()
    return output, [*(each.detach() for each in model.parameters()), torch.rand(1)], session


def _far(one: Any, other: Any) -> float:
    pairs = [
        (a.double(), b.double())
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True)
        if isinstance(a, torch.Tensor)
    ]
    assert pairs
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)


@pytest.mark.few(4)
@pytest.mark.timeout(900 if LONG else 120)
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, "") for name in _MODELS]
    + [
        ("loss and logits", plan)
        for plan in ("--accumulate 2", "--checkpoint", "--offload params", "--offload optimizer", "--bf16", "--precision pure-bf16", "--adam8bit --chunk-loss")
    ],
)  # fmt: skip
def test_nothing_is_lost_whatever_allocation_fails(name: str, plan: str) -> None:
    expected, weights, _ = _evaluated(_MODELS[name], plan, counted := Faults())
    assert counted.count >= 6 + 3 * (name != "recurrent")
    for nth in range(1, counted.count + 1, 1 if LONG else max(1, counted.count // _SAMPLE)):
        found, others, session = _evaluated(_MODELS[name], plan, faults := Faults([nth]))
        assert faults.failed, nth
        assert session.rescuer is not None
        assert [rescue.place for rescue in session.rescuer.rescues] == ["a call without gradients"], nth
        # of a loss that a model computes in fp32, a sum in another order
        assert _far(found, expected) <= (2e-2 if "bf16" in plan else 2e-6), nth
        assert all(map(torch.equal, others, weights)), nth
        said = _GAVE.format(2).replace("as written", plan or "as written")
        assert sum(entry.text.startswith(said) for entry in session.log) == 1


@pytest.mark.parametrize("at", [[5, 6], [5, 6, 7, 8]])
def test_attempts_that_fail_are_followed_by_smaller_parts(at: list[int]) -> None:
    expected, weights, _ = _evaluated(_MODELS["logits"], "", Faults())
    found, others, session = _evaluated(_MODELS["logits"], "", faults := Faults(at), torch.inference_mode)
    assert len(faults.failed) == len(at)
    assert torch.equal(found.logits, expected.logits)
    assert found.logits.is_inference()
    assert all(map(torch.equal, others, weights))
    assert session.plan == Plan()


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


class _Wrapped(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.given, self.count = forward, 0

    def forward(self, *args: Any) -> Any:
        return self.given(self, *args)


def _counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    return model.inner(x)


def _keeps(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = model.inner(x)
    return model.last + 1


def _fills(model: Any, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
    cache.append(model.inner(x))
    return cache[-1] + 1


def _draws_with_python(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.inner(x) * random.random()


class _Cache:
    def __init__(self) -> None:
        self.keys = torch.zeros(6, 1)


_REFUSED: dict[str, tuple[nn.Module, tuple[Any, ...], str]] = {
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), (), "it draws random numbers"),
    "random": (_Wrapped(_draws_with_python), (), "it draws random numbers"),
    "batch norm": (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), (), "it changes buffer 1.num_batches_tracked",
    ),
    "a counter": (_Wrapped(_counts), (), "it changes count"),
    "what it keeps": (_Wrapped(_keeps), (), "it changes last"),
    "a list": (_Wrapped(_fills), ([],), "it writes to its arguments"),
    "a cache": (_Wrapped(lambda model, x, cache: model.inner(x) + cache.keys), (_Cache(),), "it is given a _Cache, which it may write to"),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_what_cannot_be_run_again_ends_in_the_loops_own_error(name: str) -> None:
    model, more, reason = _REFUSED[name]
    x = torch.randn(6, 4)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session:
        # as deep in the call as may be: what is drawn and left has been by then
        faults = Faults([4 if name == "dropout" else 3])
        with torch.no_grad(), faults, pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
            model(x, *more)
        assert not isinstance(raised.value, NothingFitsError)
        assert session.plan == Plan()
        kind = type(model).__name__
        assert session.log.not_rescued == f"a call of {kind} without gradients cannot be run again: {reason}"


@pytest.mark.parametrize("is_short", [False, True])
def test_rows_that_depend_on_each_other_stay_together(*, is_short: bool) -> None:
    model = _Wrapped(lambda model, x: model.inner(x) - model.inner(x).mean(0))
    x = torch.randn(6, 4)
    with torch.no_grad():
        expected = model(x)

    def said(at: list[int], plan: str) -> tuple[list[str], int]:
        with fit(Workload(model, torch.optim.AdamW(model.parameters())), rescue=True) as session:
            with torch.no_grad(), Faults(at) as faults:
                assert torch.equal(model(x), expected)
            assert len(faults.failed) == len(at)
            assert session.plan == Plan.parse(plan)
            return [entry.text for entry in session.log], faults.count

    place = "memory ran out in a call without gradients: as written"
    (line,), count = said([3], "")
    assert line.startswith(f"{place} → the same in what was freed, same batch again")
    if is_short:  # that is not enough
        lines, _ = said([3, count - 2], "--offload optimizer")
        reason = "a call of _Wrapped without gradients cannot be run in parts: rows of a batch depend on each other in _Wrapped"
        assert lines[0].startswith(reason)
        assert lines[-1].startswith(f"{place} → --offload optimizer, same batch again, 2 attempts")


def test_a_call_that_keeps_its_graph_is_named() -> None:
    model, x = nn.Linear(4, 2).eval(), torch.ones(3, 4)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session:
        with Faults([1]), pytest.raises(torch.OutOfMemoryError):
            model(x)
        said = "a call of Linear in eval mode keeps its graph: put torch.no_grad() around it"
        assert session.log.not_rescued == said


def test_later_calls_as_large_are_run_in_parts_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session, torch.no_grad():

        def products(rows: int) -> int:
            x = torch.randn(rows, 4)
            with _Products() as counted:
                assert torch.allclose(model(x), model[2](model[1](model[0](x))))
            return counted.count - 2

        assert products(8) == 2
        x = torch.randn(8, 4)
        with Faults([2]):
            model(x)
        assert [products(rows) for rows in (6, 8, 12)] == [2, 4, 6]
        assert session.rescuer is not None
        assert len(session.rescuer.rescues) == 1


def test_plain_calls_are_the_loops_own() -> None:
    model, x = _Wrapped(lambda model, x: model.inner(x)), torch.randn(6, 4)
    counts = []
    for rescue in (False, True):
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=rescue):
            with torch.no_grad(), Faults() as faults:
                model(x)
            counts.append(faults.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("share", [0.8, 0.4, 0.2])
def test_an_evaluation_larger_than_its_device(share: float) -> None:
    """No fault is injected: the ledger refuses what does not fit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32), nn.Linear(32, 4))
    x = torch.randn(512, 32)

    def evaluated(capacity_bytes: int | None) -> tuple[torch.Tensor, int, int]:
        ledger = Ledger(capacity_bytes=capacity_bytes)
        ledger.begin([*parameters_of(model), *state_of([])])
        before = ledger.live_bytes
        with ledger, torch.no_grad():
            output = model(x)
        peak = ledger.peak_bytes
        ledger.close()
        return output, before, peak

    expected, before, peak = evaluated(None)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), rescue=True) as session:
        output, _, lower = evaluated(int(before + share * (peak - before)))
        assert session.plan == Plan()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert lower - before <= share * (peak - before)


def test_only_what_leaves_the_device_follows() -> None:
    plans = [str(each.plan) for each in next_plans(Plan(), Place.EVALUATION, rows=8)]
    assert plans == ["--offload optimizer", "--offload optimizer,params"]


# -- generation --------------------------------------------------------------------------------


def _generating() -> Any:
    torch.manual_seed(0)
    model: Any = gpt2().eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1455, 3
    return model


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 2, "do_sample": False}], ids=str)
def test_a_generation_is_run_in_parts(options: dict[str, Any]) -> None:
    model, ids = _generating(), _tokens(5)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, **options}
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), rescue=True) as session:
        with Faults() as counted:
            expected = model.generate(ids, **given)
        for nth in (2, counted.count // 2, counted.count):
            with Faults([nth]) as faults:
                assert torch.equal(model.generate(ids, **given), expected)
            assert faults.failed
            session.rescuer.generations._too_many = 0  # type: ignore[union-attr]
        assert session.log[-1].text.startswith(_GAVE.format(2))
    assert "generate" not in vars(model)


def test_rows_that_end_early_are_filled_up_as_in_the_whole() -> None:
    model, ids = _generating(), _tokens(5)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    free = model.generate(ids, **given, eos_token_id=-1)
    ends = int(free[0, ids.size(1) + 1])  # the first row ends with its second token
    expected = model.generate(ids, **given, eos_token_id=ends)
    assert (expected[0] == 3).any()
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), rescue=True):
        with Faults([2, 3, 4]):  # one row at a time
            assert torch.equal(model.generate(ids, **given, eos_token_id=ends), expected)


def test_sampling_is_not_run_again() -> None:
    model, ids = _generating(), _tokens(5)
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), rescue=True) as session:
        with Faults([40]), pytest.raises(torch.OutOfMemoryError):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True)
        reason = "a call of GPT2LMHeadModel without gradients cannot be run again: it draws random numbers"
        assert session.log.not_rescued == reason


# -- loops of others ---------------------------------------------------------------------------


def test_evaluation_and_prediction_of_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def measured(faults: Faults | None) -> tuple[float, Any]:
        torch.manual_seed(0)
        trainer = trainer_for(gpt2().double(), tmp_path, max_steps=1, per_device_eval_batch_size=8)
        trainer.create_optimizer()
        with fit(Workload.from_trainer(trainer), rescue=True) as session:
            trainer.train()
            with faults or nullcontext():
                loss = trainer.evaluate()["eval_loss"]
                logits = trainer.predict(trainer.eval_dataset).predictions
            if faults:
                assert faults.failed
                assert session.log[-1].text.startswith(_GAVE.format(2))
        return loss, torch.as_tensor(logits)

    expected = measured(None)
    found = measured(Faults([20]))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert _far(found[1], expected[1]) < 1e-12


def test_validation_under_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def gathered(faults: Faults) -> tuple[torch.Tensor, list[str]]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), None
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        with fit(Workload(model, optimizer), rescue=True) as session:
            accelerator.backward(model(torch.randn(6, 4)).square().mean())
            optimizer.step()
            model.eval()
            with faults, torch.no_grad():
                found += [accelerator.gather_for_metrics(model(torch.randn(6, 4))) for _ in range(3)]
            return torch.cat(found), [entry.text for entry in session.log]

    expected, _ = gathered(counted := Faults())
    found, said = gathered(Faults([counted.count // 2]))
    assert torch.allclose(found, expected, atol=1e-7)
    assert said[-1].startswith(_GAVE.format(2))
