"""The format: what a dataset is, and how its bytes become samples."""
