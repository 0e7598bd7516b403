"""Zarr that others wrote: its arrays, their codecs and values, and the samples that are windows and patches of them."""
