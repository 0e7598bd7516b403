"""Tables as text: CSV, JSON lines."""
