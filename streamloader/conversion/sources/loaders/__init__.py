"""What other loaders write: TFRecord, MosaicML MDS, LitData."""
