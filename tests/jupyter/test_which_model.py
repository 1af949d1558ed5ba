"""Which model of several trains, models and optimizers made inside the cell, and several that train together."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from memlab.runtime.loop_mode import LoopMode, resumed
from memlab.session import sessions
from tests.jupyter.conftest import Cell

SETUP = """
import copy, torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
torch.manual_seed(0)
def net(out=4): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, out))
x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))
losses = []
"""
LOOP = """
for _ in range(3):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
GAN = """
G, D = net(8), net(1)
optG, optD = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (G, D))
"""
GAN_LOOP = """
for _ in range(4):
    fake = G(x)
    optD.zero_grad()
    (D(x).mean() - D(fake.detach()).mean()).backward()
    optD.step()
    optG.zero_grad()
    loss = -D(fake).mean()
    loss.backward()
    optG.step()
    losses.append(loss.item())
"""


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.strip("\n").splitlines())


@dataclass(frozen=True)
class Case:
    """A notebook: what stands before the cell, the cell, and what the receipt calls what was trained."""

    before: str
    cell: str
    trained: str
    lossless_flags: tuple[str, ...] = ("--accumulate 2",)


ONE = "Sequential 212 · AdamW"
MADE = "model = net(); optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)\n"
CASES = {
    "a part that the making of the model calls": Case(
        "",
        "model = net()\nmodel[0](x)\ntorch.nn.utils.parametrizations.weight_norm(model[0])\n"
        f"optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)\n{LOOP}",
        "Sequential 228 · AdamW",
        ("--offload optimizer", "--precision fp32"),
    ),
    "a moving average": Case(
        f"{MADE}ema = copy.deepcopy(model)",
        f"{LOOP}    with torch.no_grad():\n        for a, b in zip(ema.parameters(), model.parameters()): a.lerp_(b, 0.1)",
        ONE,
    ),
    "a teacher that could train": Case(
        f"{MADE}teacher = net()",
        LOOP.replace("y)\n", "y) + mse_loss(model(x), teacher(x).detach())\n"),
        ONE,
    ),
    "a teacher with an optimizer of its own, before a student made in the cell": Case(
        "teacher = net(); teacher_optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)",
        MADE + LOOP.replace("loss =", "with torch.no_grad(): teacher(x)\n    loss ="),
        ONE,
    ),
    "a frozen reference beside a trained copy": Case(
        f"reference = net().requires_grad_(False)\n{MADE}",
        LOOP.replace("y)\n", "y) + 0.1 * mse_loss(model(x), reference(x))\n"),
        ONE,
    ),
    "a second copy that is only compared with": Case(
        f"{MADE}before = copy.deepcopy(model)", f"{LOOP}drift = mse_loss(model(x), before(x)).item()", ONE
    ),
    "a loss with weights of its own": Case(
        f"{MADE}criterion = nn.Sequential(nn.Linear(4, 4))",
        LOOP.replace("cross_entropy(model(x), y)", "criterion(model(x)).square().mean()"),
        ONE,
    ),
    "models in a dictionary": Case(
        f"{MADE}models = {{'net': model, 'old': net()}}; del model",
        LOOP.replace("model(x)", "models['net'](x)"),
        ONE,
    ),
    "a learner of the user's own": Case(
        "class Learner:\n    def __init__(self):\n        self.net, self.target = net(), net()\n"
        "        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)\n"
        "    def fit(self):\n        model, optimizer = self.net, self.optimizer\n"
        f"{indented(indented(LOOP))}\nlearner = Learner()",
        "learner.fit()",
        ONE,
    ),
    "all inside a function": Case(
        f"def train():\n{indented(MADE + LOOP)}    return model\nspare = net()", "result = train()", ONE
    ),
    "a model made again in the cell": Case(MADE, MADE + LOOP, ONE),
    "lazy modules": Case(
        "model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)",
        LOOP,
        ONE,
    ),
    "a model without values beside it": Case(f"{MADE}shapes = [net().to('meta')]", f"shapes[0].train()\n{LOOP}", ONE),
    "a generator and its critic": Case(
        GAN,
        GAN_LOOP,
        "G 280 + D 161 · AdamW + AdamW",
    ),
    "an actor and a critic under one optimizer": Case(
        "actor, critic = net(), net(1)\n"
        "optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], lr=0.01)",
        LOOP.replace("model(x), y)\n", "actor(x), y) + critic(x).square().mean()\n"),
        "actor 212 + critic 161 · AdamW",
    ),
    "parts of a module that are called by themselves": Case(
        "class Task(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)\n",
        "task = Task(); optimizer = torch.optim.AdamW(task.parameters(), lr=0.01)\n"
        + LOOP.replace("model(x)", "task.head(task.body(x).tanh())"),
        "task.body 144 + task.head 68 · AdamW",
    ),
    "a model trained after another": Case(
        f"{MADE}",
        LOOP
        + "second = net(); optimizer = torch.optim.SGD(second.parameters(), lr=0.1)\n"
        + LOOP.replace("model(", "second("),
        "model 212 + second 212 · AdamW + SGD",
    ),
    "a closure, as Lightning steps": Case(
        "class Wrapper:\n"
        "    def __init__(self, optimizer):\n        self._optimizer = optimizer\n"
        "        self.__class__ = type('Wrapped', (Wrapper, type(optimizer)), {})\n"
        "    def step(self, closure):\n        return self._optimizer.step(closure=closure)\n"
        "    def __getattr__(self, name):\n        return getattr(self._optimizer, name)\n",
        f"def train():\n{indented(MADE)}    wrapped = Wrapper(optimizer)\n"
        "    def closure():\n        optimizer.zero_grad()\n        loss = cross_entropy(model(x), y)\n"
        "        loss.backward()\n        losses.append(loss.item())\n        return loss\n"
        "    for _ in range(3): wrapped.step(closure)\n    return model\nresult = train()",
        ONE,
        ("--accumulate 2", "--offload optimizer"),
    ),
    "an optimizer around another": Case(
        "class Ascent(torch.optim.Optimizer):\n"
        "    def __init__(self, base):\n        self.base = base\n        super().__init__(base.param_groups, {})\n"
        "        self.param_groups = base.param_groups\n"
        "    @torch.no_grad()\n    def step(self, closure):\n"
        "        moved = [(p, 0.05 * p.grad) for g in self.param_groups for p in g['params']]\n"
        "        for p, by in moved: p.add_(by)\n"
        "        with torch.enable_grad(): loss = closure()\n"
        "        for p, by in moved: p.sub_(by)\n"
        "        self.base.step()\n        return loss\n",
        MADE + "ascent = Ascent(optimizer)\ndef closure():\n    optimizer.zero_grad()\n"
        "    loss = cross_entropy(model(x), y)\n    loss.backward()\n    losses.append(loss.item())\n    return loss\n"
        "for _ in range(3):\n    closure()\n    ascent.step(closure)",
        ONE,
        ("--accumulate 2", "--offload optimizer"),
    ),
    "LBFGS": Case(
        "",
        "model = net(); optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)\ndef closure():\n"
        "    optimizer.zero_grad()\n    loss = cross_entropy(model(x), y)\n    loss.backward()\n"
        "    losses.append(loss.item())\n    return loss\nfor _ in range(3): optimizer.step(closure)",
        "Sequential 212 · LBFGS",
        (),
    ),
}


