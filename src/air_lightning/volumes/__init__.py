"""Where files are: paths, and the one module that moves bytes."""
