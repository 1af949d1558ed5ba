"""Tiny training loops, and the wiring of techniques to an optimizer that a session does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.plan import Plan
from memlab.runtime.mechanisms import StateForm
from memlab.runtime.optimizer_step import run_step
from memlab.runtime.plain_step import take_over
from memlab.runtime.state_entries import State
from memlab.runtime.state_layers import apply_layer, canonical_state_dict, pack_loaded, remove_layer
from memlab.techniques.base import Technique
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.offload.transfers import settle
from memlab.techniques.optimizer.optimizer import OptimizerConversion

Optimizer = torch.optim.Optimizer
Snapshot = dict[str, Any]


def techniques_of(flags: str) -> list[Technique]:
    """The techniques of a plan that deal with an optimizer, in the order in which they pack."""
    plan = Plan.parse(flags)
    kinds: list[type[Technique]] = [OptimizerConversion, OffloadOptimizer]
    return [kind(plan) for kind in kinds if kind.wanted(plan)]


@contextmanager
def applied(
    optimizer: Optimizer, techniques: Sequence[Technique] | str, bucket_bytes: int = 2**20
) -> Iterator[list[Technique]]:
    """Put techniques on an optimizer, as a session does, and take them off again."""
    layers = techniques_of(techniques) if isinstance(techniques, str) else list(techniques)

    def update(live: Optimizer) -> None:
        stepped = run_step(live, layers, bucket_bytes)
        for technique in layers:
            technique.step_ended(live, skipped=not stepped)

    with ExitStack() as undo:
        for at, technique in enumerate(layers):
            technique.check_optimizer(optimizer)
            technique.attach_optimizer(optimizer, undo)
            apply_layer(optimizer, technique)
            undo.callback(remove_layer, optimizer, technique, layers[at + 1 : at + 1])
        hooks = (
            optimizer.register_step_pre_hook(take_over(update)),
            optimizer.register_state_dict_post_hook(lambda live, saved: canonical_state_dict(live, saved, layers)),
            optimizer.register_load_state_dict_post_hook(lambda live: pack_loaded(live, layers)),
        )
        for handle in hooks:
            undo.callback(handle.remove)
        yield layers


def mlp(width: int = 96, seed: int = 0) -> torch.nn.Module:
    """A small network with parameters above and below the size from which moments are 8-bit."""
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))


def tiny_gpt2() -> torch.nn.Module:
    """GPT-2 with two blocks and random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 128, "n_positions": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """The loss on the batch of a step; the same for every model."""
    generator = torch.Generator().manual_seed(step)
    if hasattr(model, "config"):
        start = torch.randint(0, 128, (8, 1), generator=generator)
        tokens = (start + 3 * torch.arange(24)) % 128
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]
    inputs = torch.randn(64, 16, generator=generator)
    target = (inputs[:, :4].sin().sum(dim=1, keepdim=True) * inputs[:, 4:5]).tanh()
    return torch.nn.functional.mse_loss(model(inputs), target)


def train(
    model: torch.nn.Module, optimizer: Optimizer, steps: range, after: Callable[[], Any] = lambda: None
) -> list[float]:
    """Train for some steps and return the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative distance between two runs."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def snapshot(model: torch.nn.Module, optimizer: Optimizer) -> Snapshot:
    """Copies of everything a technique must leave as it was."""
    settle()  # state is read where it is kept
    state = {
        name: {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[p].items()
        }
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"state": state, "parameters": parameters, "settings": settings, "hooks": _hooks(optimizer)}


def _hooks(optimizer: Optimizer) -> list[int]:
    names = [name for name in vars(optimizer) if name.endswith("_hooks")]
    return [len(getattr(optimizer, name)) for name in names]


def same(one: Any, other: Any) -> bool:
    """Whether two snapshots are equal, tensors bit by bit and with dtype and device."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return bool(one == other)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all storages that optimizer state holds, each counted once."""
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class FailingAt(TorchDispatchMode):
    """Raises out of memory at the n-th tensor operation, once."""

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.left = operation
        self.has_failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            self.has_failed = True
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


class FailingToAllocateAt(FailingAt):
    """Raises out of memory at the n-th operation that needs memory, once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.endswith("_") or any(each.alias_info is not None for each in func._schema.returns):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def assert_recovers_anywhere(
    model: torch.nn.Module,
    optimizer: Optimizer,
    techniques: Sequence[Technique],
    kind: type[FailingAt] = FailingAt,
) -> None:
    """Fail at every tensor operation of a step in turn; completing it must give what an undisturbed step gives."""
    start = snapshot(model, optimizer)
    assert run_step(optimizer, techniques, 2**14)
    expected, operation = snapshot(model, optimizer), 0
    while True:
        _go_back(model, optimizer, start)
        done: set[torch.nn.Parameter] = set()
        failing = kind(operation)
        try:
            with failing:
                run_step(optimizer, techniques, 2**14, done=done)
        except torch.OutOfMemoryError:
            assert_nothing_half_done(model, optimizer, start, done)
            run_step(optimizer, techniques, 2**10, done=done)
        assert same(snapshot(model, optimizer), expected), operation
        if not failing.has_failed:
            break
        operation += 1
    assert operation > 10


def assert_nothing_half_done(
    model: torch.nn.Module, optimizer: Optimizer, start: Snapshot, done: set[torch.nn.Parameter]
) -> None:
    """Parameters that are not done are, with their state, what they were at the start."""
    now = snapshot(model, optimizer)
    for name, parameter in model.named_parameters():
        if parameter not in done:
            assert same(now["parameters"][name], start["parameters"][name]), name
            assert same(now["state"].get(name), start["state"].get(name)), name


def _go_back(model: torch.nn.Module, optimizer: Optimizer, start: Snapshot) -> None:
    """Make a model and its optimizer what they were, resident state bit by bit."""
    settle()  # it is written where it is kept
    for name, parameter in model.named_parameters():
        parameter.data.copy_(start["parameters"][name])
        if name not in start["state"]:
            optimizer.state.pop(parameter, None)
            continue
        for key, value in start["state"][name].items():
            kept = optimizer.state[parameter].get(key)
            if isinstance(kept, torch.Tensor) and kept.shape == value.shape:
                kept.copy_(value)
            else:
                optimizer.state[parameter][key] = copy.copy(value)


class Doubling(Technique, StateForm):
    """Keeps tensors doubled; to see when state is packed."""

    field = "offload"

    def __init__(self, name: str, log: list[str], per_step: bool) -> None:
        super().__init__(Plan())
        self.name, self.log, self.state_per_step = name, log, per_step

    def pack_state(self, optimizer: Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
        self.log.append("+" + self.name)
        return {k: v * 2 if k != "step" else v for k, v in state.items()}

    def unpack_state(self, optimizer: Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
        self.log.append("-" + self.name)
        return {k: v / 2 if k != "step" else v for k, v in state.items()}


def with_gradients(make: Callable[[list[torch.nn.Parameter]], Optimizer]) -> tuple[torch.nn.Module, Optimizer]:
    model = mlp()
    optimizer = make(list(model.parameters()))
    loss_of(model, 0).backward()
    return model, optimizer