def left_by(shell: Any) -> dict[str, Any]:
    """Losses, parameters and moments that a cell has left."""
    space = {name: value for name, value in shell.user_ns.items() if not name.startswith("_")}
    models = {name: value for name, value in space.items() if isinstance(value, torch.nn.Module)}
    left = {f"{name}.{key}": p.detach().clone() for name, m in models.items() for key, p in m.named_parameters()}
    for name, value in space.items():
        if type(value) in (torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS):
            left |= {
                f"{name}.{number}.{key}": item.clone() if isinstance(item, torch.Tensor) else item
                for number, state in value.state_dict()["state"].items()
                for key, item in state.items()
                if key in ("step", "exp_avg", "exp_avg_sq", "n_iter")
            }
    return {"losses": torch.tensor(space["losses"]), **left}


@pytest.mark.parametrize("name", CASES)
def test_what_trains_is_found_and_trains_as_it_would(shell: Any, cell: Cell, name: str) -> None:
    case = CASES[name]
    assert cell(SETUP + case.before).error is None
    assert cell(case.cell).error is None
    plain = left_by(shell)
    for flags in ("", *case.lossless_flags):
        assert cell(SETUP + case.before).error is None
        ran = cell(f"%%memfit {flags}\n{case.cell}")
        assert ran.error is None, ran.err
        title = next(line for line in ran.out.splitlines() if line.startswith("memfit · "))
        assert title.startswith(f"memfit · {case.trained} · cpu"), title
        is_noted = "made its lazy layers in its first call, which was as written" in ran.out
        assert is_noted == ("Lazy" in case.before)
        left = left_by(shell)
        assert left.keys() == plain.keys()
        for key, value in plain.items():
            same = torch.allclose(torch.as_tensor(left[key]), torch.as_tensor(value), rtol=1e-5, atol=1e-7)
            assert same, f"{flags}: {key}"
        if not flags:
            for key, value in plain.items():
                assert torch.equal(torch.as_tensor(left[key]), torch.as_tensor(value)), key
        cell("%memfit undo all")
        assert sessions() == ()


