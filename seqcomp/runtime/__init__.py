"""What runs on each rank: groups, collectives with gradients, attention over shards."""
