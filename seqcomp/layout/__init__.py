"""Which token lives on which rank, and which pairs of tokens attend to each other. No torch."""
