"""Table One: persons, shares and means of columns, overall and by group."""
