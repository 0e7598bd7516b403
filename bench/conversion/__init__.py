"""How fast data is written: `streamloader convert` beside the writers of other loaders, and beside plain objects."""
