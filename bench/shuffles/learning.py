"""One real learning curve: which of ten photographs a patch is from, of patches stored photograph by photograph.

Orders of the same numbers, the same network and the same steps: what differs is the order alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bench.photos import Image8
from bench.shuffles.quality import Ids

SIDE = 16  # pixels of a patch
TESTED = 4096  # patches that are not trained on
HIDDEN = 128
LEARNING_RATE, MOMENTUM = 0.05, 0.9
LOOK = 16  # steps between two looks at the error


def patches(photos: Sequence[Image8], samples: int, seed: int) -> tuple[NDArray[np.uint8], Ids]:
    """Return patches (samples, SIDE, SIDE, 3) in the order of their photographs, and the number of the photograph."""
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) * len(photos) // samples
    out = np.empty((samples, SIDE, SIDE, 3), np.uint8)
    for i, label in enumerate(labels.tolist()):
        photo = photos[label]
        top, left = (int(rng.integers(length - SIDE + 1)) for length in photo.shape[:2])
        out[i] = photo[top : top + SIDE, left : left + SIDE]
    return out, labels


class Task:
    """Patches to learn from and patches to be tested with, as a network takes them."""

    def __init__(self, photos: Sequence[Image8], samples: int) -> None:
        images, labels = patches(photos, samples, 0)
        unseen, self.answers = (torch.from_numpy(array) for array in patches(photos, TESTED, 1))
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)
        self.unseen = _scaled(unseen)
        self.classes = int(self.labels.max()) + 1

    def errors(self, ids: Ids, batch: int, seed: int) -> list[float]:
        """Train one epoch in this order; return the part of unseen patches that is wrong, every LOOK steps."""
        torch.manual_seed(seed)
        size = SIDE * SIDE * 3
        network = torch.nn.Sequential(
            torch.nn.Linear(size, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, self.classes)
        )
        optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM)
        found = []
        for step, rows in enumerate(torch.from_numpy(ids).split(batch), 1):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(_scaled(self.images[rows])), self.labels[rows])
            loss.backward()
            optimizer.step()
            if step % LOOK == 0:
                with torch.no_grad():
                    wrong = network(self.unseen).argmax(1) != self.answers
                found.append(float(wrong.float().mean()))
        return found

    def curve(self, orders: Sequence[Ids], batch: int) -> list[float]:
        """Return the mean error over orders of several seeds, each with a network of its own."""
        return np.mean([self.errors(ids, batch, seed) for seed, ids in enumerate(orders)], axis=0).tolist()


def _scaled(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1).float() / 128 - 1
