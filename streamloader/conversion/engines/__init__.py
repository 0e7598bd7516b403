"""Where tasks run: here in processes of this machine; later elsewhere too."""
