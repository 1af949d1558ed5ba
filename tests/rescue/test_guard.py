"""A guarded call changes nothing when nothing goes wrong, whatever the loop does with the model and its outputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memlab import RefusalError, Workload, fit
from memlab.measuring.ledger import Ledger
from memlab.rescue import calls
from memlab.rescue.rescuer import Rescuer
from memlab.runtime import loop_mode
from memlab.runtime.model_state import State
from memlab.session import Session
from memlab.session.snapshot import Snapshot
from tests.loops import cases
from tests.loops.cases import Tower, causal_batch, gpt2, llama
from tests.rescue.faults import Faults, Noted

Optimizer = torch.optim.Optimizer
Loop = Callable[[nn.Module, Optimizer, int], list[torch.Tensor]]


@functools.cache
def _pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cases.pairs(step)


def pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = _pairs(step)
    return inputs.detach(), targets


# -- models, beside those of the loops' tests --------------------------------------------------


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass
class Record:
    logits: torch.Tensor
    hidden: torch.Tensor
    name: str = "record"


class Holder:
    def __init__(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        self.logits, self.hidden = logits, [hidden]


class Packing(nn.Module):
    """Returns its outputs in a container of a chosen kind."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)
        self.pack = pack

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.first(inputs).tanh()
        return self.pack(self.second(hidden), hidden)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def partly_frozen() -> nn.Module:
    model = Tower()
    model.enter.requires_grad_(False)
    return model


# -- loops: each is one step -------------------------------------------------------------------


