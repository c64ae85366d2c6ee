"""The building blocks that privacy rests on: clipped sums, noise, samples."""
