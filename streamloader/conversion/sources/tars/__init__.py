"""WebDataset: tars, also compressed."""