def own_criterion(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return [loss]


def labels_inside(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    out = model(**causal_batch(step))
    out.loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return [out.loss, out.logits]


def labels_inside_output_dropped(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    batch = {name: tensor.repeat(8, 1) for name, tensor in causal_batch(step).items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return [loss]


def own_criterion_output_dropped(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    batch = causal_batch(step)
    loss = model(input_ids=batch["input_ids"].repeat(8, 1)).logits.logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    return [loss]


def backward_twice(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    inputs = inputs.repeat(2000, 1)  # large enough for what the loop's criterion saves to be held
    loss = F.cross_entropy(model(inputs), targets.repeat(2000))
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.step()
    return [loss]


def penalty_on_input_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    inputs.requires_grad_()
    calls: list[torch.Tensor] = []
    inputs.register_hook(lambda gradient: calls.append(gradient.detach()))  # type: ignore[no-untyped-call]
    loss = F.cross_entropy(model(inputs), targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    total = loss + slope.square().sum()
    total.backward()
    optimizer.step()
    return [total, inputs.grad, torch.tensor(len(calls))]


def penalty_on_parameter_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    loss = F.cross_entropy(model(inputs), targets)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
    total.backward()
    optimizer.step()
    return [total]


def gradients_by_grad(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = F.cross_entropy(model(inputs), targets)
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return [loss]


def gradients_by_function(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    logits = model(inputs)
    torch.autograd.backward([F.cross_entropy(logits, targets), logits.square().mean()])
    optimizer.step()
    return [logits]


def gradients_of_some(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward(inputs=list(model.leave.parameters()))
    optimizer.step()
    return [loss]


def contrastive(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, _ = pairs(step)
    left = F.normalize(model(inputs), dim=1)
    right = F.normalize(model(inputs.roll(1, 1)), dim=1)
    loss = F.cross_entropy(left @ right.t(), torch.arange(len(left)))
    loss.backward()
    optimizer.step()
    return [loss]


def accumulated_by_hand(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    losses = []
    inputs, targets = pairs(step)
    for half in (slice(5), slice(5, 10)):
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = F.cross_entropy(model(inputs[half]), targets[half]) + 1e-3 * penalty
        loss.backward()
        losses.append(loss)
    optimizer.step()
    return losses


def checkpointed_by_the_loop(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    loss = F.cross_entropy(checkpoint(model, inputs, use_reentrant=False), targets)
    loss.backward()
    optimizer.step()
    return [loss]


def captured_alone(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    loss = _captured(model, step)[1].square().mean()
    loss.backward()
    optimizer.step()
    return [loss]


def captured_with_the_output(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    logits, hidden = _captured(model, step)
    loss = F.cross_entropy(logits, pairs(step)[1]) + hidden.square().mean()
    loss.backward()
    optimizer.step()
    return [loss]


def _captured(model: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept: list[torch.Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    try:
        return model(pairs(step)[0]), kept[0]
    finally:
        handle.remove()


def penalty_on_weights(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    loss = F.cross_entropy(model(inputs), targets) + 1e-3 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    return [loss]


def inputs_with_a_gradient(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    inputs.requires_grad_()
    loss = F.cross_entropy(model(inputs * 1.0), targets)
    loss.backward()
    optimizer.step()
    return [loss, inputs.grad]


def under_autocast(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return [loss]


def with_a_scaler(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    inputs, targets = pairs(step)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return [loss]


def evaluated_in_between(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    seen = own_criterion(model, optimizer, step)
    with torch.no_grad():
        seen.append(model(pairs(step)[0]))
    model.eval()
    seen.append(model(pairs(step)[0]))
    model.train()
    with torch.inference_mode():
        seen.append(model(pairs(step)[0]).clone())
    return seen


def through_function_transforms(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    inputs, targets = pairs(step)

    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (inputs,)), targets)

    gradients = torch.func.grad(loss_of)({name: p.detach() for name, p in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()
    return [loss_of(dict(model.named_parameters()))]


def functional_call(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    """Other tensors in the places of the parameters, with a graph of their own."""
    inputs, targets = pairs(step)
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, doubled, (inputs,)), targets)
    loss.backward()
    optimizer.step()
    return [loss]


def with_a_closure(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    inputs, targets = pairs(step)
    return [optimizer.step(closure)]  # type: ignore[arg-type, list-item]


def packed_in(read: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> Loop:
    def loop(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
        inputs, targets = pairs(step)
        logits, hidden = read(model(inputs))
        loss = F.cross_entropy(logits, targets) + hidden.square().mean()
        loss.backward()
        optimizer.step()
        return [loss, logits]

    return loop


def hidden_states_and_cache(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    out = model(**causal_batch(step), use_cache=True, output_hidden_states=True)
    keys = [layer.keys for layer in out.past_key_values.layers]
    loss = out.loss + sum(hidden.square().mean() for hidden in out.hidden_states) + sum(k.abs().mean() for k in keys)
    loss.backward()
    optimizer.step()
    return [loss, *keys]


_PACKS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "namedtuple": (Pair, lambda out: (out.logits, out.hidden)),
    "dataclass": (Record, lambda out: (out.logits, out.hidden)),
    "dict": (lambda a, b: {"logits": a, "hidden": b}, lambda out: (out["logits"], out["hidden"])),
    "object": (Holder, lambda out: (out.logits, out.hidden[0])),
    "nest": (lambda a, b: [{"x": (a, [b])}, 3, None, "s"], lambda out: (out[0]["x"][0], out[0]["x"][1][0])),
    "twice": (lambda a, b: (a, b, a), lambda out: (out[2], out[1])),
}

_LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "own criterion": (Tower, own_criterion),
    "dropout": (lambda: Tower(dropout=0.3), own_criterion),
    "labels inside": (gpt2, labels_inside),
    "labels inside, output dropped": (gpt2, labels_inside_output_dropped),
    "own criterion, output dropped": (gpt2, own_criterion_output_dropped),
    "labels inside, dropout": (lambda: gpt2(0.1), labels_inside),
    "tied": (Tied, own_criterion),
    "frozen parts": (partly_frozen, own_criterion),
    "batch norm": (Normed, own_criterion),
    "backward twice": (Tower, backward_twice),
    "gradient penalty on inputs": (Tower, penalty_on_input_gradients),
    "gradient penalty on parameters": (Tower, penalty_on_parameter_gradients),
    "autograd.grad": (Tower, gradients_by_grad),
    "autograd.backward": (Tower, gradients_by_function),
    "backward into some": (Tower, gradients_of_some),
    "contrastive": (lambda: Tower(dropout=0.3), contrastive),
    "accumulated by hand": (Tower, accumulated_by_hand),
    "checkpointed by the loop": (lambda: Tower(dropout=0.3), checkpointed_by_the_loop),
    "captured": (Tower, captured_alone),
    "captured, and the output": (Tower, captured_with_the_output),
    "penalty on weights": (Tower, penalty_on_weights),
    "inputs with a gradient": (Tower, inputs_with_a_gradient),
    "autocast": (Tower, under_autocast),
    "scaler": (Tower, with_a_scaler),
    "evaluated in between": (Normed, evaluated_in_between),
    "function transforms": (Tower, through_function_transforms),
    "functional call": (Tower, functional_call),
    "closure": (Tower, with_a_closure),
    "hidden states and cache": (llama, hidden_states_and_cache),
    **{f"a {name}": (lambda pack=pack: Packing(pack), packed_in(read)) for name, (pack, read) in _PACKS.items()},
}


@dataclass
class Trained:
    seen: list[torch.Tensor]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    random: torch.Tensor
    session: Session | None = None


def trained(name: str, *, guarded: bool, faults: Faults | None = None) -> Trained:
    build, loop = _LOOPS[name]
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    seen: list[torch.Tensor] = []
    with fit(Workload(model, optimizer), rescue=True) if guarded else nullcontext() as session:
        for step in range(3):
            optimizer.zero_grad()
            pairs(step)  # cached, so that faults do not count what makes a batch
            with faults if faults is not None and step == 1 else nullcontext():
                found = loop(model, optimizer, step)
            seen += [tensor.detach().clone() for tensor in found]
    return Trained(
        seen,
        [p.detach().clone() for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [buffer.clone() for buffer in model.buffers()],
        torch.get_rng_state(),
        session,
    )


# where gradients of one parameter meet in another order than in the loop's own graph, sums round otherwise
_ROUNDED = ("gradient penalty on inputs", "gradient penalty on parameters", "captured, and the output")


def assert_near(found: Trained, expected: Trained) -> None:
    for kind in ("seen", "parameters", "gradients", "buffers"):
        for a, b in zip(getattr(found, kind), getattr(expected, kind), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.random, expected.random)


def assert_same(found: Trained, expected: Trained) -> None:
    for kind in ("seen", "parameters", "gradients", "buffers"):
        left, right = getattr(found, kind), getattr(expected, kind)
        assert len(left) == len(right)
        far = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if not _equal(a, b)]
        assert not far, f"{kind} {far}"
    assert torch.equal(found.random, expected.random)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", _LOOPS)
def test_every_bit_is_the_same(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = trained(name, guarded=True)
    compare = assert_near if name in _ROUNDED else assert_same
    compare(found, trained(name, guarded=False))
    assert found.session is not None
    assert found.session.rescuer is not None
    assert found.session.rescuer.rescues == []


def test_what_is_not_rescued_is_said_once() -> None:
    for name, where in (
        ("functional call", "with computed weights (functional_call)"),
        ("checkpointed by the loop", "within torch.utils.checkpoint"),
    ):
        session = trained(name, guarded=True).session
        assert session is not None
        said = [str(entry) for entry in session.log if "is not rescued" in str(entry)]
        assert len(said) == 1
        assert f"memory that runs out in a call {where} is not rescued" in said[0]


# -- hooks, errors, leaks ----------------------------------------------------------------------


def test_hooks_on_parameters_fire_once_with_the_whole_gradient() -> None:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    before, after = [], []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: before.append(gradient.clone()))
        parameter.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    with fit(Workload(model, optimizer), rescue=True):
        own_criterion(model, optimizer, 0)
    assert len(before) == len(after) == len(list(model.parameters()))
    by_size = {gradient.shape: gradient for gradient in before}
    assert all(p.grad is not None and p.grad.shape in by_size for p in model.parameters())


def test_buffers_are_updated_once_when_a_pass_is_repeated() -> None:
    expected = trained("batch norm", guarded=False)
    count = Faults()
    trained("batch norm", guarded=True, faults=count)
    for nth in range(1, count.count, 3):
        found = trained("batch norm", guarded=True, faults=Faults([nth]))
        assert found.session is not None
        assert found.session.rescuer is not None
        assert len(found.session.rescuer.rescues) == 1
        # accumulation is refused for BatchNorm, so what is left repeats the very same pass
        assert_same(found, expected)


class Momentum(nn.Module):
    """Keeps an average of its weights in frozen layers of torch's, which its forward pass brings up to date."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.in_place = in_place

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for mean, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            if self.in_place:
                mean.data.lerp_(weight.data, 0.5)
            else:
                mean.data = mean.data * 0.5 + weight.data * 0.5
        return self.net(inputs) - self.average(inputs.flip(0)).detach()


@pytest.mark.parametrize("in_place", [True, False])
def test_frozen_weights_are_updated_once_when_a_pass_is_repeated(in_place: bool) -> None:
    def averages(at: list[int]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Momentum(in_place=in_place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=True) as session, Faults(at) as faults:
            for step in range(2):
                model(pairs(step)[0]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        counts.append(faults.count)
        assert session.rescuer is not None
        assert len(session.rescuer.rescues) == len(at)
        return [mean.detach() for mean in model.average.parameters()]

    counts: list[int] = []
    expected = averages([])
    for nth in range(12, counts[0] // 2, 3):  # before it is what is kept of the weights
        assert all(map(torch.allclose, averages([nth]), expected))


def test_a_loss_on_what_a_hook_has_kept_counts_once_when_the_pass_is_repeated() -> None:
    def weights(at: list[int]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, kept = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double(), []
        model[1].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=True) as session:
            loss = model(pairs(0)[0].double()).square().mean() + kept.pop().abs().mean()
            with Faults(at) as faults:
                loss.backward()
            optimizer.step()
        assert session.rescuer is not None
        assert len(session.rescuer.rescues) == len(at)
        counts.append(faults.count)
        return list(model.parameters())

    counts: list[int] = []
    expected = weights([])
    for nth in range(1, counts[0] + 1, 2):
        assert all(map(torch.allclose, weights([nth]), expected))


class Noting(nn.Module):
    """Counts and averages what comes to it in a backward pass, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("mean", torch.zeros(()))
        self.way, self.count = way, 0
        if way == "of a module":
            self.body[2].register_full_backward_hook(lambda _module, _inputs, outputs: self.note(outputs[0]))
        self.notes: list[float] = []

    def note(self, gradient: torch.Tensor) -> None:
        self.count += 1
        self.notes.append(float(gradient.norm()))
        self.mean.mul_(0.9).add_(gradient.norm().to(self.mean), alpha=0.1)

    def steered(self, gradient: torch.Tensor) -> torch.Tensor:
        self.note(gradient)
        return gradient / (1 + self.mean)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body[:3](inputs)
        if self.way == "on a tensor":
            hidden.register_hook(self.steered)
        if self.way == "a function":
            hidden = Noted.apply(hidden)  # type: ignore[no-untyped-call]
        output: torch.Tensor = self.body[3:](hidden)
        return output


@pytest.mark.parametrize("way", ["of a module", "of every module", "on a tensor", "a function"])
def test_what_a_backward_pass_leaves_is_left_once_when_it_is_repeated(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)  # torch leaves it behind

    def trained(at: list[int]) -> tuple[Any, ...] | None:
        torch.manual_seed(0)
        Noted.seen.clear()
        model = Noting(way).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = nullcontext()
        if way == "of every module":
            handle = nn.modules.module.register_module_full_backward_hook(
                lambda m, _i, outputs: model.note(outputs[0]) if isinstance(m, nn.Linear) else None
            )
            hook = contextlib.ExitStack()
            hook.callback(handle.remove)
        with hook, fit(Workload(model, optimizer), rescue=Rescuer(keep={"accumulation"})) as session:
            outputs = model(pairs(0)[0].double().requires_grad_())
            with Faults(at) as faults:
                try:
                    outputs.square().mean().backward()
                except torch.OutOfMemoryError:
                    # outside of the model, in a pass that calls the model's own hook, which is not repeated
                    assert way == "of every module"
                    return None
            optimizer.step()
        assert session.rescuer is not None
        assert len(session.rescuer.rescues) == len(at)
        counts.append(faults.count)
        return (
            model.count,
            model.notes,
            [*Noted.seen],
            float(model.mean),
            *map(torch.Tensor.tolist, model.parameters()),
        )

    counts: list[int] = []
    expected = trained([])
    assert expected is not None
    assert expected[1] or expected[2]
    found = [trained([nth]) for nth in range(1, counts[0] + 1, 2)]
    assert [each for each in found if each not in (None, expected)] == []
    assert found.count(expected) > len(found) / 2


@pytest.mark.parametrize("flags", ["", "--offload activations"])
def test_rows_that_are_nested(flags: str) -> None:
    class Ragged(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([row.mean(0) for row in super().forward(rows).relu().unbind()])

    def weights(guarded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Ragged(16, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), flags, rescue=True) if guarded else nullcontext():
            model(torch.nested.nested_tensor([torch.ones(3, 16), torch.ones(5, 16)])).square().sum().backward()
            optimizer.step()
        return list(model.parameters())

    assert all(map(torch.allclose, weights(False), weights(True)))


class Mapped(nn.Module):
    """Returns what it has made, and what it has made it from."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping, self.synthesis = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.mapping(inputs).tanh()
        return self.synthesis(latent).tanh(), latent


@pytest.mark.parametrize("how", ["path length", "split", "retained", "hooked", "unused"])
def test_an_output_that_another_is_computed_from_has_its_whole_gradient(how: str) -> None:
    def loop(guarded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = Mapped().double(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=True) if guarded else nullcontext():
            for step in range(2):
                image, latent = model(pairs(step)[0].double())
                loss = image.square().sum() + latent.exp().sum()
                if how == "path length":
                    (gradient,) = torch.autograd.grad(image.square().sum(), latent, create_graph=True)
                    loss = loss + gradient.square().sum()
                elif how == "split":
                    (gradient,) = torch.autograd.grad(loss, [latent])
                    loss = (latent * gradient).sum()
                elif how == "retained":
                    latent.retain_grad()
                elif how == "hooked":
                    latent.register_hook(found.append)
                    latent.register_hook(lambda gradient: 2 * gradient).remove()
                else:
                    with pytest.raises(RuntimeError, match="not have been used"):
                        torch.autograd.grad(latent.sum(), image, retain_graph=True)
                loss.backward()
                found += [latent.grad] if how == "retained" else []
                optimizer.step()
                optimizer.zero_grad()
        return [*found, *model.parameters()]

    expected, found = loop(False), loop(True)
    assert len(expected) == len(found)
    assert all(map(torch.allclose, expected, found))


def asked(how: str, output: torch.Tensor, latent: torch.Tensor) -> torch.Tensor | None:
    """The gradient of one output, as the loop asks for it by a function of torch's, from what follows from it."""
    if how == "autograd.grad":
        return torch.autograd.grad(output.square().sum(), latent)[0]
    found: list[torch.Tensor] = []
    if how == "retain_grad":
        latent.retain_grad()
    else:
        latent.register_hook(found.append)
    output.square().sum().backward()
    return latent.grad if how == "retain_grad" else found[0]


@pytest.mark.parametrize("flags", ["--accumulate 2", "--bf16", "--precision pure-bf16"])
@pytest.mark.parametrize("how", ["autograd.grad", "retain_grad", "register_hook"])
def test_a_gradient_that_a_technique_would_hide_is_refused(how: str, flags: str) -> None:
    model = Mapped()
    with (
        fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), flags, rescue=True),
        pytest.raises(RefusalError, match=rf"the loop asks for the gradient of .* \({how}\)"),
    ):
        asked(how, *model(pairs(0)[0]))


@pytest.mark.parametrize("how", ["autograd.grad", "retain_grad", "register_hook"])
def test_a_rescue_that_has_split_goes_back_where_the_loop_asks_for_a_gradient_within(how: str) -> None:
    def loop(at: list[int]) -> tuple[list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        model, found, plans = Mapped().double(), [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=True) as session:
            for step in range(3):
                rows = pairs(step)[0].double()
                with Faults(at if step == 1 else []):
                    output, _ = model(rows)
                output.square().sum().backward()
                optimizer.step()
                plans.append(session.plan.label)
                found.append(asked(how, *model(rows[:4])))
                optimizer.zero_grad()
                plans.append(session.plan.label)
        return [*found, *model.parameters()], plans

    (expected, _), (found, plans) = loop([]), loop([1])
    assert plans[2:4] == ["--accumulate 2", "as written"]
    assert all(map(torch.allclose, expected, found))


class Keeping(nn.Sequential):
    """Keeps what its first layer returns, as GradCAM has it kept by a hook."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.features = self[0](rows).tanh()
        return self[1](self.features)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["retained", "asked for"])
def test_features_have_gradients_where_something_was_compiled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(guarded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Keeping(nn.Linear(4, 8), nn.Linear(8, 1)).double()
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        with fit(Workload(model, optimizer), rescue=True) if guarded else nullcontext():
            for step in range(3):
                loss = model(torch.full((3, 4), 1.0 + step).double()).square().mean()
                if how == "retained":
                    model.features.retain_grad()
                else:
                    found += torch.autograd.grad(loss, model.features, retain_graph=True)
                loss.backward()
                found += [model.features.grad] if how == "retained" else []
                optimizer.step()
                optimizer.zero_grad()
        return [*found, *model.parameters()]

    expected = loop(False)
    for module in (loop_mode, calls):
        monkeypatch.setattr(module, "has_compiled_code", lambda: True)
    assert all(map(torch.equal, expected, loop(True)))


def test_weights_that_have_moved_to_another_module_are_counted_once() -> None:
    def gradients(at: list[int]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        rows = torch.randn(6, 4).double()
        with fit(Workload(model), rescue=Rescuer(keep=["accumulation"])):
            model(rows).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
            layer = nn.Linear(8, 2)
            layer.weight, layer.bias = model[2].weight, model[2].bias
            model[2] = layer
            loss = model(rows).square().sum()
            with Faults(at) as faults:
                loss.backward()
            counts.append(faults.count)
        return [p.grad for p in model.parameters() if p.grad is not None]

    counts: list[int] = []
    expected = gradients([])
    for nth in range(1, counts[0] + 1):
        assert all(map(torch.allclose, gradients([nth]), expected))


@pytest.mark.parametrize("draws", [False, True])
def test_random_numbers_of_the_loop_are_its_own_when_a_split_pass_is_repeated(draws: bool) -> None:
    """Of what the loop draws between the model's call and the backward pass, and after it."""

    def drawn(at: list[int]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5 if draws else 0.0), nn.Linear(8, 2)).double()
        with fit(Workload(model), "--accumulate 2", rescue=Rescuer(keep=["accumulation"])):
            output = model(torch.randn(6, 4).double())
            found = [torch.rand(3)]
            with Faults(at) as faults:
                output.square().sum().backward()
            counts.append(faults.count)
        return [*found, torch.rand(3)]

    counts: list[int] = []
    expected = drawn([])
    for nth in range(1, counts[0] + 1):
        assert all(map(torch.equal, drawn([nth]), expected)), nth


@pytest.mark.parametrize("output", [0, 1])
def test_a_gradient_that_is_retained_counts_once_when_the_pass_is_repeated(output: int) -> None:
    def gradient(at: list[int]) -> torch.Tensor | None:
        torch.manual_seed(0)
        model = Mapped().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=Rescuer(keep=["accumulation"])):
            outputs = model(pairs(0)[0].double())
            outputs[output].retain_grad()
            loss = outputs[0].square().sum() + outputs[1].exp().sum()
            with Faults(at) as faults:
                loss.backward()
            counts.append(faults.count)
        return outputs[output].grad

    counts: list[int] = []
    expected = gradient([])
    for nth in range(1, counts[0] + 1):
        assert torch.allclose(gradient([nth]), expected)


first = None  # the name of an attribute of `Packing`'s as well


def test_what_the_loop_has_done_since_is_kept_when_a_repetition_fails() -> None:
    global first
    model = Packing(lambda logits, hidden: logits + hidden.sum())
    model.note = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = State.of_model(model, torch.device("cpu"))
    with fit(Workload(model, optimizer), rescue=True):
        loss = model(torch.randn(4, 16)).square().mean()
        model.note = first = torch.ones(1)
        with Faults(lasting_from=3), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    assert model.note is first
    before.restore()  # a global that only has the name of an attribute is none of the model's
    assert first is not None


@pytest.mark.parametrize("where", ["model", "criterion", "hook"])
def test_errors_of_the_users_pass_through(where: str) -> None:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail(*_arguments: Any) -> None:
        raise ValueError("mine")

    with fit(Workload(model, optimizer), rescue=True) as session:
        if where == "model":
            model.leave.register_forward_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            _fail_in(where, model, kept, fail)
        model.leave._forward_hooks.clear()
        gc.collect()
        assert [reference for reference in kept if reference() is not None] == []
        own_criterion(model, optimizer, 0)
        assert session.rescuer is not None
        assert session.rescuer.rescues == []


def _fail_in(where: str, model: nn.Module, kept: list[Any], fail: Callable[..., None]) -> None:
    inputs, targets = pairs(0)
    kept.append(weakref.ref(inputs))
    logits = model(inputs)
    kept.append(weakref.ref(logits))
    if where == "criterion":
        fail()
    logits.register_hook(fail)
    F.cross_entropy(logits, targets).backward()


def test_a_loss_that_is_never_differentiated_keeps_nothing() -> None:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    with fit(Workload(model, optimizer), rescue=True), Ledger() as ledger:
        ledger.begin([])
        live_bytes = []
        for _ in range(6):
            inputs, targets = pairs(0)
            loss = F.cross_entropy(model(inputs), targets)
            seen = weakref.ref(loss)
            del loss, inputs, targets
            gc.collect()
            assert seen() is None
            live_bytes.append(ledger.live_bytes)
        assert max(live_bytes[1:]) <= live_bytes[0]


def test_a_loss_that_is_kept_keeps_no_activations() -> None:
    """Loops keep losses in lists; after the backward pass those hold next to nothing."""

    def live(guarded: bool) -> int:
        torch.manual_seed(0)
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters())
        with fit(Workload(model, optimizer), rescue=True) if guarded else nullcontext(), Ledger() as ledger:
            losses = [own_criterion(model, optimizer, 0)[0] for _ in range(2)]
            before = ledger.live_bytes
            losses += [own_criterion(model, optimizer, 0)[0] for _ in range(20)]
            return ledger.live_bytes - before

    assert live(guarded=True) <= live(guarded=False) + 1024


# -- memory ------------------------------------------------------------------------------------


def peak(loop: str, *, guarded: bool, large: bool = False) -> int:
    torch.manual_seed(0)
    build, step = _LOOPS[loop]
    model = build().train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    ledger = Ledger()
    with fit(Workload(model, optimizer), rescue=True) if guarded else nullcontext(), ledger:
        for index in range(2):
            optimizer.zero_grad()
            ledger.begin([])
            _until_the_step(step, model, optimizer, index)
        return ledger.peak_bytes


class _Standstill:
    """An optimizer that leaves everything as it is: its update has tests of its own."""

    def step(self) -> None:
        pass


def _until_the_step(step: Loop, model: nn.Module, optimizer: Optimizer, index: int) -> None:
    step(model, _Standstill(), index)  # type: ignore[arg-type]


_MEETING = ("contrastive", "penalty on weights", "accumulated by hand")


_ALONE = (
    "own criterion", "own criterion, output dropped", "labels inside", "labels inside, output dropped", "a tuple", "batch norm",
)  # fmt: skip


@pytest.mark.parametrize("loop", [*_ALONE, *_MEETING])
def test_the_peak_is_that_of_the_loop_alone(loop: str) -> None:
    """Where gradients of two calls, or of a call and a penalty, meet, both are there for a moment."""
    alone, guarded = peak(loop, guarded=False), peak(loop, guarded=True)
    gradients = sum(p.nbytes for p in _LOOPS[loop][0]().parameters())
    assert guarded <= 1.01 * alone + 1024 + (gradients if loop in _MEETING else 0)


@pytest.mark.parametrize("nth", [5, 12, 40, 120])
def test_expanded_tensors_are_put_back(nth: int) -> None:
    """An argument, a buffer and an attribute, several of whose elements lie in one place, as `arange(n).expand(rows, n)` has them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.register_buffer("mask", torch.ones(1, 4, 1).expand(6, 4, 1))
            self.scale = torch.ones(1, 1, 8).expand(6, 4, 8)

        def forward(self, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            hidden = self.places(at) + rows * self.mask[: len(rows)] * self.scale[: len(rows)]
            return self.head(self.body(hidden).relu().mean(1))

    def losses(faults: Sequence[int]) -> list[float]:
        torch.manual_seed(0)
        model, rows, at = Net().double(), torch.randn(6, 4, 8).double(), torch.arange(4).expand(6, 4)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        with fit(Workload(model, optimizer), rescue=True), Faults(list(faults)):
            for _ in range(3):
                loss = nn.functional.cross_entropy(model(rows, at), torch.arange(6) % 3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        Snapshot(Workload(model, optimizer)).restore()
        return found

    assert losses([nth]) == pytest.approx(losses([]), rel=1e-9)


def test_a_pass_that_is_to_be_differentiated_again_is_repeated() -> None:
    """As that of a penalty on gradients, in a critic of a WGAN-GP."""

    def trained(*, guarded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), rescue=True) if guarded else nullcontext() as session:
            for _ in range(2):
                rows = torch.randn(8, 6).double().requires_grad_()
                out = model(rows)
                with Faults([3]) if guarded else nullcontext():
                    (gradient,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
                ((gradient.norm(dim=-1) - 1).square().mean() + out.mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            if session is not None:
                assert {each.place for each in session.rescuer.rescues} == {"the backward pass"}
        return [each.detach() for each in model.parameters()]

    both = zip(trained(guarded=True), trained(guarded=False), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in both)


def test_a_call_that_has_written_to_its_weights_ends_in_the_error_of_memory() -> None:
    """As layers do that initialise themselves by their first batch (ActNorm)."""

    class Initialised(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.bias.data.add_(0)
            with torch.no_grad():
                self.bias.sub_(super().forward(rows).mean(0))
            return super().forward(rows).tanh()

    model = Initialised(6, 8)
    with fit(Workload(model, torch.optim.SGD(model.parameters())), rescue=True) as session:
        loss = model(torch.randn(4, 6)).square().mean()
        with Faults([6]), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            loss.backward()
        assert any("weights or inputs are written to in the forward pass" in str(entry) for entry in session.log)