def test_settings_that_several_models_cannot_have_by_themselves(shell: Any, cell: Cell) -> None:
    both = CASES["an actor and a critic under one optimizer"]
    for flags, said in (
        (
            "--precision pure-bf16",
            "session: one AdamW updates actor and critic, so --precision pure-bf16 cannot be applied to each by itself; "
            "give each its own optimizer, or use --accumulate, --checkpoint, --bf16, --adam8bit or --offload "
            "activations,optimizer",
        ),
        (
            "--release-grads",
            "gradients: this cell trains actor and critic, and --release-grads treats the gradients of each as "
            "those of its own loss; leave out --release-grads, or name one model with --model",
        ),
    ):
        assert cell(SETUP + both.before).error is None
        ran = cell(f"%%memfit {flags}\n{both.cell}")
        assert (ran.out + ran.err).strip() == f"UsageError: {said}"
        cell("%memfit undo all")


def test_a_setting_that_goes_when_a_second_model_is_called_has_no_row(cell: Cell) -> None:
    """In the step before, `--release-grads` had only watched the loop: what that took is nothing of its."""
    made = "one, other = net(), net()\nopt1, opt2 = (torch.optim.AdamW(each.parameters()) for each in (one, other))"
    assert cell(f"{SETUP}{made}").error is None
    ran = cell("""%%memfit --release-grads
for _ in range(3):
    for model, optimizer in ((one, opt1), (other, opt2)):
        mse_loss(model(x), torch.ones(12, 4)).backward()
        optimizer.step(); optimizer.zero_grad()
""")
    assert ran.error is None, ran.err
    said = " ".join(ran.out.split())
    assert "refused --release-grads: gradients: this cell trains one and other" in said
    assert next(line.split("  ")[0] for line in ran.out.splitlines() if " KiB" in line) == "as written"
    assert "--release-grads   " not in ran.out


def test_a_plan_for_one_of_two_models_under_one_optimizer_says_that_it_is_for_both(shell: Any, cell: Cell) -> None:
    both = CASES["an actor and a critic under one optimizer"]
    for flags, is_said in (("--adam8bit", True), ("--checkpoint", False)):
        assert cell(SETUP + both.before).error is None
        ran = cell(f"%%memfit --model critic {flags}\n{both.cell}")
        note = "AdamW updates parameters that are none of Sequential's as well: the plan is for these, too"
        assert (note in " ".join(ran.out.split())) == is_said, ran.out + ran.err
        cell("%memfit undo all")


