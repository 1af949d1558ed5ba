"""Checkpointing of any module tree: generated models, and models as people write them, bit for bit as without it.

A run of 1,000 is `python -m tests.techniques.test_trees 0 1000`.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers import GPT2Config, GPT2LMHeadModel

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.measuring.runs import training_step
from memlab.records import Category
from memlab.runtime.modules import CacheOff
from memlab.techniques.checkpointing.look import same
from tests.techniques.trees import Case, differences
from tests.techniques.vision import MODELS, vision_workload

_SEEDS_PER_TEST = 10
_FIRST = [
    *range(0, 10, _SEEDS_PER_TEST),
    *(pytest.param(n, marks=pytest.mark.full) for n in range(10, 80, _SEEDS_PER_TEST)),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("first", _FIRST)
def test_generated_models_train_as_without_it(first: int) -> None:
    assert [wrong for seed in range(first, first + _SEEDS_PER_TEST) for wrong in _wrong(seed)] == []


def _wrong(seed: int) -> list[str]:
    """What is not as without checkpointing."""
    case = Case(seed)
    expected = _outcome(case, case.another())
    model = case.another()
    before = [vars(module).keys() for module in model.modules()]
    with fit(Workload(model), case.flags) as session:
        found = _outcome(case, model)
        wrong = [note for note in session.notes if "something else" in note]
    is_loops_own = isinstance(expected, str) and isinstance(found, str) and expected[:60] == found[:60]
    if isinstance(expected, str) or isinstance(found, str):
        wrong += [] if is_loops_own else [f"{expected!s:.80} and {found!s:.80}"]
    else:
        wrong += differences(expected, found)[:3]
    wrong += [] if [vars(module).keys() for module in model.modules()] == before else ["attributes are left"]
    wrong += [f"{mode} is left" for mode in _get_current_dispatch_mode_stack()]
    return [f"seed {seed} under {case.flags}, {case.loop}: {each}" for each in wrong]


def _outcome(case: Case, model: nn.Module) -> dict[str, Any] | str:
    """What a loop leaves, or its own error."""
    try:
        return case.trained(model)
    except RuntimeError as error:
        return str(error)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", ["full", "every:2", "selective", "budget:1GiB"])
def test_models_for_images_train_as_without_it(name: str, setting: str) -> None:
    left: list[list[torch.Tensor]] = []
    for flags in ("", f"--checkpoint {setting}"):
        load = vision_workload(name)
        torch.manual_seed(3)
        with fit(load, flags):
            losses = [training_step(load) for _ in range(3)]
        left.append([torch.tensor(losses), *load.model.state_dict().values(), torch.rand(2)])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


@pytest.mark.parametrize(("name", "most"), [("resnet", 0.9), ("unet", 0.7), ("vae", 0.8), ("sequential", 0.7)])
def test_models_for_images_keep_less_and_are_predicted(name: str, most: float) -> None:
    load = vision_workload(name)
    plain, found, predicted = (
        measure(load, "", steps=1),
        measure(load, "--checkpoint", steps=1),
        predict(load, "--checkpoint"),
    )
    assert found.breakdown[Category.ACTIVATIONS] < most * plain.breakdown[Category.ACTIVATIONS]
    assert predicted.peak_allocated_bytes == found.peak_allocated_bytes


def test_a_budget_for_parts_of_a_model_holds() -> None:
    load = vision_workload("sequential")
    with fit(load, "--checkpoint budget:2MiB") as session:
        for _ in range(2):
            training_step(load)
        (note,) = session.notes
    assert " blocks recomputed: " in note
    assert note.endswith("budget 2.0 MiB")
    with (
        fit(load, "--checkpoint budget:1KiB"),
        pytest.raises(RefusalError, match="recomputed they still keep their inputs"),
    ):
        training_step(load)


class Chain(nn.Module):
    """Parts of one kind, one after the other."""

    def __init__(self, make: Callable[[], nn.Module], times: int = 3) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(times))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            hidden = part(hidden)
        return hidden


def mlp(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def gradients_of(model: nn.Module, flags: str | None, runs: int = 2) -> list[torch.Tensor]:
    """Gradients of the last of some runs, the first of which only looks."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(runs):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        model(inputs * 1.0).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("runs", [1, 2])
