"""Lightning's side of sharding: the strategy, its precision plugin, processes and signals."""
