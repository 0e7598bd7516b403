"""Which samples, in which order, for which rank: pure arithmetic on numpy arrays, no input or output."""
