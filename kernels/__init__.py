"""One folder per op on the parity path. Import an op from its own folder; this file stays a docstring (DESIGN section 2)."""
