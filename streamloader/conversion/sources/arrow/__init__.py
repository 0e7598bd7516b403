"""Apache Arrow's family: Parquet, Arrow and Feather files, Hugging Face datasets."""
