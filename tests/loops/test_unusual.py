"""Loops that do what few loops do: under every setting they come out as without memlab, or are refused in one line."""

from __future__ import annotations

from collections import ChainMap, UserDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.rescuer import Rescuer
from memlab.session import sessions
from tests.rescue.faults import Faults

STEPS = 4
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Any]]


def mlp(inputs: int = 4, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


class FillsAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(outputs=4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor], batch: dict[str, Any]) -> torch.Tensor:
        x = self.body(x)
        seen.append(x)
        batch["logits"] = self.head(x * batch.pop("scale"))
        return batch["logits"]


class Tree(nn.Module):
    """A model that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join, self.out = nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, tree: Any, *, is_root: bool = True) -> torch.Tensor:
        if isinstance(tree, torch.Tensor):
            hidden = self.leaf(tree)
        else:
            hidden = self.join(torch.cat([self(branch, is_root=False) for branch in tree], 1))
        return self.out(hidden) if is_root else hidden


class Doubled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class HoldsItsOptimizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.optimizer = torch.optim.Adam(self.parameters(), 1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def updated(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def fills_a_list(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for step in range(STEPS):
        seen: list[torch.Tensor] = []
        batch: dict[str, Any] = {"scale": torch.full((6, 4), 0.5)}
        x = torch.randn(6, 4, requires_grad=step % 2 == 1)
        loss = F.mse_loss(model(x, seen, batch), torch.ones(6, 2)) + sum(each.square().mean() for each in seen)
        found += [updated(optimizer, loss), len(seen), sorted(batch), None if x.grad is None else x.grad.clone()]
    return found


class WritesToItsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(outputs=4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        made = self.body(torch.cat([x, hidden], 1)[:, :4] + hidden)
        hidden.copy_(made.detach())
        return self.head(made)


def carries_a_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    hidden = torch.zeros(6, 4)
    found = [updated(optimizer, model(torch.randn(6, 4), hidden).square().mean()) for _ in range(STEPS)]
    return [*found, hidden]


def forward_derivatives(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _ in range(STEPS):
        x = torch.randn(6, 4)
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            loss = value.square().mean() + tangent.square().mean()
        found.append(updated(optimizer, loss))
    return found


def batched_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _ in range(STEPS):
        x = torch.randn(6, 4, requires_grad=True)
        out = model(x)
        wanted = torch.eye(2)[:, None].expand(2, 6, 2)
        (jacobian,) = torch.autograd.grad(out, x, wanted, retain_graph=True, is_grads_batched=True)
        found += [jacobian, updated(optimizer, out.square().mean())]
    return found


def derived_jacobians(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _ in range(STEPS):
        x = torch.randn(6, 4, requires_grad=True)
        wanted = torch.eye(2)[:, None].expand(2, 6, 2)
        (jacobian,) = torch.autograd.grad(model(x), x, wanted, create_graph=True, is_grads_batched=True)
        found.append(updated(optimizer, jacobian.square().sum()))
    return found


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


_pytree.register_dataclass(Pair)


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, pair: Pair) -> torch.Tensor:
        return self.body(pair.left * pair.right)


def gradients_of_an_object(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _ in range(STEPS):
        pair = Pair(torch.randn(6, 4, requires_grad=True), torch.randn(6, 4))
        found += [updated(optimizer, model(pair).square().mean()), pair.left.grad]
    return found


def calls_itself(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for _ in range(STEPS):
        x = torch.randn(6, 4)
        found.append(updated(optimizer, model(((x, x + 1), (x * 2, (x, x - 1)))).square().mean()))
    return found


def without_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for _ in range(STEPS):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = model(torch.randn(6, 4)).square().mean()
        found.append(updated(optimizer, loss))
    return found


def rounds_what_is_saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    def pack(tensor: torch.Tensor) -> Any:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() and type(tensor) is torch.Tensor else tensor

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        return kept.to(torch.float64) if kept.is_floating_point() else kept

    found = []
    for rows in torch.randn(STEPS, 6, 4):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = F.cross_entropy(model(rows), torch.tensor([0, 1, 1, 0, 1, 0]))
        found.append(updated(optimizer, loss))
    return found


def checkpoints_its_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for rows in torch.randn(STEPS, 6, 4):
        output = checkpoint(model, rows, use_reentrant=False)
        found.append(updated(optimizer, checkpoint(F.mse_loss, output, torch.ones(6, 2), use_reentrant=False)))
    return found


class Attending(nn.Module):
    """Its attention saves other tensors by other kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


