"""Encoded samples into arrays."""
