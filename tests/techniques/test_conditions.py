"""Calls of one model that do something else by what they are told: each is judged by itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError
from memlab.techniques.accumulation.conditions import Conditions
from memlab.techniques.accumulation.judge import Judge
from tests.techniques.test_judge import trained

Change = Callable[["Told", bool], dict[str, Any]]
STEPS = 6


def by_rows(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, target)


def by_pairs(outputs: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    """A loss whose rows depend on each other."""
    rows = F.normalize(outputs, dim=-1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class Pairs(nn.Module):
    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return by_pairs(outputs, target)


class Told(nn.Module):
    """A model that takes another loss when any of many things tells it to."""

    of_all = ""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        self.stage, self.loss, self.criterion = 0, by_rows, nn.MSELoss()
        self.register_buffer("mode", torch.zeros(()))
        self.config = SimpleNamespace(kind="rows", names=["rows"], weights={"pairs": 0.0})

    def forward(
        self, rows: torch.Tensor, target: torch.Tensor, kind: str = "", stage: Any = 0, losses: Any = ("rows",)
    ) -> torch.Tensor:
        outputs, config = self.layers(rows), self.config
        told = (kind, *losses, self.of_all, config.kind, config.names[0], WORLD["kind"])
        if "pairs" in told or stage or self.stage or self.mode > 0.5 or config.weights["pairs"]:
            return by_pairs(outputs, target)
        return self.loss(outputs, target) if self.loss is not by_rows else self.criterion(outputs, target)


WORLD = {"kind": "rows"}


def _set(path: str, *values: Any) -> Change:
    def change(model: Told, is_other: bool) -> dict[str, Any]:
        owner, _, name = path.rpartition(".")
        owner = model.config if owner else model
        setattr(owner, name, values[is_other])
        return {}

    return change


def _in(container: Callable[[Told], Any], key: Any, *values: Any) -> Change:
    def change(model: Told, is_other: bool) -> dict[str, Any]:
        container(model)[key] = values[is_other]
        return {}

    return change


def _of_the_class(_model: Told, is_other: bool) -> dict[str, Any]:
    Told.of_all = "pairs" if is_other else ""
    return {}


CHANGES: dict[str, Change] = {
    "an argument": lambda _, is_other: {"kind": "pairs" if is_other else "rows"},
    "a number": lambda _, is_other: {"stage": int(is_other)},
    "a number in a tensor": lambda _, is_other: {"stage": torch.tensor(int(is_other))},
    "a list argument": lambda _, is_other: {"losses": ["pairs" if is_other else "rows"]},
    "an attribute": _set("stage", 0, 1),
    "a tensor": _set("stage", torch.tensor([0]), torch.tensor([1])),
    "a buffer": lambda model, is_other: model.mode.fill_(float(is_other)) is None or {},
    "a function": _set("loss", by_rows, by_pairs),
    "a module": lambda model, is_other: setattr(model, "criterion", Pairs() if is_other else nn.MSELoss()) or {},
    "a configuration": _set("config.kind", "rows", "pairs"),
    "a list": _in(lambda model: model.config.names, 0, "rows", "pairs"),
    "a dictionary": _in(lambda model: model.config.weights, "pairs", 0.0, 1.0),
    "a global": _in(lambda _: WORLD, "kind", "rows", "pairs"),
    "the class": _of_the_class,
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, target = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
    return rows, target


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "is_other", [lambda step: step >= 3, lambda step: step % 3 == 1], ids=["later", "now and then"]
)
def test_another_loss_is_judged_by_itself(name: str, is_other: Callable[[int], bool]) -> None:
    runs = []
    for flags in ("", "--accumulate 2"):
        torch.manual_seed(0)
        runs.append(
            trained(
                Told(),
                lambda model, step: model(*batch(step), **CHANGES[name](model, is_other(step))),
                flags,
                STEPS,
            )
        )
        CHANGES[name](Told(), False)
    (expected, weights, _), (losses, found, notes) = runs
    assert losses == pytest.approx(expected, rel=1e-5)
    assert torch.cat([*map(torch.flatten, found)]).allclose(torch.cat([*map(torch.flatten, weights)]), rtol=1e-5)
    assert [note for note in notes if "a batch is run whole, since " in note]


class Restless(dict[str, int]):
    """A dictionary that is another one each time that it is looked at."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return {"parity": self.looks % 2}.items()  # a walk looks once


