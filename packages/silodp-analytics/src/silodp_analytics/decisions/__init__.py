"""What follows from predicted probabilities: thresholds, net benefit, calibration."""
