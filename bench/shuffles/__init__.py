"""How well orders mix: `python -m bench.shuffles`. What is measured, and against whom: bench/README.md."""
