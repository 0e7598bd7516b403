"""One rank that serves and writes its metrics, until its standard input ends: `metrics_rank.py URL FOLDER`."""

import sys
import time

import streamloader as sl


def main() -> None:
    """Print the address of the metrics once the first epoch is over, then train on."""
    url, folder = sys.argv[1:]
    dataset = sl.NumpyDataset(url, batch_size=16, num_workers=0)
    server = sl.metrics.serve(dataset, 0)
    files = sl.metrics.StatsFile(dataset, folder, seconds=3600)
    for _ in dataset:
        pass
    files.close()
    print(server.url, flush=True)
    sys.stdin.read()
    began = time.monotonic()
    print(began, flush=True)


if __name__ == "__main__":
    main()
