"""Run configurations: TOML files, and the objects that they describe."""
