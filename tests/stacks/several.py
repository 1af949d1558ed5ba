"""Loops in which several models train: the same kind of entries as in `loops`."""

from __future__ import annotations

from tests.stacks.loops import ROWS, STACKS, Stack

_HEAD = (
    ROWS
    + """
import itertools
from dataclasses import dataclass
def net(i, o, act=nn.Tanh): return nn.Sequential(nn.Linear(i, 16), act(), nn.Linear(16, 16), act(), nn.Linear(16, o))
def adam(p): return torch.optim.AdamW(p, lr=1e-3, eps=1e-4)
"""
)
SEVERAL: dict[str, Stack] = {}


def _case(name: str, make: str, cell: str, parts: list[str]) -> None:
    SEVERAL[name] = Stack(_HEAD + make, cell, tuple(parts))


_case(
    "WGAN-GP",
    "G, D = net(4, 12), net(12, 1)\noptG, optD = adam(G.parameters()), adam(D.parameters())",
    """
losses = []
for inputs, _ in batches:
    for _ in range(2):
        fake = G(torch.randn(8, 4)).detach()
        mix = (torch.rand(8, 1) * inputs + torch.rand(8, 1) * fake).requires_grad_()
        (g,) = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)
        lossD = D(fake).mean() - D(inputs).mean() + 10 * (g.norm(dim=1) - 1).square().mean()
        optD.zero_grad(); lossD.backward(); optD.step()
    lossG = -D(G(torch.randn(8, 4))).mean()
    optG.zero_grad(); lossG.backward(); optG.step()
    losses += [lossD.item(), lossG.item()]
""",
    ["G", "D"],
)
_case(
    "CycleGAN",
    """
G, F_, DA, DB = net(12, 12), net(12, 12), net(12, 1), net(12, 1)
optG = adam(itertools.chain(G.parameters(), F_.parameters()))
optD = adam(itertools.chain(DA.parameters(), DB.parameters()))
def grads(on, *nets):
    for n in nets: n.requires_grad_(on)
""",
    """
losses = []
for a, _ in batches:
    b = a.flip(0) + 1
    grads(False, DA, DB)
    fb, fa = G(a), F_(b)
    loss = (F_(fb) - a).abs().mean() + (G(fa) - b).abs().mean() + (DB(fb) - 1).square().mean() + (DA(fa) - 1).square().mean()
    optG.zero_grad(); loss.backward(); optG.step()
    grads(True, DA, DB)
    optD.zero_grad()
    lossA = (DA(a) - 1).square().mean() + DA(fa.detach()).square().mean(); lossA.backward()
    lossB = (DB(b) - 1).square().mean() + DB(fb.detach()).square().mean(); lossB.backward()
    optD.step()
    losses += [loss.item(), lossA.item(), lossB.item()]
""",
    ["G", "F_", "DA", "DB"],
)
_case(
    "actor, critic, two optimizers, one loss",
    "actor, critic = net(12, 3), net(12, 1)\noptA, optC = adam(actor.parameters()), adam(critic.parameters())",
    """
losses = []
for s, t in batches:
    policy = torch.distributions.Categorical(logits=actor(s)); v = critic(s)[:, 0]
    a = policy.sample(); adv = (a == t).float() - v
    loss = -(policy.log_prob(a) * adv.detach()).mean() + adv.square().mean()
    optA.zero_grad(); optC.zero_grad(); loss.backward(); optA.step(); optC.step()
    losses.append(loss.item())
""",
    ["actor", "critic"],
)
_case(
    "SAC-like",
    """
import copy
actor, q1, q2 = net(12, 2), net(14, 1), net(14, 1)
t1, t2 = copy.deepcopy(q1).requires_grad_(False), copy.deepcopy(q2).requires_grad_(False)
optA, optQ = adam(actor.parameters()), adam(list(q1.parameters()) + list(q2.parameters()))
""",
    """
losses = []
for s, _ in batches:
    with torch.no_grad():
        n = s.flip(0); an = actor(n).tanh()
        y = 0.1 + 0.9 * torch.min(t1(torch.cat([n, an], 1)), t2(torch.cat([n, an], 1)))
    a = torch.randn(8, 2).tanh(); sa = torch.cat([s, a], 1)
    lq = F.mse_loss(q1(sa), y) + F.mse_loss(q2(sa), y)
    optQ.zero_grad(); lq.backward(); optQ.step()
    act = actor(s).tanh(); x = torch.cat([s, act], 1)
    la = -torch.min(q1(x), q2(x)).mean()
    optA.zero_grad(); la.backward(); optA.step()
    with torch.no_grad():
        for q, t in ((q1, t1), (q2, t2)):
            for p, r in zip(q.parameters(), t.parameters()): r.lerp_(p, 0.1)
    losses += [lq.item(), la.item()]
""",
    ["actor", "q1", "q2", "t1", "t2"],
)
_case(
    "mutual distillation",
    "one, two = net(12, 3), net(12, 3)\nopts = [adam(one.parameters()), adam(two.parameters())]",
    """
losses = []
for x, t in batches:
    a, b = one(x), two(x)
    la = F.cross_entropy(a, t) + F.kl_div(a.log_softmax(-1), b.detach().softmax(-1), reduction="batchmean")
    lb = F.cross_entropy(b, t) + F.kl_div(b.log_softmax(-1), a.detach().softmax(-1), reduction="batchmean")
    for o in opts: o.zero_grad()
    la.backward(); lb.backward()
    for o in opts: o.step()
    losses += [la.item(), lb.item()]
""",
    ["one", "two"],
)
_case(
    "VAE beside U-Net",
    """
class VAE(nn.Module):
    def __init__(self):
        super().__init__(); self.encoder, self.decoder = net(12, 8), net(4, 12)
    def encode(self, x):
        m, l = self.encoder(x).chunk(2, -1); return m + torch.randn_like(m) * (0.5 * l).exp(), m, l
    def forward(self, x):
        z, m, l = self.encode(x); return self.decoder(z), z
text = net(12, 4).requires_grad_(False).eval()
vae, unet = VAE(), net(8, 4)
vae.decoder.requires_grad_(False)
optV, optU = adam(p for p in vae.parameters() if p.requires_grad), adam(unet.parameters())
""",
    """
losses = []
for x, _ in batches:
    made, z = vae(x)
    lv = F.mse_loss(made, x)
    optV.zero_grad(); lv.backward(); optV.step()
    with torch.no_grad(): c = text(x)
    noise = torch.randn_like(z); z = z.detach() * 0.5 + noise * 0.5
    lu = F.mse_loss(unet(torch.cat([z, c], 1)), noise)
    optU.zero_grad(); lu.backward(); optU.step()
    losses += [lv.item(), lu.item()]
""",
    ["vae", "unet"],
)
_case(
    "three in a dict",
    """
nets = {"enc": net(12, 4), "dec": net(4, 12), "dis": net(12, 1)}
opts = {k: adam(n.parameters()) for k, n in nets.items()}
""",
    """
losses = []
for x, _ in batches:
    z = nets["enc"](x); y = nets["dec"](z)
    ld = F.softplus(-nets["dis"](x)).mean() + F.softplus(nets["dis"](y.detach())).mean()
    opts["dis"].zero_grad(); ld.backward(); opts["dis"].step()
    l = F.mse_loss(y, x) + F.softplus(-nets["dis"](y)).mean()
    opts["enc"].zero_grad(); opts["dec"].zero_grad(); l.backward(); opts["enc"].step(); opts["dec"].step()
    losses += [ld.item(), l.item()]
""",
    ["nets['enc']", "nets['dec']", "nets['dis']"],
)
_case(
    "ModuleDict of towers",
    """
towers = nn.ModuleDict({"image": net(12, 6), "text": net(5, 6)})
opt = adam(towers.parameters())
""",
    """
losses = []
for x, _ in batches:
    i, t = F.normalize(towers["image"](x), dim=-1), F.normalize(towers["text"](x[:, :5]), dim=-1)
    logits = 10 * i @ t.T; y = torch.arange(8)
    loss = F.cross_entropy(logits, y) + F.cross_entropy(logits.T, y)
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
""",
    ["towers"],
)
_case(
    "dataclass",
    """
@dataclass
class Agent:
    policy: nn.Module
    value: nn.Module
    opts: list
p, v = net(12, 3), net(12, 1)
agent = Agent(p, v, [adam(p.parameters()), adam(v.parameters())])
del p, v
""",
    """
losses = []
for x, t in batches:
    lp, lv = F.cross_entropy(agent.policy(x), t), (agent.value(x)[:, 0] - t).square().mean()
    for o in agent.opts: o.zero_grad()
    (lp + lv).backward()
    for o in agent.opts: o.step()
    losses += [lp.item(), lv.item()]
""",
    ["agent.policy", "agent.value"],
)
_case(
    "ensemble in a list, one optimizer",
    """
ensemble = [net(12, 3) for _ in range(3)]
opt = adam(itertools.chain(*(m.parameters() for m in ensemble)))
""",
    """
losses = []
for x, t in batches:
    loss = sum(F.cross_entropy(m(x), t) for m in ensemble)
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
""",
    ["ensemble[0]", "ensemble[1]", "ensemble[2]"],
)
_case(
    "made in the cell",
    "",
    """
losses = []
torch.manual_seed(3)
G, D = net(4, 12), net(12, 1)
optG, optD = adam(G.parameters()), adam(D.parameters())
for x, _ in batches:
    fake = G(torch.randn(8, 4))
    ld = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
    optD.zero_grad(); ld.backward(); optD.step()
    lg = F.softplus(-D(fake)).mean()
    optG.zero_grad(); lg.backward(); optG.step()
    losses += [ld.item(), lg.item()]
""",
    ["G", "D"],
)
_BACKBONE_AND_HEAD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__(); self.backbone, self.head = net(12, 8), net(8, 3)
    def forward(self, x): return self.head(self.backbone(x))
