"""Statistics of the silos' tables under differential privacy: method, configuration, plan, command, report."""
