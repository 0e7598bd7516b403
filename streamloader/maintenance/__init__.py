"""Maintains finished datasets: verify, append, export, cleanup."""
