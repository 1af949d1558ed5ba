"""Finding the live objects, and what is said when they are missing or do not belong together."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.errors import WorkloadError
from memlab.runtime.batch import Batch
from memlab.runtime.modules import accepts_use_cache, signature_of
from memlab.runtime.namespace import find_model, names_in
from memlab.runtime.ownership import live_optimizers, needs_closure


def linear() -> nn.Linear:
    return nn.Linear(4, 2)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


class Trainer:
    """Shaped like transformers.Trainer."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer

    def train(self) -> None: ...


class TestMaking:
    def test_it_describes_itself(self) -> None:
        model = linear()
        assert Workload(model, adamw(model)).describe() == "Linear 10 · AdamW · cpu"
        assert Workload(model).describe() == "Linear 10 · no optimizer yet · cpu"
        assert Workload(nn.Linear(1000, 1000), name="wide").describe() == "wide 1M · no optimizer yet · cpu"

    def test_several_optimizers(self) -> None:
        model = nn.Sequential(linear(), nn.Linear(2, 2))
        pair = [torch.optim.SGD(model[0].parameters()), adamw(model[1])]
        assert Workload(model, pair).optimizers == pair
        assert Workload(model, tuple(pair)).describe() == "Sequential 16 · SGD + AdamW · cpu"

    @pytest.mark.parametrize("given", ["model", None, 3, [nn.Linear(1, 1)], nn.Parameter(torch.ones(1))])
    def test_no_module(self, given: Any) -> None:
        with pytest.raises(WorkloadError) as error:
            Workload(given)
        assert str(error.value) == f"model: expected a torch.nn.Module, got {type(given).__name__}"

    @pytest.mark.parametrize("given", [3, "adamw", [3], torch.ones(1), {"lr": 1}])
    def test_no_optimizer(self, given: Any) -> None:
        with pytest.raises(WorkloadError) as error:
            Workload(linear(), given)
        assert str(error.value) == (
            f"optimizer: expected a torch.optim.Optimizer, a sequence of them or None, got {type(given).__name__}"
        )

    def test_no_trainable_parameter(self) -> None:
        for model in (linear().requires_grad_(False), nn.ReLU()):
            with pytest.raises(WorkloadError) as error:
                Workload(model)
            assert str(error.value) == (
                f"{type(model).__name__} has no trainable parameter: set requires_grad on some, or put the training "
                f"model in its place"
            )

    def test_an_optimizer_of_another_model(self) -> None:
        with pytest.raises(WorkloadError) as error:
            Workload(linear(), adamw(linear()))
        assert str(error.value) == (
            "AdamW steps no parameter of Linear: was the model rebuilt after the optimizer was made? Make the "
            "optimizer from this model's parameters()"
        )

    def test_wrappers_are_looked_through(self) -> None:
        inner = linear()
        assert Workload(nn.DataParallel(inner)).model is inner


