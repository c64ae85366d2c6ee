"""Runs that release sums in place of a model: what their methods, configurations, commands and pages have in common."""
