"""Where the tables of silos lie: text files, Parquet, workbooks, and what extensions add."""
