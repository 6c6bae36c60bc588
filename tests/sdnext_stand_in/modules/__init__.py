"""The host's package of this name: it has an `__init__.py`, so it wins over every namespace portion."""
