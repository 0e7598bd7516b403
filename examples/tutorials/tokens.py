"""Trains a small language model on documents that are packed into rows, with attention within documents only.

    python examples/tutorials/tokens.py

Without `--documents FILE`, JSON lines with a "text" in each, it takes docstrings of Python's standard library. The
page docs/tutorials/tokens.md explains each part.
"""

import argparse
import ast
import json
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

import streamloader as sl

ROW = 257  # 256 tokens to read, and the one that follows each of them
VOCABULARY = 256
ROWS = {"tokens": sl.Pack(ROW, fit="best", columns=("documents", "positions"))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("tokens"), help="folder for all files that are written")
    parser.add_argument("--documents", type=Path, help='your documents: JSON lines with the key "text"')
    parser.add_argument("--url", help="where the dataset is written, such as s3://my-bucket/tokens")
    parser.add_argument("--loops", type=int, default=4, help="of 30 steps")
    arguments = parser.parse_args()
    documents = arguments.documents or write_docstrings(arguments.out / "documents.jsonl")
    url = arguments.url or str(arguments.out / "dataset")

    fields, splits = {"tokens": "ragged:uint8"}, {"train": 0.95, "val": 0.05}
    report = sl.convert(documents, url, map=tokenize, fields=fields, split=splits, workers=0, resume=True)
    lengths = sl.open(url, split="train").lengths("tokens")
    print(f"{report.num_samples} documents in {url}, in train {lengths.sum()} tokens, at most {lengths.max()} in one")

    options = {"pack": ROWS, "with_index": True, "remainder": "drop", "shuffle": sl.Shuffle(lanes=2)}
    train = sl.StreamingDataset(url, split="train", batch_size=16, steps_per_epoch=30, **options)
    val = sl.StreamingDataset(url, split="val", batch_size=16, pack=ROWS, shuffle=False, remainder="uneven")
    print(f"{train.num_samples} rows of {ROW} tokens", flush=True)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30 * arguments.loops, pct_start=0.1)
    losses, counts = [], torch.ones(VOCABULARY)
    for loop in range(arguments.loops):
        for batch in train:
            inputs, targets = inputs_and_targets(batch)
            loss = nn.functional.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten(), ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            losses.append(loss.item())
            counts += torch.bincount(targets[targets >= 0], minlength=VOCABULARY)
        perplexity, unigram = evaluate(model, val, counts)
        print(f"loop {loop + 1}: loss {np.mean(losses[-30:]):.3f}, perplexity {perplexity:.2f}", flush=True)

    state = train.state_dict()
    one_gpu = next(iter(train))["index"].tolist()
    two_gpus = []
    for rank in range(2):
        dataset = sl.StreamingDataset(url, split="train", batch_size=8, world=(rank, 2), **options)
        dataset.load_state_dict(state)
        two_gpus += next(iter(dataset))["index"].tolist()
    print(f"the next step has the same rows on 1 and 2 GPUs: {sorted(one_gpu) == sorted(two_gpus)}")

    print(f"padding: {train.stats().padding_share:.1%} of all tokens")
    draw(arguments.out / "tokens.png", losses, unigram, batch["tokens_documents"])
    print(f"test perplexity {perplexity:.2f}, single tokens {unigram:.2f}")


def write_docstrings(path: Path) -> Path:
    """Write the docstrings of classes and functions of Python's standard library as JSON lines."""
    texts = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-p]*.py")):
        nodes = ast.walk(ast.parse(source.read_bytes()))
        texts += [ast.get_docstring(node) for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    return path


def tokenize(document: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the tokens of a document: its bytes, and 0, which no text has, for its end."""
    return {"tokens": np.frombuffer(document["text"].encode() + b"\0", np.uint8)}


def inputs_and_targets(batch: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the inputs of the model and the next tokens (b, n), which are -1 where a document or a row ends."""
    tokens, documents = batch["tokens"].long(), batch["tokens_documents"]
    follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)  # -1 is padding
    documents = documents[:, :-1]
    sees = (documents[:, :, None] == documents[:, None, :]).tril()  # (b, n, n): earlier tokens of the same document
    return (tokens[:, :-1], batch["tokens_positions"][:, :-1], sees), tokens[:, 1:].where(follows, -1)


class LanguageModel(nn.Module):
    """Tokens and their positions (b, n), and what each sees -> logits of the next tokens (b, n, VOCABULARY).

    A transformer of one layer. The embeddings of the three tokens before each token are added to its own: attention
    would learn to look at them, but not within seconds.
    """

    def __init__(self, width: int = 96, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(4))
        self.positions = nn.Embedding(ROW, width)
        for embedding in (*self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)
        self.layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Return the logits."""
        x = self.positions(positions)
        for back, embedding in enumerate(self.tokens):
            x = x + embedding(tokens.roll(back, 1)) * (positions >= back)[:, :, None]
        return self.logits(self.layer(x, src_mask=~sees.repeat_interleave(self.heads, 0)))


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset, counts: Tensor) -> tuple[float, float]:
    """Return the perplexity of the model, and of a model that knows only how often each token was seen."""
    ours, theirs = [], []
    for batch in data:
        inputs, targets = inputs_and_targets(batch)
        counted = targets >= 0
        ours.append(nn.functional.cross_entropy(model(*inputs)[counted], targets[counted], reduction="none"))
        theirs.append(-(counts / counts.sum()).log()[targets[counted]])
    return torch.cat(ours).mean().exp().item(), torch.cat(theirs).mean().exp().item()


def draw(path: Path, losses: list[float], unigram: float, documents: Tensor) -> None:
    """Draw the loss, the documents of the rows of a batch, and which tokens see which in the row with most of them."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 2.9), layout="constrained")
    left.plot(np.exp(losses))
    left.axhline(unigram, color="gray", linestyle="--")
    left.text(len(losses), unigram * 1.05, "single tokens", color="gray", ha="right")
    left.set(xlabel="step", ylabel="training perplexity", yscale="log")
    colors = np.ma.masked_less(documents.numpy(), 0) % 20
    middle.imshow(colors, cmap="tab20", vmin=0, vmax=19, aspect="auto", interpolation="nearest")
    middle.set(xlabel="token", ylabel="row", yticks=range(0, 16, 5), title="Documents of a batch")
    most = documents.diff().ne(0).sum(1).argmax()
    row = documents[most]
    sees = (row[:, None] == row).tril().numpy() & (row >= 0).numpy()
    right.imshow(np.where(sees, colors[most], np.nan), cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
    right.set(xlabel="sees token", ylabel="token", title=f"Attention in row {most}")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
