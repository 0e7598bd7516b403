"""Formats that a dataset can be exported to, one file for each."""
