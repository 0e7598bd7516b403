"""Conversion of what people have into datasets: sources -> tasks -> shards -> manifest."""
