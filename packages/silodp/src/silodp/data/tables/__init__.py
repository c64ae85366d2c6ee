"""Tables of the silos: CSV and Parquet files read by a declared schema (see `Federation.from_tables`)."""
