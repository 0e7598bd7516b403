"""The torch part: datasets, mixtures, ranks, workers, tensors."""
