"""What memlab refuses is one line, fails the cell and changes nothing."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from memlab.live.control import control_of
from memlab.plan import Plan
from memlab.runtime.workload import Workload
from memlab.session import session_of, sessions
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between
from tests.jupyter.conftest import MAKE, STEP, TRAIN, Cell
from tests.jupyter.test_which_model import GAN, GAN_LOOP, SETUP

FLAGS = (
    "--accumulate, --batchnorm, --checkpoint, --precision, --fp16, --bf16, --optim, --adam8bit, --offload, --loss, --chunk-loss, "
    "--gradients, --release-grads, --padding, --pack, --tile, --lora, --base, --scale, --model, --optimizer, --budget, --lossless, --capacity, --keep, --no-rescue, --background, --inference, --nproc, --quiet, --help"
)


def one_line(ran: Any) -> str:
    """The line that is all the cell showed."""
    text = (ran.out + ran.err).strip()
    assert type(ran.error).__name__ == "UsageError"
    assert "\n" not in text
    assert "Traceback" not in text
    return str(text.removeprefix("UsageError: "))


def shown(ran: Any) -> str:
    """The line that is all a cell without the magic showed, which a refusal has ended."""
    return str((ran.out + ran.err).strip().removeprefix("RefusalError: "))


@pytest.fixture
def unchanged(shell: Any) -> Callable[[], None]:
    """Asserts that the notebook's model and optimizer are bit for bit what they were."""
    snapshots: list[tuple[Workload, Snapshot]] = []
    attributes: list[set[str]] = []

    def check() -> None:
        workload, before = snapshots[0]
        assert changed_between(before, Snapshot(workload)) == []
        assert set(vars(workload.model)) == attributes[0]
        assert sessions() == ()

    def begin() -> None:
        workload = Workload(shell.user_ns["model"], shell.user_ns["optimizer"])
        snapshots.append((workload, Snapshot(workload)))
        attributes.append(set(vars(workload.model)))

    check.begin = begin  # type: ignore[attr-defined]
    return check


