"""Measures a dataset's endpoint, this machine and the loader; forecasts memory, requests and mixing."""
