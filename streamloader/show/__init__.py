"""Values of samples as HTML, for notebooks and `streamloader view`."""