def refused(made: Cell, unchanged: Any, line: str, body: str = TRAIN, setup: str = "") -> str:
    """The one line that a cell is refused with, nothing having changed."""
    if setup:
        assert made(setup).error is None
    unchanged.begin()
    text = one_line(made(f"{line}\n{body}"))
    unchanged()
    return text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--accumulte 4", f"unknown flag --accumulte; did you mean --accumulate?; flags are {FLAGS}"),
        ("--modell net", f"unknown flag --modell; did you mean --model?; flags are {FLAGS}"),
        ("4", f"unknown flag 4; flags are {FLAGS}"),
        ("off", "%%memfit off: a cell takes flags only; did you mean the line %memfit undo?"),
        ("--capacity -1GiB", "size '-1GiB': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("--capacity 8", "size '8': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("--capacity {limit}", "{limit}: there is no such variable, or what stands in the braces fails; give a value"),
        ("--accumulate four", "--accumulate four: expected a whole number of micro-batches, 1 or more, as in '--accumulate 4'"),
        ("--accumulate", "--accumulate needs a value: --accumulate N"),
        ("--model", "--model needs a value: --model NAME[,NAME…]"),
        ("--model ''", "--model needs a value: --model NAME[,NAME…]"),
        ("--model=", "--model needs a value: --model NAME[,NAME…]"),
        ("--model ,", "--model needs a value: --model NAME[,NAME…]"),
        ("--optimizer ''", "--optimizer needs a value: --optimizer NAME"),
        ("--budget ''", "--budget needs a value: --budget SIZE"),
        ("--capacity 8GiB --capacity 9GiB", "--capacity is given twice (8GiB and 9GiB); give one of them"),
        ("--offload ,", "--offload ,: allowed are optimizer, activations, params, frozen"),
        ("--fp16 --bf16", "--fp16 and --bf16 both set the precision; give one of them"),
        (
            "--optim sgd --offload optimizer",
            "--optim sgd and --offload optimizer exclude each other: SGD without momentum keeps no state to offload; "
            "drop one of the two",
        ),
        ("--budget", "--budget needs a value: --budget SIZE"),
        ("--budget 4GX", "size '4GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("--lossless", "--lossless says what --budget may choose; give a budget, as in --budget 8GiB --lossless"),
        ("--capacity 4GX", "size '4GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("--keep", "--keep needs a value: --keep FIELD[,FIELD…]"),
        (
            "--keep presicion",
            "--keep presicion: allowed are accumulation, batchnorm, checkpointing, precision, optimizer, offload, loss, gradients, padding, tiling, adapters, base, scale, and the flags "
            "that set them; did you mean precision?",
        ),
        (
            "--keep precision --keep speed",
            "--keep speed: allowed are accumulation, batchnorm, checkpointing, precision, optimizer, offload, loss, gradients, padding, tiling, adapters, base, scale, and the flags "
            "that set them",
        ),
        (
            "--keep loss --no-rescue",
            "--keep says what a rescue may not change, and --no-rescue that there is none; drop one of the two",
        ),
        ("--model 'net", "\"--model 'net\" cannot be read: No closing quotation"),
        ("--model net", "--model net: no variable of that name; candidates here: model"),
        ("--model inputs", "--model inputs: inputs is a Tensor, expected a torch Module"),
        (
            "--precision tf32",
            "precision: tf32 needs a CUDA GPU of the Ampere generation or newer; use --bf16 here",
        ),
        (
            "--chunk-loss",
            "loss: Sequential has no linear layer onto 2048 or more classes; use --accumulate N, which divides the logits as well",
        ),
    ],
)  # fmt: skip
def test_the_line(made: Cell, unchanged: Any, line: str, said: str) -> None:
    if "tf32" in line and torch.cuda.is_available():
        pytest.skip("tf32 is not refused beside a GPU")
    assert refused(made, unchanged, f"%%memfit {line}") == said


def test_a_cell_that_calls_forward_directly_is_not_stopped_when_it_is_done(cell: Cell) -> None:
    cell(SETUP)
    cell(
        "layers = one, other = nn.Linear(4, 4), nn.Linear(4, 4)\noptimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in layers]"
    )
    ran = cell(
        "%%memfit --accumulate 2\nfor layer, own in zip((one, other), optimizers):\n"
        "    layer.forward(torch.ones(2, 4)).sum().backward()\n    own.step()\n"
    )
    assert ran.error is None
    assert (
        "no model was measured: the cell trains without calling a model (it calls forward directly, parts of one, or what has no "
        "module); call the model itself, or name the part that is called with --model; --accumulate 2 was not applied"
    ) in ran.out + ran.err


def test_a_model_that_the_cell_trains_in_eval_mode_only(made: Cell) -> None:
    made("model.eval()")
    train = f"optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n{TRAIN}"
    said = "no model in train mode was found: the loop trains Sequential in eval mode only; call model.train() before"
    assert f"memfit: {said}\n" in made(f"%%memfit\n{train}").out
    assert str(made(f"%%memfit --checkpoint\n{train}").error) == f"{said}; --checkpoint was not applied"


def test_a_frozen_model_beside_a_tensor_that_trains(cell: Cell) -> None:
    cell(
        "import torch\nnet = torch.nn.Linear(4, 4).requires_grad_(False)\nimage = torch.rand(2, 4, requires_grad=True)\n"
        "class Both(torch.nn.Module):\n"
        "    def __init__(self): super().__init__(); self.net, self.image = net, torch.nn.Parameter(image.detach())\n"
        "    def forward(self): return self.net(self.image)"
    )
    said = (
        "no model to train was found: all parameters of Linear are frozen, and its gradients go to a tensor outside of it; make "
        "that a parameter of a module around both, and call this module"
    )
    assert cell("%%memfit\nnet(image).sum().backward()").out == f"memfit: {said}\n"
    assert one_line(cell("%%memfit --bf16\nnet(image).sum().backward()")) == f"{said}; --bf16 was not applied"
    assert cell("%%memfit --offload activations\nboth = Both()\nboth().sum().backward()").error is None


def test_no_model(cell: Cell) -> None:
    expected = (
        "no model found: the cell names no torch.nn.Module with values to train, and trains none by calling it (calls within "
        "transforms of torch.func do not count); make the model first, or train it in this cell; for forward passes or "
        "generate() alone add --inference"
    )
    assert one_line(cell("%%memfit --accumulate 4\nx = 1")) == f"{expected}; --accumulate 4 was not applied"
    assert cell("%%memfit\nx = 1").out == f"memfit: {expected}\n"


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("--checkpoint", "; --checkpoint was not applied"),
        ("--checkpoint --model net", ""),
        ("--inference --model net", ""),
    ],
)
def test_a_model_without_values_is_named(cell: Cell, line: str, end: str) -> None:
    cell("import torch\nnet = torch.nn.Linear(4, 4, device='meta')\ninputs = torch.zeros(2, 4, device='meta')")
    assert one_line(cell(f"%%memfit {line}\nnet(inputs).sum().backward()")) == (
        "Linear has parameters without values: make it on cpu or cuda (memlab.build), load its weights, or call it once "
        f"(lazy layers) first{end}"
    )


