"""Its place makes `tests/` importable: tests of all kinds share `oracle`."""
