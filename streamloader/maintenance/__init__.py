"""Maintenance of datasets: verify, append, export, cleanup."""