def test_of_several_models_the_one_that_trains_is_taken_unless_one_is_named(shell: Any, made: Cell) -> None:
    made("other = torch.nn.Linear(2, 2)")
    for named in ("", "--model model"):
        ran = made(f"%%memfit --accumulate 4 {named}\n{TRAIN}")
        assert ran.error is None
        assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4"
        assert session_of(shell.user_ns["other"]) is None
        made("%memfit undo")


REFUSED = (
    "accumulation: rows of a batch depend on each other in Sequential: run apart they give another result than together "
    "(output is "
)
_CENTRED = "register_forward_hook(lambda module, given, output: output - output.mean(0))\n"


@pytest.mark.parametrize(
    "body",
    [
        "train()",
        "Framework().fit(train)",
        "Framework().fit_and_translate(train)",
        "swallowed(train)",
        "%run -i script.py\nafter = True",
        "%run -i fresh.py\nafter = True",
        "exec(open('script.py').read())",
    ],
)
def test_a_refusal_is_one_line_wherever_it_comes_from(
    shell: Any, made: Cell, body: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("model(inputs[:2]).sum().backward()\n")
    made_anew = "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    (tmp_path / "fresh.py").write_text(
        f"{made_anew}net[0].{_CENTRED}del model\nnet(torch.randn(2, 4)).sum().backward()\n"
    )
    made(
        f"model[0].{_CENTRED}"
        "def train():\n    model(inputs[:2]).sum().backward()\n"
        "def swallowed(call):\n    try: call()\n    except Exception: pass\n"
        "class Framework:\n    def fit(self, call): call()\n"
        "    def fit_and_translate(self, call):\n        try: call()\n"
        "        except Exception as error: raise RuntimeError('training failed') from error\n"
    )
    text = one_line(made(f"%%memfit --accumulate 4\n{body}"))
    assert text.startswith(REFUSED)
    assert text.endswith("; use --checkpoint or --offload activations, which keep the batch whole")
    assert "after" not in shell.user_ns


def test_an_optimizer_of_another_model(made: Cell, unchanged: Any) -> None:
    setup = "stale = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())"
    assert refused(made, unchanged, "%%memfit --accumulate 4 --optimizer stale", setup=setup) == (
        "AdamW steps no parameter of Sequential: was the model rebuilt after the optimizer was made? "
        "Make the optimizer from this model's parameters()"
    )


def test_lbfgs(made: Cell, unchanged: Any) -> None:
    said = refused(made, unchanged, "%%memfit --adam8bit", setup="optimizer = torch.optim.LBFGS(model.parameters())")
    assert said.startswith("optimizer: ")
    assert "LBFGS" in said


def test_batch_norm(made: Cell) -> None:
    made(
        "model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4))\n"
        "optimizer = torch.optim.AdamW(model.parameters())"
    )
    assert one_line(made(f"%%memfit --accumulate 4\n{TRAIN}")) == (
        "accumulation: Sequential has BatchNorm (1), whose statistics depend on the whole batch; add --batchnorm micro for statistics of "
        "each micro-batch, as in accumulation written by hand, "
        "or use --checkpoint or --offload activations, which keep the batch whole"
    )
    assert [(session.plan, session.steps) for session in sessions()] == [(Plan(), 0)]


def test_half_precision_parameters(made: Cell, unchanged: Any) -> None:
    setup = "model = model.half()\noptimizer = torch.optim.AdamW(model.parameters())"
    assert refused(made, unchanged, "%%memfit --fp16", setup=setup) == (
        "precision: --fp16 needs float32 parameters, Sequential has float16 ones; "
        "call model.float() and make the optimizer anew, or leave the precision as it is"
    )


def test_a_compiled_model_is_no_reason_to_refuse(made: Cell) -> None:
    made("model = torch.compile(model, backend='eager')")
    ran = made(f"%%memfit --accumulate 4\n{TRAIN}")
    assert ran.error is None, ran.err
    assert "--accumulate 4" in ran.out


