"""Models and tensors that hold their state where few do: each plan trains them as the plain loop does, or says why not."""

from __future__ import annotations

import copy
import functools
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit

PLANS = (
    "",
    "--accumulate 2",
    "--checkpoint",
    "--offload activations",
    "--bf16",
    "--precision pure-bf16",
    "--release-grads",
)


def blocks(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), *between, nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)))


class Meta(nn.Module):
    """Keeps tensors without values: a table of shapes, a layer that tells them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()
        self.shapes = [nn.Linear(8, 3, device="meta")]
        self.register_buffer("table", torch.empty(4, 2**15, device="meta"))
        self.last: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.last = self.shapes[0](rows.to("meta"))
        return self.body(rows) * (self.last.size(1) + self.table.size(0))


class Slotted(nn.Module):
    """Counts its calls in a slot."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(rows) * self.calls


class Marked(nn.Module):
    """Counts its calls at a parameter, as Opacus does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight: Any = self.body[0][0].weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return self.body(rows) * weight.calls


class Wide(nn.Sequential):
    """Has a part of many parts, each with statistics of its own."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), _Many()) for _ in range(2)))


class _Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Sequential(nn.Identity(), nn.BatchNorm1d(8)) for _ in range(150))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(rows) for part in self.each]).mean(0)


class Named(torch.Tensor):
    """Needs a name for what its method does, which results do not have."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        assert self.name
        return super().to(*args, **kwargs)


class Strict(torch.Tensor):
    """Knows only what this model does with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("linear", "tanh", "mean", "square", "backward", "__get__", "as_subclass"):
            raise TypeError(f"no {name}")
        return super().__torch_function__(func, types, args, kwargs or {})


Rows = Callable[[], torch.Tensor]


def rows_of(kind: type[torch.Tensor]) -> Rows:
    return lambda: torch.randn(8, 8).as_subclass(kind)


def trained(make: Callable[[], nn.Module], flags: str | None, rows: Rows, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nullcontext() if flags is None else fit(Workload(model, optimizer), flags, **options):
        for _ in range(3):
            optimizer.zero_grad()
            model(rows()).square().mean().backward()
            optimizer.step()
    return [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta]


@pytest.mark.parametrize(
    ("make", "plan"),
    # of BatchNorm a batch is not split
    [
        (make, plan)
        for make in (Meta, Slotted, Marked, Wide)
        for plan in PLANS
        if make is not Wide or "accu" not in plan
    ],
)
def test_state_in_unusual_places(make: Callable[[], nn.Module], plan: str) -> None:
    expected = trained(make, None, rows_of(torch.Tensor))
    found = trained(make, plan, rows_of(torch.Tensor), rescue=not plan)
    tolerance = 0.05 if "bf16" in plan else 1e-5
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Named, plan) for plan in PLANS]
    + [(Strict, plan) for plan in PLANS if plan != "--accumulate 2" and "bf16" not in plan],
)
def test_batches_of_a_class_of_the_users(kind: type[torch.Tensor], plan: str) -> None:
    expected = trained(blocks, None, rows_of(kind))
    found = trained(blocks, plan, rows_of(kind), rescue=not plan)
    tolerance = 0.05 if "bf16" in plan else 1e-5
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(found, expected, strict=True))


