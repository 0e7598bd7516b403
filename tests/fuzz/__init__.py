"""Fuzzing of everything that reads bytes which others may have written: `make fuzz`, see docs/testing.md."""
