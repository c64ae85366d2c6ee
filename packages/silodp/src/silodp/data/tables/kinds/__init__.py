"""The kinds of columns that features are made of; each is one file (see docs/extending.md)."""
