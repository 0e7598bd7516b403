"""What can be converted: one file for each format, all behind `Source` in base.py."""
