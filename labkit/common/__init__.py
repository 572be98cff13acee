"""What every room may use and nothing of the field: errors, checked values, places, units, HTML."""
