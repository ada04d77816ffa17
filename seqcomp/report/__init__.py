"""What a compiled program does, for people and machines; renders, decides nothing."""
