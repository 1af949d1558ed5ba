"""Several models in one cell: which a plan applies to, parts by model in the receipt, and commands that know all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.live.control import control_of
from memlab.records import LOOP, Category
from memlab.records.live_state import Activity
from memlab.records.run_record import RunRecord
from memlab.session import session_of, sessions
from tests.helpers.stages import Later
from tests.jupyter.conftest import Cell
from tests.jupyter.test_which_model import GAN, GAN_LOOP, SETUP


def plans() -> dict[str, str]:
    return {session.workload.name: session.plan.label for session in sessions()}


def test_parts_of_each_model_add_up_to_the_breakdown(shell: Any, cell: Cell) -> None:
    cell(SETUP + GAN)
    ran = cell(f"%%memfit\n{GAN_LOOP}")
    comparison = shell.run_line_magic("memfit", "report")
    (measured,) = comparison.measurements
    assert list(measured.models) == ["G", "D", LOOP]
    summed: dict[str, int] = {}
    for parts in measured.models.values():
        for name, size in parts.items():
            summed[name] = summed.get(name, 0) + size
    assert summed == dict(measured.breakdown)
    space = shell.user_ns
    for name in ("G", "D"):
        own_bytes = sum(p.numel() * 4 for p in space[name].parameters())
        assert measured.models[name][Category.PARAMETERS] == own_bytes
        # the peak may be before a model's first gradients and moments
        assert measured.models[name].get(Category.GRADIENTS, 0) in (0, own_bytes)
        assert measured.models[name].get(Category.OPTIMIZER_STATE, 2 * own_bytes) >= 2 * own_bytes
    assert any(Category.GRADIENTS in parts for parts in measured.models.values())
    # the generator's graph is kept while the critic is called
    assert measured.models["G"][Category.ACTIVATIONS] > 0
    table = [line.split() for line in ran.out.splitlines()]
    assert next(t for t in table if "gradients" in t)[:6] == ["plan", "at", "the", "peak", "parameters", "gradients"]
    assert "at the peak" in comparison._repr_html_()


def test_panel_and_state_of_each_have_its_name_and_the_peak_of_the_receipt(cell: Cell) -> None:
    cell(SETUP + GAN)
    assert cell("%memfit panel --model D").out.startswith("memfit · D 161 · AdamW · cpu\n")
    receipt = cell(f"%%memfit --adam8bit\n{GAN_LOOP}").out
    state = cell("%memfit").out
    peaks = [line.split(maxsplit=2)[2] for line in state.splitlines() if line.startswith("peak allocated")]
    assert len(peaks) == 2 == state.count("plan in force   --adam8bit")
    assert all(peak.partition(" on ")[0] in receipt for peak in peaks)


def test_steps_of_a_model_in_the_place_of_another_are_those_of_its_own_plan(
    shell: Any, cell: Cell, tmp_path: Path
) -> None:
    cell(SETUP)
    cell("""
def train(*asked):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for plan in (None, *asked):
        if plan is not None:
            get_ipython().run_line_magic("memfit", plan)
        for _ in range(3):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model
""")
    assert cell("%%memfit\ntrain('--accumulate 2')\nkept = train()").error is None
    cell(f"%memfit record {tmp_path / 'run.json'}")
    steps = RunRecord.load(tmp_path / "run.json").steps
    assert [step.plan for step in steps] == ["as written"] * 3 + ["--accumulate 2"] * 3 + ["as written"] * 3


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_a_model_that_comes_late_has_the_plan_that_the_others_have_come_to(cell: Cell, flags: str) -> None:
    cell(SETUP + GAN)
    ran = cell(f"""%%memfit {flags}
for model, optimizer in ((G, optG), (D, optD)):
    for _ in range(3):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if model is G:
        get_ipython().run_line_magic("memfit", "--accumulate 2")