def test_models_with_a_part_in_common_and_optimizers_of_their_own_are_told_what_they_can_have(cell: Cell) -> None:
    before = """
shared = nn.Linear(4, 4)
one, other = nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(shared, nn.Linear(4, 3))
of_one, of_other = torch.optim.AdamW(one.parameters()), torch.optim.AdamW(other[1].parameters())
"""
    loop = """
for _ in range(2):
    one(torch.randn(4, 4)).sum().backward()
    other(torch.randn(4, 4)).sum().backward()
    of_one.step()
    of_other.step()
"""
    assert cell(SETUP + before).error is None
    ran = cell(f"%%memfit --adam8bit\n{loop}")
    assert (ran.out + ran.err).strip() == (
        "UsageError: session: one AdamW updates weights of one and of other, and another optimizer the rest, so --adam8bit "
        "cannot be applied to each by itself; use one optimizer for both, or --accumulate, --checkpoint, --bf16 or --offload "
        "activations"
    )
    ran = cell(f"%%memfit --accumulate 2 --bf16 --offload activations\n{loop}")
    assert ran.error is None, ran.err
    cell("%memfit undo all")


def test_models_that_share_weights_and_have_an_optimizer_each_are_not_told_to_have_one_each(cell: Cell) -> None:
    before = """
one, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
other[1] = one[1]
optimizers = torch.optim.AdamW(one.parameters()), torch.optim.SGD(other.parameters(), 0.1)
"""
    loop = """
for model, optimizer in zip((one, other), optimizers):
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
"""
    assert cell(SETUP + before).error is None
    ran = cell(f"%%memfit --precision pure-bf16\n{loop}{loop}")
    # of two models and two optimizers any may be found first
    assert re.search(
        r"session: (one and other|other and one) share weights, which one (AdamW|SGD) updates for both, so --precision pure-bf16 cannot "
        r"be applied to each by itself; use --accumulate, --checkpoint, --bf16, --adam8bit or --offload activations,optimizer",
        " ".join((ran.out + ran.err).split()),
    )
    cell("%memfit undo all")


def test_what_a_backward_pass_computes_again_is_no_model_of_the_cell(shell: Any, cell: Cell) -> None:
    both = CASES["an actor and a critic under one optimizer"]
    assert cell(SETUP + both.before).error is None
    assert cell(f"%%memfit --checkpoint\n{both.cell}").error is None
    ran = cell(f"%%memfit --precision pure-bf16\n{both.cell}")
    assert ran.err.startswith("UsageError: session: one AdamW updates ")
    assert {str(session.plan) for session in sessions()} == {"--checkpoint"}
    assert len(sessions()) == 2
    assert cell(f"%%memfit --adam8bit\n{both.cell}").error is None
    cell("%memfit undo all")


def test_a_model_is_named_by_the_way_to_it(shell: Any, cell: Cell) -> None:
    body = LOOP.replace("model(x)", "agent.actor(x)")
    before = (
        "class Agent: pass\nagent = Agent(); agent.actor, agent.critics = net(), [net(1), net(1)]\n"
        "optimizer = torch.optim.AdamW(agent.actor.parameters())"
    )
    assert cell(SETUP + before).error is None
    assert "memfit · Sequential 212 · AdamW" in cell(f"%%memfit --model agent.actor\n{body}").out
    said = cell(f"%%memfit --model agent.critic\n{body}").err.strip()
    assert said == (
        "UsageError: --model agent.critic: agent holds agent.actor, agent.critics[0], agent.critics[1]; name one of them"
    )


