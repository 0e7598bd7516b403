"""Fetch, decode and gather in bounded memory: executes the plan, decides nothing about order."""
