"""Trains a classifier of spoken words on clips of different lengths, which are padded in batches of like length.

    python examples/tutorials/speech.py

Without `--clips FOLDER`, WAV files of 8000 samples a second as FOLDER/WORD/CLIP.wav, it synthesises words of two
vowels. The page docs/tutorials/speech.md explains each part.
"""

import argparse
import io
import wave
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

import streamloader as sl

RATE, HOP = 8000, 80  # samples a second; from one frame of a spectrogram to the next
FORMANTS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}  # Hz
EPOCHS = 8


def make_clips(folder: Path) -> Path:
    """Write 40 clips of each word of two vowels as FOLDER/WORD/NUMBER.wav."""
    random = np.random.default_rng(0)
    for word in [first + second for first in FORMANTS for second in FORMANTS if first != second]:
        (folder / word).mkdir(parents=True, exist_ok=True)
        for number in range(40):
            samples, path = synthesise(word, random), folder / word / f"{number:02d}.wav"
            if not path.exists():
                with wave.open(str(path), "wb") as file:
                    file.setparams((1, 2, RATE, 0, "NONE", ""))
                    file.writeframes((samples * 16_000).clip(-32_768, 32_767).astype("<i2").tobytes())
    return folder


def synthesise(word: str, random: np.random.Generator) -> np.ndarray:
    """Return the harmonics of a random voice, as loud as the formants make them, which glide from vowel to vowel."""
    seconds, pitch, size = random.uniform(0.25, 1.0), random.uniform(90, 220), random.uniform(0.85, 1.2)
    time = np.arange(int(seconds * RATE)) / RATE
    glide = 1 / (1 + np.exp(-20 * (time / seconds - random.uniform(0.35, 0.65))))  # from 0 to 1
    pitches = pitch * np.linspace(1, random.uniform(0.8, 1.1), len(time))
    harmonics = np.arange(1, int(RATE / 2 / pitch))[:, None]
    loudness = 0.0
    for first, second in zip(FORMANTS[word[0]], FORMANTS[word[1]], strict=True):
        formant = size * (first + (second - first) * glide)
        loudness = loudness + 1 / (1 + ((harmonics * pitches - formant) / 80) ** 2)
    voice = (loudness * np.sin(harmonics * 2 * np.pi * np.cumsum(pitches) / RATE)).sum(0)
    return 0.5 * voice / np.abs(voice).max() + random.normal(0, random.uniform(0.02, 0.25), len(time))