class TestFinding:
    def test_the_only_model_and_its_optimizers(self) -> None:
        model = linear()
        optimizer, foreign = adamw(model), adamw(linear())
        found = Workload.find({"net": model, "opt": optimizer, "other": foreign, "n": 3, "_hidden": linear()})
        assert found is not None
        assert (found.model, found.optimizers) == (model, [optimizer])

    def test_nothing_there(self) -> None:
        assert Workload.find({}) is None
        assert Workload.find({"x": 3, "frozen": linear().requires_grad_(False)}) is None

    def test_parts_and_aliases_are_not_other_models(self) -> None:
        model = nn.Sequential(linear(), nn.Linear(2, 2))
        found = Workload.find({"encoder": model[0], "model": model, "same": model})
        assert found is not None
        assert found.model is model

    @pytest.mark.parametrize(
        ("cell", "name"),
        [("loss = net(x)", "net"), ("loss = train(x)", "net"), ("loss = averaged(x)", "averaged"), ("", "averaged")],
    )
    def test_the_part_that_a_cell_calls_is_what_it_trains(self, cell: str, name: str) -> None:
        net = linear()
        averaged = nn.ModuleDict({"online": net, "average": linear().requires_grad_(False)})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        namespace = {"net": net, "averaged": averaged, "optimizer": optimizer}
        exec("def train(x): return [net(x), averaged.average]", namespace)
        found = Workload.find(namespace, f"{cell}; loss.backward(); optimizer.step(); averaged.average" if cell else "")
        assert found is not None
        assert found.model is namespace[name]

    def test_of_several_models_the_one_that_the_cells_functions_use(self) -> None:
        code = (
            "def step(batch): return [model(x) for x in batch]\n"
            "def train(): return step([1])\n"
            "def other_train(): return (lambda: other(1))()\n"
        )
        namespace: dict[str, Any] = {"model": linear(), "other": linear(), "unused": linear()}
        exec(code, namespace)
        for cell, name in (("train()", "model"), ("last = train()", "model"), ("other_train()", "other")):
            found = Workload.find(namespace, cell)
            assert found is not None, cell
            assert found.model is namespace[name], cell
            assert find_model(namespace, cell) is namespace[name], cell
        # what the cell names itself comes before what its functions name
        found = Workload.find(namespace, "train(); unused")
        assert found is not None
        assert found.model is namespace["unused"]
        with pytest.raises(WorkloadError, match=r"several models found: other \(Linear\), model \(Linear\)"):
            Workload.find(namespace, "train(); other_train()")
        # assigned anew by the cell: the old one does not count
        assert Workload.find({**namespace, "train": namespace["train"]}, "model = make()\ntrain()") is None

    def test_several_models(self) -> None:
        namespace = {"generator": linear(), "critic": nn.Bilinear(2, 2, 2)}
        with pytest.raises(WorkloadError) as error:
            Workload.find(namespace)
        assert str(error.value) == (
            "several models found: generator (Linear), critic (Bilinear); name the one to use with --model generator"
        )
        found = Workload.find(namespace, model="critic")
        assert found is not None
        assert found.model is namespace["critic"]
        found = Workload.find(namespace, "loss = critic(x, x)")
        assert found is not None
        assert found.model is namespace["critic"]

    def test_a_name_the_cell_assigns_is_not_looked_at(self) -> None:
        namespace = {"model": linear()}
        assert Workload.find(namespace, "model = build()\nmodel(x)") is None

    def test_a_named_variable_that_is_missing_or_no_model(self) -> None:
        model = linear()
        namespace = {"net": model, "n": 3, "opt": adamw(model)}
        cases = {
            ("model", "nett"): "--model nett: no variable of that name; candidates here: net",
            ("model", "n"): "--model n: n is a int, expected a torch Module",
            ("optimizer", "sgd"): "--optimizer sgd: no variable of that name; candidates here: opt",
            ("optimizer", "net"): "--optimizer net: net is a Linear, expected a torch Optimizer",
        }
        for (kind, name), text in cases.items():
            with pytest.raises(WorkloadError) as error:
                Workload.find(namespace, **{kind: name})  # type: ignore[arg-type]
            assert str(error.value) == text

    def test_a_trainer_stands_for_its_model_and_optimizer(self) -> None:
        model = linear()
        trainer = Trainer(model, adamw(model))
        for found in (
            Workload.find({"trainer": trainer, "args": 3}, "trainer.train()"),
            Workload.find({"trainer": trainer, "spare": nn.Bilinear(2, 2, 2)}, model="trainer"),
            Workload.from_trainer(trainer),
        ):
            assert found is not None
            assert (found.model, found.optimizers) == (model, [trainer.optimizer])
        assert Workload.from_trainer(Trainer(model)).optimizers == []

    @pytest.mark.parametrize("given", [3, None, SimpleNamespace(), Trainer(None)])
    def test_no_trainer(self, given: Any) -> None:
        with pytest.raises(WorkloadError) as error:
            Workload.from_trainer(given)
        assert str(error.value) == (
            f"{type(given).__name__} has no model; pass a transformers.Trainer, or use Workload(model=…)"
        )

    def test_names_in_a_cell(self) -> None:
        assert names_in("%%magic\nmodel(x)") == ([], set())
        names, assigned = names_in("a, b = f(c)\nfor i in d:\n    e = model(i)")
        assert names == ["a", "b", "f", "c", "i", "d", "e", "model"]
        assert assigned == {"a", "b"}
        live = {"a": 1, "e": nn.Linear(2, 2), "g": nn.Linear(2, 2)}
        assert names_in("for i in d:\n    e = a = 1\n    def f():\n        g = 1", live)[1] == {"e"}


class TestBatch:
    def test_forms(self) -> None:
        x = torch.ones(2)
        assert Batch.of({"x": x}) == Batch((), {"x": x})
        assert Batch.of((x, 3)) == Batch((x, 3), {})
        assert Batch.of(x).args[0] is x
        batch = Batch((x,), {})
        assert Batch.of(batch) is batch


def test_annotations_may_name_what_is_not_there() -> None:
    """Since Python 3.14 they are computed when somebody asks for them; before, with a line above."""
    source = f"""{"" if sys.version_info >= (3, 14) else "from __future__ import annotations"}
class Net(torch.nn.Linear):
    def forward(self, x: Tensor, use_cache: Maybe = None) -> Tensor:
        return super().forward(x)
class Steps(torch.optim.SGD):
    def step(self, closure: Closure) -> Loss:
        return super().step(closure)
def train(load: Load): ...
"""
    world: dict[str, Any] = {"torch": torch}
    exec(compile(source, "cell", "exec", dont_inherit=True), world)
    model = world["Net"](4, 4)
    optimizer = world["Steps"](model.parameters(), lr=0.1)
    assert accepts_use_cache(model)
    assert needs_closure(optimizer)
    assert [*signature_of(world["train"]).parameters] == ["load"]
    with fit(Workload(model, optimizer), "--accumulate 2"):
        model(torch.ones(4, 4)).sum().backward()


def test_what_the_shell_holds_is_not_looked_into() -> None:
    """`exit` and `quit` hold the shell, which holds results of earlier cells."""
    model, earlier = linear(), linear()
    optimizers = [adamw(model), adamw(earlier)]
    autocall = pytest.importorskip("IPython.core.autocall", reason="needs IPython")
    leave = autocall.ExitAutocall(SimpleNamespace(user_ns={"_12": earlier}))
    found = Workload.find({"exit": leave, "model": model, "optimizer": optimizers[0]})
    assert found is not None
    assert found.model is model
    assert Workload.find({"exit": leave}) is None


def test_objects_whose_class_cannot_be_hashed_stand_in_no_way() -> None:
    class Unhashable(type):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(cls, other: object) -> bool:
            return cls is other

    stray = Unhashable("Stray", (), {})()
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    assert any(each is optimizer for each in live_optimizers())
    del stray
