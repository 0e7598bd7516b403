"""Trains a small language model on windows of one long array of tokens in a bucket.

    python examples/tokens.py --url s3://my-bucket/tokens --make

The dataset has one field, "tokens", with one token for each sample. A window has 129 tokens, 128 to read and the one
that follows each of them, and windows begin every 128 tokens. Training uses the first tokens; the loss on the last ones
is compared with their entropy, which no model does better than without looking at the tokens before. You can stop the
script at any time and start it again without `--make`: it resumes after the last checkpoint. `--make` first writes
sentences of invented words; leave it out for your data. Keys of S3 come from the environment.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import streamloader as sl

ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
TRAIN, HELD_OUT = slice(0, 270_000), slice(270_000, 300_000)  # tokens
WINDOWS = sl.Window(129, stride=128)
SAVE_STEPS = 10  # use thousands in a real run


def main() -> None:
    """Train, save checkpoints, evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--endpoint", help="URL of the S3 server; default AWS's")
    parser.add_argument("--make", action="store_true", help="write the data first")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=Path("tokens.pt"))
    arguments = parser.parse_args()
    storage = {"endpoint_url": arguments.endpoint} if arguments.endpoint else {}
    if arguments.make:
        make(arguments.url, storage)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    options = {"batch_size": 32, "windows": WINDOWS, "storage_options": storage}
    train = sl.StreamingDataset(arguments.url, where=TRAIN, **options)
    held_out = sl.StreamingDataset(arguments.url, where=HELD_OUT, shuffle=False, **options)

    torch.manual_seed(0)
    model, step = LanguageModel(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train.load_state_dict(saved["data"])
        step = saved["step"]
    print(f"begin at step {step}, epoch {train.epoch}", flush=True)
    while train.epoch < arguments.epochs:
        epoch, losses = train.epoch, []
        for batch in train:
            loss = next_token_loss(model, batch["tokens"][batch["valid"]])  # padding in the last batch does not count
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            losses.append(loss.item())
            if step % SAVE_STEPS == 0 or train.epoch > epoch:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": train.state_dict()}
                unfinished = arguments.checkpoint.with_suffix(".unfinished")
                torch.save(states | {"step": step}, unfinished)
                unfinished.replace(arguments.checkpoint)  # a kill leaves the old checkpoint or the new one
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)
    entropy, loss = evaluate(model, held_out)
    print(f"held-out loss in nats for each token: entropy {entropy:.3f}, model {loss:.3f}")


class LanguageModel(nn.Module):
    """Tokens (b, n) -> logits of the next tokens (b, n, vocabulary): an embedding and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32)
        self.gru = nn.GRU(32, 96, batch_first=True)
        self.logits = nn.Linear(96, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        return self.logits(self.gru(self.embedding(tokens))[0])


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens that follow, in nats; int32 (b, 129) -> ()."""
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten().long())


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset) -> tuple[float, float]:
    """Return the entropy of the single tokens and the mean loss of the model, in nats."""
    counts, losses, total = torch.zeros(len(ALPHABET)), 0.0, 0
    for batch in data:
        windows = batch["tokens"][batch["valid"]]
        counts += torch.bincount(windows[:, 1:].flatten(), minlength=len(ALPHABET))
        losses += next_token_loss(model, windows).item() * len(windows)
        total += len(windows)
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log()).sum().item(), losses / total


def make(url: str, storage: dict[str, str]) -> None:
    """Write 300,000 letters of sentences: of 100 invented words, each followed by one of four."""
    random = np.random.default_rng(0)
    letters = list(ALPHABET[2:])
    words = ["".join(random.choice(letters, random.integers(2, 8))) for _ in range(100)]
    followers = random.integers(0, len(words), (len(words), 4))
    text, word = [], 0
    for _ in range(math.ceil(300_000 / 3)):  # a word and its space have at least 3 letters
        text.append(words[word] + (". " if random.random() < 0.1 else " "))
        word = followers[word, random.choice(4, p=[0.4, 0.3, 0.2, 0.1])]
    tokens = np.array([ALPHABET.index(letter) for letter in "".join(text)[:300_000]], np.int32)
    with sl.Writer(url, {"tokens": "int32"}, overwrite=True, storage_options=storage) as writer:
        writer.write_batch({"tokens": tokens})


if __name__ == "__main__":
    main()