def test_a_stale_optimizer_is_named_and_the_cell_runs(shell: Any, cell: Cell) -> None:
    assert cell(SETUP + MADE + "model = net()").error is None
    said = (
        "memfit: `optimizer` updates none of `model`'s parameters; make it again: "
        "optimizer = AdamW(model.parameters(), ...)"
    )
    for flags in ("", "--accumulate 2"):
        ran = cell(f"%%memfit {flags}\n{LOOP}")
        assert ran.error is None, ran.err
        in_force = flags or "as written"  # and no row, which later ones would be compared with
        no_row = (
            f"memfit: nothing of Sequential was updated in this cell, so it has no row; {in_force} is in force on it"
        )
        assert ran.out.splitlines() == [said, no_row]
    assert len(shell.user_ns["losses"]) == 6
    # an image that is optimized is no parameter of a model, and no mistake
    assert (
        cell(SETUP + "model = net(); image = torch.nn.Parameter(x); optimizer = torch.optim.Adam([image])").error
        is None
    )
    assert "updates none of" not in cell(f"%%memfit\n{LOOP}").out


@pytest.mark.parametrize(
    ("before", "made", "said"),
    [
        (MADE, "model = net()", "the AdamW that steps updates none of Sequential's parameters; make it again"),
        (
            f"{MADE}\nmodel[-1] = copy.deepcopy(model[-1])",
            "",
            "the AdamW that steps was made before {last}.weight and 1 more of Sequential, which it does not update; make it again",
        ),
        (
            f"{MADE}\nheld = [optimizer, net()]; model = held[1]; del optimizer",
            "optimizer = held[0]",
            "the AdamW that steps updates none of Sequential's parameters; make it again",
        ),
    ],
)
def test_an_optimizer_that_turns_out_to_be_stale_is_named(
    shell: Any, cell: Cell, before: str, made: str, said: str
) -> None:
    assert cell(f"import copy\n{SETUP}{before}").error is None
    ran = cell(f"%%memfit\n{made}\n{LOOP}")
    assert ran.error is None, ran.err
    said = said.format(last=len(shell.user_ns["model"]) - 1)
    assert ran.out.splitlines()[0] == f"memfit: {said}"
    assert ran.out.count("make it again") == 1


def test_an_optimizer_of_some_layers_and_of_other_variables_is_not_stale(shell: Any, cell: Cell) -> None:
    before = "model, other = net(), net(); optimizer = torch.optim.AdamW([*model[0].parameters(), *other.parameters()])"
    assert cell(SETUP + before).error is None
    ran = cell(f"%%memfit\n{LOOP}")
    assert ran.error is None, ran.err
    assert "make it again" not in ran.out


@pytest.mark.full
def test_watching_for_models_breaks_no_graph_of_what_is_compiled(cell: Cell, shell: Any) -> None:
    assert cell(SETUP).error is None
    source = """
%%memfit --offload activations
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
torch._dynamo.reset()
inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
model = torch.compile(inner, backend=backend)
optimizer = torch.optim.AdamW(inner.parameters(), 1e-3)
"""
    for _ in range(2):  # the second time there are models that the cell replaces
        assert cell(source + LOOP).error is None
        assert len(shell.user_ns["graphs"]) <= 2


@pytest.mark.parametrize("is_whole_called", [True, False])
def test_a_refusal_for_a_part_waits_for_the_whole(cell: Cell, is_whole_called: bool) -> None:
    cell("""
        import torch
        from torch import nn
        def train(is_whole_called):
            layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)]
            model = nn.Sequential(nn.Embedding(9, 8), *layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                inputs = torch.arange(6)
                loss = model[0](inputs).sum() + (model(inputs).sum() if is_whole_called else 0)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """)
    ran = cell(f"%%memfit --checkpoint\ntrain({is_whole_called})")
    if is_whole_called:
        assert ran.error is None
        assert "memfit · Sequential" in ran.out
    else:
        assert str(ran.error).startswith(
            "checkpointing: no part of Embedding can be recomputed: none holds more than one"
        )


_STEPS = """
    for step in range(5):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())"""
