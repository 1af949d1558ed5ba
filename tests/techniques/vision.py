"""Small models as people write them for images: without blocks in a list, and with BatchNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 16))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def double(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = double(3, 8), double(8, 16), double(16, 32)
        self.up1, self.conv1 = nn.ConvTranspose2d(32, 16, 2, 2), double(32, 16)
        self.up2, self.conv2 = nn.ConvTranspose2d(16, 8, 2, 2), double(16, 8)
        self.outc = nn.Conv2d(8, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inc(x)
        second = self.down1(F.max_pool2d(first, 2))
        h = self.down2(F.max_pool2d(second, 2))
        h = self.conv1(torch.cat([second, self.up1(h)], 1))
        h = self.conv2(torch.cat([first, self.up2(h)], 1))
        return self.outc(h).mean((2, 3))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 4, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 4, 2, 1), nn.GELU(), nn.Flatten()]
        self.encoder = nn.Sequential(*layers)
        self.mu, self.logvar = nn.Linear(32 * 8 * 8, 16), nn.Linear(32 * 8 * 8, 16)
        self.project = nn.Linear(16, 32 * 8 * 8)
        layers = [nn.Unflatten(1, (32, 8, 8)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GELU()]
        self.decoder = nn.Sequential(
            *layers, nn.ConvTranspose2d(16, 16, 3, 1, 1), nn.GELU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        image = self.decoder(self.project(mu + torch.randn_like(mu) * (0.5 * logvar).exp()))
        return torch.cat([image.flatten(1)[:, :8], mu[:, :2]], 1)


def plain_sequential() -> nn.Sequential:
    """A stack of layers, as in a first example."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


MODELS = {"resnet": ResNet, "unet": UNet, "vae": VAE, "sequential": plain_sequential}


def vision_workload(name: str) -> Workload:
    """A model in training mode, with SGD and eight images."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (8,), generator=generator)
    return Workload(
        model, torch.optim.SGD(model.parameters(), lr=0.01), batch=(images, labels), loss_fn=F.cross_entropy
    )
