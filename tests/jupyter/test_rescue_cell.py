"""`%%memfit` cells go on when memory runs out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from memlab.rescue.recovery import NothingFitsError
from memlab.session import session_of
from tests.jupyter.conftest import TRAIN, Cell
from tests.rescue.faults import Faults

MIXED_LENGTHS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
def fresh():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_head=4, n_layer=3, vocab_size=512, n_positions=256, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
texts = [torch.randint(0, 512, (8, length), generator=generator) for length in (24, 40, 24, 200, 40, 200)]
"""

LOOP = """
losses = []
for batch in texts:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""

BLOCKS = """
import torch
torch.manual_seed(0)
class Blocks(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 8 * width), torch.nn.GELU(), torch.nn.Linear(8 * width, width))
            for _ in range(6)
        )
    def forward(self, x, t):
        for block in self.blocks:
            x = x + block(x)
        return {"loss": torch.nn.functional.mse_loss(x, t)}
model = Blocks()
optimizer = torch.optim.AdamW(model.parameters())
x, t = torch.randn(2, 8, 64)
"""

OWN_CRITERION = LOOP.replace(
    "loss = model(input_ids=batch, labels=batch).loss",
    "logits = model(input_ids=batch).logits.float()\n"
    "    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())",
)


@pytest.fixture
def texts(shell: Any, cell: Cell) -> Cell:
    """A shell with a small GPT-2, and batches of text of which two are long."""
    assert cell(MIXED_LENGTHS).error is None
    return cell


@pytest.mark.few(1)
@pytest.mark.parametrize("loop", [LOOP, OWN_CRITERION], ids=["loss of the model", "loss of the loop"])
def test_a_loop_over_mixed_lengths_runs_to_the_end_on_a_device_too_small(shell: Any, texts: Cell, loop: str) -> None:
    texts(f"model, optimizer = fresh()\n{loop}\nexpected, reference = losses, model")
    texts("model, optimizer = fresh()")
    ran = texts(f"%%memfit --capacity 20MiB\n{loop}")
    session = session_of(shell.user_ns["model"])
    assert ran.error is None
    assert shell.user_ns["losses"] == pytest.approx(shell.user_ns["expected"], rel=1e-6)
    for mine, theirs in zip(shell.user_ns["model"].parameters(), shell.user_ns["reference"].parameters(), strict=True):
        # Adam divides small gradients by their own size, so rounding of 1e-7 may show in steps of lr
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=2e-3)
    out = re.sub(r"\n  +", " ", ran.out)  # receipts wrap long lines
    # changes of the plan, and not an event beside them (a graph that was made again)
    line = r"(step \d+: memory ran out in [^:]*: [^→(]* → (--[^,]*(?:,optimizer)?), same batch again)"
    rescues = re.findall(line, out)
    said, noted = rescues[: len(rescues) // 2], rescues[len(rescues) // 2 :]
    assert said == noted
    assert said[0][0].startswith("step 4: memory ran out in the ")
    assert said[-1][1] == session.plan.label
    assert session.plan.precision.value == session.plan.optimizer.value == "keep"
    assert session.rescuer is None
    assert re.search(r"^as written .*^--accumulate", ran.out, re.DOTALL | re.MULTILINE)


def test_it_fails_without_a_rescue(shell: Any, texts: Cell) -> None:
    texts("model, optimizer = fresh()")
    ran = texts(f"%%memfit --capacity 20MiB --no-rescue\n{LOOP}")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert not isinstance(ran.error, NothingFitsError)
    assert len(shell.user_ns["losses"]) == 3
    texts("%config MemLab.rescue = False")
    assert isinstance(texts(f"%%memfit --capacity 20MiB\n{LOOP}").error, torch.OutOfMemoryError)


def test_what_is_pinned_does_not_change(shell: Any, texts: Cell) -> None:
    texts("model, optimizer = fresh()")
    ran = texts(f"%%memfit --capacity 20MiB --keep accumulate\n{LOOP}")
    plan = session_of(shell.user_ns["model"]).plan
    assert ran.error is None
    assert plan.accumulation == 1
    assert plan.changes()
    texts("%memfit undo\nmodel, optimizer = fresh()\n%config MemLab.keep = 'accumulate'")
    texts(f"%%memfit --capacity 20MiB\n{LOOP}")
    assert session_of(shell.user_ns["model"]).plan == plan


def test_when_nothing_fits_the_cell_says_so_in_one_paragraph(shell: Any, texts: Cell) -> None:
    texts("model, optimizer = fresh()")
    ran = texts(f"%%memfit --capacity 4MiB --keep precision,optimizer,offload\n{LOOP}")
    text = ran.out + ran.err
    paragraph = next(line for line in text.splitlines() if line.startswith("UsageError: "))
    assert "NothingFitsError" not in text
    assert re.search(r"Step \d+ ran out of memory under every plan there is to try: ", paragraph)
    assert "more than there is: any GPU has that much; where a capacity was set, raise it" in paragraph
    assert "The kernel still works, and weights and optimizer state are as they were before step" in paragraph
    # and training goes on where it stopped, once there is room
    assert texts(f"optimizer.zero_grad()\n%memfit undo\n{LOOP}").error is None
    assert len(shell.user_ns["losses"]) == 6


def test_a_loop_that_handles_what_does_not_fit_goes_on_and_so_does_the_notebook(shell: Any, texts: Cell) -> None:
    texts("model, optimizer = fresh(); texts = texts[:4]")
    skipping = """
