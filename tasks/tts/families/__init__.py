"""The families of speech models: the interface, and each family's model, loss, generation and rules for plans."""
