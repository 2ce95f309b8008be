"""What a run needs around the network."""