@pytest.mark.parametrize("flags", ["--precision pure-bf16", "--offload params"])
def test_a_function_of_the_loop_that_is_compiled_as_one_graph(shell: Any, cell: Cell, flags: str) -> None:
    blocks = "torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(3)))"
    cell(f"""{MAKE}model, inputs = {blocks}, torch.randn(4, 64)
optimizer = torch.optim.AdamW(model.parameters())
@torch.compile(backend="eager", fullgraph=True)
def loss_of(inputs):
    return model(inputs).square().mean()
before = [parameter.detach().clone() for parameter in model.parameters()]
""")
    assert one_line(cell(f"%%memfit {flags}\nmodel\nloss_of(inputs).backward()\noptimizer.step()")) == (
        "session: torch.compile cannot make one graph (fullgraph=True, compiled autograd) of a function or a backward pass "
        "with code of the plan in it; let it make several, or leave the plan out"
    )
    assert session_of(shell.user_ns["model"]).plan.label == "as written"
    assert all(map(torch.equal, shell.user_ns["model"].parameters(), shell.user_ns["before"]))
    assert cell("%%memfit\nmodel\nloss_of(inputs).backward()\noptimizer.step()").error is None


_FULLGRAPH = """
import torch, torch.nn.functional as F
from memlab.live.control import control_of
torch.manual_seed(0)
blocks = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(2))
model = torch.nn.Sequential(torch.nn.Sequential(*blocks), torch.nn.Linear(32, 2048))
optimizer, inputs, target = torch.optim.AdamW(model.parameters()), torch.randn(4, 32), torch.randint(0, 2048, (4,))
@torch.compile(backend="eager", fullgraph=True)
def loss_of(logits, target): return F.cross_entropy(logits, target)
def loss_by_model(inputs, target): return F.cross_entropy(model(inputs), target)
if of_model:
    loss_by_model = torch.compile(loss_by_model, backend="eager", fullgraph=True)
def train(click, of_model):
    losses = []
    for step in range(6):
        loss = loss_by_model(inputs, target) if of_model and step % 2 else loss_of(model(inputs), target)
        loss.backward(); optimizer.step(); optimizer.zero_grad(); losses.append(loss.item())
        if click and step == 2: control_of(model).ask(*click)
    return losses
"""


@pytest.mark.parametrize(
    ("click", "of_model", "said"),
    [
        (("loss", "chunked"), False, "loss: the loop calls loss_of, of which torch.compile makes one graph (fullgraph=True), and which "
         "takes no logits that are not computed; compile it without fullgraph, or use --accumulate N"),
        (("offload", "params"), True, "offload: the loop calls loss_by_model, of which torch.compile makes one graph (fullgraph=True) with "
         "calls of model in it; compile it without fullgraph, or leave the setting out"),
        (("precision", "pure-bf16"), True, "precision: the loop calls loss_by_model, of which torch.compile makes one graph "
         "(fullgraph=True) with calls of model in it; compile it without fullgraph, or leave the setting out"),
        (("offload", "params"), False, ""),
    ],
)  # fmt: skip
def test_a_click_that_a_function_of_one_graph_forbids(
    shell: Any, cell: Cell, click: Any, of_model: bool, said: str
) -> None:
    shell.user_ns.update(click=click, of_model=of_model)
    assert cell(_FULLGRAPH).error is None
    assert cell("%%memfit --model model\nfound = train(click, of_model)").error is None
    ran = cell("%memfit")
    assert (said or "as written → --offload params") in " ".join(ran.out.split()).replace("Sequential", "model")
    assert cell(f"%memfit undo all\n{_FULLGRAPH}expected = train(None, of_model)").error is None
    assert shell.user_ns["found"] == shell.user_ns["expected"]


def test_logits_that_are_not_computed_in_a_function_of_one_graph(shell: Any, cell: Cell) -> None:
    shell.user_ns["of_model"] = False
    assert cell(_FULLGRAPH).error is None
    assert one_line(cell("%%memfit --chunk-loss --model model\ntrain(None, False)")).startswith(
        "session: torch.compile cannot make one graph (fullgraph=True, compiled autograd) of a function"
    )


