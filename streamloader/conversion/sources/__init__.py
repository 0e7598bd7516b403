"""What can be converted: one file for each format, all behind `RowSource` in base.py."""
