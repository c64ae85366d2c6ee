"""The cost of a run before it begins: ε of settings, and settings for a target ε. No data are read."""
