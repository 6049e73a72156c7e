"""A model becomes FSDP2 units on a mesh of ranks. Nothing here knows Lightning."""
