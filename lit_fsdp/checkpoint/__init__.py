"""The state of a run out and in: sharded folders, single files, manifests, the newest complete one."""
