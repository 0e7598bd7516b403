"""The samples of each rank, in order: pure arithmetic on numpy arrays, without I/O."""
