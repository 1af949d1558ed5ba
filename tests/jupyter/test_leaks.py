"""What a loop holds more of after each step is named in the receipt, with the line that adds to it; clean loops get no word."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.jupyter.conftest import Cell

MAKE = """
import collections, functools, random, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(64, 256), nn.Linear(256, 16), []
    def forward(self, x, keep=False):
        hidden = torch.relu(self.first(x))
        if keep:
            self.seen.append(hidden)
        return self.last(hidden)
class Tracker:
    def __init__(self):
        self.values = []
    def update(self, value):
        self.values.append(value)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(32, 64), torch.randint(0, 16, (32,))
def step(out):
    loss = nn.functional.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""

# what is named, a part of what is said, and the loop
LEAKS = {
    "a sum of losses": ("total", "(line 4: total += step(model(x)))", "total = 0\nfor i in range(30):\n    total += step(model(x))"),
    "a list of losses": ("losses", "losses.append", "losses = []\nfor i in range(30):\n    losses.append(step(model(x)))"),
    "fourteen steps": ("losses", "keeps the graphs", "losses = []\nfor i in range(14):\n    losses.append(step(model(x)))"),
    "outputs": ("outs", "2.0 KiB more after each", "outs = []\nfor i in range(30):\n    outs.append(model(x))\n    step(outs[-1])"),
    "a hook": (
        "acts",
        "32.0 KiB more",
        "acts = []\nhook = model.first.register_forward_hook(lambda m, i, o: acts.append(o))\n"
        "for i in range(30):\n    step(model(x))\nhook.remove()",
    ),
    "a closure of a hook": (
        "store['first']",
        "store.setdefault",
        "def made():\n    store = {}\n    def hook(m, i, o):\n        store.setdefault('first', []).append(o)\n    return hook\n"
        "hook = model.first.register_forward_hook(made())\nfor i in range(30):\n    step(model(x))\nhook.remove()",
    ),
    "an attribute of the model": ("model.seen", "self.seen.append", "for i in range(30):\n    step(model(x, keep=True))\nmodel.seen = []"),
    "a dictionary of sums": (
        "sums['loss']",
        "reaches the graphs",
        "sums = {'loss': 0, 'steps': 0}\nfor i in range(30):\n    sums['loss'] = sums['loss'] + step(model(x))",
    ),
    "records": (
        "log",
        "log.append",
        "log = []\nfor i in range(30):\n    out = model(x)\n    log.append({'step': i, 'out': out})\n    step(out)",
    ),
    "a variable of a function": (
        "running",
        "running = running + ",
        "def train():\n    running = 0.0\n    for i in range(30):\n        running = running + step(model(x))\ntrain()",
    ),
    "an object": (
        "tracker.values",
        "self.values.append",
        "tracker = Tracker()\nfor i in range(30):\n    tracker.update(step(model(x)))",
    ),
    "a cache": (
        "embed",
        "50.0 KiB more after each step",
        "@functools.cache\ndef embed(i):\n    return torch.randn(200, 64)\nfor i in range(30):\n    embed(i)\n    step(model(x))",
    ),
    "errors": (
        "errors",
        "keep str(error) of each",
        "errors = []\ndef fails():\n    out = model(x)\n    raise ValueError('no')\nfor i in range(30):\n    step(model(x))\n"
        "    try:\n        fails()\n    except ValueError as error:\n        errors.append(error)",
    ),
    "a state that is not cut off": (
        "h",
        "h = 0.9 * h + out",
        "h = torch.zeros(32, 16)\nfor i in range(30):\n    out = model(x)\n    h = 0.9 * h + out\n    step(out)",
    ),
    "copies of the weights": (
        "saved",
        "KiB more after each step",
        "saved = []\nfor i in range(30):\n    step(model(x))\n"
        "    saved.append({k: v.clone() for k, v in model.state_dict().items()})",
    ),
    "one tensor that grows": (
        "everything",
        "32.0 KiB more after each step",
        "everything = torch.empty(0, 256)\nfor i in range(30):\n    out = model(x)\n"
        "    everything = torch.cat([everything, out.detach().repeat(1, 16)])\n    step(out)",
    ),
    "a buffer": (
        "model.average",
        "self.average = ",
        "class Counts(Net):\n    def __init__(self):\n        super().__init__()\n        self.register_buffer('average', torch.zeros(16))\n"
        "    def forward(self, x):\n        out = super().forward(x)\n        self.average = 0.9 * self.average + 0.1 * out.mean(0)\n"
        "        return out\nmodel = Counts()\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "for i in range(30):\n    step(model(x))",
    ),
    "copies of the model": (
        "best",
        "KiB more after each step (line 6: best.append(copy.deepcopy(model)))",
        "import copy\nbest = []\nfor i in range(30):\n    step(model(x)); model.seen.clear()\n    best.append(copy.deepcopy(model))",
    ),
    "inputs that want gradients": (
        "attacked",
        "8.0 KiB more after each step",
        "attacked = []\nfor i in range(30):\n    attacked.append(x.clone().requires_grad_())\n    step(model(attacked[-1]))",
    ),
}  # fmt: skip
CLEAN = {
    "averages of weights in modules": (
        "average, net = torch.optim.swa_utils.AveragedModel(model), None\nimport copy\nfor i in range(30):\n    step(model(x))\n"
        "    average.update_parameters(model)\n    net = copy.deepcopy(model) if i % 3 == 0 else net"
    ),
    "lists of parameters": (
        "groups = []\nfor i in range(30):\n    step(model(x))\n    groups.append([*model.parameters()])"
    ),
    "numbers": "losses = []\nfor i in range(30):\n    losses.append(step(model(x)).item())",
    "detached losses": "losses = []\nfor i in range(30):\n    losses.append(step(model(x)).detach())",
    "a sum of numbers": "total = 0.0\nfor i in range(30):\n    total += step(model(x)).item()",
    "a detached sum": "total = torch.zeros(())\nfor i in range(30):\n    total += step(model(x)).detach()",
    "the last loss": "for i in range(30):\n    out = model(x)\n    loss = step(out)",
    "an average of weights": (
        "ema = {k: v.clone() for k, v in model.state_dict().items()}\nfor i in range(30):\n    step(model(x))\n"
        "    for k, v in model.state_dict().items():\n        ema[k] = 0.9 * ema[k] + 0.1 * v"
    ),
    "accumulation by hand": (
        "for i in range(30):\n    parts = []\n    for _ in range(3):\n"
        "        parts.append(nn.functional.cross_entropy(model(x), y) / 3)\n        parts[-1].backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()"
    ),
    "a bounded queue": (
        "queue = collections.deque(maxlen=100)\nfor i in range(30):\n    out = model(x)\n"
        "    queue.append(out.detach())\n    step(out)"
    ),
    "longer and longer episodes": (
        "for i in range(30):\n    parts = []\n    for _ in range(1 + i // 3):\n"
        "        parts.append(nn.functional.cross_entropy(model(x), y))\n    sum(parts).backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()"
    ),
    "a state that is cut off": (
        "h = torch.zeros(32, 16)\nfor i in range(30):\n    h = 0.9 * h.detach() + model(x)\n    step(h)"
    ),
    "a dataset": (
        "data = [torch.randn(32, 64) for _ in range(2000)]\nfor i in range(30):\n    step(model(data[i]))"
    ),
    "classes that were told": (
        "told = []\nfor i in range(30):\n    out = model(x)\n    told.append(out.argmax(-1))\n    step(out)"
    ),
    "a hook that keeps the last": (
        "last = {}\nhook = model.first.register_forward_hook(lambda m, i, o: last.update(first=o))\n"
        "for i in range(30):\n    step(model(x))\nhook.remove()"
    ),
    "a table by class": (
        "table = collections.defaultdict(float)\nfor i in range(30):\n    table[i % 3] += step(model(x)).item()"
    ),
    "batches of many lengths": (
        "random.seed(0)\nfor i in range(30):\n    rows = random.randint(1, 32)\n    out = model(x[:rows].clone())\n"
        "    nn.functional.cross_entropy(out, y[:rows]).backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    ),
    "longer and longer batches": (
        "for i in range(30):\n    batch = torch.randn(32 + 8 * i, 64)\n    out = model(batch)\n"
        "    out.square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    ),
    "a generator": (
        "def batches():\n    for i in range(30):\n        yield torch.randn(32, 64)\nfor batch in batches():\n    step(model(batch))"
    ),
    "a loader": (
        "data = torch.utils.data.TensorDataset(torch.randn(320, 64))\n"
        "for _ in range(3):\n    for (batch,) in torch.utils.data.DataLoader(data, batch_size=32):\n        step(model(batch))"
    ),
    "a prior with its graph": (
        "prior = (torch.ones(16, requires_grad=True) * 2).exp()\nfor i in range(30):\n"
        "    nn.functional.cross_entropy(model(x) + prior, y).backward(retain_graph=True)\n"
        "    optimizer.step()\n    optimizer.zero_grad()"
    ),
    "metrics of each epoch": (
        "epochs = []\nfor epoch in range(6):\n    seen = []\n    for i in range(5):\n        seen.append(step(model(x)))\n"
        "    epochs.append(torch.stack(seen).mean().item())"
    ),
}  # fmt: skip

WORDS = re.compile(r"graphs of all steps|more after each|raised errors|failed in memlab")


@pytest.mark.parametrize("name", LEAKS)
def test_what_grows_is_named_with_its_line(cell: Cell, name: str) -> None:
    place, part, loop = LEAKS[name]
    assert cell(MAKE).error is None
    ran = cell(f"%%memfit\n{loop}")
    said = " ".join(ran.out.split())
    assert ran.error is None
    assert re.search(rf"step \d+: {re.escape(place)} (keeps|reaches|holds) ", said), said
    assert part in said


@pytest.mark.parametrize("name", CLEAN)
def test_clean_loops_get_no_word(cell: Cell, name: str) -> None:
    assert cell(MAKE).error is None
    ran = cell(f"%%memfit\n{CLEAN[name]}")
    assert ran.error is None
    assert not WORDS.search(ran.out), ran.out


def test_nothing_of_the_loop_is_kept(cell: Cell, shell: Any) -> None:
    assert cell(MAKE).error is None
    assert (
        cell(
            f"%%memfit\n{LEAKS['a list of losses'][2]}\nimport weakref\nlast = weakref.ref(losses[-1])\ndel losses"
        ).error
        is None
    )
    assert shell.user_ns["last"]() is None


def test_what_results_and_errors_of_earlier_cells_hold_is_told(cell: Cell) -> None:
    assert cell(MAKE).error is None
    assert cell("model(torch.randn(3000, 64))").error is None
    assert (
        cell("def fails():\n    large = torch.randn(1000, 1000)\n    raise ValueError('no')\nfails()").error is not None
    )
    assert cell("step(model(x))").error is None  # a result with a graph that is freed
    out = cell("%%memfit\nfor i in range(4):\n    step(model(x))").out
    # an output of 16 values, and 64 and 256 of its graph, of 3,000 rows
    assert "Out[2] holds 3.8 MiB from before: %reset -f out frees it" in out
    assert "the error of an earlier cell holds 3.8 MiB from before: the next cell that fails frees it" in out
    assert "Out[4]" not in out


def test_where_memory_runs_out_and_nothing_is_rescued_the_cause_is_told(cell: Cell) -> None:
    assert cell(MAKE).error is None
    loop = "kept = []\nfor i in range(30):\n    out = model(x)\n    kept.append(torch.cat([out] * 500).detach())\n    step(out)"
    ran = cell(f"%%memfit --capacity 12MiB --no-rescue\n{loop}")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert "step 12: kept holds 1000.0 KiB more after each step (line 5: kept.append(" in " ".join(ran.out.split())


def test_where_nothing_fits_the_cause_is_told(cell: Cell) -> None:
    assert cell(MAKE).error is None
    loop = "kept = []\nfor i in range(30):\n    out = model(x)\n    kept.append(torch.cat([out] * 100).detach())\n    step(out)"
    ran = cell(f"%%memfit --capacity 5MiB\n{loop}")
    said = str(ran.error)
    assert "Step 25 ran out of memory under every plan there is to try" in said
    assert (
        "What grows: kept holds 200.0 KiB more after each step (line 5: kept.append(torch.cat([out] * 100).detach()))"
        in said
    )


def test_no_code_of_the_user_runs_when_variables_are_looked_at(cell: Cell) -> None:
    assert cell(MAKE).error is None
    traps = """
asked = []
class Trap(list):
    def __iter__(self): asked.append("iter"); return super().__iter__()
    def __len__(self): asked.append("len"); return super().__len__()
    def __getattribute__(self, name): asked.append(name); return super().__getattribute__(name)
class Asks:
    __module__ = None
    def __getattr__(self, name): asked.append(name); raise AttributeError(name)
    def __eq__(self, other): asked.append("eq"); return True
    def __hash__(self): asked.append("hash"); return 1
    def __bool__(self): asked.append("bool"); return False
    @property
    def held(self): asked.append("held")
trap, asks, keyed = Trap([torch.ones(3)]), Asks(), {Asks(): 1}
asked.clear()
"""
    assert cell(traps).error is None
    ran = cell("%%memfit\nfor i in range(15):\n    step(model(x))")
    assert "failed in memlab" not in ran.out
    assert cell("print({*asked} - {'__class__'})").out == "set()\n"  # other parts ask for classes
