"""What a run will cost: ε of settings, settings of a target ε. No data are read."""
