"""`%memfit worst` predicts and rehearses the largest batch of a loader, and puts everything back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.jupyter.conftest import Cell

MAKE = """
import random, torch, transformers
from torch.utils.data import DataLoader, TensorDataset
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
optimizer = torch.optim.AdamW(model.parameters())
texts = [torch.randint(0, 200, (200 if i == 77 else random.Random(i).randint(10, 60),)) for i in range(100)]
def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "labels": ids.clone(), "of": len(rows)}
loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate)
def train(steps):
    for _, batch in zip(range(steps), loader):
        batch.pop("of")
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def with_loader(cell: Cell) -> Cell:
    assert cell(MAKE).error is None
    return cell


def peak_of(out: str, plan: str) -> tuple[str, str]:
    row = next(line for line in out.splitlines() if line.startswith(plan))
    words = row.removeprefix(plan).split()
    return " ".join(words[:2]), " ".join(words[2:4])


def test_it_is_measured_and_predicted_and_put_back(with_loader: Cell, shell: Any) -> None:
    assert with_loader("%%memfit\ntrain(2)").error is None
    model, optimizer = shell.user_ns["model"], shell.user_ns["optimizer"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    random_state = torch.get_rng_state()
    ran = with_loader("%memfit worst")
    assert ran.error is None
    assert "100 samples of 10 to 200 elements" in ran.out
    assert "as written fits the largest batch" in ran.out
    measured, predicted = peak_of(ran.out, "as written")
    assert measured == predicted
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, moments, [state["exp_avg"] for state in optimizer.state.values()]))
    # a run meets no more than this
    largest = with_loader(
        "%%memfit\nids = collate(sorted(texts, key=len)[-8:])['input_ids']\nmodel(input_ids=ids, labels=ids).loss.backward()\noptimizer.step()\noptimizer.zero_grad()"
    )
    assert peak_of(largest.out, "as written")[0] == measured


def test_a_plan_that_does_not_fit_says_so(with_loader: Cell) -> None:
    assert with_loader("%%memfit\ntrain(1)\n").error is None
    assert with_loader("%memfit device --capacity 12MiB").error is None
    assert "as written does not fit the largest batch: %memfit find --budget SIZE" in with_loader("%memfit worst").out
    assert "--accumulate 8 fits the largest batch" in with_loader("%memfit worst loader --accumulate 8").out
    assert with_loader("%memfit device --capacity none").error is None


def test_a_loop_with_a_loss_of_its_own(with_loader: Cell) -> None:
    make = "net = torch.nn.Linear(16, 4)\nsgd = torch.optim.SGD(net.parameters())\npairs = DataLoader(TensorDataset(torch.randn(40, 16), torch.randint(0, 4, (40,))), batch_size=16)"
    assert with_loader(make).error is None
    flags = "pairs --model net --loss-fn torch.nn.functional.cross_entropy"
    assert "as written fits the largest batch" in with_loader(f"%memfit worst {flags}").out
    loop = "for x, y in pairs:\n    torch.nn.functional.cross_entropy(net(x), y).backward()\n    sgd.step()\n    sgd.zero_grad()"
    assert with_loader(f"%%memfit\n{loop}").error is None
    assert "the largest batch has 16 rows" in with_loader("%memfit worst pairs").out


def test_a_trainer_gives_the_loader_it_trains_on(with_loader: Cell, tmp_path: Any) -> None:
    make = (
        "arguments = transformers.TrainingArguments("
        f"{str(tmp_path)!r}, report_to=[], per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True)\n"
        "rows = [{'input_ids': each, 'labels': each} for each in texts]\n"
        "def joined(rows):\n    return {k: torch.nn.utils.rnn.pad_sequence([r[k] for r in rows], batch_first=True) for k in rows[0]}\n"
        "trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=joined)\n"
        "known = len(trainer.accelerator._dataloaders)"
    )
    assert with_loader(make).error is None
    ran = with_loader("%memfit worst trainer --model model")
    assert "100 samples of 20 to 400 elements" in ran.out
    assert "the largest batch that can come has 4 rows" in ran.out
    assert with_loader("print(len(trainer.accelerator._dataloaders) == known)").out.endswith("True\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("texts", "%memfit worst texts: a list is no torch DataLoader and no trainer with one; name one of these"),
        ("other", "%memfit worst other: no variable of that name; name a DataLoader, as in %memfit worst loader"),
        ("loader loader", "%memfit worst takes one loader, as in %memfit worst loader"),
    ],
)
def test_what_is_no_loader_is_refused(with_loader: Cell, line: str, said: str) -> None:
    assert said in str(with_loader(f"%memfit worst {line}").error)


def test_of_several_loaders_one_is_named(with_loader: Cell) -> None:
    assert with_loader("held_out = DataLoader(texts, batch_size=2, collate_fn=collate)").error is None
    said = "%memfit worst: several loaders (loader, held_out); name the one that trains, as in %memfit worst loader"
    assert said in str(with_loader("%memfit worst").error)
    assert with_loader("del loader, held_out").error is None
    said = (
        "%memfit worst needs a loader: no variable of this notebook is a torch DataLoader or a trainer; make it first"
    )
    assert said in str(with_loader("%memfit worst").error)


_OWN = {
    "a tensor of the loader twice": "model(input_ids=batch['input_ids'], labels=batch['input_ids'])",
    "another name": "model(input_ids=batch['ids'], labels=batch['ids'])",
    "by position": "model(batch['ids'], labels=batch['ids'])",
    "a mask": "model(input_ids=batch['input_ids'], attention_mask=(batch['input_ids'] >= 0).long(), labels=batch['input_ids'])",
    "positions": "model(input_ids=batch['input_ids'], position_ids=torch.arange(batch['input_ids'].shape[1])[None], labels=batch['input_ids'])",
}  # fmt: skip


@pytest.mark.parametrize("name", _OWN)
def test_what_the_loop_makes_of_a_batch_has_the_size_of_the_largest(cell: Cell, name: str) -> None:
    call = _OWN[name]
    key = "ids" if "['ids']" in call else "input_ids"
    assert cell(MAKE).error is None
    collate = f"lambda rows: {{'{key}': torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}}"
    assert cell(f"loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn={collate})").error is None
    step = f"    {call}.loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    assert cell(f"%%memfit\nfor _, batch in zip(range(2), loader):\n{step}").error is None
    ran = cell("%memfit worst")
    assert ran.error is None
    measured, predicted = peak_of(ran.out, "as written")
    assert measured == predicted
    largest = cell(f"%%memfit\nfor batch in [loader.collate_fn(sorted(texts, key=len)[-8:])]:\n{step}")
    assert peak_of(largest.out, "as written")[0] == measured