def test_calls_of_the_model_in_a_function_of_one_graph_have_their_logits(shell: Any, cell: Cell) -> None:
    shell.user_ns["of_model"] = True
    train = "losses = []\nfor _ in range(3):\n loss = loss_by_model(inputs, target); loss.backward()\n optimizer.step(); optimizer.zero_grad(); losses.append(loss.item())"
    assert cell(f"{_FULLGRAPH}{train}\nexpected = losses\n{_FULLGRAPH}").error is None
    assert cell(f"%%memfit --chunk-loss --model model\n{train}").error is None
    assert shell.user_ns["losses"] == shell.user_ns["expected"]


def test_missing_bitsandbytes(made: Cell, unchanged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    said = refused(made, unchanged, "%%memfit --adam8bit")
    assert said == (
        "8-bit Adam or NF4 needs bitsandbytes, which is not installed: pip install 'memlab[lab]' (or pip install bitsandbytes)"
    )


def test_a_refusal_leaves_the_old_plan_in_force(shell: Any, made: Cell) -> None:
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    one_line(made(f"%%memfit --chunk-loss\n{TRAIN}"))
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4"


def test_a_refusal_of_a_model_made_in_the_cell(cell: Cell) -> None:
    body = "import torch\nnet = torch.nn.Linear(4, 4)\nnet(torch.zeros(2, 4)).sum().backward()"
    assert one_line(cell(f"%%memfit --checkpoint\n{body}")).startswith(
        "checkpointing: no part of Linear can be recomputed"
    )
    assert sessions() == ()


def test_a_refused_cell_holds_nothing(shell: Any, cell: Cell) -> None:
    cell("""import torch
def train():
    net = torch.nn.Linear(4, 4)
    nets.append(net)
    net(torch.zeros(2, 4)).sum().backward()
""")
    one_line(cell("%%memfit --checkpoint\nnets = []\ntrain()"))
    left = weakref.ref(shell.user_ns["nets"].pop())
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("flags", ["", "--fp16", "--release-grads"])
def test_a_model_that_the_cell_makes_anew_in_a_loop_is_not_the_one_of_before(
    shell: Any, made: Cell, flags: str
) -> None:
    made("baseline = model")
    steps = STEP.strip().replace("\n", "\n        ")
    ran = made(f"""%%memfit {flags}
for fold in range(3):
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        {steps}
""")
    assert ran.error is None, ran.err
    assert "memfit · Linear 68 · AdamW · cpu · batch 12 × 16 · CPU ledger · 12 steps" in ran.out
    assert session_of(shell.user_ns["baseline"]) is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("Plan.parse('--nonsense')", "PlanError: unknown flag --nonsense"),
        (
            "fit(memlab.Workload(model, optimizer), '--checkpoint')",
            "SessionError: Sequential has a session already: use its switch(plan), or undo() it first; in a notebook, flags of %%memfit and %memfit undo do that",
        ),
    ],
)
def test_the_users_own_call_to_memlab_shows_none_of_its_frames(made: Cell, call: str, said: str) -> None:
    text = f"import memlab\nmemlab.{call}\n{TRAIN}"
    ran = made(f"%%memfit\n{text}")
    shown = (ran.out + ran.err).strip()
    assert shown.startswith(said)
    assert "\n" not in shown
    assert made(f"%memfit undo all\n{TRAIN}").error is None  # what the cell had begun ended with it


def test_gradients_are_watched_in_cells_and_not_between_them(shell: Any, made: Cell) -> None:
    """A step split over cells is watched in each of them; code between cells meets no mode of memlab's."""
    training = "for _ in range(3):\n    optimizer.zero_grad()\n    model(inputs).sum().backward()\n    optimizer.step()"
    assert made(f"%%memfit --release-grads\n{training}").error is None
    assert _get_current_function_mode_stack() == []
    assert made(f"{training}\noptimizer.zero_grad()\nmodel(inputs).sum().backward()").error is None
    assert _get_current_function_mode_stack() == []
    looking = "print(model[0].weight.grad.norm())"
    nearest = "leave it out, or %memfit undo, before a step whose gradients are looked at"
    for _ in range(2):
        assert shown(made(looking)) == (
            "gradients: --release-grads frees those of a step in its backward pass; parameters have been updated with the "
            f"gradients so far; {nearest}"
        )
    assert _get_current_function_mode_stack() == []
    assert made("optimizer.step()").error is None  # nothing has come of the look
    for _ in range(2):
        assert shown(made(looking)) == f"gradients: --release-grads has freed those of the last step; {nearest}"
    assert made(training).error is None
    assert made("%memfit undo all\nassert model[0].weight.grad is None").error is None


