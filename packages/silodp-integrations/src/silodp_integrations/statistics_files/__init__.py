"""Files of statistics packages: SPSS (.sav, .zsav, .por), SAS (.sas7bdat, .xpt) and Stata (.dta), by pyreadstat.

They hold more than cells: codes for no value, names of values, and formats. Codes become missing cells, names are shown
and never applied, and formats say what is a day and which numbers have leading zeros.
"""
