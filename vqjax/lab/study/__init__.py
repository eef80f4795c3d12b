"""Studies: rows that are compared with one budget, tuned alike and paired by seed."""
