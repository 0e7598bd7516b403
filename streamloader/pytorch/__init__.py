"""PyTorch's side: datasets, mixtures, ranks, workers, tensors."""
