"""The command line `silodp`: one module per group of commands."""
