"""What one rank does of a run that is killed again and again; a script, not a test.

torchrun --nproc-per-node R killed_ranks.py URL FOLDER EPOCHS ATTEMPT: goes on from FOLDER/state.json, where it is, and
notes each step in FOLDER/<attempt>-<rank>.jsonl: where the run stands after it, and the samples of this rank.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from datasets import check_batch, numbers

from streamloader.pytorch.dataset import StreamingDataset

SAVE_STEPS = 3


def main() -> None:
    """Run until EPOCHS are over, or until someone kills this rank."""
    url, folder, epochs, attempt = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ds = StreamingDataset(url, batch_size=8, fields=["x"], with_index=True)
    saved = folder / "state.json"
    if saved.exists():
        ds.load_state_dict(json.loads(saved.read_text()))
    dist.barrier()  # nobody saves before everybody has read
    steps = 0
    with (folder / f"{attempt}-{rank}.jsonl").open("w") as log:
        while ds.epoch < epochs:
            for batch in ds:
                check_batch(batch, ["x"])
                state = ds.state_dict()
                entry = {"after": [state["epoch"], state["position"]], "samples": numbers(batch)}
                print(json.dumps(entry), file=log, flush=True)
                dist.barrier()  # as the gradients' exchange does: no rank is a step ahead
                steps += 1
                if rank == 0:
                    if steps % SAVE_STEPS == 0:
                        unfinished = saved.with_suffix(".unfinished")
                        unfinished.write_text(json.dumps(state))
                        unfinished.replace(saved)
                    print(f"step {steps}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
