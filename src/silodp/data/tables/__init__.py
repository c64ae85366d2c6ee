"""Tables of the silos: CSV and Parquet files read by a declared schema."""

from silodp.data.tables.reader import read_tables
from silodp.data.tables.schema import Schema

__all__ = ["Schema", "read_tables"]
