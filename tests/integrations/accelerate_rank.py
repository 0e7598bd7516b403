"""A rank that passes its dataset to Accelerate: `torchrun accelerate_rank.py URL FOLDER` writes rank<r>.json there."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import take

import streamloader as sl


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    accelerator = Accelerator(cpu=True)

    def prepared(**given: Any) -> Any:
        dataset = sl.StreamingDataset(url, batch_size=8, fields=["flag"], with_index=True, seed=3, **given)
        model = torch.nn.Linear(1, 1)
        _, _, mine = accelerator.prepare(model, torch.optim.SGD(model.parameters()), dataset)
        assert mine is dataset
        return mine

    found: dict[str, Any] = {}
    for name, given in {"": {}, "device": {"device": accelerator.device}}.items():
        dataset = prepared(**given)
        accelerator.register_for_checkpointing(dataset)
        iterator = iter(dataset)
        begun = take(iterator, 3)
        state = dataset.state_dict()
        accelerator.save_state(str(folder / f"saved{name}"))
        rest = take(iterator)
        accelerator.wait_for_everyone()  # the others may read what rank 0 writes
        accelerator.load_state(str(folder / f"saved{name}"))
        found[name] = {"begun": begun, "state": state, "rest": rest, "resumed": take(dataset)}
        accelerator._custom_objects.clear()
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