model = Model()
"""
_case(
    "backbone and head, two optimizers, called as a whole",
    _BACKBONE_AND_HEAD
    + """
optB, optH = adam(model.backbone.parameters()), torch.optim.SGD(model.head.parameters(), lr=0.1)
""",
    """
losses = []
for x, t in batches:
    loss = F.cross_entropy(model(x), t)
    optB.zero_grad(); optH.zero_grad(); loss.backward(); optB.step(); optH.step()
    losses.append(loss.item())
""",
    ["model"],
)
_case(
    "a submodule also trained by itself",
    _BACKBONE_AND_HEAD
    + """
backbone = model.backbone
opt, optB = adam(model.parameters()), adam(backbone.parameters())
""",
    """
losses = []
for x, t in batches:
    pre = (backbone(x) - backbone(x.flip(1)).detach()).square().mean()
    optB.zero_grad(); pre.backward(); optB.step()
    loss = F.cross_entropy(model(x), t)
    opt.zero_grad(); loss.backward(); opt.step()
    losses += [pre.item(), loss.item()]
""",
    ["model"],
)
_case(
    "shared trunk",
    """
trunk = net(12, 8); a, b = nn.Sequential(trunk, nn.Linear(8, 3)), nn.Sequential(trunk, nn.Linear(8, 1))
optA, optB = adam(a.parameters()), adam(b.parameters())
""",
    """
losses = []
for x, t in batches:
    la = F.cross_entropy(a(x), t); optA.zero_grad(); la.backward(); optA.step()
    lb = b(x).square().mean(); optB.zero_grad(); lb.backward(); optB.step()
    losses += [la.item(), lb.item()]
""",
    ["a", "b"],
)

ALL_STACKS = {**STACKS, **SEVERAL}