class Quantised(torch.Tensor):
    """A frozen weight of 8 bits, which says that it is fp32 and is dequantised where it is used, as those of torchao."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[return-value]

    def __init__(self, values: torch.Tensor) -> None:
        self.scale = values.abs().max() / 127
        self.values = (values / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            made = Quantised.__new__(Quantised, args[0])
            made.scale, made.values = args[0].scale, args[0].values
            return made
        plain = torch.utils._pytree.tree_map_only(
            Quantised, lambda each: each.values.float() * each.scale, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


def test_quantised_weights_are_left_alone_in_pure_bf16() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].weight = nn.Parameter(Quantised(torch.randn(8, 8)), requires_grad=False)
    weight, before = model[0].weight, model[1].weight.clone()
    with fit(Workload(model, torch.optim.SGD(model[1:].parameters(), lr=0.1)), "--precision pure-bf16"):
        model(torch.randn(4, 8)).sum().backward()
        assert model[1].weight.dtype is torch.bfloat16
    assert model[0].weight is weight
    assert type(weight) is Quantised
    assert torch.equal(model[1].weight, before)


def test_methods_of_parts_are_pickled_and_copied_as_without_a_plan() -> None:
    model = blocks()
    rows = torch.randn(2, 8)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--checkpoint"):
        forwards = [copy.deepcopy(model[0].forward), pickle.loads(pickle.dumps(model[0].forward))]
        expected = model[0](rows)
    for forward in forwards:
        assert type(forward).__name__ == "method"
        assert forward.__self__ is not model[0]
        assert torch.equal(forward(rows), expected)


def test_constants_may_share_memory_where_gradients_are_released() -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
            mean = torch.zeros(4)
            self.register_buffer("mean", mean[None])
            self[0].register_buffer("mean", mean[None])

    trained(Normed, "--release-grads", lambda: torch.randn(8, 4))


class Scaled(nn.Module):
    """Scales gradients by what is set when they come: by a hook, or by a function of its own."""

    def __init__(self, *, hooked: bool, loss: bool = False) -> None:
        super().__init__()
        self.body, self.by, self.gives_loss = blocks(), 1.0, loss
        if hooked:
            self.body[1].register_full_backward_hook(lambda part, given, _: (given[0] * self.by,))
        self.hooked = hooked

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.body(rows)
        out = out if self.hooked else _Scaling.apply(out, self)
        return out.square().mean() if self.gives_loss else out


class _Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, model: Any) -> torch.Tensor:
        ctx.model = model
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.model.by, None


@pytest.mark.parametrize(
    "plan", ["", "--accumulate 2", "--checkpoint", "--offload activations", "--accumulate 2 --checkpoint"]
)
@pytest.mark.parametrize(("hooked", "loss"), [(True, False), (False, False), (False, True)])
def test_a_backward_pass_reads_what_the_loop_sets_before_it(hooked: bool, loss: bool, plan: str) -> None:
    def gradients(flags: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Scaled(hooked=hooked, loss=loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nullcontext() if flags is None else fit(Workload(model, optimizer), flags, rescue=not flags):
            for step in range(2):
                out = model(torch.randn(8, 8))
                model.by = 2.0 + step
                (out if loss else out.square().mean()).backward()
                model.by = 1.0
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(gradients(plan), gradients(None), strict=True)
    )


def test_what_a_backward_pass_of_the_loop_changes_is_refused() -> None:
    model = blocks()
    seen: list[int] = []
    noting = False
    model[1].register_full_backward_hook(lambda _, given, __: seen.append(len(given[0])) if noting else None)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--accumulate 2"):
        loss = model(torch.randn(8, 8)).square().mean()
        noting = True
        with pytest.raises(RefusalError) as caught:
            loss.backward()
    assert seen == []
    assert str(caught.value) == (
        "accumulation: the backward pass of Sequential changes seen of a hook of 1, and would once for each micro-batch; use "
        "--checkpoint or --offload activations, which keep the batch whole"
    )


class Adapting(nn.Module):
    """Takes a step of its own within its forward pass, as test-time training does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(blocks(), blocks()), nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        def loss(weights: Any, each: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.head, weights, each).square().mean()

        weights = dict(self.head.named_parameters())
        steps = torch.func.grad(loss)(weights, rows)
        adapted = {name: weight - 0.1 * steps[name] for name, weight in weights.items()}
        return torch.func.functional_call(self.head, adapted, self.body(rows))


def test_a_forward_pass_that_differentiates() -> None:
    rows = rows_of(torch.Tensor)
    assert all(map(torch.equal, trained(Adapting, "--checkpoint", rows), trained(Adapting, None, rows)))
    with pytest.raises(RefusalError) as caught:
        trained(Adapting, "--offload activations", rows)
    assert str(caught.value) == (
        "offload: Adapting differentiates by torch.func in its forward pass, where torch lets nobody move what is saved; "
        "use --checkpoint"
    )


_FAILS = "MEMLAB_TEST_FAILS"


class Cached(nn.Module):
    """Draws a mask for each number of rows, once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()
        self.mask = functools.lru_cache(maxsize=8)(lambda rows: torch.rand(rows, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.body(rows * self.mask(len(rows)))
        if os.environ.pop(_FAILS, None):  # which no rescue puts back
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return out


class Hooked(Cached):
    """Has a hook on a weight in each call, which its loop takes away."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.handle = self.body[0][0].weight.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(rows)


@pytest.mark.parametrize("kind", [Cached, Hooked])
def test_what_a_call_that_ran_out_of_memory_has_made_goes(kind: type[Cached]) -> None:
    def after(flags: str | None) -> tuple[list[torch.Tensor], float]:
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nullcontext() if flags is None else fit(Workload(model, optimizer), flags, rescue=True):
            for count in (4, 8, 8):
                if flags is not None and count == 8:
                    os.environ[_FAILS] = "1"
                model(torch.randn(count, 8)).square().mean().backward()
                if isinstance(model, Hooked):
                    model.handle.remove()
                optimizer.step()
        return [*model.parameters()], torch.rand(()).item()

    (expected, number), (found, own_number) = after(None), after("")
    assert number == own_number
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))
