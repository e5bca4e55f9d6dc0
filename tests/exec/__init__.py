"""Commands inside calls, from the highest door that sees them."""