from accelerate.utils.memory import should_reduce_batch_size
losses, skipped, as_peers_see_it = [], 0, []
for batch in texts:
    try:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    except torch.OutOfMemoryError as error:
        skipped += 1
        as_peers_see_it.append(should_reduce_batch_size(error))
    optimizer.zero_grad()
"""
    ran = texts(
        f"%%memfit --capacity 8MiB --keep accumulation,checkpointing,offload,precision,optimizer,loss,tiling\n{skipping}"
    )
    assert ran.error is None
    assert shell.user_ns["skipped"] > 0
    assert len(shell.user_ns["losses"]) + shell.user_ns["skipped"] == 4
    assert all(shell.user_ns["as_peers_see_it"])


def test_a_plan_that_changes_numerics_does_not_stay_when_nothing_fits(shell: Any, cell: Cell) -> None:
    """There is no room to bring the parameters back: the last exact plan stays, and the message says so."""
    cell(BLOCKS)
    ran = cell("%%memfit --capacity 400KiB\nmodel(x, t)['loss'].backward()\noptimizer.step()")
    (paragraph,) = [line for line in (ran.out + ran.err).splitlines() if line.startswith("UsageError: ")]
    plan = session_of(shell.user_ns["model"]).plan
    assert {"precision", "optimizer"}.isdisjoint(plan.changes())
    assert plan.changes()
    assert f"There is no room to go back to as written: {plan.label} stays in force until %memfit undo." in paragraph
    assert "Try next" not in ran.out + ran.err
    log = f"step 1: memory ran out, and there is no room to go back to as written: {plan.label}"
    state = cell("%memfit").out
    assert log in state
    assert "peak allocated  > 400.0 KiB on CPU ledger" in state
    report = cell("%memfit report").out
    assert log in report
    assert "out of memory: The last plan tried asked for " in report
    assert "no plan is in force" in cell("%memfit undo\n%memfit").out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "--keep acumulate",
            "--keep acumulate: allowed are accumulation, batchnorm, checkpointing, precision, optimizer, ",
        ),
        ("--keep", "--keep needs a value: --keep FIELD[,FIELD…]"),
        ("--no-rescue --keep loss", "--keep says what a rescue may not change, and --no-rescue that there is none"),
    ],
)
def test_wrong_input_is_one_line(made: Cell, line: str, text: str) -> None:
    ran = made(f"%%memfit {line}\n{TRAIN}")
    assert f"UsageError: {text}" in ran.out + ran.err
    assert "Traceback" not in ran.out + ran.err


def test_a_wrong_default_is_refused_when_it_is_set(made: Cell, caplog: pytest.LogCaptureFixture) -> None:
    made("%config MemLab.keep = 'precison'")
    assert "did you mean precision?" in caplog.text
    assert made("%config MemLab.keep").result.result == ""


def test_a_quiet_cell_says_it_in_the_receipt_only(texts: Cell) -> None:
    texts("model, optimizer = fresh(); texts = texts[:4]")
    assert texts(f"%%memfit --quiet --capacity 20MiB\n{LOOP}").out.count("same batch again") == 1


def test_a_plan_that_was_tried_and_refused_on_the_way_is_no_refusal_of_the_cell(shell: Any, cell: Cell) -> None:
    cell("""
import torch, torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 3)
    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden), hidden
""")
    made = "torch.manual_seed(0); model = Net().double(); opt = torch.optim.SGD(model.parameters(), lr=0.1); seen = []"
    loop = """
for _ in range(2):
    out, hidden = model(torch.ones(6, 8).double()); hidden.retain_grad()
    loss = nn.functional.cross_entropy(out, torch.arange(6) % 3)
    opt.zero_grad(); loss.backward(); seen.append(hidden.grad.sum().item()); opt.step()
