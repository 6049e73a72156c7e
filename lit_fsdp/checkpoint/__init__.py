"""The state of a run out and in: folders of shards, single files, and which one is complete and newest.

It hands on no names, because looking for the newest checkpoint needs no torch.
"""
