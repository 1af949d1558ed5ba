"""The model call is taken over without a trace: in files, in copies, for tracers, compilers and transforms."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memlab import Plan, Workload, fit, predict
from memlab.errors import RefusalError
from memlab.measuring import host_rates
from tests.loops.cases import Tower, pairs

PLANS = (
    "",
    "--accumulate 2",
    "--checkpoint",
    "--tile 2",
    "--offload activations,params",
    "--precision pure-bf16 --offload optimizer",
    "--bf16 --release-grads",
)
# what opens a file where there is no memlab, and says how the model in it computes
_OPEN = """
import sys
import types
sys.modules["memlab"] = None  # as if it was not installed
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(sorted(vars(model)), type(model.forward).__name__, model(torch.ones(2, 16)).sum().item())
"""


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 16)) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*inner), nn.Linear(16, 8))


def trained(model: Callable[..., Any], optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        inputs, targets = pairs(step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def applied(model: nn.Module, plan: str) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        session = fit(Workload(model, optimizer), plan)
    except RefusalError as refusal:
        pytest.skip(f"{plan}: {refusal}")
    trained(model, optimizer)
    return session


@pytest.mark.parametrize("plan", PLANS)
def test_copies_and_pickles_are_what_they_would_be_without_memlab(plan: str) -> None:
    model = blocks()
    session = applied(model, plan)
    plain = {type(part): _attributes(part) for part in blocks().modules()}
    assert _attributes(copy.copy(model)) == plain[nn.Sequential]
    ways = (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _saved_and_loaded)
    for way in ways:
        made = way(model)
        assert all(_attributes(part) == plain[type(part)] for part in made.modules())
        seen = weakref.ref(made)
        gc.disable()
        try:
            del made
            assert seen() is None  # at once, so in no cycle
        finally:
            gc.enable()
    session.undo()
    assert all(_attributes(part) == plain[type(part)] for part in model.modules())


class _WithOwnState(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # as a LightningModule's, which leaves nothing of torch's out


def test_a_class_that_says_itself_what_is_pickled_has_nothing_of_memlab_either() -> None:
    model = _WithOwnState(2, 2)
    before = _attributes(model)
    with fit(Workload(model, torch.optim.SGD(model.parameters())), ""):
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert _attributes(made) == before
        hook = model.register_forward_hook(lambda *_: None)  # for which each call puts something on the model
        model(torch.ones(1, 2))
        hook.remove()
        assert _attributes(copy.deepcopy(model)) == before
    assert _attributes(model) == before


def _attributes(module: nn.Module) -> dict[str, int]:
    """Names of a module's attributes, and how many hooks and options of hooks it has."""
    return {name: len(value) if "_hooks" in name else 0 for name, value in vars(module).items()}


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    written = io.BytesIO()
    torch.save(model, written)
    assert b"memlab" not in written.getvalue()
    written.seek(0)
    return torch.load(written, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["", "--checkpoint", "--offload optimizer", "--precision pure-bf16"])
def test_copies_of_parametrized_layers_are_what_they_would_be_without_memlab(plan: str) -> None:
    """Their class copies all attributes, and asks for no state."""
    norm = nn.utils.parametrizations.weight_norm
    for model in (
        nn.Sequential(*(nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()) for _ in range(3))),
        norm(nn.Linear(4, 4)),
    ):
        if isinstance(model, nn.Sequential):
            model[0][0].forward = functools.partial(torch.mul, other=2)
        elif plan == "--checkpoint":  # a single layer
            continue
        plain = copy.deepcopy(model)
        own = [set(vars(module)) for module in plain.modules()]
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), plan):
            model(torch.ones(2, 4)).sum().backward()
            copied = copy.deepcopy(model)
        assert [set(vars(module)) for module in copied.modules()] == own
        assert torch.equal(copied(torch.ones(2, 4)), plain(torch.ones(2, 4)))
        assert [set(vars(module)) for module in model.modules()] == own


def test_a_saved_model_opens_where_memlab_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 2"):
        torch.save(model, tmp_path / "model.pt")
    found = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path / "model.pt")], capture_output=True, text=True, check=True
    ).stdout
    assert found.split("] ")[1] == f"method {model(torch.ones(2, 16)).sum().item()}\n"


