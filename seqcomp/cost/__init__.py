"""What a plan costs on a cluster: time, memory and money, from shapes alone."""
