"""rPDP-FL: a privacy budget for every record (Liu et al.), its baselines, and a filter by spent budget."""