class _Scored(torch.utils.data.Dataset[torch.Tensor]):
    """Rows with what a model says of them, which workers compute."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            scored: torch.Tensor = self.model(torch.full((1, 16), float(index))).squeeze(0)
        return scored


@pytest.mark.parametrize("plan", ["", "--accumulate 2 --bf16", "--checkpoint --offload optimizer", "--adam8bit"])
def test_workers_of_a_data_loader_get_the_model_as_it_is(plan: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    data = _Scored(model)
    expected = torch.stack([data[index] for index in range(4)])
    with fit(Workload(model, torch.optim.Adam(model.parameters())), plan):
        model(torch.ones(2, 16)).sum().backward()
        forked = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
        found = torch.cat([*forked])
        sent = pickle.dumps(data)  # what a worker that is spawned is sent
    assert torch.equal(found, expected)
    assert b"memlab" not in sent
    received = pickle.loads(sent)
    assert torch.equal(torch.stack([received[index] for index in range(4)]), expected)


@pytest.mark.parametrize("plan", ["", "--accumulate 2", "--checkpoint", "--precision pure-bf16", "--offload params"])
def test_a_whole_model_is_loaded_with_weights_only(plan: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), plan):
        torch.save(model, tmp_path / "model.pt")
        expected = {name: each.clone() for name, each in model.state_dict().items()}
    safe: list[Any] = [nn.Sequential, nn.Linear, nn.ReLU, set]
    with torch.serialization.safe_globals(safe):
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(each, expected[name]) for name, each in loaded.state_dict().items())


def test_an_own_forward_of_the_instance_is_kept_by_copies() -> None:
    model = blocks()
    model.forward = torch.nn.functional.relu  # type: ignore[method-assign, assignment]
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))):
        assert copy.deepcopy(model).forward is torch.nn.functional.relu
        assert model(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 1.0]
    assert vars(model)["forward"] is torch.nn.functional.relu


def test_tracers_scripts_and_transforms_see_the_model() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(4, 16)
    plain = model(inputs)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, parameters, (inputs,))
        return output.square().mean()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = torch.func.grad(loss)(parameters)
    for rescue in (False, True):
        with fit(
            Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--accumulate 2", rescue=rescue
        ) as session:
            assert torch.equal(torch.jit.trace(model, inputs)(inputs), plain)  # type: ignore[no-untyped-call]
            assert torch.equal(torch.jit.script(model)(inputs), plain)
            assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(inputs), plain)
            assert torch.equal(torch.vmap(model)(inputs), plain)
            found = torch.func.grad(loss)(parameters)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        said = [entry.text for entry in session.log]
        assert (
            said.count("calls inside of torch.func transforms are left as they are: the plan does not apply there") == 1
        )


class Vocabulary(nn.Module):
    """A feed-forward part whose weights have 1 MiB, and a head onto a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(128, 2048), nn.GELU(), nn.Linear(2048, 128))
        self.head = nn.Linear(128, 2048)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.part(rows))
        return out


@pytest.mark.parametrize(("plan", "half"), [("--chunk-loss", False), ("--tile 2", False), ("--tile 2 --bf16", True)])
def test_settings_of_parts_leave_calls_alone_that_are_as_they_are_written(plan: str, half: bool) -> None:
    model, rows, targets = Vocabulary(), torch.randn(6, 128), torch.arange(6)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tangents = {name: torch.ones_like(value) for name, value in weights.items()}

    def loss(weights: dict[str, torch.Tensor], rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (rows,)), targets)

    def without_hooks() -> list[torch.Tensor]:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return list(torch.autograd.grad(F.cross_entropy(model(rows), targets), list(model.parameters())))

    def found() -> list[torch.Tensor]:
        of_all = torch.func.grad(loss)(weights, rows, targets)
        of_each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, rows[:, None], targets[:, None])
        forward = torch.func.jvp(lambda given: loss(given, rows, targets), (weights,), (tangents,))
        return [*of_all.values(), *of_each.values(), *forward, *without_hooks()]

    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        expected = found()
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), plan):
            model(rows).sum().backward()
            assert all(map(torch.equal, found(), expected))


def test_hooks_run_once_around_the_call() -> None:
    model = nn.Linear(16, 3)
    rows: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    model.register_forward_hook(lambda _, __, output: rows.append(len(output)))
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--accumulate 2"):
        model(torch.randn(4, 16)).sum().backward()
    assert rows == [4, 4]
    assert "forward" not in vars(model)


class Recursive(nn.Module):
    """A model that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self.linear(self(inputs, depth - 1)) if depth else inputs


class OwnCall(nn.Module):
    """A model whose class says itself what calling it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.forward(inputs)