def chooses_its_kernels(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for rows in torch.randn(STEPS, 6, 5, 4):
        with sdpa_kernel(SDPBackend.MATH):
            output = model(rows)
        found.append(updated(optimizer, output.square().mean()))
    return [*found, torch.backends.cuda.flash_sdp_enabled(), torch.get_default_dtype()]


def refers_to_itself(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """A call with all weights frozen, as a model whose adapters are switched off is its own reference."""
    found = []
    for rows in torch.randn(STEPS, 6, 4):
        output = model(rows)
        model.requires_grad_(False)
        reference = model(rows)
        model.requires_grad_(True)
        found.append(updated(optimizer, (output - 0.9 * reference).square().mean()))
    return found


class Delegating:
    """A batch whose attributes are in a dictionary of its own."""

    def __init__(self, **data: torch.Tensor) -> None:
        self.data = data

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.data[name]


class Uncopied(Delegating):
    def __copy__(self) -> Self:
        raise TypeError("not to be copied")


class OfObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, batch: Any) -> torch.Tensor:
        rows = batch.rows if isinstance(batch, Delegating) else batch["rows"]
        return self.body(rows)


def batches_that_are_objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for kind in (Delegating, UserDict, Uncopied, ChainMap, MappingProxyType):
        rows = torch.randn(6, 4)
        batch = kind(rows=rows) if issubclass(kind, (Delegating, UserDict)) else kind({"rows": rows})
        found.append(updated(optimizer, model(batch).square().mean()))
    return found


def another_class(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(STEPS):
        model.__class__ = Doubled if step >= STEPS // 2 else nn.Sequential
        found.append(updated(optimizer, model(torch.randn(6, 4)).square().mean()))
    return found


def made_anew(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.__init__(model.parameters(), lr=1e-2)  # type: ignore[misc] # which some loops do to start over
        found.append(updated(optimizer, model(torch.randn(6, 4)).square().mean()))
    return found


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [updated(optimizer, model(torch.randn(6, 4)).square().mean()) for _ in range(STEPS)]


class Codes(nn.Parameter):
    """Frozen weights that become integers, and tell the layer their scale in its first call."""

    scale: float | None = 0.01


class QuantisesItself(nn.Module):
    """Turns frozen weights into integers in its first call, as layers of bitsandbytes do."""

    def __init__(self, weights: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight, self.adapter, self.scale = weights(torch.randn(4, 4), requires_grad=False), nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = 0.01
            if isinstance(self.weight, Codes):
                self.scale, self.weight.scale = self.weight.scale, None
            self.weight.data = (self.weight.data / self.scale).round().to(torch.int8)
        return x @ (self.weight.data * self.scale) + self.adapter(x)


def ticks() -> int:
    ticks.number = getattr(ticks, "number", 0) + 1  # type: ignore[attr-defined]
    return ticks.number  # type: ignore[attr-defined, no-any-return]


def keeps_a_default(*, seen: list[int] = [0]) -> int:  # noqa: B006 - what is tested
    seen[0] += 1
    return seen[0]


class Counter:
    number = 0

    def count(self) -> int:
        type(self).number += 1
        return self.number


class Held:
    def count(self) -> int:
        settings.number += 1
        return settings.count() + int(settings.number)


settings = ModuleType("settings")
settings.number = settings.others = 0  # type: ignore[attr-defined]


def _of_settings() -> int:
    settings.others += 1
    return int(settings.others)


settings.count = _of_settings  # type: ignore[attr-defined]


class CountsElsewhere(nn.Module):
    """Counts its calls where few models do: in functions, classes, a module of Python's, a sequence of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.counter, self.held = mlp(outputs=4), Counter(), Held()
        self.points = torch.quasirandom.SobolEngine(1)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counter.number += 1
        number = ticks() + keeps_a_default() + self.counter.count() + self.held.count()
        return self.body(x) * (1 + number % 7 + float(self.points.draw(1)))


def counts_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    def counts() -> list[int]:
        return [ticks.number, Counter.number, settings.number, settings.others]  # type: ignore[attr-defined]

    ticks.number = Counter.number = settings.number = settings.others = 0  # type: ignore[attr-defined]
    (seen,) = (keeps_a_default.__kwdefaults__ or {}).values()
    seen[0] = 0
    return [*plain(model, optimizer), *counts(), *seen, *(part.points.num_generated for part in model.children())]


def with_functions_exchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Calls functions of torch's, and the step of an optimizer's class, by others that change what they give."""
    calls, kind = [0], type(optimizer)
    loss, backward, step = F.mse_loss, torch.Tensor.backward, kind.step

    def counted(self: Any, closure: Any = None) -> Any:
        calls[0] += 1
        return step(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "mse_loss", torch.enable_grad()(lambda *args: 1.5 * loss(*args)))  # of torch's own by its look
        patch.setattr(torch.Tensor, "backward", lambda self, *args, **kwargs: backward(3 * self, *args, **kwargs))
        patch.setattr(kind, "step", counted)
        rows = torch.randn(STEPS, 6, 4)
        found = [updated(optimizer, F.mse_loss(model(each), torch.ones(6, 2))) for each in rows]
    return [*found, *calls]


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "fills a list": (FillsAList, fills_a_list),
    "writes to its argument": (WritesToItsArgument, carries_a_buffer),
    "forward derivatives": (mlp, forward_derivatives),
    "batched gradients": (mlp, batched_gradients),
    "derived jacobians": (mlp, derived_jacobians),
    "gradients of an object": (OfPairs, gradients_of_an_object),
    "calls itself": (Tree, calls_itself),
    "without hooks": (mlp, without_hooks),
    "rounds what is saved": (mlp, rounds_what_is_saved),
    "checkpoints its calls": (mlp, checkpoints_its_calls),
    "chooses its kernels": (Attending, chooses_its_kernels),
    "refers to itself": (mlp, refers_to_itself),
    "batches that are objects": (OfObjects, batches_that_are_objects),
    "another class": (mlp, another_class),
    "optimizer made anew": (mlp, made_anew),
    "optimizer in the model": (HoldsItsOptimizer, plain),
    "counts elsewhere": (lambda: nn.Sequential(*(CountsElsewhere() for _ in range(3))), counts_elsewhere),
    "functions exchanged": (mlp, with_functions_exchanged),
    "quantises its weights": (lambda: nn.Sequential(*(QuantisesItself(nn.Parameter) for _ in range(3))), plain),
    "quantises weights of its own": (lambda: nn.Sequential(*(QuantisesItself(Codes) for _ in range(3))), plain),
}
# calls that are left as they are written are not run again
NOT_REPEATED = ("forward derivatives", "without hooks", "checkpoints its calls")
NOT_SPLIT = {
    "checkpoints its calls": "Sequential is called within torch.utils.checkpoint, which counts what one run saves; use --checkpoint in",
    "fills a list": "FillsAList changes what is in its arguments; use --checkpoint or",
    "writes to its argument": "WritesToItsArgument writes to its argument[0][1] in place; use --checkpoint or",
    "batched gradients": "the loop takes several gradients of Sequential in one pass (is_grads_batched, vectorize=True); use --checkpoint or",
    "derived jacobians": "the loop takes several gradients of Sequential in one pass (is_grads_batched, vectorize=True); use --checkpoint or",
}
SETTINGS = {
    "guarded": ("", ()),
    "out of memory": ("", (9, 60, 111)),
    "out of memory, whole batches": ("", (20, 34, 89)),
    "accumulate": ("--accumulate 2", ()),
    "checkpoint, accumulate": ("--checkpoint --accumulate 2", ()),
    "checkpoint, offload": ("--checkpoint --offload activations,optimizer", ()),
    "release": ("--release-grads", ()),
}


def run(name: str, plan: str | None, faults: Sequence[int] = (), keep: Sequence[str] = ()) -> list[Any]:
    """What a loop finds, and the weights it comes to; None for a run without memlab."""
    torch.manual_seed(1)
    make, loop = LOOPS[name]
    model = make()
    optimizer = getattr(model, "optimizer", None) or torch.optim.Adam(model.parameters(), 1e-3)
    if plan is None:
        found = loop(model, optimizer)
    else:
        rescuer = Rescuer(keep) if plan == "" else False
        with fit(Workload(model, optimizer), plan, rescue=rescuer), Faults(faults):
            found = loop(model, optimizer)
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.fixture(autouse=True)
def in_fp64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:memlab. refused:RuntimeWarning")  # there is no observer to tell
@pytest.mark.few(50)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LOOPS)
def test_it_comes_out_as_without(name: str, setting: str) -> None:
    plan, faults = SETTINGS[setting]
    expected = run(name, None)
    refusal = NOT_SPLIT.get(name) if "--accumulate" in plan else None
    ends = torch.OutOfMemoryError if faults and name in NOT_REPEATED else RefusalError if refusal else None
    with pytest.raises(ends) if ends else nullcontext() as caught:
        found = run(name, plan, faults, ("accumulation",) if "whole" in setting else ())
    if caught is not None:
        assert str(caught.value).startswith(f"accumulation: {refusal}" if refusal else "CUDA out of memory")
        assert "\n" not in str(caught.value)
        assert sessions() == ()
        return
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        else:
            assert one == (pytest.approx(other, rel=1e-9) if isinstance(other, float) else other)


def test_gradients_that_the_loop_holds_are_not_freed_under_it() -> None:
    model = mlp()
    model(torch.ones(6, 4)).sum().backward()
    held = [p.grad for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fit(Workload(model, optimizer), "--release-grads"):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(6, 4)).sum().backward()
        with pytest.raises(
            RefusalError, match=r"the loop holds gradients beside its weights \(in a list, or as views\)"
        ):
            optimizer.step()
    assert all(one is p.grad for one, p in zip(held, model.parameters(), strict=True))


def test_a_packed_state_in_a_module_is_left_as_it_is() -> None:
    torch.set_default_dtype(torch.float32)
    model = HoldsItsOptimizer()
    with fit(Workload(model, model.optimizer), "--bf16 --adam8bit"):
        plain(model, model.optimizer)
    assert {*next(iter(model.optimizer.state.values()))} == {"step", "exp_avg", "exp_avg_sq"}
    assert not model.optimizer._optimizer_step_pre_hooks
    assert model._compiled_call_impl is None


def test_exporting_looks_through_recomputed_parts() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fit(Workload(model, optimizer), "--checkpoint"):
        plain(model, optimizer)
        exported = torch.export.export(model, (torch.ones(6, 4),)).module()
    assert torch.equal(exported(torch.ones(6, 4)), model(torch.ones(6, 4)))
