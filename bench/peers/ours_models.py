"""The models that `ours_device.py` trains: torchvision's, or small ones where it is not installed or time is short."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 1000
LEARNING_RATE = 0.01
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, for pixels from 0 to 255

Step = Callable[[Any], None]


def trainer(name: str, device: torch.device, small: bool) -> Step:
    """Return a function that trains the model by one batch, and never waits for the device."""
    model = (small_resnet() if small else resnet(name)) if name.startswith("resnet") else Transformer(small)
    model = model.to(device, memory_format=torch.channels_last)
    parameters = list(model.parameters())

    def step(batch: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        with torch.no_grad():  # as SGD of torch.optim, whose import takes seconds in each process
            torch._foreach_add_(parameters, [one.grad for one in parameters], alpha=-LEARNING_RATE)
        for one in parameters:
            one.grad = None

    return step


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of (images, labels) or of (tokens, positions)."""
    inputs, others = batch
    if isinstance(model, Transformer):
        tokens = inputs.remainder(model.vocabulary).long()
        logits = model(tokens[:, :-1], others[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return functional.cross_entropy(model(inputs), others.remainder(CLASSES))


def normalised(images: Tensor) -> Tensor:
    """Return uint8 (batch, height, width, 3) as normalised bfloat16 (batch, 3, height, width), by one kernel."""
    scale, shift = constants(images.device)
    out = torch.empty_like(images, dtype=torch.bfloat16)
    return torch.addcmul(shift, images, scale, out=out).permute(0, 3, 1, 2)


@cache
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 1 / STD and -MEAN / STD on the device, copied once: each copy from the host would wait."""
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return (1 / std).to(device), (-mean / std).to(device)


def resnet(name: str) -> nn.Module:
    """Return torchvision's model, or a small one."""
    with contextlib.suppress(ImportError):
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)()
        return model
    return small_resnet()


def is_torchvision_installed() -> bool:
    """Whether `resnet` returns the model of that name."""
    with contextlib.suppress(ImportError):
        import torchvision

        return bool(torchvision.__version__)
    return False


def small_resnet() -> nn.Module:
    """Return a model of images of any size that takes milliseconds on a CPU."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


class Transformer(nn.Module):
    """A decoder: 8 layers of 512, 51 million parameters with embeddings of GPT-2's vocabulary; small: one of 32.

    Each row is one causal sequence, as most pretraining has it; positions begin anew with each document.
    """

    def __init__(self, small: bool) -> None:
        super().__init__()
        width, layers, self.vocabulary = (32, 1, 256) if small else (512, 8, 50_304)
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.positions = nn.Embedding(2048, width)
        self.blocks = nn.Sequential(*(Block(width, heads=8) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (rows, length, vocabulary)."""
        hidden = self.embedding(tokens) + self.positions(positions.remainder(2048))
        return functional.linear(self.norm(self.blocks(hidden)), self.embedding.weight)


class Block(nn.Module):
    """A layer: attention, then two linear ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (rows, length, width)."""
        parts = self.projections(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(self.norm(hidden))
