"""Conversion of what people have into datasets: sources -> tasks -> shards -> manifest."""

from streamloader.conversion.job import convert
from streamloader.conversion.progress import Preview, Progress, Report

__all__ = ["Preview", "Progress", "Report", "convert"]