def test_a_gradient_that_is_there_can_be_looked_at_from_another_cell(shell: Any, made: Cell) -> None:
    """A plan that was clicked keeps the gradients of its first step, until it is seen that the loop drops them."""
    made(f"%%memfit\n{TRAIN}")
    control_of(shell.user_ns["model"]).ask("gradients", "release")
    step = "optimizer.zero_grad()\nmodel(inputs).sum().backward()\noptimizer.step()"
    assert made(step).error is None
    for _ in range(2):
        assert float(made("print(model[0].weight.grad.norm().item())").out) > 0
    assert made(step).error is None
    assert session_of(shell.user_ns["model"]).plan.label == "--release-grads"


@pytest.mark.parametrize(
    "line", ["optimizer.zero_grad()", "model.zero_grad(False)", "[p.grad for p in model.parameters()]"]
)
def test_a_plain_cell_goes_on_from_the_middle_of_the_first_step_of_release_grads(
    made: Cell, line: str, shell: Any
) -> None:
    """Nothing has been freed in it, so that the plan can go."""
    made("%%memfit --release-grads\noptimizer.zero_grad()\nmodel(inputs).sum().backward()")
    assert made(line).error is None
    assert made("optimizer.zero_grad()\nmodel(inputs).sum().backward()\noptimizer.step()").error is None
    assert session_of(shell.user_ns["model"]).plan.label == "as written"


def test_a_refusal_in_a_plain_cell_is_one_line(made: Cell) -> None:
    made(f"model[0].{_CENTRED}")
    made("session = __import__('memlab').fit(__import__('memlab').Workload(model, optimizer), '--accumulate 4')")
    assert shown(made("model(inputs[:2]).sum().backward()")).startswith(REFUSED)
    ran = made("1 / 0")
    assert (ran.out + ran.err).count("Traceback (most recent call last)") == 1