def read_wav(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of a clip as float32 from -1 to 1, and its label."""
    with wave.open(io.BytesIO(sample["audio"])) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return {"wave": samples.astype(np.float32) / 32_768, "label": sample["label"]}


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a clip at another volume and with some noise."""
    sample = read_wav(sample)
    noise = rng.normal(0, rng.uniform(0, 0.1), len(sample["wave"]))
    return {**sample, "wave": (sample["wave"] * rng.uniform(0.5, 2) + noise).astype(np.float32)}


class Recogniser(nn.Module):
    """Waves (b, n) and their lengths (b,) -> logits (b, words): convolutions along a spectrogram, and their maximum."""

    def __init__(self, words: int, bands: int = 40) -> None:
        super().__init__()
        edges = 700 * (10 ** (torch.linspace(0, 2595 * np.log10(1 + RATE / 1400), bands + 2) / 2595) - 1)  # mel scale
        low, middle, high = (edges[i : i + bands, None] for i in range(3))
        hertz = torch.linspace(0, RATE / 2, 129)
        triangles = torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)
        self.register_buffer("triangles", triangles)
        self.register_buffer("window", torch.hann_window(256))
        layers = [nn.Conv1d(bands, 64, 5, padding=2)]
        for _ in range(2):
            layers += [nn.ReLU(), nn.Conv1d(64, 64, 9, padding=4)]
        self.layers, self.logits = nn.Sequential(*layers), nn.Linear(64, words)

    def spectrogram(self, waves: Tensor) -> Tensor:
        """Return the logarithm of the power in each band of each frame, (b, bands, frames)."""
        spectrum = torch.stft(waves, 256, HOP, window=self.window, return_complex=True, pad_mode="constant")
        return (self.triangles @ spectrum.abs().square() + 1e-4).log()

    def forward(self, waves: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits, of those frames that are no padding."""
        frames = self.spectrogram(waves)
        real = (torch.arange(frames.shape[2]) <= (lengths // HOP)[:, None])[:, None]
        mean = (frames * real).sum((1, 2), keepdim=True) / real.sum((1, 2), keepdim=True) / frames.shape[1]
        features = self.layers((frames - mean) * real)
        return self.logits(features.masked_fill(~real, -torch.inf).amax(2))


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset) -> tuple[float, float]:
    """Return the accuracy, and the share of the most frequent word."""
    right, labels = 0, []
    for batch in data:
        right += int((model(batch["wave"], batch["wave_lengths"]).argmax(1) == batch["label"]).sum())
        labels += batch["label"].tolist()
    return right / len(labels), np.bincount(labels).max() / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("speech"), help="folder for all files that are written")
    parser.add_argument("--clips", type=Path, help="your folder of WAV files, FOLDER/WORD/CLIP.wav")
    parser.add_argument("--url", help="where the dataset is written, such as s3://my-bucket/speech")
    arguments = parser.parse_args()
    clips = arguments.clips or make_clips(arguments.out / "clips")
    url = arguments.url or str(arguments.out / "dataset")

    report = sl.convert(clips, url, split={"train": 0.8, "test": 0.2}, resume=True)
    print(f"{report.num_samples} clips in {url}", flush=True)

    options = {"batch_size": 32, "collate": {"wave": sl.Pad(to=HOP)}}
    for choice in ({}, {"bucket_by": "audio", "bucket_steps": 10}):
        train = sl.StreamingDataset(url, split="train", transform=augment, **choice, **options)
        steps = sum(1 for _ in train)
        print(f"{choice}: {steps} steps, {train.stats().padding_share:.1%} padding", flush=True)
    test = sl.StreamingDataset(url, split="test", transform=read_wav, shuffle=False, remainder="uneven", **options)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    torch.manual_seed(0)
    words = train.classes["label"]
    model = Recogniser(len(words))
    optimizer = torch.optim.Adam(model.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=EPOCHS * len(train))
    losses, accuracies = [], []
    for epoch in range(EPOCHS):
        for batch in train:
            logits = model(batch["wave"], batch["wave_lengths"])
            loss = nn.functional.cross_entropy(logits, batch["label"], reduction="none")[batch["valid"]].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            losses.append(loss.item())
        accuracy, frequent = evaluate(model, test)
        accuracies.append(accuracy)
        print(f"epoch {epoch + 1}: loss {np.mean(losses[-len(train) :]):.3f}, accuracy {accuracy:.3f}", flush=True)
    draw(arguments.out / "speech.png", losses, accuracies, spectrograms(model, next(iter(test)), words))
    print(f"test accuracy {accuracy:.3f}, most frequent word {frequent:.3f}")


@torch.no_grad()
def spectrograms(model: Recogniser, batch: dict[str, Tensor], words: tuple[str, ...]) -> list[tuple[Tensor, str]]:
    """Return four spectrograms of a batch, with their words as text."""
    frames, guesses = model.spectrogram(batch["wave"]), model(batch["wave"], batch["wave_lengths"]).argmax(1)
    titles = [f"{words[label]}, predicted {words[guess]}" for label, guess in zip(batch["label"], guesses, strict=True)]
    return list(zip(frames, titles, strict=True))[:: max(1, len(frames) // 4)]


def draw(path: Path, losses: list[float], accuracies: list[float], shown: list[tuple[Tensor, str]]) -> None:
    """Draw loss and accuracy, and four spectrograms with their titles."""
    figure = plt.figure(figsize=(9, 3.2), layout="constrained")
    curves, clips = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    upper, lower = curves.subplots(2, sharex=True)
    upper.plot(losses)
    upper.set(ylabel="training loss")
    lower.plot(np.arange(1, EPOCHS + 1) * len(losses) / EPOCHS, accuracies, "o-", color="tab:orange")
    lower.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    clips.suptitle("Clips of one batch, with their padding")
    places = clips.subplots(2, 2, sharex=True, sharey=True).flat
    look = {"cmap": plt.get_cmap("viridis", 10), "vmin": -9, "vmax": 5, "interpolation": "nearest"}
    for axes, (frames, title) in zip(places, shown, strict=False):
        extent = (0, frames.shape[1] * HOP / RATE, 0, len(frames))
        axes.imshow(frames, origin="lower", aspect="auto", extent=extent, **look)
        axes.set_title(title, fontsize=9)
    clips.supxlabel("seconds", fontsize=9)
    clips.supylabel("mel band", fontsize=9)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