SEARCH = f"""
import gc, weakref
import torch
from torch import nn
torch.manual_seed(0)
made, alive, losses = [], [], []
inputs = torch.randn(8, 4)
for trial in range(3):
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
{_STEPS}
    gc.collect()
    alive.append(sum(ref() is not None for ref in made))
"""


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--capacity 8GiB",
        "--checkpoint",
        "--accumulate 2 --offload optimizer",
        "--fp16",
        "--precision pure-bf16",
        "--release-grads",
    ],
)
def test_a_search_keeps_one_model_at_a_time(shell: Any, cell: Cell, flags: str) -> None:
    """Each has the plan from its first step on, and all are counted."""
    assert cell(SEARCH).error is None
    losses = shell.user_ns["losses"]
    told = cell(f"%%memfit {flags}\n{SEARCH}")
    assert told.error is None
    assert shell.user_ns["alive"] == [3, 3, 3]
    assert shell.user_ns["losses"] == pytest.approx(losses, rel=5e-2 if "16" in flags else 1e-6)
    assert "15 steps" in told.out
    assert len(told.out.splitlines()[0].split(" + ")) == 1
    gc.collect()
    with resumed():  # what listened to the loops of the models that are gone listens no more
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, LoopMode)]
    assert len(modes) <= 1


def test_a_further_model_that_a_plan_does_not_apply_to_ends_no_loop(shell: Any, cell: Cell) -> None:
    loop = f"""
import torch
from torch import nn
torch.manual_seed(0)
losses, inputs = [], torch.randn(8, 4)
models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2)]
for model in models:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{_STEPS}
"""
    cell(loop)
    losses = shell.user_ns["losses"]
    told = cell(f"%%memfit --fp16\n{loop}")
    assert told.error is None
    assert shell.user_ns["losses"] == pytest.approx(losses, rel=1e-2)
    said = " ".join(told.out.split())
    assert "refused --fp16: precision: this cell trains models[0] and model, and --fp16 treats" in said
    assert said.endswith("name one model with --model; as written is back")


def test_a_model_that_is_wrapped_later_is_one_model(cell: Cell) -> None:
    cell(SETUP + "model = net()\noptimizer = torch.optim.AdamW(model.parameters())")
    cell("%%memfit --checkpoint\n" + LOOP)
    cell("""
class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, rows):
        return self.inner(rows)
model = Wrapper(model)""")
    assert "\n--checkpoint " in cell("%%memfit --quiet\n" + LOOP).out  # a row; the plan stays in force
    ran = cell("%%memfit --quiet --release-grads\n" + LOOP)
    assert ran.error is None
    assert "\n--release-grads " in ran.out
    assert "in place of Sequential, which is part of Wrapper" in cell("%memfit").out
    cell("%memfit undo")
    assert sessions() == ()


def test_a_model_that_the_plan_does_not_apply_to_is_left_beside_others(shell: Any, cell: Cell) -> None:
    setup = """
import torch; from torch import nn
torch.manual_seed(0)
codes = nn.Embedding(6, 4)
decoder = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)), nn.Linear(8, 1))
optimizer = torch.optim.Adam([*decoder.parameters(), *codes.parameters()], lr=1e-2)
points, losses = torch.randn(6, 5, 4), []
"""
    loop = """
for k in range(6):
    loss = decoder(torch.cat([points[k], codes(torch.tensor(k)).expand(5, -1)], 1)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
    assert cell(setup + loop).error is None
    plain = shell.user_ns["losses"]
    assert cell(setup).error is None
    ran = cell(f"%%memfit --checkpoint\n{loop}")
    assert ran.error is None
    assert "memfit: codes is left as it is: checkpointing: no part of codes can be recomputed" in ran.out + ran.err
    assert shell.user_ns["losses"] == plain
    assert {each.workload.name: each.plan.label for each in sessions()} == {
        "decoder": "--checkpoint",
        "codes": "as written",
    }
