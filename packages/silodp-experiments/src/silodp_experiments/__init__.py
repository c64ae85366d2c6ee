"""Experiments of papers: benchmark data sets and their download, comparisons of methods, and tables computed again."""
