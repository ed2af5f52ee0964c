"""Values that every record is made of: numbers and units, names, bounds, refusals."""
