"""Legal plans enumerated, pruned and ranked by the cost model; differences of two plans."""