def test_what_changes_while_it_is_looked_at_is_refused() -> None:
    model = Told()
    model.restless = Restless(parity=0)  # type: ignore[assignment]
    with pytest.raises(RefusalError) as caught:
        trained(model, lambda model, step: model(*batch(step)), "--accumulate 2")
    assert str(caught.value) == (
        "accumulation: what Told reads, returns or leaves behind changes from call to call; use --checkpoint or --offload "
        "activations, which keep the batch whole"
    )


def test_a_dictionary_that_grows_in_every_step_is_judged_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = 0
    whole = Judge.judge

    def counted(*args: Any) -> Any:
        nonlocal judged
        judged += 1
        return whole(*args)

    def loop(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(*batch(step))
        model.config.weights[step] = float(loss)
        return loss

    monkeypatch.setattr(Judge, "judge", counted)
    trained(Told(), loop, "--accumulate 2", 200)
    assert judged <= 64 + 8


class TestConditions:
    def test_values_that_come_back_have_the_key_they_had(self) -> None:
        conditions = Conditions()
        keys = [conditions.key({"mode": mode}, []) for mode in ("a", "b", "a", "b")]
        assert keys[:2] == keys[2:]
        assert keys[0] != keys[1]

    def test_a_number_that_always_changes_is_looked_at_ever_more_seldom(self) -> None:
        conditions = Conditions()
        keys = [conditions.key({"step": step, "mode": "a"}, []) for step in range(100)]
        assert len({*keys}) == 4 + 1 + 6  # four values; then when their number has doubled
        assert conditions.key({"step": 100, "mode": "b"}, []) not in keys

    def test_what_the_forward_writes_is_left_out(self) -> None:
        conditions = Conditions()
        conditions.key({"calls": 0}, [])
        conditions.leave_out(["calls"])
        assert len({conditions.key({"calls": calls}, []) for calls in range(3)}) == 1

    def test_tensors_and_objects_count_by_their_kind(self) -> None:
        conditions = Conditions()
        kept = [
            conditions.key({"x": value}, []) for value in (torch.zeros(2), torch.ones(3), nn.Parameter(torch.ones(1)))
        ]
        assert len({*kept}) == 1
        assert conditions.key({"x": None}, []) != kept[0]


class OfLists(nn.Linear):
    def forward(self, rows: list[Any], targets: list[Any]) -> torch.Tensor:
        scaled = [
            super(OfLists, self).forward(row).sum(0) * (1 + target) for row, target in zip(rows, targets, strict=True)
        ]
        return torch.stack(scaled)


class OfDicts(nn.Linear):
    def forward(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        return torch.stack([super(OfDicts, self).forward(row["row"]).sum(0) * (1 + row["target"]) for row in rows])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kind", [OfLists, OfDicts])
def test_rows_in_lists_are_no_conditions(
    kind: type[nn.Linear], as_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers beside the tensors of each row change in every step, and go with their rows."""
    judged = []
    judge = Judge.judge
    monkeypatch.setattr(Judge, "judge", lambda *args: judged.append(1) or judge(*args))

    def ragged(model: nn.Module, step: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(step)
        rows = [torch.randn(2 + row % 3, 4, generator=drawn) for row in range(8)]
        targets = torch.randint(0, 3, (8,), generator=drawn).tolist()
        if kind is OfDicts:
            given = map(torch.tensor, targets) if as_tensor else targets
            return (
                model([{"row": row, "target": target} for row, target in zip(rows, given, strict=True)]).square().mean()
            )
        return model(rows, [torch.tensor([target]) for target in targets] if as_tensor else targets).square().mean()

    trained(kind(4, 3), ragged, "--accumulate 2", 12)
    assert len(judged) == 1
