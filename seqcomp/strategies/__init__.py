"""What each strategy means, as data: what it needs, what it sends, what it computes."""