@pytest.mark.parametrize("kind", [Recursive, OwnCall])
def test_unusual_calls(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 5") as session:
        found = trained(model, optimizer)
        assert not any("had no effect" in entry.text for entry in session.log)
    assert found == pytest.approx(expected, rel=1e-6)
    assert set(vars(model)) == set(vars(plain))


def test_a_loop_that_goes_past_the_call_is_told() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 2") as session:
        trained(model.eval(), optimizer)
        assert session.usage.passed_by == (
            "--accumulate 2 had no effect: the loop trains Tower in eval mode only; call model.train() before"
        )
    model.train()
    with fit(Workload(model, optimizer), "--accumulate 2") as session:
        trained(model.forward, optimizer)
    assert [entry.text for entry in session.log if "no effect" in entry.text] == [
        "--accumulate 2 had no effect: the loop trains Tower without calling it (it calls parts of it, its forward directly, "
        "or it within compiled code or a transform of torch.func); call the model itself, or name the part that it calls with --model"
    ]


COMPILED_PLANS = (
    "",
    "--accumulate 2",
    "--offload optimizer,activations",
    "--release-grads",
    "--accumulate 2 --offload optimizer",
    "--checkpoint",
)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models(in_place: bool) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if in_place:
            model.compile(backend="aot_eager")
            return model, optimizer
        return torch.compile(model, backend="aot_eager"), optimizer

    expected = trained(*made())
    for plan in COMPILED_PLANS:
        model, optimizer = made()
        with fit(Workload(model, optimizer), plan, rescue="release" not in plan):
            assert trained(model, optimizer) == pytest.approx(expected, rel=1e-5), plan
    model, optimizer = made()
    name = type(model).__name__
    with pytest.raises(RefusalError) as refused:
        fit(Workload(model, optimizer), "--tile 2")
    assert str(refused.value) == (
        f"tiling: {name} is compiled, and compiled code does not look into its modules again; put the plan on "
        "the model before torch.compile, or train it uncompiled"
    )


@pytest.mark.parametrize("plan", ["--accumulate 2", "--bf16"])
def test_a_model_that_is_compiled_in_the_middle_keeps_its_plan(plan: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(4, 2)
    earlier = fit(Workload(other, torch.optim.SGD(other.parameters(), lr=0.1)), plan, rescue=False)
    with fit(Workload(model, optimizer), plan, rescue=False) as session:
        earlier.undo()
        for step in range(4):
            if step == 2:
                model.compile(backend="eager")
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        compiled = model._compiled_call_impl
        assert type(compiled).__name__ == "CallHook"
        assert not [entry.text for entry in session.log if "run whole" in entry.text]
    assert nn.Module.compile.__module__ == "torch.nn.modules.module"
    assert vars(model)["_compiled_call_impl"] is not compiled, "the user's own is there again"


def test_a_compiled_loss_is_left_alone() -> None:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = torch.compile(nn.functional.cross_entropy, backend="eager")
    with fit(Workload(model, optimizer), Plan(), rescue=True):
        for step in range(2):
            inputs, targets = pairs(step)
            loss_of(model(inputs), targets).backward()
            optimizer.step()


def hook_every_module(kind: str, seen: list[Any]) -> Any:
    every = nn.modules.module
    if kind == "looks before":
        return every.register_module_forward_pre_hook(lambda module, args: seen.append(type(module).__name__))

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        seen.append(output.detach().mean().item())
        return output * 0.9 if kind == "takes part" and isinstance(module, nn.Linear) else None

    return every.register_module_forward_hook(hook)


@pytest.mark.parametrize("plan", ["--accumulate 2", "--checkpoint", "--checkpoint every:2", "--offload activations"])
@pytest.mark.parametrize("kind", ["looks on", "looks before", "takes part"])
def test_hooks_of_every_module_run_as_often_as_ever(kind: str, plan: str) -> None:
    """They are seen in no module, and collect and change what those of a module do."""
    runs: list[tuple[list[float], list[Any]]] = []
    for flags in ("", plan):
        model, seen = blocks(), list[Any]()
        handle = hook_every_module(kind, seen)
        try:
            with fit(Workload(model, optimizer := torch.optim.AdamW(model.parameters())), flags):
                runs.append((trained(model, optimizer), seen))
        finally:
            handle.remove()
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    assert len(runs[0][1]) > 3 * 3
    if kind == "looks before":
        assert runs[1][1] == runs[0][1]
    else:
        assert runs[1][1] == pytest.approx(runs[0][1], rel=1e-4, abs=1e-6)


def test_hooks_of_every_module_and_optimizer_see_nothing_of_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "_known", {})  # the rates of this machine are measured anew
    model, seen = blocks(), list[Any]()
    workload = Workload(
        model, torch.optim.AdamW(model.parameters()), batch=pairs(0), loss_fn=nn.functional.cross_entropy
    )
    handles = [
        hook_every_module("looks before", seen),
        register_optimizer_step_pre_hook(lambda *_: seen.append("step")),
    ]
    try:
        assert predict(workload, "--checkpoint").peak_allocated_bytes > 0
        assert seen == []
        with fit(workload):
            trained(model, workload.optimizers[0], steps=1)
        assert seen[-1] == "step"
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_may_remove_itself_and_register_others_under_checkpointing() -> None:
    counted = []
    for flags in ("", "--checkpoint"):
        model, seen, handles = blocks(), [], []
        layer = model[0][0][0]

        def first(_module: nn.Module, _args: Any, _output: Any, seen: Any = seen, handles: Any = handles) -> None:
            seen.append("first")
            handles.pop().remove()
            handles.append(layer.register_forward_hook(lambda *_: seen.append("later")))  # noqa: B023 - called at once

        handles.append(layer.register_forward_hook(first))
        with fit(Workload(model, optimizer := torch.optim.AdamW(model.parameters())), flags):
            trained(model, optimizer)
            handles.pop().remove()
        counted.append((seen, len(layer._forward_hooks)))
    assert counted[1] == counted[0] == (["first", "later", "later"], 0)


@pytest.mark.parametrize("plan", ["--adam8bit", "--offload optimizer:disk", "--accumulate 2"])
@pytest.mark.parametrize("raises", [False, True], ids=["", "raising"])
def test_step_hooks_that_the_loop_registers_later_come_before_the_update(plan: str, raises: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []

    def first(*_step: Any) -> None:
        seen.append(model.weight.detach().clone())
        if raises:
            raise ValueError("not this batch")

    with fit(Workload(model, optimizer), plan):
        before = model.weight.detach().clone()
        model(torch.ones(4, 4)).sum().backward()
        hook = optimizer.register_step_pre_hook(first)
        with pytest.raises(ValueError, match="not this batch") if raises else nullcontext():
            optimizer.step()
        assert torch.equal(seen[0], before)
        assert torch.equal(model.weight.detach(), before) is raises
        hook.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_forward_can_be_given_to_another_module() -> None:
    model, other = blocks(), blocks()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--checkpoint"):
        parts = [
            (part, twin) for part, twin in zip(model.modules(), other.modules(), strict=True) if "forward" in vars(part)
        ]
        inputs, _ = pairs(0)
        for part, twin in parts:
            assert part.forward.__self__ is part
            assert part.forward.__func__ is type(part).forward
            given = types.MethodType(part.forward.__func__, twin)
            assert isinstance(part, nn.Linear) or torch.equal(given(inputs), twin(inputs))
    assert parts


def cloned(module: nn.Module) -> nn.Module:
    """Copy a module as meta-learning libraries do: with all attributes, and weights that have a graph."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    for table in ("_parameters", "_buffers", "_modules"):
        clone.__dict__[table] = getattr(module, table).copy()
    for name, parameter in module._parameters.items():
        clone._parameters[name] = None if parameter is None else parameter.clone()  # type: ignore[assignment]
    for name, part in module._modules.items():
        clone._modules[name] = None if part is None else cloned(part)
    return clone


@pytest.mark.parametrize("plan", ["", "--checkpoint", "--accumulate 2", "--offload activations", "--bf16"])
def test_a_copy_that_has_all_attributes_runs_its_own_weights(plan: str) -> None:
    model = blocks()
    inputs, targets = pairs(0)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), plan, rescue=not plan):
        clone = cloned(model)
        weights = [*clone.parameters()]
        gradients = torch.autograd.grad(nn.functional.cross_entropy(clone(inputs), targets), weights)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
        pairs_of_parts = zip(clone.modules(), blocks().modules(), strict=True)
        others = [vars(part).keys() ^ vars(plain_part).keys() for part, plain_part in pairs_of_parts]
    plain = blocks()
    expected = torch.autograd.grad(nn.functional.cross_entropy(plain(inputs), targets), [*plain.parameters()])
    assert all(map(torch.equal, gradients, expected))
    assert not any(others)
