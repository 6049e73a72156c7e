"""Settings come in, as YAML, as options and as mappings in Python: one parser, one wording of what it refuses.

It hands on no names, because ``mappings`` needs no jsonargparse before there is a mapping to read.
"""