INTERRUPT = {
    "forward": "handle = model[2].register_forward_hook(stop)",
    "backward": "handle = model[2].weight.register_hook(stop)",
    "step": "handle = optimizer.register_step_pre_hook(stop)",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("flags", ["", "--accumulate 4", "--adam8bit --fp16", "--offload optimizer,activations"])
@pytest.mark.parametrize("where", INTERRUPT)
def test_interrupt(shell: Any, made: Cell, where: str, flags: str) -> None:
    # hooks run in the order in which they were registered: this one comes before memlab's
    made(f"armed = False\ndef stop(*_):\n    if armed: raise KeyboardInterrupt\n{INTERRUPT[where]}")
    assert made(f"%%memfit {flags}\n{TRAIN}").error is None
    made("armed = True")
    workload = Workload(shell.user_ns["model"], shell.user_ns["optimizer"])
    session = session_of(workload.model)
    plan = session.plan
    before = {name: p.detach().clone() for name, p in workload.model.named_parameters()}
    ran = made(f"%%memfit\n{STEP}")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert (ran.out + ran.err).count("Traceback (most recent call last)") == 1
    assert session.plan == plan
    assert session.observers.all == (control_of(session.workload.model),)
    # no parameter was updated half-way, and training goes on
    assert all(torch.equal(p, before[name]) for name, p in workload.model.named_parameters())
    made("handle.remove()\noptimizer.zero_grad()")
    assert made(f"%%memfit\n{TRAIN}").error is None
    made("%memfit undo")
    assert all(torch.isfinite(p).all() for p in workload.model.parameters())
    assert "forward" not in vars(workload.model)


@pytest.mark.parametrize(
    "where", ["memlab.jupyter.cell_magic.CellMagic._find", "memlab.jupyter.history.History.receipt"]
)
def test_an_interrupt_in_memlabs_own_work_shows_none_of_its_frames(
    where: str, made: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, interrupted)
        ran = made(f"%%memfit\n{TRAIN}")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "KeyboardInterrupt" in ran.out + ran.err
    assert "Traceback" not in ran.out + ran.err
    assert ".py" not in ran.out + ran.err
    assert made(f"%%memfit\n{TRAIN}").error is None


def test_a_deleted_model_is_said_and_let_go(shell: Any, made: Cell) -> None:
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    model = weakref.ref(shell.user_ns["model"])
    made("del model")
    assert (
        "Sequential is in no variable of this notebook any more: %memfit undo removes the plan and releases the model"
        in made("%memfit").out
    )
    made("%memfit undo\ndel optimizer")
    gc.collect()
    assert model() is None
    said = "Sequential of the last cell is deleted, and no plan is in force on any model; put %%memfit on the cell that trains"
    assert made("%memfit").out == f"memfit: {said} (%%memfit? explains)\n"
    made(MAKE.replace("model", "net"))
    for line in ("--accumulate 4", "export", 'compare "--checkpoint"'):
        assert one_line(made(f"%memfit {line}")) == f"{said} net (%%memfit? explains)"


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_a_model_without_a_plan_is_freed_at_once(shell: Any, made: Cell, *, is_made_inside: bool) -> None:
    made("%memfit panel")
    anew = "model = torch.nn.Sequential(torch.nn.Linear(8, 2)); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    loop = "for _ in range(3):\n    loss = model(torch.randn(4, 8)).sum(); loss.backward(); optimizer.step()\n"
    made(anew)
    assert made(f"%%memfit\n{anew if is_made_inside else ''}\n{loop}").error is None
    held = [weakref.ref(shell.user_ns["model"]), weakref.ref(shell.user_ns["model"][0].weight)]
    gc.collect()
    gc.disable()
    try:
        made("del model, optimizer, loss")
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_a_model_dropped_with_its_optimizer_is_freed(shell: Any, made: Cell) -> None:
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    model = weakref.ref(shell.user_ns["model"])
    made("del model, optimizer")
    gc.collect()
    assert model() is None
    assert sessions() == ()


CLIPS = """
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
MAKE_DEEP = """
import torch
from torch.nn import Linear, ReLU, Sequential
model = Sequential(*(Sequential(Linear(64, 128), ReLU(), Linear(128, 64)) for _ in range(4)))
optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(512, 64)
"""


@pytest.mark.parametrize("asked", ["cell", "line", "rescue"])
def test_a_plan_that_its_cell_is_refused_for_does_not_stay(shell: Any, cell: Cell, asked: str) -> None:
    """The next cell would be refused as well, without having asked for anything."""
    cell(MAKE_DEEP)
    cell(f"%%memfit --checkpoint\n{CLIPS}")
    if asked == "line":
        cell("%memfit --release-grads")
    flags = {"cell": "--release-grads", "line": "", "rescue": "--release-grads --capacity 2500KiB"}[asked]
    refused = cell(f"%%memfit {flags}\n{CLIPS}")
    assert refused.err.strip().endswith("leave --release-grads out")
    assert ("memory ran out in the forward pass: --release-grads → " in refused.out) is (asked == "rescue")
    session = session_of(shell.user_ns["model"])
    assert session is not None
    assert session.plan.label == "--checkpoint"
    assert control_of(shell.user_ns["model"]).moment().plan.label == "--checkpoint"
    assert session.log[-1].text.endswith("; --checkpoint is back")
    assert cell(f"%%memfit\n{CLIPS}").error is None


@pytest.mark.parametrize(
    ("flags", "between", "said"),
    [
        ("--release-grads", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "gradients: the loop takes the norm"),
        ("--release-grads", "optimizer.param_groups[0]['lr'] *= 0.9", "gradients: the loop changes the optimizer's settings"),
    ],
)  # fmt: skip
def test_a_refusal_that_the_loop_catches_is_said_and_its_plan_leaves(
    shell: Any, made: Cell, flags: str, between: str, said: str
) -> None:
    made("""
class Net(torch.nn.Linear):
    def forward(self, inputs, target):
        return torch.nn.functional.cross_entropy(super().forward(inputs), target)
model = Net(16, 4)
optimizer = torch.optim.AdamW(model.parameters())
""")
    loop = f"""
for _ in range(3):
    try:
        loss = model(inputs, target)
        loss.backward(retain_graph=True)
        {between}
        optimizer.step()
        optimizer.zero_grad()
    except Exception:
        pass
"""
    assert one_line(made(f"%%memfit {flags}\n{loop}")).startswith(said)
    assert session_of(shell.user_ns["model"]).plan.label == "as written"
    assert made("%%memfit\nmodel(inputs, target).backward()\noptimizer.step()").error is None


@pytest.mark.parametrize("refused", ["first", "second"])
def test_a_refusal_of_one_of_several_models_that_the_loop_catches_is_said(cell: Cell, refused: str) -> None:
    cell("""
import torch
class Net(torch.nn.Linear):
    def forward(self, inputs):
        hidden = super().forward(inputs)
        return {"hidden": hidden, "loss": hidden.square().mean()}
first, second = Net(16, 4), Net(16, 4)
optimizers, x = [torch.optim.AdamW(model.parameters()) for model in (first, second)], torch.randn(8, 16)
""")
    loop = f"""
for _ in range(2):
    for model, optimizer in zip((first, second), optimizers):
        output = model(x)
        if model is {refused}:
            try:
                torch.autograd.grad(output["loss"], output["hidden"], retain_graph=True)
            except Exception:
                pass
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    ran = cell(f"%%memfit --accumulate 2\n{loop}")
    assert str(ran.error).startswith("accumulation: the loop asks for the gradient of a tensor from which Net computes")
    assert {session.plan.label for session in sessions()} == {"as written"}


def test_a_plan_that_one_of_several_models_is_refused_stays_on_none(cell: Cell) -> None:
    cell(SETUP + GAN)
    for flags in ("--release-grads", "--chunk-loss"):
        assert type(cell(f"%%memfit {flags}\n{GAN_LOOP}").error).__name__ == "UsageError"
        assert {session.plan.label for session in sessions()} <= {"as written"}


def test_a_loop_under_a_default_device_is_no_reader_of_gradients(made: Cell) -> None:
    indented = TRAIN.replace("\n", "\n    ")
    assert made(f"%%memfit --release-grads\nwith torch.device('cpu'):\n    {indented}").error is None


AFTER_STEP = (
    "gradients: the loop uses gradients after optimizer.step(){}, when they are gone; leave --release-grads out"
)
READING = """
for _ in range(3):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    model[0].weight.grad.norm()
"""
IN_FUNCTION = f"def my_loop():\n{textwrap.indent(READING, '    ')}"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (READING, ""),
        (f"{IN_FUNCTION}my_loop()", " (in my_loop)"),
        (f"{IN_FUNCTION}with torch.device('cpu'):\n    my_loop()", " (in my_loop)"),
    ],
    ids=["cell", "function", "under a default device"],
)
def test_the_place_that_a_refusal_names_is_the_users(made: Cell, body: str, place: str) -> None:
    assert one_line(made(f"%%memfit --release-grads\n{body}")) == AFTER_STEP.format(place)


