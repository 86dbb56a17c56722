"""What model families are made of."""
