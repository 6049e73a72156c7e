"""What generated speech sounds like, and what validation and prediction make of it."""