""")
    assert ran.error is None, ran.err
    assert plans() == {"G": "--accumulate 2", "D": "--accumulate 2"}


@pytest.mark.parametrize("flag", ["--model G,D", "--model G --model D", "--model D"])
def test_a_plan_applies_to_those_that_are_named(shell: Any, cell: Cell, flag: str) -> None:
    cell(SETUP + GAN)
    ran = cell(f"%%memfit {flag} --checkpoint\n{GAN_LOOP}")
    assert ran.error is None, ran.err
    named = [name for name in ("G", "D") if name in flag.split("--model ", 1)[1]]
    attached = [name for name in ("G", "D") if session_of(shell.user_ns[name]) is not None]
    assert attached == named
    assert set(plans().values()) == {"--checkpoint"}


def test_undo_says_what_it_leaves(cell: Cell) -> None:
    cell(SETUP + GAN)
    cell(f"%%memfit --checkpoint\n{GAN_LOOP}")
    cell(f"%%memfit --model G --accumulate 2\n{GAN_LOOP}")
    assert cell("%memfit undo").out.splitlines() == [
        "memfit: G is as it was",
        "memfit: still in force: --checkpoint on D; %memfit undo all removes it",
    ]
    assert cell("%memfit undo all").out == "memfit: D is as it was\n"


def test_notes_say_which_model_they_are_about(shell: Any, cell: Cell) -> None:
    cell(SETUP + GAN)
    cell(f"%%memfit --checkpoint\n{GAN_LOOP}")
    (measured,) = shell.run_line_magic("memfit", "report").measurements
    assert sorted(note.partition(": ")[0] for note in measured.notes) == ["D", "G"]


def test_names_that_cannot_be_served(shell: Any, cell: Cell) -> None:
    cell(SETUP + GAN)
    for flags, said in (
        (
            "--model G,D --optimizer optG",
            "--optimizer optG with 2 models: each is updated by the optimizers that hold its parameters; leave "
            "--optimizer out",
        ),
        ("--model G,E", "--model E: no variable of that name; candidates here: G, D"),
        ("--model G,D --inference", "--model G,D: an inference cell has one model; name one"),
        ("--model G,D --nproc 2 --scale ddp", "--model G,D: a cell in several processes has one model; name one"),
    ):
        assert cell(f"%%memfit {flags}\n{GAN_LOOP}").err.strip() == f"UsageError: {said}"
        assert sessions() == ()


BOTH = """
actor, critic = net(), net(1)
optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], lr=0.01)
"""
BOTH_LOOP = """
for _ in range(4):
    optimizer.zero_grad()
    loss = cross_entropy(actor(x), y) + critic(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def test_commands_are_about_all_of_them(shell: Any, cell: Cell) -> None:
    cell(SETUP + GAN)
    cell(f"%%memfit\n{GAN_LOOP}")
    cell("%memfit switch --accumulate 2")
    assert plans() == {"G": "--accumulate 2", "D": "--accumulate 2"}
    refused = cell("%memfit switch --release-grads").err
    assert refused.strip().endswith("leave out --release-grads, or name one model with --model")
    assert plans() == {"G": "--accumulate 2", "D": "--accumulate 2"}
    exported = cell("%memfit export").out.splitlines()
    assert exported[:2] == [
        "# memlab plan: --accumulate 2",
        "# models: G, D; what is done here to the model and its optimizer is done to each of them",
    ]
    assert cell("%memfit undo").out.splitlines() == ["memfit: G is as it was", "memfit: D is as it was"]
    assert sessions() == ()


@pytest.mark.parametrize("clicked", ["G", "D"])
def test_the_panel_of_each_follows_and_steers_the_loop(shell: Any, cell: Cell, clicked: str) -> None:
    cell(SETUP + GAN)
    cell(f"%%memfit\n{GAN_LOOP}")
    controls = {name: control_of(shell.user_ns[name]) for name in ("G", "D")}
    shown: list[tuple[str, str]] = []

    def look(step: int) -> None:
        moments = [each.moment() for each in controls.values()]
        states = [f"{each.activity}: {(each.plan if each.pending is None else each.pending).label}" for each in moments]
        shown.append((states[0], states[1]))
        if step == 0:
            controls[clicked].ask("accumulation", "2")
        if step == 2:
            controls[clicked].undo()

    for each in controls.values():
        each.loop.stage = Later()
    shell.user_ns["look"] = look
    ran = cell(f"%%memfit\n{GAN_LOOP.replace('_ in', 'i in')}    look(i)\n")
    assert ran.error is None, ran.err
    plans_seen = ("as written", "--accumulate 2", "--accumulate 2", "as written")
    assert shown == [(f"training: {plan}",) * 2 for plan in plans_seen]
    assert plans() == {"G": "as written", "D": "as written"}
    assert [each.moment().activity for each in controls.values()] == [Activity.IDLE] * 2


@pytest.mark.parametrize(("made", "loop"), [(GAN, GAN_LOOP), (BOTH, BOTH_LOOP)], ids=["apart", "one optimizer"])
def test_memory_that_runs_out_in_one_model_is_rescued_and_the_others_follow(
    shell: Any, cell: Cell, made: str, loop: str
) -> None:
    larger = SETUP.replace("nn.Linear(8, 16)", "nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 16)").replace(
        "12", "512"
    )
    cell(larger + made)
    cell(f"%%memfit\n{loop}")
    expected = list(shell.user_ns["losses"])
    (plain,) = shell.run_line_magic("memfit", "report").measurements
    cell("%memfit undo all")
    cell(larger + made)
    ran = cell(f"%%memfit --capacity {int(plain.peak_allocated_bytes * 0.8)}B\n{loop}")
    assert ran.error is None, ran.err
    assert shell.user_ns["losses"] == pytest.approx(expected, rel=1e-5)
    assert "memory ran out in" in ran.out
    (plan,) = set(plans().values())
    assert plan != "as written"


def test_an_optimizer_of_two_models_is_converted_once(shell: Any, cell: Cell) -> None:
    cell(SETUP + BOTH)
    cell(BOTH_LOOP)
    expected = list(shell.user_ns["losses"])
    cell(SETUP + BOTH)
    ran = cell(f"%%memfit --offload optimizer --checkpoint\n{BOTH_LOOP}")
    assert ran.error is None, ran.err
    assert shell.user_ns["losses"] == expected
    first, second = sorted(sessions(), key=lambda session: session.workload.name)
    assert [type(each).__name__ for each in first.techniques] == ["ActivationCheckpointing", "OffloadOptimizer"]
    assert [type(each).__name__ for each in second.techniques] == ["ActivationCheckpointing"]
    saved = shell.user_ns["optimizer"].state_dict()["state"]
    cell("%memfit undo")
    live = shell.user_ns["optimizer"].state_dict()["state"]
    assert all(torch.equal(saved[key]["exp_avg"], live[key]["exp_avg"]) for key in live)


@pytest.mark.parametrize("known", ["at its first call", "before the cell"])
def test_a_model_that_trains_in_another_thread_is_not_measured(shell: Any, cell: Cell, known: str) -> None:
    cell("""
        import threading, torch
        def made(seed):
            torch.manual_seed(seed)
            model = torch.nn.Linear(4, 2)
            return model, torch.optim.AdamW(model.parameters())
        def train(model, optimizer):
            for step in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        def train_elsewhere():
            thread = threading.Thread(target=train, args=(other, others))
            thread.start()
            thread.join()
        (one, its), (other, others) = made(0), made(1)
        """)
    beside = (
        "train_elsewhere()" if known == "before the cell" else "other.train(); others.zero_grad(); train_elsewhere()"
    )
    ran = cell(f"%%memfit --adam8bit\none(torch.ones(2, 4)).sum().backward()\n{beside}\nits.step()")
    assert ran.error is None
    assert "other: step 1: trains in a thread of its own, and is not measured" in ran.out
    assert session_of(shell.user_ns["other"]).plan.label == "--adam8bit"  # the plan applies to it
    assert "· 1 step\n" in ran.out


def test_another_form_of_a_model_is_no_further_model(shell: Any, cell: Cell) -> None:
    cell(SETUP)
    cell("model = net(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    step = "cross_entropy(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()"
    made = "torch.nn.utils.parametrize.register_parametrization(model[-1], 'weight', torch.nn.Identity())"
    ran = cell(f"%%memfit --accumulate 2\n{step}\n{step}\n{made}\n{step}")
    assert ran.error is None
    assert "ParametrizationList" not in ran.out
    assert len(sessions()) == 1


def test_a_budget_that_nothing_fits_into_names_the_models_as_the_receipt_does(shell: Any, cell: Cell) -> None:
    cell(SETUP + GAN)
    cell(f"%%memfit\n{GAN_LOOP}")
    title = shell.run_line_magic("memfit", "report").title
    assert " · G 280 + D 161 · " in title
    refused = cell(f"%%memfit --budget 1KiB\n{GAN_LOOP}")
    assert "nothing fits into 1.0 KiB for G 280 + D 161 · AdamW + AdamW · cpu: the smallest of " in refused.err
