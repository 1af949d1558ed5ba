"""Adapters in cells: by a flag and by a click, in loops of a Trainer, of Accelerate and by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.live.control import control_of
from memlab.session import session_of
from tests.jupyter.conftest import TRAIN, Cell

for package in ("peft", "transformers", "accelerate"):
    pytest.importorskip(package, reason=f"needs {package}")

_MAKE = """
import torch, transformers
torch.manual_seed(0)
ids = torch.randint(0, 64, (8, 12))
config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
                                 resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = transformers.GPT2LMHeadModel(config)
"""

_TRAINER = """
rows = [{{"input_ids": row, "labels": row}} for row in ids]
class Clicks(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        click(state.global_step)
args = transformers.TrainingArguments(output_dir={folder!r}, max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2,
                                      report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, save_strategy="no",
                                      lr_scheduler_type="constant", weight_decay=0.01)
trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=[Clicks()])
trainer.train()
held = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
"""

_ACCELERATE = """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
losses = []
for step in range(6):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    click(step + 1)
held = sum(len(group["params"]) for group in optimizer.param_groups)
"""


class Clicks:
    """Somebody who asks for adapters from another thread, or for none, once a step has ended."""

    def __init__(self, shell: Any, plans: dict[int, str]) -> None:
        self._shell, self._plans = shell, plans

    def __call__(self, step: int) -> None:
        if step in self._plans:
            control = control_of(self._shell.user_ns["model"])
            asking = threading.Thread(target=control.ask, args=("adapters", self._plans[step]))
            asking.start()
            asking.join()


@pytest.fixture
def ready(shell: Any, cell: Cell) -> Cell:
    """A model, and no clicks unless a test makes some."""
    assert cell(_MAKE).error is None
    shell.user_ns["click"] = Clicks(shell, {})
    return cell


def _weights(shell: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}


@pytest.mark.parametrize("loop", [_TRAINER, _ACCELERATE], ids=["Trainer", "Accelerate"])
def test_a_flag_trains_adapters_in_a_loop_that_makes_its_optimizer_later(
    shell: Any, ready: Cell, tmp_path: Path, loop: str
) -> None:
    before, own = _weights(shell), len([*shell.user_ns["model"].parameters()])
    ran = ready(
        f"%%memfit --lora r=4\n{loop.format(folder=str(tmp_path))}"
        if loop is _TRAINER
        else f"%%memfit --lora r=4\n{loop}"
    )
    assert ran.error is None
    assert "--lora r=4" in ran.out
    assert shell.user_ns["held"] == 16
    done = ready("%memfit undo")
    assert "waits beside GPT2LMHeadModel" in done.out
    after = _weights(shell)
    assert [*after] == [*before]
    assert all(torch.equal(after[name], before[name]) for name in before)
    optimizer = shell.user_ns["trainer"].optimizer if loop is _TRAINER else shell.user_ns["optimizer"]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == own


@pytest.mark.parametrize(
    ("loop", "off"), [(_TRAINER, "off"), (_ACCELERATE, "off:merge")], ids=["Trainer", "Accelerate"]
)
def test_a_click_brings_them_and_another_one_takes_them_off(
    shell: Any, ready: Cell, tmp_path: Path, loop: str, off: str
) -> None:
    counts: list[int] = []
    clicks = Clicks(shell, {2: "r=4", 4: off})

    def click(step: int) -> None:
        counts.append(sum(p.requires_grad for p in shell.user_ns["model"].parameters()))
        clicks(step)

    shell.user_ns["click"] = click
    own = len([*shell.user_ns["model"].parameters()])
    ran = ready(f"%%memfit\n{loop.format(folder=str(tmp_path)) if loop is _TRAINER else loop}")
    assert ran.error is None
    assert counts == [own, own, 16, 16, own, own]
    moment = control_of(shell.user_ns["model"]).moment()
    assert (moment.plan.label, moment.pending) == ("as written", None)
    assert shell.user_ns["held"] == own


def test_a_trainer_saves_what_peft_loads(shell: Any, ready: Cell, tmp_path: Path) -> None:
    import peft

    ran = ready(
        f"%%memfit --lora r=4\n{_TRAINER.format(folder=str(tmp_path))}\ntrainer.save_model({str(tmp_path / 'saved')!r})"
    )
    assert ran.error is None
    model = shell.user_ns["model"].eval()
    ids = shell.user_ns["ids"]
    with torch.no_grad():
        outputs = model(input_ids=ids).logits
    torch.manual_seed(0)
    fresh: dict[str, Any] = {}
    exec(_MAKE, fresh)
    loaded = peft.PeftModel.from_pretrained(fresh["model"], str(tmp_path / "saved")).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, outputs)


def test_refusals_are_one_line_and_off_says_what_becomes_of_it(shell: Any, made: Cell) -> None:
    ran = made(f"%%memfit --lora targets=q_proj\n{TRAIN}")
    assert str(ran.error) == "adapters: targets=q_proj matches no linear layer of Sequential; there are 0, 2, 4"
    assert session_of(shell.user_ns["model"]) is None
    assert made(f"%%memfit --lora r=2\n{TRAIN}").error is None
    merged = made("%memfit --lora off:merge")
    assert "is part of the weights of Sequential: undo does not take it out" in merged.out
    again = made("%memfit --lora off:drop")
    assert "no adapters of Sequential have learnt anything to drop" in f"{again.out}{again.error}"


def test_what_waits_after_an_undo_is_merged_by_a_line(made: Cell, shell: Any) -> None:
    assert made(f"%%memfit --lora r=2\n{TRAIN}").error is None
    undone = made("%memfit undo")
    assert "in the next plan --lora r=2,alpha=4 brings it back, --lora off:merge adds it to the weights" in undone.out
    before = [parameter.detach().clone() for parameter in shell.user_ns["model"].parameters()]
    merged = made("%memfit --lora off:merge")
    assert merged.error is None
    assert "what adapters learnt in 4 steps is part of the weights of Sequential" in merged.out
    assert not all(map(torch.equal, before, shell.user_ns["model"].parameters()))
    said = "no adapters of Sequential have learnt anything to merge into the weights; train some with --lora"
    assert said in str(made("%memfit --lora off:merge").error)
