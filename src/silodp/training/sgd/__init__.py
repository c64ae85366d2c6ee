"""Local SGD of many users or records at once."""
