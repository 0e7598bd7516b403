"""`streamloader view`: a local web page that shows the samples of a dataset and of a run."""
