"""The fast engine: modules become a list of operators by rules, and a walk along it adds up what is alive."""
