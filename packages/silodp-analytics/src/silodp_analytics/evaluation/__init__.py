"""Evaluation of a model by noisy sums of counts over the silos: series, methods, results, report."""
