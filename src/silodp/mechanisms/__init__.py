"""Building blocks of differential privacy: clipped sums, quantization, noise and sampling."""
