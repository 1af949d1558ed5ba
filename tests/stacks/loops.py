"""The loops: each is code that makes things, and a cell that trains them and leaves `losses`.

They are written as a notebook would have them. Nothing here knows memlab. `parts` says where the models are whose weights
are compared afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stack:
    """One loop.

    Args:
        make: source of the cells before, after torch has been imported and seeded.
        cell: source of the cell that trains; sets `losses`.
        parts: expressions for the models.
        packages: what it needs beside torch.
        beside: more flags beside a setting, where the loop needs them.
        by_hand: for a setting that asks for another result than the untouched loop's, the cell that gives it.
    """

    make: str
    cell: str
    parts: tuple[str, ...] = ("model",)
    packages: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)
    by_hand: dict[str, str] = field(default_factory=dict)


TORCH = """
import copy, tempfile
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""


def _loop(over: str, *lines: str) -> str:
    """A loop whose lines compute `loss`."""
    body = [*lines, "optimizer.zero_grad(); loss.backward(); optimizer.step()", "losses.append(loss.item())"]
    return "losses = []\n" + "\n    ".join([f"{over}:", *"\n".join(body).split("\n")]) + "\n"


def _batches(inputs: str, targets: str) -> str:
    generator = "generator=torch.Generator().manual_seed(i)"
    return (
        f"batches = [(torch.randn({inputs}, {generator}), torch.randint({targets}, {generator})) for i in range(4)]\n"
    )


_IMAGES = _batches("8, 3, 16, 16", "0, 5, (8,)")
ROWS = _batches("8, 12", "0, 3, (8,)")
_ADAMW = "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)\n"
_MLP = "nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))"
_CLASSIFY = _loop("for inputs, targets in batches", "loss = F.cross_entropy(model(inputs), targets)")
_LANGUAGE = _loop("for ids in batches", "loss = model(input_ids=ids, labels=ids).loss")

_TEXTS = """
batches = [torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)]
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        ids = torch.randint(0, 96, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}
"""

_GPT2 = (
    """
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                    attn_pdrop=0.0)
model = GPT2LMHeadModel(config).train()
"""
    + _TEXTS
)

# four-bit weights of a small Llama, from a folder as they usually come
_QUANTISED = (
    """
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
folder = tempfile.mkdtemp()
LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=2, max_position_embeddings=32)).save_pretrained(folder)
quantisation = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
model = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantisation, device_map="cpu")
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).train()
"""
    + _TEXTS
)

_TOKENIZER = """
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from datasets import Dataset
words = Tokenizer(models.WordLevel({str(i): i for i in range(96)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
def words_of(seed, count):
    return " ".join(str(int(i)) for i in torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(seed)))
"""

_TRAINER_SAID = """
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""

_ARGUMENTS = """output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=4, logging_steps=1,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, learning_rate=1e-3, adam_epsilon=1e-4"""

# keys' biases have no gradient but rounding, which Adam in half precision would otherwise make updates of
_DAMPED = _ARGUMENTS.replace("adam_epsilon=1e-4", "adam_epsilon=1e-2")

_BLOCK = """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.act = nn.ReLU(inplace=True)
    def forward(self, x):
        return self.act(x + self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))
