"""Arrays with an axis of samples: NumPy, HDF5, NetCDF, Zarr, token files."""
