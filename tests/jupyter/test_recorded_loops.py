"""Loops that train one model in a way of their own: a step is recorded, and what is predicted for it is what cells then need."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from memlab import Workload, measure
from memlab.errors import WorkloadError
from memlab.jupyter.magic import loaded
from memlab.runtime import loop_mode
from memlab.session import session_of
from tests.helpers.kernel import frames_of_memlab
from tests.jupyter.conftest import MAKE, Cell

NET = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class Net(nn.Module):
    def __init__(self, width=64, words=200, has_loss=False):
        super().__init__()
        self.first, self.last, self.has_loss = nn.Embedding(words, width), nn.Linear(width, words), has_loss
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
    def forward(self, ids):
        x = self.first(ids)
        for block in self.blocks:
            x = block(x)
        out = self.last(x)
        return {"loss": F.cross_entropy(out.view(-1, 200), ids.view(-1))} if self.has_loss else out
"""
OWN_LOSS = "model = Net(); optimizer = torch.optim.AdamW(model.parameters())\nbatches = [torch.randint(0, 200, (8, 48)) for _ in range(6)]\n"
LOSS_WITHIN = OWN_LOSS.replace("Net()", "Net(has_loss=True)")
LOOPS = {
    "a criterion, and an output that is held and counted after the update": (
        OWN_LOSS,
        """
right = 0
for ids in batches:
    optimizer.zero_grad()
    out = model(ids)
    loss = F.cross_entropy(out.view(-1, 200), ids.view(-1))
    loss.backward()
    optimizer.step()
    right += (out.argmax(-1) == ids).sum().item()
""",
    ),
    "gradients that are dropped after the forward pass": (
        OWN_LOSS,
        """
for ids in batches:
    loss = F.cross_entropy(model(ids).view(-1, 200), ids.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "gradients that are zeroed and kept": (
        OWN_LOSS,
        """
for ids in batches:
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(ids).view(-1, 200), ids.view(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    ),
    "two calls for each update": (
        LOSS_WITHIN,
        """
for n, ids in enumerate(batches):
    loss = model(ids)["loss"] / 2
    loss.backward()
    if n % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "the loss within the model, and gradients that are dropped late": (
        LOSS_WITHIN,
        """
for ids in batches:
    loss = model(ids)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
}
PLANS = ["--accumulate 1", "--accumulate 2", "--bf16", "--checkpoint --optim adafactor", "--offload optimizer,params"]


def peaks(shell: Any) -> dict[str, int]:
    return {row.plan: row.peak_allocated_bytes for row in shell.run_line_magic("memfit", "report").measurements}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LOOPS)
def test_predicted_is_measured(shell: Any, cell: Cell, name: str) -> None:
    made, loop = LOOPS[name]
    cell(NET + made)
    assert cell(f"%%memfit\n{loop}").error is None
    asked = "predict --plans " + " ".join(f'"{flags}"' for flags in PLANS)
    predicted = {each.plan: each.peak_allocated_bytes for each in shell.run_line_magic("memfit", asked).predictions}
    for flags in PLANS:
        assert cell(f"%%memfit {flags}\n{loop}").error is None
    measured = peaks(shell)
    assert len(measured) == len(PLANS)
    assert predicted == {plan: pytest.approx(size_bytes, rel=0.003) for plan, size_bytes in measured.items()}


def test_plans_are_compared_by_the_recorded_step(shell: Any, cell: Cell) -> None:
    """Steps of their own need what cells need, and leave nothing; what they train on is made up, and is never kept."""
    made, loop = LOOPS["gradients that are zeroed and kept"]
    cell(NET + made)
    for flags in ("", "--bf16"):
        assert cell(f"%%memfit {flags}\n{loop}").error is None
    in_cells = peaks(shell)
    before = {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}
    compared = shell.run_line_magic("memfit", "compare --bf16")
    assert {row.plan: row.peak_allocated_bytes for row in compared.measurements} == {
        plan: pytest.approx(size_bytes, rel=0.003) for plan, size_bytes in in_cells.items()
    }
    assert not compared.measurements[0].losses
    history = loaded[shell].notebook.history_of(shell.user_ns["model"])
    workload = Workload(shell.user_ns["model"], [shell.user_ns["optimizer"]], history.batch)
    workload.tape = history.tape
    with pytest.raises(WorkloadError, match="returned no loss"):
        measure(workload, steps=1, keep=True)
    assert all(bool((value == before[name]).all()) for name, value in shell.user_ns["model"].state_dict().items())


def test_what_a_loop_does_that_a_plan_refuses_is_known_beforehand(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["two calls for each update"]
    cell(NET + made)
    cell(f"%%memfit\n{loop}")
    _, prediction = shell.run_line_magic("memfit", 'predict --plans "" "--release-grads"').predictions
    assert "the loop calls backward() a second time before optimizer.step()" in prediction.refused


def test_a_budget_is_chosen_again_once_the_loss_of_the_loop_is_known(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["a criterion, and an output that is held and counted after the update"]
    cell(NET + made)
    cell(f"%%memfit\n{loop}")
    budget_bytes = int(peaks(shell)["as written"] * 0.9)
    cell("%memfit undo")
    cell(NET + made)  # another model, of which nothing is known
    ran = cell(f"%%memfit --budget {budget_bytes}B\n{loop}")
    assert ran.error is None
    report = shell.run_line_magic("memfit", "report")
    plan = session_of(shell.user_ns["model"]).plan.label
    chosen = next(row for row in report.measurements if row.plan == plan)
    (prediction,) = [each for each in report.predictions if each.plan == chosen.plan]
    assert chosen.peak_allocated_bytes == pytest.approx(prediction.peak_allocated_bytes, rel=0.003)
    assert chosen.peak_allocated_bytes <= budget_bytes


def test_outputs_of_the_step_before_are_not_kept(shell: Any, cell: Cell) -> None:
    shell.user_ns["gone"] = gone = []
    cell("import torch, weakref\nmodel = torch.nn.Linear(64, 512); optimizer = torch.optim.SGD(model.parameters())\n")
    ran = cell("""%%memfit
for step in range(5):
    if step:
        mean = out.sum()
    out = model(torch.ones(256, 64))
    gone.append(weakref.ref(out))
    out.mean().backward()
    optimizer.step()
""")
    assert ran.error is None
    assert [each() is None for each in gone] == [True] * 4 + [False]


def test_data_of_the_loop_are_not_kept(shell: Any, cell: Cell) -> None:
    cell("""
import torch
model = torch.nn.Linear(64, 8); optimizer = torch.optim.SGD(model.parameters())
inputs, target = torch.randn(2**14, 64), torch.randint(0, 8, (2**18,))
""")
    ran = cell("""%%memfit
for step in range(4):
    chosen = torch.randint(0, 2**14, (32,))
    loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), target[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
    assert ran.error is None
    left = [weakref.ref(shell.user_ns[name]) for name in ("inputs", "target")]
    cell("del inputs, target")
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_a_warning_shows_the_line_of_the_loop(cell: Cell) -> None:
    cell(MAKE)
    ran = cell("""%%memfit
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(4):
        loss = torch.nn.functional.l1_loss(model(inputs), torch.zeros(4))
        loss.backward()
        optimizer.step()
""")
    assert ran.error is None
    ran = cell("print({each.filename.startswith(('/tmp/ipykernel', '<ipython-input')) for each in said}, len(said))")
    assert ran.out == "{True} 4\n"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("made", "step"),
    [
        ("few = torch.eye(8).to_sparse()", "loss = model(few @ torch.ones(8, 16)).square().mean()"),
        (
            """class Strict(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.nn.functional.linear, torch.Tensor.square, torch.Tensor.mean, torch.Tensor.add, torch.Tensor.backward):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})
x = torch.ones(8, 16).as_subclass(Strict)""",
            "loss = torch.nn.functional.linear(x, model.weight).square().mean() + 0 * model(torch.ones(8, 16)).sum()",
        ),
        ("import copy", "loss = model(torch.ones(8, 16)).square().mean(); best = copy.deepcopy(model.state_dict())"),
        (
            "",
            "m = torch.rand(8) > 0.5; m[0] = True; loss = model(torch.ones(8, 16))[m].square().mean()",
        ),
    ],
    ids=["sparse", "a strict class of tensors", "copies", "a loss that asks for values"],
)
def test_what_a_recorder_meets_is_no_error_of_the_loop(shell: Any, cell: Cell, made: str, step: str) -> None:
    cell(
        f"import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(16, 4); optimizer = torch.optim.SGD(model.parameters())\n{made}"
    )
    ran = cell(
        f"%%memfit\nfor _ in range(5):\n    {step}\n    loss.backward(); optimizer.step(); optimizer.zero_grad()"
    )
    assert ran.error is None, ran.err
    assert "5 steps" in ran.out
    assert cell("%memfit predict").error is None
    ran = cell(
        f"%%memfit --budget 1MiB\nfor _ in range(5):\n    {step}\n    loss.backward(); optimizer.step(); optimizer.zero_grad()"
    )
    assert ran.error is None, ran.err


def test_a_model_that_is_called_with_a_sparse_tensor_trains_on(cell: Cell) -> None:
    ran = cell("""%%memfit
import torch
class Graph(torch.nn.Linear):
    def forward(self, x, among):
        return super().forward(among @ x)
few, model = torch.eye(8).to_sparse(), Graph(16, 4)
optimizer = torch.optim.SGD(model.parameters())
for step in range(5):
    model(torch.ones(8, 16), few).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    assert ran.error is None, ran.err
    assert "5 steps" in ran.out


@pytest.mark.full
def test_a_budget_that_the_loss_of_the_loop_does_not_fit_lets_the_loop_go_on(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["a criterion, and an output that is held and counted after the update"]
    cell(NET + made)
    ran = cell(f"%%memfit --accumulate 2 --budget 2210KiB\n{loop}")  # micro-batches as they are: fewer plans
    assert ran.error is None, ran.err
    assert "the plan stays, though with the loop's own loss counted: nothing fits into" in ran.out
    assert session_of(shell.user_ns["model"]).steps == 6


def test_an_error_of_the_loop_shows_the_loop_alone(cell: Cell) -> None:
    cell(MAKE)
    ran = cell("""%%memfit
for step in range(3):
    loss = torch.nn.functional.cross_entropy(model(inputs), target[: 5 if step == 1 else 12])
    loss.backward()
    optimizer.step()
""")
    assert not frames_of_memlab(ran.out + ran.err)
    assert "memfit: " not in ran.out + ran.err
    assert "Expected input batch_size (12) to match target batch_size (5)" in ran.out + ran.err


def test_a_loop_that_steps_in_its_backward_pass_keeps_no_recorder(cell: Cell) -> None:
    """What ends while a function runs that it is told of is put back by torch, and goes all the same."""
    cell(MAKE)
    cell("""
del optimizer
of_each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def update(p):
    of_each[p].step()
    of_each[p].zero_grad()
for p in of_each:
    p.register_post_accumulate_grad_hook(update)
""")
    loop = "for _ in range(6):\n    torch.nn.functional.cross_entropy(model(inputs), target).backward()"
    assert cell(f"%%memfit --capacity 8GiB\n{loop}").error is None
    assert not loop_mode._paused
    assert not torch.overrides._get_current_function_mode_stack()
