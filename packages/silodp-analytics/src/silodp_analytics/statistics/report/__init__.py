"""Statistics of tables from noisy counts: estimates, and the page and file that show them."""
