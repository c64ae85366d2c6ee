"""Tables that are the results of queries: SQLite and DuckDB files, PostgreSQL, MariaDB, and drivers of the DB-API.

Drivers change values on valid rows: they round decimals, turn keys into numbers, and make years of 'infinity'. So every
column is asked for in one declared type, and what a driver could have changed is refused.
"""
