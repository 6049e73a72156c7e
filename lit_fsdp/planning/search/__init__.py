"""Which settings fit and are fastest: what is tried, by which engine, and how the result is shown and written."""
