"""What a step will take, and which settings fit, before there is a GPU."""