def test_blocks_that_write_to_their_input(runs: int) -> None:
    torch.manual_seed(0)
    model = Chain(lambda: mlp(nn.ReLU(inplace=True)))
    expected = gradients_of(model, None)
    with fit(Workload(model), "--checkpoint"):
        assert differences(gradients_of(model, "--checkpoint", runs), expected) == []


_clock = np.zeros(100_000)  # more than is looked into


class DependsOnTime(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        _clock[0] += 1
        return hidden * float(_clock[0])


def test_a_part_that_computes_something_else_when_run_again_is_left_alone_and_said() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 32), DependsOnTime(), nn.GELU(), nn.Linear(32, 8), nn.GELU())
    model = nn.Sequential(first, *mlp(nn.Identity()), *mlp(nn.Identity()))
    with fit(Workload(model), "--checkpoint") as session:
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            assert session.notes[-1] == "0[0..2] computed something else when run again, and is not recomputed"


def test_what_is_no_number_is_not_the_same_as_zero() -> None:
    values = torch.tensor([1.0, math.nan])
    assert same(values, values.clone())
    assert not same(values, torch.tensor([1.0, 0.0]))
    assert not same(values, "values")


def test_hooks_that_only_look_run_once_and_those_that_change_something_run_again() -> None:
    torch.manual_seed(0)
    model, seen = Chain(lambda: mlp(nn.Identity())), []
    model.parts[0][1].register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    model.parts[1][1].register_forward_hook(lambda _m, _i, out: out * 2)
    expected = gradients_of(model, None, 1)
    seen.clear()
    with fit(Workload(model), "--checkpoint"):
        assert differences(gradients_of(model, "--checkpoint", 1), expected) == []
    assert len(seen) == 1


class Trainer(nn.Module):
    """Its loop calls its layers, and never itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        )
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))

    def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(inputs)).square().mean()


class Ran(TorchDispatchMode):
    """Counts how often an operator runs; what modules count is put back when they run again."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator, self.times = operator, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func is self.operator
        return func(*args, **(kwargs or {}))


def test_loops_that_call_layers_of_the_model() -> None:
    left, runs = [], []
    for flags in ("", "--checkpoint"):
        model = Trainer()
        with fit(Workload(model), flags), Ran(torch.ops.aten.gelu.default) as ran:
            for _ in range(2):
                model.training_step(torch.ones(4, 8)).backward()
        left.append([*model.state_dict().values(), *(p.grad for p in model.parameters())])
        runs.append(ran.times)
    assert differences(*left) == []
    assert runs[1] > runs[0] == 8  # they are computed again


def test_other_parameters_for_the_length_of_a_call_are_those_of_the_recomputation() -> None:
    torch.manual_seed(0)
    model = Chain(lambda: mlp(nn.Identity()))
    inputs = torch.randn(4, 8)

    def gradient() -> torch.Tensor:
        others = {name: (2 * parameter).requires_grad_() for name, parameter in model.named_parameters()}
        loss = torch.func.functional_call(model, others, (inputs,)).square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    expected = gradient()
    with fit(Workload(model), "--checkpoint"):
        assert torch.equal(gradient(), expected)


class Memory:
    """What decoders put keys and values in."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []


class Decoder(nn.Module):
    """Each block puts its input into a memory, where its configuration says so, and computes from all that is in it."""

    def __init__(self, *, use_cache: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = type("Config", (), {"use_cache": use_cache})()
        self.blocks = nn.ModuleList(Remembering() for _ in range(3))

    def forward(self, hidden: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        remembers = self.config.use_cache if use_cache is None else use_cache
        memory = Memory() if remembers else None
        for block in self.blocks:
            hidden = block(hidden, memory=memory)
        return hidden


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(nn.LayerNorm(8))

    def forward(self, hidden: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
        if memory is not None:
            memory.values.append(hidden)
            hidden = torch.stack(memory.values).sum(0)
        return self.inner(hidden)


class Wrapper(nn.Module):
    """A wrapper that hands everything on, as those of adapters do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_cache_of_a_model_within_a_wrapper_is_off_in_training_and_on_again() -> None:
    expected = gradients_of(Wrapper(Decoder(use_cache=False)), None)
    model = Wrapper(Decoder(use_cache=True))
    with fit(Workload(model), "--checkpoint"):
        assert differences(gradients_of(model, "--checkpoint"), expected) == []
        assert model.model.config.use_cache is True