"""

# inverted residual blocks with squeeze and excitation, which a model is mostly made of by name and not in lists
_EFFICIENT = """
class Inverted(nn.Module):
    def __init__(self, c, out, stride):
        super().__init__()
        wide = 2 * c
        self.conv_pw, self.bn1 = nn.Conv2d(c, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv_dw, self.bn2 = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.se = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.SiLU(inplace=True), nn.Conv2d(4, wide, 1),
                                nn.Sigmoid())
        self.conv_pwl, self.bn3 = nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)
        self.has_skip = c == out and stride == 1
    def forward(self, x):
        h = F.silu(self.bn1(self.conv_pw(x)), inplace=True)
        h = F.silu(self.bn2(self.conv_dw(h)), inplace=True)
        h = self.bn3(self.conv_pwl(h * self.se(h)))
        return x + h if self.has_skip else h
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(nn.Sequential(Inverted(8, 8, 1), Inverted(8, 8, 1)), nn.Sequential(Inverted(8, 16, 2)))
        self.classifier = nn.Linear(16, 5)
    def forward_features(self, x):
        return self.blocks(F.silu(self.bn1(self.conv_stem(x)), inplace=True))
    def forward(self, x):
        return self.classifier(self.forward_features(x).mean((2, 3)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""

_HALVES_BY_HAND = """
losses = []
for inputs, targets in batches:
    optimizer.zero_grad()
    loss = 0
    for rows in (slice(0, 4), slice(4, 8)):
        part = F.cross_entropy(model(inputs[rows]), targets[rows]) / 2
        part.backward()
        loss += part.item()
    optimizer.step()
    losses.append(loss)
"""

_LIGHTNING = f"""
import lightning
class Base(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = {_MLP}
        self.said = []
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
def fit(model):
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
"""

STACKS: dict[str, Stack] = {
    "CNN": Stack(
        _IMAGES
        + _BLOCK
        + """
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.MaxPool2d(2), Block(8), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(8, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
""",
        _CLASSIFY,
    ),
    "CNN as in timm": Stack(
        _IMAGES + _EFFICIENT,
        _CLASSIFY,
        beside={"--accumulate 2": "--batchnorm micro"},
        by_hand={"--accumulate 2": _HALVES_BY_HAND},
    ),
    "U-Net, frozen encoder": Stack(
        """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)])
        self.mid = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 8, 4, 2, 1), nn.ConvTranspose2d(16, 4, 4, 2, 1)])
    def forward(self, x, t):
        x = x + t[:, None, None, None]
        kept = []
        for down in self.down:
            x = F.silu(down(x)); kept.append(x)
        x = self.mid(x)
        for up in self.up:
            x = up(torch.cat([x, kept.pop()], 1))
        return x
vae = nn.Conv2d(3, 4, 2, 2).requires_grad_(False)
model = UNet()
images = [torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]
"""
        + _ADAMW,
        _loop(
            "for image in images",
            "with torch.no_grad(): latents = vae(image)",
            "noise, t = torch.randn_like(latents), torch.rand(len(latents))",
            "noisy = latents * (1 - t)[:, None, None, None] + noise * t[:, None, None, None]",
            "loss = F.mse_loss(model(noisy, t), noise)",
        ),
    ),
    "VAE": Stack(
        ROWS
        + """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.decoder(z), mean, logvar
model = VAE()
optimizer = torch.optim.Adam(model.parameters())
""",
        _loop(
            "for inputs, _ in batches",
            "made, mean, logvar = model(inputs)",
            "loss = F.mse_loss(made, inputs) - 0.5 * (1 + logvar - mean.square() - logvar.exp()).mean()",
        ),
    ),
    "GAN": Stack(
        ROWS
        + """
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
netD = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizerG, optimizerD = torch.optim.Adam(netG.parameters()), torch.optim.Adam(netD.parameters())
""",
        """
losses = []
for inputs, _ in batches:
    netD.zero_grad()
    errD_real = F.softplus(-netD(inputs)).mean(); errD_real.backward()
    fake = netG(torch.randn(8, 4))
    errD_fake = F.softplus(netD(fake.detach())).mean(); errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = F.softplus(-netD(fake)).mean(); errG.backward()
    optimizerG.step()
    losses += [errD_real.item(), errD_fake.item(), errG.item()]
""",
        parts=("netG", "netD"),
    ),
    "DPO by hand": Stack(
        _GPT2
        + """
reference = copy.deepcopy(model).eval().requires_grad_(False)
def log_probability(network, ids):
    return network(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))
"""
        + _ADAMW,
        _loop(
            "for ids in batches",
            "chosen, rejected = ids, ids.flip(1)",
            "with torch.no_grad(): base = log_probability(reference, chosen) - log_probability(reference, rejected)",
            "margin = log_probability(model, chosen) - log_probability(model, rejected) - base",
            "loss = -F.logsigmoid(0.1 * margin).mean()",
        ),
        packages=("transformers",),
    ),
    "actor and critic": Stack(
        """
actor, critic = (nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size)) for size in (2, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
""",
        _loop(
            "for episode in range(3)",
            """state, log_probs, values, rewards = torch.randn(1, 4), [], [], []
for _ in range(5):
    policy = torch.distributions.Categorical(logits=actor(state))
    action = policy.sample()
    log_probs.append(policy.log_prob(action)); values.append(critic(state)[:, 0])
    rewards.append(float(action) - 0.5); state = state.roll(1, -1) + 0.1 * float(action)
returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
advantage = returns - torch.cat(values)
loss = -(torch.cat(log_probs) * advantage.detach()).mean() + advantage.square().mean()""",
        ),
        parts=("actor", "critic"),
    ),
    "siamese": Stack(
        ROWS + "model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))\n" + _ADAMW,
        _loop(
            "for inputs, targets in batches",
            "one, two = model(inputs), model(inputs.flip(0))",
            "loss = F.cosine_embedding_loss(one, two, (targets == targets.flip(0)).float() * 2 - 1)",
        ),
    ),
    "distillation": Stack(
        ROWS + f"teacher = {_MLP}.eval()\nmodel = {_MLP}\n" + _ADAMW,
        _loop(
            "for inputs, targets in batches",
            "with torch.no_grad(): wanted = teacher(inputs).softmax(-1)",
            "output = model(inputs)",
            "loss = F.cross_entropy(output, targets) + F.kl_div(output.log_softmax(-1), wanted, reduction='batchmean')",
        ),
    ),
    "MAML": Stack(
        ROWS + f"model = {_MLP}\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        _loop(
            "for inputs, targets in batches",
            "weights = dict(model.named_parameters())",
            "inner = F.cross_entropy(torch.func.functional_call(model, weights, (inputs[:4],)), targets[:4])",
            "gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)",
            "fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients)}",
            "loss = F.cross_entropy(torch.func.functional_call(model, fast, (inputs[4:],)), targets[4:])",
        ),
    ),
    "compiled": Stack(
        ROWS + f'torch._dynamo.reset()\nmodel = torch.compile({_MLP}, backend="aot_eager")\n' + _ADAMW, _CLASSIFY
    ),
    "Trainer": Stack(
        _GPT2
        + f"""
from transformers import Trainer, TrainingArguments
trainer = Trainer(model, TrainingArguments({_ARGUMENTS}), train_dataset=Rows())
""",
        _TRAINER_SAID,
        packages=("transformers", "accelerate"),
    ),
    "Trainer that accumulates": Stack(
        _GPT2
        + f"""
from transformers import Trainer, TrainingArguments
trainer = Trainer(model, TrainingArguments({_DAMPED}, gradient_accumulation_steps=2), train_dataset=Rows())
""",
        _TRAINER_SAID,
        packages=("transformers", "accelerate"),
    ),
    "Accelerate": Stack(
        _GPT2
        + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
""",
        """
losses = []
for ids in batches:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
""",
        packages=("transformers", "accelerate"),
    ),
    "PEFT LoRA": Stack(
        _GPT2
        + """
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))
"""
        + _ADAMW,
        _LANGUAGE,
        packages=("transformers", "peft"),
    ),
    "PEFT QLoRA": Stack(_QUANTISED + _ADAMW, _LANGUAGE, packages=("transformers", "peft", "bitsandbytes")),
    "TRL SFT": Stack(
        _GPT2
        + _TOKENIZER
        + f"""
from trl import SFTConfig, SFTTrainer
data = Dataset.from_list([{{key: value.tolist() for key, value in Rows()[i].items()}} for i in range(16)])
trainer = SFTTrainer(model, args=SFTConfig({_ARGUMENTS}, bf16=False, max_length=16, dataset_kwargs={{"skip_prepare_dataset": True}}),
                     train_dataset=data, processing_class=tokenizer)
""",
        _TRAINER_SAID,
        packages=("transformers", "trl", "datasets"),
    ),
    "TRL DPO": Stack(
        _GPT2
        + _TOKENIZER
        + f"""
from trl import DPOConfig, DPOTrainer
data = Dataset.from_list([dict(prompt=words_of(i, 4), chosen=" " + words_of(100 + i, 3 + i % 3), rejected=" " + words_of(200 + i, 5))
                          for i in range(16)])
trainer = DPOTrainer(model, copy.deepcopy(model), train_dataset=data, processing_class=tokenizer,
                     args=DPOConfig({_ARGUMENTS}, bf16=False, gradient_checkpointing=False))
""",
        _TRAINER_SAID,
        packages=("transformers", "trl", "datasets"),
    ),
    "Lightning": Stack(
        ROWS
        + _LIGHTNING
        + """
class Lit(Base):
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, _):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.said.append(loss.item())
        return loss
model = Lit()
""",
        "fit(model)\nlosses = model.said\n",
        packages=("lightning",),
    ),
    "Lightning, manual": Stack(
        ROWS
        + _LIGHTNING
        + """
class Lit(Base):
    automatic_optimization = False
    def training_step(self, batch, _):
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        optimizer.zero_grad(); self.manual_backward(loss); optimizer.step()
        self.said.append(loss.item())
""",
        "model = Lit()\nfit(model)\nlosses = model.said\n",
        packages=("lightning",),
    ),
}