"""
    cell(made + loop)
    expected = shell.user_ns["seen"]
    for nth in (10, 16, 22):
        cell(made)
        with Faults([nth]):
            assert cell(f"%%memfit --capacity 8GiB --quiet{loop}").error is None
        assert shell.user_ns["seen"] == pytest.approx(expected)
        cell("%memfit undo")


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (
            "opt = Greedy(model.parameters())\nfor i in range(2):\n    model(x, t)['loss'].backward(); opt.step(); opt.zero_grad()",
            "memory that runs out in the update of Greedy is not rescued, as it cannot be done in parts. The update had begun, and "
            "may be done for a part of the weights: load a checkpoint to go on. ",
        ),
        (
            "whole = model(x, t)['loss']\nleaf = torch.zeros(1, requires_grad=True)\n"
            "def within(gradient):\n    with torch.enable_grad():\n        model(x.repeat(999, 1, 1), t)['loss'].backward()\n"
            "leaf.register_hook(within)\noptimizer.step()\nleaf.sum().backward()",
            "memory that runs out in a call within a backward pass (of a hook, say) is not rescued. ",
        ),
    ],
    ids=["an update of one's own", "a call of a hook"],
)
def test_what_is_not_rescued_says_why_and_what_to_try(cell: Cell, loop: str, said: str) -> None:
    cell(BLOCKS)
    cell("""
class Greedy(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self, closure=None):
        torch.zeros(2**28, device=self.param_groups[0]["params"][0].device)
""")
    ran = cell(f"%%memfit --capacity 40MiB\n{loop}")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert f"memfit: out of memory under as written: {said}" in ran.out + ran.err


def test_an_optimizer_that_keeps_its_own_step_is_not_said_to_be_as_before(cell: Cell) -> None:
    cell(BLOCKS)
    cell("optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)")
    ran = cell("""%%memfit --capacity 5MiB
def closure():
    optimizer.zero_grad()
    loss = model(x.repeat(64, 1, 1), t.repeat(64, 1, 1))["loss"]
    loss.backward()
    return loss
optimizer.step(closure)""")
    assert "the optimizer was in the middle of step 1: load a checkpoint to go on" in ran.out + ran.err


_VALIDATION = """
model(x, t)["loss"].backward()
optimizer.step()
model.eval()
with {mode}, faults:
    validated = model(x, t)["loss"]
"""


def test_validation_is_rescued_as_well_and_said(shell: Any, cell: Cell) -> None:
    cell(BLOCKS)
    shell.user_ns["faults"] = Faults([4])
    ran = cell(f"%%memfit --capacity 8GiB\n{_VALIDATION.format(mode='torch.no_grad()')}")
    assert ran.error is None
    with torch.no_grad():
        expected = shell.user_ns["model"](shell.user_ns["x"], shell.user_ns["t"])["loss"]
    assert float(shell.user_ns["validated"]) == pytest.approx(float(expected), rel=1e-6)
    out = re.sub(r"\n  +", " ", ran.out)
    line = "step 2: memory ran out in a call without gradients: as written → its rows in 2 parts, same batch again"
    assert out.count(line) == 2  # at once, and in the receipt


@pytest.mark.parametrize(
    "call", ["model(large)", "model.generate(large, max_new_tokens=3, do_sample=False, pad_token_id=0)"]
)
def test_the_capacity_of_a_cell_is_enforced_in_evaluations(shell: Any, cell: Cell, call: str) -> None:
    make = """
import torch, transformers
sizes = dict(n_layer=2, n_embd=64, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
optimizer = torch.optim.AdamW(model.parameters())
words, large = torch.randint(0, 200, (4, 16)), torch.randint(0, 200, (64, 64))
def train():
    model.train()(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
"""
    assert cell(make).error is None
    loop = f"train()\nwith torch.no_grad():\n    found = {call}\nfits = True"
    ran = cell(f"%%memfit --capacity 24MiB\n{loop}\ntrain()\ntrain()")
    assert ran.error is None
    assert "memory ran out in a call without gradients: as written → its rows in" in ran.out
    refused = cell(f"%%memfit --capacity 24MiB --no-rescue\n{loop}")
    assert isinstance(refused.error, torch.OutOfMemoryError)
    assert cell(f"%%memfit\n{loop}").error is None


def test_a_model_that_was_validated_in_parts_is_freed_with_its_name(shell: Any, cell: Cell) -> None:
    cell(BLOCKS.replace("model = Blocks()", "Blocks.generate = lambda self, x: x\nmodel = Blocks()"))
    shell.user_ns["faults"] = Faults([4, 5])
    assert cell(f"%%memfit --capacity 8GiB\n{_VALIDATION.format(mode='torch.no_grad()')}").error is None
    ran = cell(
        "import gc, weakref\nalive = weakref.ref(model)\ngc.disable()\ndel model, optimizer\nprint(alive() is None)\ngc.enable()"
    )
    assert "True" in ran.out


def test_advice_on_a_validation_is_about_it(shell: Any, cell: Cell) -> None:
    cell(BLOCKS)
    shell.user_ns["faults"] = Faults([4])
    ran = cell(f"%%memfit --capacity 8GiB\n{_VALIDATION.format(mode='torch.enable_grad()')}")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    said = (
        "memfit: out of memory under as written: a call of Blocks in eval mode keeps its graph: put torch.no_grad() around it. "
        "Try next: %%memfit --offload optimizer\n"
    )
    assert said in ran.out + ran.err
