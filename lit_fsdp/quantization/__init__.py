"""4- and 8-bit weights as plain rows of bytes, which shard like any other tensor."""
