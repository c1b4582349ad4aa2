"""Who sees whom in a pass, and attention computed accordingly."""