def test_a_module_that_is_moved_is_no_reader_of_gradients(made: Cell) -> None:
    moving = READING.replace("model[0].weight.grad.norm()", "model.double().float()")
    assert made(f"%%memfit --release-grads\n{moving}").error is None


_SHARD = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
optimizer = torch.optim.AdamW(model.parameters())
"""


def test_a_model_that_is_sharded_already_trains_as_it_is_written(made: Cell, shell: Any) -> None:
    hook = sys.excepthook
    try:
        assert made(_SHARD).error is None
        refused_text = one_line(made(f"%%memfit --checkpoint\n{TRAIN}"))
        assert "is already sharded (FSDP2 or tensor parallel)" in refused_text
        before = [p.full_tensor().detach().clone() for p in shell.user_ns["model"].parameters()]
        ran = made(f"%%memfit --capacity 1GiB\n{TRAIN}")
        assert ran.error is None
        assert ran.out.count(f"memfit: nothing was measured or protected: {refused_text}") == 1
        after = [p.full_tensor() for p in shell.user_ns["model"].parameters()]
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert sessions() == ()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def test_a_model_with_a_sparse_parameter_trains_as_it_is_written(made: Cell) -> None:
    made(
        "class Sparse(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(16, 4)\n"
        "        self.mixing = torch.nn.Parameter(torch.eye(12).to_sparse())\n"
        "    def forward(self, x):\n"
        "        return super().forward(torch.sparse.mm(self.mixing, x))\n"
        "model = Sparse()\n"
        "optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)"
    )
    text = "session: Sparse has a parameter that is sparse or nested (mixing); make it a dense one"
    assert one_line(made(f"%%memfit --checkpoint\n{TRAIN}")) == text
    ran = made(f"%%memfit --capacity 1GiB\n{TRAIN}")
    assert ran.error is None
    assert ran.out.strip() == f"memfit: nothing was measured or protected: {text}"
    assert sessions() == ()
