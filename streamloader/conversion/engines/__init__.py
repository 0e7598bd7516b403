"""Where tasks run: in processes of this machine, or on a Dask, Ray or Spark cluster; `engine.py` says how."""
