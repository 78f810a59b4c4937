"""The data path: a dataset of local paths and a loader that knows what was consumed."""
