"""Measuring: what a dataset's endpoint and this machine can give, and how much of it the loader reaches."""