def test_an_object_that_blocks_write_to_is_as_it_was_when_they_run_again() -> None:
    inputs = torch.randn(4, 8)
    found = []
    for flags in ("", "--checkpoint"):
        model = Decoder(use_cache=True)
        with fit(Workload(model), flags):
            # said in the call: the cache is off in memlab's call, so blocks are called with a memory of the loop's own
            memory = Memory()
            hidden = inputs
            for block in model.blocks:
                hidden = block(hidden, memory=memory)
            (hidden.square().mean() + memory.values[1].mean()).backward()
            assert len(memory.values) == 3
        found.append([parameter.grad for parameter in model.parameters()])
    assert differences(*found) == []


def test_copies_and_files_made_meanwhile_are_those_of_the_plain_model() -> None:
    load = vision_workload("unet")
    plain = {name: sorted(vars(module)) for name, module in load.model.named_modules()}
    with fit(load, "--checkpoint"):
        training_step(load)
        for made in (copy.deepcopy(load.model), pickle.loads(pickle.dumps(load.model))):
            assert {name: sorted(vars(module)) for name, module in made.named_modules()} == plain
        assert b"memlab" not in pickle.dumps(load.model)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    failed = 0
    for number in range(first, first + count):
        found = _wrong(number)
        failed += bool(found)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
    print(f"{count - failed} of {count} as without checkpointing")


class _Writing(nn.Linear):
    """Writes to its weights in each call: so that nothing more changes, or again and again."""

    def __init__(self, inputs: int, outputs: int, *, settles: bool) -> None:
        super().__init__(inputs, outputs)
        self.settles = settles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.settles:
            self.weight.data.clamp_(-0.2, 0.2)
        else:
            self.weight.data.mul_(0.99)
        return super().forward(x).relu()


@pytest.mark.parametrize("settles", [True, False])
def test_weights_that_a_part_writes_to_are_written_once(settles: bool) -> None:
    def losses(plan: str | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Writing(16, size, settles=settles) for size in (64, 16)), nn.Linear(16, 4))
        model = nn.Sequential(model[0], nn.Linear(64, 16), model[1], model[2])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        with nullcontext() if plan is None else fit(Workload(model, optimizer), plan):
            for _ in range(3):
                loss = model(torch.ones(32, 16)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    assert losses("--checkpoint") == losses(None)


class _Decoder(nn.Linear):
    """Calls its cache what its caller calls it, and tells whether it was to fill one."""

    def forward(self, rows: torch.Tensor, use_cache: bool | None = None, **caches: Any) -> torch.Tensor:
        self.asked = use_cache
        return super().forward(rows)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_of_the_loops_own_stays_on_by_whatever_name(name: str) -> None:
    """Transformers calls it `cache` since 5.24."""
    model = _Decoder(4, 4)
    off = CacheOff("checkpointing")
    assert off.options(model, "Decoder", {}) == {"use_cache": False}
    assert off.options(model, "Decoder", {name: (held := [1])}) == {name: held}
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    with pytest.raises(RefusalError, match=r"^checkpointing: the loop asks Decoder for a key-value cache"):
        off.options(model, "Decoder", {name: None})


def small_gpt2() -> GPT2LMHeadModel:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).train()


@pytest.mark.parametrize("flags", ["--checkpoint", "--accumulate 2"])
@pytest.mark.parametrize("is_asked", [True, False], ids=["asked for", "of the configuration"])
def test_a_loop_that_goes_on_from_a_key_value_cache_is_refused(flags: str, is_asked: bool) -> None:
    """It was called without one, and trained on other losses."""
    model, rows = small_gpt2(), torch.randint(0, 96, (4, 8))
    asked = {"use_cache": True} if is_asked else {}
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), flags):
        with pytest.raises(RefusalError, match=r"the loop asks GPT2LMHeadModel for a key-value cache") as refusal:
            before = model(input_ids=rows, **asked)
            model(input_ids=rows, past_key_values=before.past_key_values, **asked)
        assert refusal.value.is_late is not is_asked  # a call without the cache cannot be taken back
