"""The save path: DCP storage, staging, one save in flight, and the catalogue."""
